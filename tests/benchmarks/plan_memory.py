"""How far the planner's memory is from what public runs measured: python tests/benchmarks/plan_memory.py

Prints the error of every row of `tests/plan/memory_rows.csv` between steps and at the peak, and medians. No constant of
the memory model is fitted to them; the goals are medians of 3 % between steps and 5 % at the peak.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plan"))
from memory_rows import errors


def main() -> None:
    """Print it."""
    with tempfile.TemporaryDirectory() as folder:
        found = list(errors(Path(folder)))
    for one in found:
        print(f"{_percent(one.allocated):>8} {_percent(one.peak):>8}  {one.row.name} {one.row.note}".rstrip())
    print("   steps     peak  medians of absolute errors")
    for name, of in (
        ("all rows", found),
        ("Megatron's CI", [one for one in found if one.row.kind == "ci"]),
        ("published", [one for one in found if one.row.kind == "published"]),
        ("without CUDA graphs and the elastic model", [one for one in found if one.row.note == ""]),
        ("peaks over 20 GB", [one for one in found if (one.row.peak or 0) > 20e9]),
    ):
        print(f"{_median(e.allocated for e in of):>8} {_median(e.peak for e in of):>8}  {name}, {len(of)}")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def _median(values: Iterable[float | None]) -> str:
    known = [abs(value) for value in values if value is not None]
    return f"{median(known):.1%}" if known else ""


if __name__ == "__main__":
    main()
