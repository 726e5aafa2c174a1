"""Prepare the quickstart's data from the text and the tokenizer that come with moekit.

    <shared_root>/tokenizers/python-docs/   tokenizer.json, tokenizer_config.json
    <shared_root>/data/python-docs/         python-docs_00000_tokens.bin and .idx;
                                            data-args.txt, for Megatron's --data-args-path;
                                            manifest.json, what was made from what; tokenize.log

Each folder is filled under another name and renamed when it is whole, so it is complete if it is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moekit.data import python_docs, shards
from moekit.data.folders import locked, make_folder
from moekit.data.making.plain import tokenize
from moekit.data.manifest import Listed, Manifest
from moekit.problems import MoekitError, Problem, error

NAME = "python-docs"
"""The name of data and tokenizer, as a recipe's `data.name` says it."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
WAITING = "waiting for another process that prepares the same data"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """The quickstart's data, ready for Megatron."""

    prefix: Path
    """The token files' path without `.bin` and `.idx`, as `moekit.data.shards` takes it."""
    documents: int
    tokens: int
    """The end-of-document tokens included."""
    seconds: float
    """How long this call took."""
    already: bool
    """Whether all of it was there before."""


def prepare_python_docs(shared_root: Path, progress: Progress) -> Prepared:
    """Make what is missing of the two folders; nothing, within milliseconds, where both are there.

    Two calls at the same time do the work once. A killed call leaves nothing that the next one takes for whole.

    Args:
        shared_root: the folder that holds `data/` and `tokenizers/`; made if needed.
        progress: called with a sentence for each step that takes time.

    Raises:
        MoekitError: the path cannot be given to Megatron, a package is missing, a file cannot be written, or a folder
            holds something else than what moekit puts there.
    """
    started = time.monotonic()
    folder = shared_root.absolute() / "data" / NAME
    if problem := unreadable_path(shared_root):
        raise MoekitError(problem)
    try:
        already = _tokenizer_present(shared_root.absolute() / "tokenizers" / NAME) and _data_present(folder)
        if not already:
            folder.parent.mkdir(parents=True, exist_ok=True)
            prepare_tokenizer(shared_root, progress)
            with locked(folder.with_name(f".{NAME}.lock"), WAITING, progress):
                if not _data_present(folder):
                    make_folder(folder, lambda temporary: _fill_data(temporary, folder, progress))
        manifest = _read_manifest(folder)
        _point_at(folder)
    except OSError as reason:
        raise _not_prepared(reason, folder) from None
    return Prepared(_prefix(folder), manifest["documents"], manifest["tokens"], time.monotonic() - started, already)


def prepare_tokenizer(shared_root: Path, progress: Progress) -> None:
    """Make the tokenizer's folder alone, where it is missing, for a run that trains on other data.

    Arguments and errors as for `prepare_python_docs`.
    """
    tokenizer = shared_root.absolute() / "tokenizers" / NAME
    try:
        if not _tokenizer_present(tokenizer):
            tokenizer.parent.mkdir(parents=True, exist_ok=True)
            with locked(tokenizer.with_name(f".{NAME}.lock"), WAITING, progress):
                if not _tokenizer_present(tokenizer):
                    make_folder(tokenizer, _fill_tokenizer)
    except OSError as problem:
        raise _not_prepared(problem, tokenizer) from None


def unreadable_path(shared_root: Path) -> Problem | None:
    """Megatron splits the file of `--data-args-path` at white space (megatron/training/utils/common_utils.py:523)."""
    folder = str(shared_root.absolute() / "data" / NAME)
    if folder.split() == [folder] and folder.isprintable():
        return None
    what = f"Megatron cannot read data below `{folder}`: the path has a space or a character that cannot be printed"
    return Problem(
        "", what, "run this in a folder whose path has neither, or with another `shared_root` in the profile"
    )


def _not_prepared(problem: OSError, folder: Path) -> MoekitError:
    hint = "run this again with a shared root that can be written to and has 10 MB of free space"
    return error(f"cannot prepare the data: {problem.strerror}", hint, str(problem.filename or folder))


def _fill_tokenizer(temporary: Path) -> None:
    for name in TOKENIZER_FILES:
        (temporary / name).write_bytes((python_docs.TOKENIZER / name).read_bytes())


def _tokenizer_present(folder: Path) -> bool:
    if not folder.exists():
        return False
    for name in TOKENIZER_FILES:
        file = folder / name
        if not file.exists() or file.read_bytes() != (python_docs.TOKENIZER / name).read_bytes():
            raise _foreign(folder, f"its `{name}` is not that of this moekit")
    return True


def _fill_data(temporary: Path, folder: Path, progress: Progress) -> None:
    expected = sum(1 for _ in python_docs.documents())
    progress(f"tokenizing {expected} pages of Python's documentation")
    made = tokenize(
        python_docs.TEXT, python_docs.TOKENIZER / "tokenizer.json", python_docs.END_OF_DOCUMENT, temporary, NAME
    )
    shard = shards.open_shard(made)
    shards.check_tokens(shard, end_of_document=0, vocabulary=python_docs.VOCABULARY)
    if shard.documents != expected:  # datatrove skips what it cannot read with a warning
        raise RuntimeError(
            f"{shard.documents} of {expected} documents were tokenized; see {temporary / 'tokenize.log'}"
        )
    manifest = {**asdict(_manifest(made, shard)), **_made_of(made)}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    (temporary / "data-args.txt").write_text(f"{_prefix(folder)}\n", "utf-8")


def _manifest(made: Path, shard: shards.Shard) -> Manifest:
    """As `moekit data manifest` writes it, of one shard."""
    bin_sha256, idx_sha256 = (
        hashlib.sha256(end(made).read_bytes()).hexdigest() for end in (shards.bin_path, shards.idx_path)
    )
    listed = Listed(
        made.name,
        documents=shard.documents,
        tokens=shard.tokens,
        bin_bytes=shards.bin_path(made).stat().st_size,
        idx_bytes=shards.idx_path(made).stat().st_size,
        bin_sha256=bin_sha256,
        idx_sha256=idx_sha256,
        weight=shard.tokens,
    )
    return Manifest(
        name=NAME,
        fingerprint=hashlib.sha256(json.dumps(_origin(), sort_keys=True).encode()).hexdigest(),
        tokenizer=NAME,
        tokenizer_sha256=_origin()["tokenizer.json"],
        vocab_size=python_docs.VOCABULARY,
        end_of_document=python_docs.END_OF_DOCUMENT,
        end_of_document_id=0,
        documents=shard.documents,
        tokens=shard.tokens,
        shards=(listed,),
        held_out=(),
        empty=(),
        parts=(),
        versions={package: version(package) for package in ("datatrove", "tokenizers")},
    )


def _made_of(made: Path) -> dict[str, Any]:
    """What tells the data of this moekit from another's."""
    sizes = {file.name: file.stat().st_size for file in (shards.bin_path(made), shards.idx_path(made))}
    return {"vocabulary": python_docs.VOCABULARY, "made_from": _origin(), "bytes": sizes}


def _data_present(folder: Path) -> bool:
    if not folder.exists():
        return False
    manifest = _read_manifest(folder)
    if manifest["made_from"] != _origin():
        raise _foreign(folder, "it was made from another text or tokenizer than this moekit's")
    for name, size_bytes in manifest["bytes"].items():
        file = folder / name
        if not file.exists():
            raise _foreign(folder, f"`{name}` is missing")
        if file.stat().st_size != size_bytes:
            raise _foreign(folder, f"`{name}` has {file.stat().st_size:,} bytes, not {size_bytes:,}")
    return True


def _origin() -> dict[str, str]:
    files = (python_docs.TEXT, python_docs.TOKENIZER / "tokenizer.json")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not {"documents", "tokens", "made_from", "bytes"} <= manifest.keys():
        raise _foreign(folder, "it has no readable `manifest.json`")
    return manifest


def _foreign(folder: Path, reason: str) -> MoekitError:
    return error(
        f"this is not the data that moekit puts here: {reason}", "move it away and run this again", str(folder)
    )


def _prefix(folder: Path) -> Path:
    return folder / f"{NAME}_00000_tokens"


def _point_at(folder: Path) -> None:
    """Write where the token files are, absolute, if the folder has come here from elsewhere."""
    file = folder / "data-args.txt"
    text = f"{_prefix(folder)}\n"
    if not file.exists() or file.read_text("utf-8") != text:
        temporary = file.with_name(f".tmp-{file.name}-{os.getpid()}")
        temporary.write_text(text, "utf-8")
        temporary.replace(file)
