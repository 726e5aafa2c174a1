"""`moekit data manifest`: the list of a data set's checked shards, or of a blend of several data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import moekit
from moekit.data.checking.folder import Report, check_folder
from moekit.data.checking.pair import Progress
from moekit.data.folders import locked
from moekit.data.manifest import (
    Listed,
    Manifest,
    Part,
    as_listed,
    blend_fingerprint,
    fingerprint,
    lists_not_as_said,
    manifest_files,
    not_as_listed,
    read_manifest,
    refuse_path,
)
from moekit.data.places import load_plan
from moekit.data.plan import DataFolder
from moekit.launch.folders import write
from moekit.problems import MoekitError, Problem, error

SHOWN_FINDINGS = 5


def make_manifest(folder: Path, held_out: int = 0, progress: Progress = lambda _: None) -> tuple[Manifest, Report]:
    """Check every shard of a plan, hashes included, and list them; and what the check said.

    Args:
        folder: the data set's.
        held_out: shards, from the end, that training does not read and validation does.
        progress: called with the bytes read since the last call.

    Raises:
        MoekitError: there is no plan, or a sample's; a shard is not whole; nothing would be left to train on; Megatron
            could not read a path; or the list cannot be written.
    """
    there = DataFolder(folder)
    name = folder.name
    plan = load_plan(there)
    if plan is None:
        raise error(
            f"there is no data set to list: {there.plan} is missing", f"`moekit data tokenize {name}` begins one"
        )
    if plan.is_sample:
        what = f"this is a sample, of {plan.limit:,} documents a file, and no data to train on"
        raise error(what, f"`moekit data tokenize {plan.name.removesuffix('-sample')}` makes all of it", str(folder))
    refuse_path(there.prefix(plan.name, 0).absolute())  # before hours of reading
    report = check_folder(folder, sha256=True, progress=progress)
    wrong = [finding for finding in report.findings if finding.kind not in ("foreign", "manifest")]
    if wrong:
        raise MoekitError(*_told(folder, plan.name, [(finding.what, finding.remedy) for finding in wrong]))
    records = {shard.prefix.name: shard.record for shard in report.shards if shard.record}
    listed = [as_listed(prefix, record) for prefix, record in records.items() if record.documents]
    if not listed:
        hint = "see `keep_fraction` and `text_key` in its description"
        raise error(f"data set `{plan.name}` has no documents at all, so there is nothing to list", hint, str(folder))
    if not 0 <= held_out < len(listed):
        what = f"`--held-out {held_out}` leaves none of the {len(listed)} shards with documents to train on"
        raise error(what, "hold out fewer; `data.split` in a recipe holds out documents of every shard", str(folder))
    train, valid = listed[: len(listed) - held_out], listed[len(listed) - held_out :]
    manifest = Manifest(
        name=plan.name,
        fingerprint=fingerprint(plan),
        tokenizer=plan.tokenizer,
        tokenizer_sha256=plan.tokenizer_sha256,
        vocab_size=plan.vocab_size,
        end_of_document=plan.end_of_document,
        end_of_document_id=plan.end_of_document_id,
        documents=sum(shard.documents for shard in train),
        tokens=sum(shard.tokens for shard in train),
        shards=tuple(train),
        held_out=tuple(valid),
        empty=tuple(prefix for prefix, record in records.items() if not record.documents),
        parts=(),
        versions={**plan.versions, "moekit": moekit.__version__},
    )
    _write(folder, manifest)
    return manifest, report


def make_blend(root: Path, name: str, given: Sequence[str]) -> Manifest:
    """List the shards of several data sets, each with its share of what is read.

    Args:
        root: the folder that has `data/`.
        name: the blend's, as a recipe's `data.name` says it.
        given: `NAME:WEIGHT`, once for each data set. Weights are relative to each other.

    Raises:
        MoekitError: a data set has no manifest, or is not as it says, is a blend itself, or was made with another
            tokenizer than the first; or the blend's name is a data set's.
    """
    folder = root / "data" / name
    if DataFolder(folder).plan.exists():
        raise error(f"`{name}` is a data set of its own: {folder}", "give the blend another name")
    if DataFolder(folder).data_args.exists() and read_manifest(folder) is None:
        raise error(f"`{name}` has a list that moekit did not write: {folder}", "give the blend another name")
    weights = [_weight(one) for one in given]
    names = [part for part, _ in weights]
    if len(set(names)) < len(names):
        raise error("a data set is named twice in `--of`", "name it once, with the sum of its weights")
    manifests = [_part(root, part) for part in names]
    first = manifests[0]
    for other in manifests[1:]:
        if (other.tokenizer_sha256, other.vocab_size, other.end_of_document_id) != (
            first.tokenizer_sha256,
            first.vocab_size,
            first.end_of_document_id,
        ):
            what = f"`{other.name}` was tokenized with another tokenizer than `{first.name}`"
            hint = f"`{other.tokenizer}` and `{first.tokenizer}`: tokenize one of them anew with the other's"
            raise error(what, hint)
    total = sum(weight for _, weight in weights)
    parts = tuple(
        Part(one.name, weight / total, one.tokens, one.fingerprint)
        for one, (_, weight) in zip(manifests, weights, strict=True)
    )
    blend = replace(
        first,
        name=name,
        fingerprint=blend_fingerprint(parts),
        documents=sum(one.documents for one in manifests),
        tokens=sum(one.tokens for one in manifests),
        shards=tuple(shard for part, one in zip(parts, manifests, strict=True) for shard in _shared(part, one.shards)),
        held_out=tuple(
            shard for part, one in zip(parts, manifests, strict=True) for shard in _shared(part, one.held_out)
        ),
        empty=(),
        parts=parts,
        versions={"moekit": moekit.__version__},
    )
    _write(folder, blend)
    return blend


def _part(root: Path, name: str) -> Manifest:
    folder = root / "data" / name
    manifest = read_manifest(folder)
    if manifest is None:
        raise error(f"data set `{name}` has no manifest: {folder}", f"`moekit data manifest {name}` makes it")
    if manifest.parts:
        raise error(f"`{name}` is a blend itself", "name the data sets it is made of")
    if wrong := [*not_as_listed(folder, manifest)]:
        hint = f"`moekit data check {name}` says more; then `moekit data manifest {name}`"
        raise error(f"data set `{name}` {wrong[0]}", hint, str(folder))
    return manifest


def _shared(part: Part, shards: tuple[Listed, ...]) -> list[Listed]:
    """A data set's shards as those of a blend, with its share divided between them by their tokens."""
    tokens = sum(shard.tokens for shard in shards)
    return [
        replace(shard, prefix=f"../{part.name}/{shard.prefix}", weight=part.weight * shard.tokens / tokens)
        for shard in shards
    ]


def _weight(given: str) -> tuple[str, float]:
    name, _, said = given.rpartition(":")
    try:
        weight = float(said)
    except ValueError:
        weight = -1.0
    if not name or not 0 < weight < float("inf"):
        raise error(f"`--of {given}` is not a data set and its weight", "such as `--of fineweb_edu:0.7`")
    return name, weight


def _write(folder: Path, manifest: Manifest) -> None:
    """Write a manifest and its lists, one moekit at a time; a list that is no longer its own goes."""
    files = manifest_files(folder, manifest)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".manifest.lock", "", lambda _: None):
        write(folder, files)
        if "data-args.json" not in files:
            (folder / "data-args.json").unlink(missing_ok=True)
    if problem := lists_not_as_said(folder, manifest):
        raise error(f"{problem}, though it was just written", "is the disk full?", str(folder))


def _told(folder: Path, name: str, wrong: Sequence[tuple[str, str]]) -> list[Problem]:
    problems = [Problem(str(folder), what, remedy) for what, remedy in wrong[:SHOWN_FINDINGS]]
    if (more := len(wrong) - SHOWN_FINDINGS) > 0:
        hint = f"`moekit data check {name}` names them all"
        problems.append(Problem(str(folder), f"and {more:,} more shards are not whole", hint))
    return problems
