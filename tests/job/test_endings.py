"""How an attempt ended, from the files that a real one leaves (texts are torchrun's, Slurm's and Megatron's)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moekit.job.endings import ended_well, ending, exit_records, first_cause, first_error

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


TORCHRUN = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_07:59:34
  host      : n1
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 31919)
  error_file: <N/A>
"""
RERUN = """\
ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 5 at iteration #7 invocation #1 (message='found NaN in local grad norm for bucket #0')
ERROR:megatron.core.rerun_state_machine:Rank 5, node n2, device 1, iteration #7: First rerun: unexpected result is reproducible within the tolerance (nan = nan). Need to rerun on a different GPU to verify correctness.!
"""  # noqa: E501


@pytest.mark.parametrize(
    ("leaves", "log", "kind", "sentence"),
    [
        ({0: "ok", 1: "ok"}, "", "ended", "all ranks came to their end"),
        ({0: "SIGTERM", 1: "SIGTERM"}, "", "stopped", "its ranks were told to end (SIGTERM) and did not save"),
        ({0: "SIGTERM"}, "", "killed", "rank 1 ended without a word, the others were told to end"),
        (
            {0: "SystemExit: 16", 1: "SystemExit: 16"},
            RERUN,
            "rerun",
            "rank 5: found NaN in local grad norm for bucket #0 (it is nan), exit 16",
        ),
        ({0: "SystemExit: 17"}, "", "invalid", "Megatron found a result that cannot be right, exit 17"),
        (
            {0: "SIGTERM", 1: "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"},
            "",
            "out_of_memory",
            "rank 1 ran out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (
            {0: "SIGTERM"},
            TORCHRUN.format(rank=1, code=-9) + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n",
            "out_of_memory",
            "rank 1 was killed: its node was out of memory",
        ),
        (
            {0: "SIGTERM"},
            TORCHRUN.format(rank=1, code=-4),
            "illegal_instruction",
            "rank 1: the processor or GPU does not know an instruction of the image's libraries (exit 132)",
        ),
        (
            {0: "SIGTERM"},
            TORCHRUN.format(rank=1, code=-11),
            "failed",
            "rank 1 was ended by signal 11 (Segmentation fault)",
        ),
        (
            {0: "RuntimeError: Connection closed by peer [10.0.0.2]:4711"},
            TORCHRUN.format(rank=1, code=-6),
            "failed",
            "rank 1 was ended by signal 6 (Aborted)",
        ),
        ({0: "SIGTERM"}, "srun: error: Node failure on n2\n", "lost", "node n2 failed"),
        (
            {0: "RuntimeError: Connection closed by peer [10.0.0.2]:4711"},
            "",
            "lost",
            "rank 1 ended without a word (rank 0: RuntimeError: Connection closed by peer [10.0.0.2]:4711)",
        ),
        ({0: "ValueError: no such layer"}, "", "failed", "rank 0: ValueError: no such layer"),
        ({}, "", "failed", "it ended without a word"),
    ],
)
def test_how_an_attempt_ended(attempt: Path, leaves: dict[int, str], log: str, kind: str, sentence: str) -> None:
    codes = {"ok": 0, "SIGTERM": 143, "SystemExit: 16": 16, "SystemExit: 17": 17}
    for rank, reason in leaves.items():
        leave(attempt, rank, codes.get(reason, 1), reason, float(rank))
    (attempt / "train.log").write_text(log)
    how = ending(attempt, 2)
    assert (how.kind, how.sentence) == (kind, sentence)
    if kind == "rerun":
        assert how.ranks == (5,)


def test_taken_away_with_its_batch_shell(attempt: Path) -> None:
    assert ending(attempt, 2, taken=True).kind == "lost"
    leave(attempt, 0, 143, "SIGTERM", 1.0)
    assert ending(attempt, 2, taken=True).kind == "lost"
    leave(attempt, 1, 1, "ValueError: no such layer", 2.0)
    assert ending(attempt, 2, taken=True).kind == "failed"


def test_with_its_batch_shell_goes_what_ranks_write_to(attempt: Path) -> None:
    for rank in (0, 1):
        leave(attempt, rank, 1, "BrokenPipeError: [Errno 32] Broken pipe", 1.0)
    assert ending(attempt, 2, taken=True).kind == "lost"
    assert ending(attempt, 2).kind == "failed"


def test_srun_killed(attempt: Path) -> None:
    (attempt / "train.log").write_text("Storing distributed optimizer sharded state\n")
    assert ending(attempt, 2, srun_code=137).sentence == "srun was killed (SIGKILL)"
    assert ending(attempt, 2, srun_code=1).kind == "failed"


def test_a_spike_that_training_went_on_from_is_no_cause(attempt: Path) -> None:
    (attempt / "train.log").write_text(RERUN)
    leave(attempt, 0, 143, "SIGTERM", 1.0)
    leave(attempt, 1, 143, "SIGTERM", 1.0)
    assert ending(attempt, 2).kind == "stopped"


def test_a_long_log_is_read_from_its_end(attempt: Path) -> None:
    with (attempt / "train.log").open("w") as log:
        log.write("Traceback (most recent call last):\nValueError: long ago\n")
        log.seek(3 << 30)
        log.write(TRACEBACK)
    assert ending(attempt, 1).sentence == "ValueError: first"


def test_half_of_a_record_is_none(attempt: Path) -> None:
    leave(attempt, 0, 0, "ok", 1.0)
    (attempt / "exit" / "rank1.json").write_text('{"code": 0, "rea')
    (attempt / "exit" / "rank2.json").write_text("[]")
    assert list(exit_records(attempt)) == [0]
