"""The parts of a shard, one an input file: `.parts/00000/00003.bin`, `.idx` and, written last, `.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from moekit.data.plan import DataFolder
from moekit.data.planning import write_json
from moekit.data.shards import bin_path, idx_path


@dataclass(frozen=True)
class Part:
    """What was made of one input file: a pair of token files that becomes a stretch of a shard."""

    documents: int
    tokens: int
    rows: int
    empty: int
    not_kept: int
    bin_bytes: int
    idx_bytes: int
    seconds: float


@dataclass(frozen=True)
class Step:
    """What was done since the last report."""

    documents: int = 0
    tokens: int = 0
    read_bytes: int = 0
    """Of input files, as they lie on the disk."""
    reused: bool = False
    """Whether an earlier run has done it."""
    note: str = ""
    """Something that the user should know: a sentence."""


Progress = Callable[[Step], None]


def part_prefix(folder: DataFolder, task: int, number: int) -> Path:
    """The path of a part's pair without `.bin` and `.idx`; `number` counts the files of the task."""
    return folder.parts(task) / f"{number:05d}"


def temporary(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".tmp-{path.name}")


def keep_part(prefix: Path, part: Part) -> None:
    """Give a pair that is whole its name, and put down what it holds."""
    for of in (bin_path, idx_path):
        of(temporary(prefix)).replace(of(prefix))
    write_json(prefix.with_name(f"{prefix.name}.json"), asdict(part))


def find_part(prefix: Path) -> Part | None:
    """A part that is whole: what is put down of it agrees with the sizes of its files."""
    try:
        part = Part(**json.loads(prefix.with_name(f"{prefix.name}.json").read_bytes()))
        sizes = bin_path(prefix).stat().st_size, idx_path(prefix).stat().st_size
    except (OSError, ValueError, TypeError):
        return None
    return part if sizes == (part.bin_bytes, part.idx_bytes) else None
