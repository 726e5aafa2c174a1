"""`make faults`: every fault of the table at its injection points, on a real Slurm on this machine (root), with real
training on its CPU. Prints a line for each, goes on where it ended, and ends with 1 where one was not as expected.

    make_faults.py WORK [WORD]     WORK keeps what was prepared and seen; WORD: only faults and names that have it
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "slurm"))

from cluster import Unavailable
from faults.bench import bench
from faults.cases import CASES
from faults.trial import Case, Result, run_case


def main(work: Path, word: str) -> int:
    """Run what is missing or failed; the exit code."""
    work.mkdir(parents=True, exist_ok=True)
    seen = work / "seen.jsonl"
    wanted = [case for case in CASES if word.lower() in f"{case.name} {case.fault}".lower()]
    if not wanted:
        print(f"no fault has `{word}` in its name", file=sys.stderr)
        return 2
    good = {name for name, result in results(seen).items() if result.ok}
    left = in_turn(
        [case for case in wanted if case.name not in good], {case.fault for case in wanted if case.name in good}
    )
    print(f"{len(wanted)} faults, {len(left)} to try, {len(wanted) - len(left)} seen before ({seen})", flush=True)
    if left:
        try:
            with bench(work, lambda text: print(f"    {text}", flush=True)) as here:
                for number, case in enumerate(left, 1):
                    result = run_case(case, here)
                    with seen.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
                    print(line(case, result, f"{number}/{len(left)}"), flush=True)
        except Unavailable as reason:
            print(f"error: {reason}", file=sys.stderr)
            return 1
    found = results(seen)
    (work / "faults.md").write_text(table(wanted, found))
    wrong = [case.name for case in wanted if not (case.name in found and found[case.name].ok)]
    spent = sum(found[case.name].seconds for case in wanted if case.name in found) / 60
    print(f"{len(wanted) - len(wrong)} of {len(wanted)} as expected, {spent:.0f} min of trials: {work / 'faults.md'}")
    for name in wrong:
        print(f"    {name}: {found[name].detail[:300] if name in found else 'not tried'}")
    return 1 if wrong else 0


def in_turn(cases: list[Case], seen: set[str]) -> list[Case]:
    """The first of each fault not `seen`, then the others; a run that trains goes from case to case."""
    first = {case.fault: case.name for case in reversed(cases) if case.fault not in seen}
    return sorted(cases, key=lambda case: (first.get(case.fault) != case.name, case.start != "going"))


def results(path: Path) -> dict[str, Result]:
    """The last result of each case."""
    rows = path.read_text().splitlines() if path.exists() else []
    return {result.case: result for result in (Result(**json.loads(row)) for row in rows)}


def line(case: Case, result: Result, count: str) -> str:
    word = "ok  " if result.ok else "FAIL"
    seen = f"expected {case.then}, observed {result.observed}"
    return (
        f"{time.strftime('%H:%M:%S')} {count:>7} {word} {case.name}: {case.fault}, {case.point}; {seen}; "
        f"{result.numbers} numbers equal; {result.seconds:.0f} s{'' if result.ok else f': {result.detail}'}"
    )


def table(cases: list[Case], found: dict[str, Result]) -> str:
    rows = [
        f"| {case.name} | {case.fault} | {case.point} | {case.then} | {one.observed if one else 'not tried'} | "
        f"{one.numbers if one else 0:,} | {one.seconds if one else 0:.0f} | "
        f"{(one.detail if one else '').replace('|', '/')[:200]} |"
        for case in cases
        for one in (found.get(case.name),)
    ]
    head = "| case | fault | injection point | expected | observed | equal numbers | s | what was said |\n"
    return head + "|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of some three hundred Pythons would compile anew
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2] if len(sys.argv) > 2 else ""))
