"""The first cause of a failed attempt, from the files that a real one leaves (texts are torchrun's and Megatron's)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moekit.job.endings import ended_well, first_cause, first_error

TRACEBACK = """\
moekit: in this process: wandb_face (...)
Traceback (most recent call last):
  File "job/entry.py", line 76, in <module>
    main()
ValueError: first
[rank1]: Traceback (most recent call last):
RuntimeError: second
"""
KILLED = """\
E1129 21:08:11.100000 17 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: -9) local_rank: 1
Root Cause (first observed failure):
  exitcode  : -9 (pid: 17)
  traceback : Signal 9 (SIGKILL) received by PID 17
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "exit").mkdir()
    return tmp_path


def leave(attempt: Path, rank: int, code: int, reason: str, time: float) -> None:
    (attempt / "exit" / f"rank{rank}.json").write_text(json.dumps({"code": code, "reason": reason, "time": time}))


def test_all_ranks_at_their_end_is_no_failure(attempt: Path) -> None:
    leave(attempt, 0, 0, "ok", 1.0)
    assert not ended_well(attempt, 2)
    leave(attempt, 1, 0, "ok", 1.0)
    assert ended_well(attempt, 2)
    leave(attempt, 1, 143, "SIGTERM", 1.0)
    assert not ended_well(attempt, 2)


def test_leaving_without_a_checkpoint_to_load_is_a_failure(attempt: Path) -> None:
    (attempt / "train.log").write_text(">> '--exit-on-missing-checkpoint' set ... exiting. <<\n")
    leave(attempt, 0, 0, "SystemExit: None", 1.0)
    assert not ended_well(attempt, 1)
    said = "Megatron left without training: '--exit-on-missing-checkpoint' set ... exiting."
    assert first_cause(attempt, 1) == said
    (attempt / "train.log").write_text("")
    assert first_cause(attempt, 1) == "Megatron left without training"


def test_the_earliest_failure_is_the_cause(attempt: Path) -> None:
    leave(attempt, 0, 1, "RuntimeError: connection closed by peer\nmore", 2.0)
    leave(attempt, 1, 1, "ValueError: found NaN in local grad norm\n", 1.0)
    leave(attempt, 2, 143, "SIGTERM", 0.5)
    assert first_cause(attempt, 3) == "rank 1: ValueError: found NaN in local grad norm"


def test_a_killed_rank_comes_before_those_that_missed_it(attempt: Path) -> None:
    leave(attempt, 0, 1, "RuntimeError: connection closed by peer", 2.0)
    (attempt / "train.log").write_text(KILLED)
    assert first_cause(attempt, 2) == "rank 1 was killed (SIGKILL): most often the machine was out of memory"


def test_megatrons_parser_says_what_it_refuses(attempt: Path) -> None:
    leave(attempt, 0, 2, "SystemExit: 2", 1.0)
    (attempt / "train.log").write_text("usage: entry.py [-h]\nentry.py: error: unrecognized arguments: --foo 1\n")
    assert first_cause(attempt, 1) == "Megatron refuses its arguments: unrecognized arguments: --foo 1"


def test_without_records_the_log_tells(attempt: Path) -> None:
    assert first_cause(attempt, 2) == "it ended without a word"
    (attempt / "train.log").write_text(TRACEBACK)
    assert first_cause(attempt, 2) == "ValueError: first"
    assert first_error("a warning\nNo module named torch\n\n") == "No module named torch"
