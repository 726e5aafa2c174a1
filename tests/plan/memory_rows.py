"""Measured memory of public runs (`memory_rows.csv`), and what the planner says of them.

`kind`: `ci` are golden values of Megatron-LM's own CI, of its last rank: bytes allocated between steps and at the peak;
`published` are peaks of the fullest rank. `flags` are the run's options that have to do with memory; what a source does
not print is taken from the recipe it names. Peaks with the note `graphs` leave out what CUDA graphs hold in pools of
their own; `elastic` is a run whose model masks its own weights, which has no other name in Megatron.
Llama-3-70B SFT also keeps FP8 weights once (`disable_parameter_transpose_cache`), for which there is no option. Of
published rows with a peak those are missing that are no Megatron run, or say no shape or no layout.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moekit.plan.candidates import of_run
from moekit.plan.given import Given
from moekit.plan.layout import layout_of
from moekit.plan.memory.model import Memory, memory
from moekit.plan.resolve import resolve_given
from moekit.plan.run import facts_of
from moekit.recipe.importing import import_recipe
from moekit.recipe.load import Loaded, load

_FILE = Path(__file__).parent / "memory_rows.csv"
_ALWAYS = "--train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer"


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    kind: str
    gpus: int
    vocabulary: int
    is_last: bool
    """Measured on the last stage, not the fullest."""
    allocated: int | None
    """Bytes between steps."""
    peak: int | None
    """Bytes; None: the run was out of memory."""
    note: str
    flags: str


def rows() -> list[Row]:
    """All of them."""
    with _FILE.open(newline="") as file:
        return [
            Row(
                name=row["name"],
                kind=row["kind"],
                gpus=int(row["gpus"]),
                vocabulary=int(row["vocabulary"]),
                is_last=row["stage"] == "last",
                allocated=int(row["allocated_bytes"]) if row["allocated_bytes"] else None,
                peak=int(row["peak_bytes"]) if row["peak_bytes"] else None,
                note=row["note"],
                flags=row["flags"],
            )
            for row in csv.DictReader(file)
        ]


def recipe_of(folder: Path, row: Row) -> Loaded:
    """The run as a recipe."""
    command = f"pretrain_gpt.py {row.flags} {_ALWAYS} --vocab-size {row.vocabulary}\n"
    path = folder / "row.yaml"
    path.write_text(import_recipe(command, row.name, gpus=row.gpus))
    return load(str(path))


def memory_of(loaded: Loaded, busiest: float = 1.0, vocabulary: int | None = None) -> Memory:
    """What the planner says of a recipe."""
    given = Given.of(loaded)
    shape = resolve_given(given, vocabulary)
    return memory(shape, facts_of(given), of_run(given, shape, layout_of(given, shape)), busiest)


@dataclass(frozen=True)
class Error:
    """Of one row: predicted over measured, less 1."""

    row: Row
    allocated: float | None
    peak: float | None
    predicted_peak: float


def errors(folder: Path) -> Iterator[Error]:
    """Of all rows; `folder` is for a recipe at a time."""
    for row in rows():
        found = memory_of(recipe_of(folder, row))
        stage = -1 if row.is_last else int(found.peak[0].argmax())
        allocated, peak = float(found.allocated[0, stage]), float(found.peak[0, stage])
        yield Error(
            row,
            allocated / row.allocated - 1 if row.allocated else None,
            peak / row.peak - 1 if row.peak else None,
            peak,
        )
