"""A worker process: tokenizes one input file after the other on one thread, with one tokenizer, as it is told.

    python -m moekit.data.making.worker FOLDER PARENT

Standard input has a line of JSON for each file, `{"task": 0, "file": 3}`; standard output gets what becomes of it:
lines `{"step": {...}}`, then `{"part": {...}}`, or `{"problem": {...}}`, which is its last. It ends with its input, and
is killed with the process that started it, whose id is PARENT.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from moekit.data.making.encoding import load_encoder, logged_to, make_part
from moekit.data.making.parts import Part, Step, keep_part, part_prefix, temporary
from moekit.data.places import load_plan
from moekit.data.plan import DataFolder, Plan
from moekit.data.planning import tokenizer_file, unwritable
from moekit.lifeline import die_with_parent
from moekit.problems import MoekitError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ESTALE)
"""What a disk answers that takes no more."""


def main(folder: DataFolder, parent: int) -> None:
    """Work until the input ends or something cannot be done."""
    die_with_parent()
    if os.getppid() != parent:  # it had ended before
        return
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may come between the answers
    try:
        _work(folder, answers)
    except MoekitError as refused:
        _answer(answers, "problem", asdict(refused.problems[0]))
    except OSError as reason:
        if reason.errno not in DISK:
            raise
        _answer(answers, "problem", asdict(unwritable(folder.path, reason).problems[0]))
    sys.stderr.flush()
    os._exit(0)  # files that a full disk did not take are not closed once more, each with a complaint


def _work(folder: DataFolder, answers: TextIO) -> None:
    plan = load_plan(folder)
    assert plan, folder.plan
    encoder = load_encoder(tokenizer_file(folder, plan), plan.end_of_document)
    for line in sys.stdin:
        job = json.loads(line)
        part = _make(folder, plan, encoder, job["task"], job["file"], answers)
        _answer(answers, "part", asdict(part))


def _make(folder: DataFolder, plan: Plan, encoder: object, task: int, number: int, answers: TextIO) -> Part:
    prefix = part_prefix(folder, task, number)
    prefix.parent.mkdir(parents=True, exist_ok=True)

    def report(step: Step) -> None:
        _answer(answers, "step", asdict(step))

    with logged_to(folder.log(task)):
        part = make_part(plan, plan.files_of(task)[number], encoder, temporary(prefix), report)
    keep_part(prefix, part)
    return part


def _answer(answers: TextIO, kind: str, content: object) -> None:
    answers.write(json.dumps({kind: content}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(DataFolder(Path(sys.argv[1])), int(sys.argv[2]))
