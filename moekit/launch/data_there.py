"""Whether a run's data is there, whole, and made with the run's tokenizer; and how often the run will read it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from moekit.data.manifest import Listed, Manifest, lists_not_as_said, not_as_listed, read_manifest
from moekit.data.plan import DataFolder
from moekit.data.shards import bin_path, idx_path, split_documents
from moekit.launch import hash_table_there
from moekit.launch.run_files import weights_and_shards
from moekit.launch.rundir import data_dir, tokenizer_dir
from moekit.problems import MoekitError, Problem
from moekit.recipe.load import Loaded
from moekit.recipe.sizes import total_steps

PREPARED_DATA = "python-docs"
"""The data set that comes with moekit and is prepared at the first launch (moekit/data/quickstart.py)."""
MANY_EPOCHS = 4
"""From here on, text that was read before teaches ever less (Muennighoff et al. 2023, arXiv:2305.16264, figure 1)."""
_PARTS = ("training", "validation", "test")


def problems(loaded: Loaded, shared_root: Path) -> Iterator[Problem]:
    """What of a recipe's data and tokenizer is not there, not whole, or not made for each other; and warnings."""
    data = loaded.recipe.data
    tokenizer = data.tokenizer if data.tokenizer not in (None, PREPARED_DATA) else None
    if tokenizer and not (folder := tokenizer_dir(shared_root, tokenizer)).exists():
        what = f"there is no tokenizer `{tokenizer}`: {folder}"
        hint = "put its files there, or `moekit data tokenizer DATASET` fetches that of a data set"
        yield Problem(loaded.source.where("data.tokenizer"), what, hint)
    if data.name and data.name != PREPARED_DATA:
        try:
            yield from _data(loaded, data_dir(shared_root, data.name), shared_root)
        except MoekitError as unreadable:
            yield from unreadable.problems
        except OSError as reason:
            yield Problem(str(reason.filename), f"cannot be read: {reason.strerror}", "see who owns it")
    yield from hash_table_there.problems(loaded, shared_root)


def said_of_epochs(loaded: Loaded, shared_root: Path) -> str | None:
    """How often a run reads its data, in one sentence; None where data or run do not say how long they are."""
    found = epochs(loaded, shared_root)
    if not found:
        return None
    tokens = trained_tokens(loaded) or 0
    each = ", ".join(f"{_epochs(number)} of `{name}`" for name, number in found.items())
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, " billion"), (1e6, " million")) if tokens >= size), (1, "")
    )
    shown = f"{tokens / size:,.3g}{unit}" if unit else f"{tokens:,}"
    return f"{shown} tokens of training are {each}"


def epochs(loaded: Loaded, shared_root: Path) -> dict[str, float]:
    """How often each data set that a run trains on is read; empty where that is not known."""
    data, tokens = loaded.recipe.data, trained_tokens(loaded)
    if not data.name or data.name == PREPARED_DATA or not tokens:
        return {}
    try:
        manifest = read_manifest(data_dir(shared_root, data.name))
    except MoekitError:
        return {}
    if manifest is None:
        return {}
    share = 1.0 if data.per_split else _training_share(data.split)
    if data.shards:
        read = sum(one.tokens for one in _all(manifest) if Path(one.prefix).name in {*data.shards})
        return {data.name: tokens / read / share} if read else {}
    if manifest.parts:
        return {part.name: tokens * part.weight / part.tokens / share for part in manifest.parts}
    return {data.name: tokens / manifest.tokens / share}


def _epochs(number: float) -> str:
    return f"{number:,.0f} epochs" if number >= 100 else f"{number:.2g} epochs"


def trained_tokens(loaded: Loaded) -> int | None:
    """Tokens that a run trains on, from its first step to its last; None where the recipe does not say it."""
    train, length = loaded.recipe.train, loaded.recipe.model.seq_length
    if train.samples is not None and length:
        return train.samples * length
    steps = total_steps(loaded.recipe)
    return steps * train.global_batch_size * length if steps and train.global_batch_size and length else None


def _data(loaded: Loaded, folder: Path, shared_root: Path) -> Iterator[Problem]:
    data, name = loaded.recipe.data, folder.name
    place = loaded.source.where("data.shards" if data.shards else "data.name")
    if not folder.is_dir():
        hint = f"`moekit data tokenize {name}` makes it; or put its shards there, and their list `data-args.txt`"
        yield Problem(loaded.source.where("data.name"), f"there is no data set `{name}`: {folder}", hint)
        return
    manifest = read_manifest(folder)
    if manifest is None and not data.shards and DataFolder(folder).plan.exists():
        what = f"data set `{name}` has no manifest: {folder}"
        hint = f"`moekit data tokenize {name}` makes its shards, `moekit data manifest {name}` lists them"
        yield Problem(place, what, hint)
        return
    if manifest is None or data.shards:
        lacking = [*_by_hand(loaded, folder, place)]
        yield from lacking
        if not lacking and manifest is None:
            what = f"data set `{name}` has no manifest, so nothing says that its shards are whole: {folder}"
            yield Problem(place, what, f"`moekit data check {folder}` looks at them", "warning")
    else:
        yield from _as_listed(loaded, folder, manifest, place)
    if manifest:
        yield from _tokenizer(loaded, manifest, shared_root)
        yield from _often(loaded, shared_root, place)


def _by_hand(loaded: Loaded, folder: Path, place: str) -> Iterator[Problem]:
    """What is missing of the shards that a recipe names, or a list that no manifest stands beside."""
    data, listed = loaded.recipe.data, folder / ("data-args.json" if loaded.recipe.data.per_split else "data-args.txt")
    if not data.shards and not listed.is_file():
        what = f"data set `{data.name}` has no list of its shards: {listed}"
        yield Problem(place, what, "write each shard's prefix into it, or name them in `data.shards`")
        return
    said = [] if data.shards else re.split(r'[\s",\[\]]+', listed.read_text(encoding="utf-8"))
    words = weights_and_shards(data.shards)[1] if data.shards else [word for word in said if word.startswith("/")]
    shards = [folder / word for word in words]
    files = [end(path) for path in shards for end in (bin_path, idx_path)]
    if missing := [file for file in files if not file.is_file()]:
        more = len(missing) - 1
        others = f", nor {more} other file{'s' * (more > 1)}" if more else ""
        what = f"data set `{data.name}` has no {missing[0]}{others}"
        yield Problem(place, what, "a shard is two files, `.bin` and `.idx`, named by what they share")


def _as_listed(loaded: Loaded, folder: Path, manifest: Manifest, place: str) -> Iterator[Problem]:
    """What a manifest lists and is not there as it says, and lists that are not its own."""
    name = folder.name
    parts = " ".join(part.name for part in manifest.parts) or name
    if wrong := [*not_as_listed(folder, manifest)]:
        more = f", and {len(wrong) - 1:,} more" * (len(wrong) > 1)
        hint = f"`moekit data check {parts}` says what to make again; then `moekit data manifest {name}`"
        yield Problem(place, f"data set `{name}` {wrong[0]}{more}", hint)
    elif problem := lists_not_as_said(folder, manifest):
        yield Problem(place, f"data set `{name}`: {problem}", f"{_command(manifest)} writes it again")
    elif loaded.recipe.data.per_split and not manifest.held_out:
        what = f"data set `{name}` holds no shards out, and `data.per_split` reads those"
        yield Problem(loaded.source.where("data.per_split"), what, f"`moekit data manifest {name} --held-out 1`")
    elif not loaded.recipe.data.per_split:
        yield from _split(loaded, manifest)


def _split(loaded: Loaded, manifest: Manifest) -> Iterator[Problem]:
    """Megatron divides each shard, and never ends looking for samples of a part without a document (gpt_dataset.py)."""
    split = loaded.recipe.data.split
    for shard in manifest.shards if split else ():
        shares = [float(word) for word in re.findall(r"\d+\.?\d*|\.\d+", split or "")]
        parts = split_documents(shard.documents, split or "")
        empty = [part for part, share, has in zip(_PARTS, shares, parts, strict=False) if share and not has]
        if empty:
            what = f"`data.split: {split}` gives {empty[0]} none of the {shard.documents:,} documents of {shard.prefix}"
            hint = f"give it more; or `moekit data manifest {manifest.name} --held-out 1` and `data.per_split: true`"
            yield Problem(loaded.source.where("data.split"), what, hint)
            return


def _tokenizer(loaded: Loaded, manifest: Manifest, shared_root: Path) -> Iterator[Problem]:
    """The run's tokenizer is the one that the data was made with."""
    data, made_with = loaded.recipe.data, f"data set `{manifest.name}` was made with `{manifest.tokenizer}`"
    if data.vocab_size is not None and data.vocab_size < manifest.vocab_size:
        what = f"`data.vocab_size: {data.vocab_size}` is less than the {manifest.vocab_size:,} token ids of the data"
        yield Problem(loaded.source.where("data.vocab_size"), what, made_with)
    if not data.tokenizer or not (folder := tokenizer_dir(shared_root, data.tokenizer)).exists():
        return
    file = folder if folder.is_file() else folder / "tokenizer.json"
    place = loaded.source.where("data.tokenizer")
    if not file.is_file():
        what = f"tokenizer `{data.tokenizer}` has no `tokenizer.json`, so nothing says that the data was made with it"
        yield Problem(place, what, made_with, "warning")
    elif hashlib.sha256(file.read_bytes()).hexdigest() != manifest.tokenizer_sha256:
        what = f"data set `{data.name}` was made with another tokenizer than the `{data.tokenizer}` that is in {folder}"
        hint = f"it was `{manifest.tokenizer}`, of sha256 {manifest.tokenizer_sha256[:12]}...; "
        hint += f"`moekit data tokenizer {manifest.parts[0].name if manifest.parts else manifest.name}` fetches it"
        yield Problem(place, what, hint)


def _often(loaded: Loaded, shared_root: Path, place: str) -> Iterator[Problem]:
    """Data that is read too often; and shards without weights, of which Megatron reads each document once."""
    data = loaded.recipe.data
    for name, number in epochs(loaded, shared_root).items():
        several = len(data.shards or ()) > 1 and not weights_and_shards(data.shards or ())[0]
        if number > 1 and several and data.dataloader_type != "cyclic":
            what = (
                f"training reads the {len(data.shards or ())} shards of `data.shards` {number:,.1f} times, and Megatron"
            )
            hint = "put a weight before each; or unset it with `null`: the list of the manifest has weights"
            yield Problem(place, f"{what} reads shards without weights once", hint)
        elif number > MANY_EPOCHS:
            what = f"training reads `{name}` {number:,.1f} times; from {MANY_EPOCHS} epochs on, more teach ever less"
            yield Problem(place, what, "train on more text, or for fewer steps", "warning")


def _command(manifest: Manifest) -> str:
    of = "".join(f" --of {part.name}:{part.weight:g}" for part in manifest.parts)
    held_out = f" --held-out {len(manifest.held_out)}" if manifest.held_out and not of else ""
    return f"`moekit data manifest {manifest.name}{of}{held_out}`"


def _all(manifest: Manifest) -> Iterator[Listed]:
    yield from manifest.shards
    yield from manifest.held_out


def _training_share(split: str | None) -> float:
    """The share of the documents that training reads."""
    shares = [float(word) for word in re.findall(r"\d+\.?\d*|\.\d+", split or "1")]
    return shares[0] / sum(shares) if shares and shares[0] else 1.0
