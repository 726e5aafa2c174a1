"""Random recipes before our rules and before the real Megatron: where do the two disagree?

    python tests/differential/agree.py -n 10000

Exit code 0 when there is no false accept, no false refusal, and the recipes covered what they must.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

from asking import Answers, ask
from generate import Case, cases, cluster, seeds
from judged import DISAGREEMENTS, Finding, findings, needs_step, question, refusals, step_question
from shrink import minimal, page
from tally import Tally, as_json, summary

WHOLE = 10_000
"""From so many recipes on, every field must have been changed often enough."""


def run(
    count: int, seed: int, answers: Answers, jobs: int | None = None, steps: int = 0, found_file: Path | None = None
) -> Tally:
    """So many recipes before both judges, and of those that both accept so many through a step of training.

    Each disagreement goes to `found_file` as it is found, a JSON line.
    """
    tally = Tally()
    drawn, asked = itertools.tee((case, refusals(case.values, case.profile)) for case in cases(seed, count))
    questions = (question(case.values, case.profile, needs_step(ours)) for case, ours in asked)
    for (case, ours), theirs in zip(drawn, ask(questions, answers, jobs, count), strict=True):
        found = findings(case.values, ours, theirs)
        tally.add(case, ours, theirs, found)
        _write(found_file, case, found)
    for some in itertools.batched(tally.accepted, max(1, steps)):
        if tally.steps["passed"] + tally.steps["refused"] >= steps:
            break
        questions = (step_question(case.values, case.profile) for case in some)
        for case, theirs in zip(some, ask(questions, answers, jobs, len(some)), strict=True):
            tally.add_step(case, theirs[-1])
    return tally


def _write(file: Path | None, case: Case, found: list[Finding]) -> None:
    rows = [{**vars(finding), **vars(case)} for finding in found if finding.kind in DISAGREEMENTS]
    if file is not None and rows:
        with file.open("a") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=WHOLE, help="recipes (default 10,000)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same recipes (default 1)")
    parser.add_argument("--steps", type=int, default=0, help="so many accepted recipes also train a step")
    parser.add_argument("--jobs", type=int, help="questions judged at a time (default: one a core)")
    parser.add_argument("--answers", type=Path, help="keeps Megatron's answers: the next run asks only what is new")
    parser.add_argument("--found", type=Path, help="each disagreement, a JSON line, as it is found")
    parser.add_argument("--json", type=Path, help="everything that was counted")
    parser.add_argument("--markdown", type=Path, help="the summary as a page")
    parser.add_argument("--shrink", action="store_true", help="a minimal recipe for each group of disagreements")
    given = parser.parse_args()
    paths = [path and path.absolute() for path in (given.answers, given.found, given.json, given.markdown)]
    answer_file, found_file, json_file, markdown = paths
    seeds()  # read before the working directory changes
    for profile in ("hopper", "blackwell"):
        cluster(profile)
    answers = Answers(answer_file)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # some options make Megatron write into its working directory
        tally = run(given.n, given.seed, answers, given.jobs, given.steps, found_file)
        smallest = minimal(tally, answers, given.jobs) if given.shrink else {}
        os.chdir("/")
    text = summary(tally) + page(tally, smallest)
    print(text)
    if markdown:
        markdown.write_text(text)
    if json_file:
        json_file.write_text(json.dumps(as_json(tally, smallest), indent=1) + "\n")
    failures = list(tally.failures(whole=given.n >= WHOLE))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
