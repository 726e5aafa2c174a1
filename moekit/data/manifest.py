"""What training reads of a data set: `manifest.json`, and the same as lists that Megatron reads.

`data-args.txt` is for `--data-args-path`, `data-args.json` for `--per-split-data-args-path` where shards are held out.
Several shards are listed with weights, their tokens: of shards without weights Megatron reads each document once, and a
run that needs more ends for want of samples (megatron/core/datasets/blended_megatron_dataset_builder.py:167, 197).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moekit.data.plan import DataFolder, Plan, ShardRecord
from moekit.data.shards import bin_path, idx_path
from moekit.problems import MoekitError, error


@dataclass(frozen=True)
class Listed:
    """One shard, as it was when it was listed."""

    prefix: str
    """The path without `.bin` and `.idx`, from the data set's folder."""
    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str
    weight: float
    """How often it is read beside the others."""


@dataclass(frozen=True)
class Part:
    """One data set of a blend."""

    name: str
    weight: float
    """Its share of what is read."""
    tokens: int
    """Those that training reads, the held-out ones left out."""
    fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`."""

    name: str
    fingerprint: str
    """Of the plan, or of a blend's parts."""
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: str
    end_of_document_id: int
    documents: int
    """Of training, as `tokens`."""
    tokens: int
    shards: tuple[Listed, ...]
    held_out: tuple[Listed, ...]
    """Shards that only validation reads."""
    empty: tuple[str, ...]
    """Shards without documents, which Megatron cannot map into memory and which are not listed."""
    parts: tuple[Part, ...]
    """Of a blend; else empty."""
    versions: dict[str, str]


def fingerprint(plan: Plan) -> str:
    """The sha256 of a plan, which tells it from every other."""
    return _sha256_of(asdict(plan))


def blend_fingerprint(parts: tuple[Part, ...]) -> str:
    """The sha256 of what a blend is made of."""
    return _sha256_of([asdict(part) for part in parts])


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def as_listed(prefix: str, record: ShardRecord) -> Listed:
    """A whole shard as a manifest lists it."""
    return Listed(
        prefix,
        documents=record.documents,
        tokens=record.tokens,
        bin_bytes=record.bin_bytes,
        idx_bytes=record.idx_bytes,
        bin_sha256=record.bin_sha256,
        idx_sha256=record.idx_sha256,
        weight=record.tokens,
    )


def manifest_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """The texts that belong to a manifest in a folder, `manifest.json` last.

    Raises:
        MoekitError: Megatron could not read a path of them.
    """
    files = {"data-args.txt": data_args(folder, manifest.shards)}
    if manifest.held_out:
        train, valid = (words(folder, shards) for shards in (manifest.shards, manifest.held_out))
        files["data-args.json"] = json.dumps({"train": train, "valid": valid, "test": None}, indent=1) + "\n"
    return {**files, "manifest.json": json.dumps(asdict(manifest), indent=1) + "\n"}


def data_args(folder: Path, shards: tuple[Listed, ...]) -> str:
    """The text of `data-args.txt`: a shard a line, its weight before it where there are several."""
    said = words(folder, shards)
    return (
        f"{said[0]}\n" if len(said) == 1 else "".join(f"{a} {b}\n" for a, b in zip(said[::2], said[1::2], strict=True))
    )


def words(folder: Path, shards: tuple[Listed, ...]) -> list[str]:
    """What Megatron's `get_blend_from_list` reads (megatron/core/datasets/utils.py:44).

    Raises:
        MoekitError: Megatron could not read a path.
    """
    prefixes = [refuse_path(prefix_of(folder, shard)) for shard in shards]
    if len(prefixes) == 1:
        return prefixes
    return [word for shard, prefix in zip(shards, prefixes, strict=True) for word in (f"{shard.weight:.12g}", prefix)]


def refuse_path(prefix: Path) -> str:
    """A shard's path as a list can say it.

    Raises:
        MoekitError: it has white space, at which Megatron splits the list (training/utils/common_utils.py:524), or a
            character that cannot be printed.
    """
    path = str(prefix)
    if path.split() == [path] and path.isprintable():
        return path
    what = f"Megatron cannot read data at `{path}`: the path has a space or a character that cannot be printed"
    raise error(what, "move the data below a `shared_root` whose path has neither")


def prefix_of(folder: Path, shard: Listed) -> Path:
    """The absolute path of a shard, without `.bin` and `.idx`."""
    return Path(os.path.normpath(folder.absolute() / shard.prefix))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none.

    Raises:
        MoekitError: it cannot be read.
    """
    path = DataFolder(folder).manifest
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said.keys() < {field.name for field in fields(Manifest)}:
            raise ValueError
        kinds: dict[str, type] = {"shards": Listed, "held_out": Listed, "parts": Part, "empty": str}
        for name, kind in kinds.items():
            said[name] = tuple(one if kind is str else kind(**one) for one in said[name])
        return Manifest(**{field.name: said[field.name] for field in fields(Manifest)})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror}", "", str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        hint = f"`moekit data manifest {folder.name}` writes it again"
        raise error("is no manifest of this moekit, or damaged", hint, str(path)) from None


def not_as_listed(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What of a manifest's shards is not there as it says, by sizes: clauses that follow the data set's name."""
    for shard in (*manifest.shards, *manifest.held_out):
        prefix = prefix_of(folder, shard)
        for path, size_bytes in ((bin_path(prefix), shard.bin_bytes), (idx_path(prefix), shard.idx_bytes)):
            try:
                found = path.stat().st_size
            except OSError:
                yield f"has no {path}"
                continue
            if found != size_bytes:
                yield f"has {found:,} bytes in {path}, and its manifest says {size_bytes:,}"


def lists_not_as_said(folder: Path, manifest: Manifest) -> str | None:
    """A list beside a manifest that is not the manifest's, as in a folder that was moved; None where all are."""
    try:
        wanted = manifest_files(folder, manifest)
    except MoekitError as unreadable:
        return unreadable.problems[0].what
    for name, text in wanted.items():
        path = folder / name
        if name != "manifest.json" and not (path.is_file() and path.read_text(encoding="utf-8") == text):
            return f"`{name}` is not the list of its manifest"
    return None
