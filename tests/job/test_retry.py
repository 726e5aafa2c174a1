"""What comes next for a run, by what its attempts left."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moekit.job
from moekit.job.attempts import Attempt, Facts, read_attempts, read_facts
from moekit.job.endings import Ending
from moekit.job.retry import MOST_RERUNS, NO_PROGRESS, SAME_FAILURE, Decision, decide, first_node

FACTS = Facts(requeue=True, world=2, ranks_per_node=1, total=100)
OUTSIDE = ("lost", "stopped", "ended")


def attempts(*kinds: str, **said: Any) -> list[Attempt]:
    """Attempts that ended so, each ten steps and a checkpoint further than the one before."""
    return [
        Attempt(
            number,
            Ending(kind, f"a {kind} ending at port {4000 + number}"),
            **{"began_at_step": 10 * number - 10, "step": 10 * number, "checkpoint": 10 * number, **said},
        )
        for number, kind in enumerate(kinds, 1)
    ]


def next_of(*kinds: str, **said: Any) -> Decision:
    known = attempts(*kinds, **said)
    return decide(known, FACTS, known[-1].checkpoint)


def test_a_run_without_attempts_begins() -> None:
    assert decide([], FACTS, 0) == Decision("first", "begins at the beginning")
    assert decide([], FACTS, 4).action == "resume"


@pytest.mark.parametrize("kind", [*OUTSIDE, "failed", "killed"])
def test_what_may_pass_is_tried_again(kind: str) -> None:
    decision = next_of(kind)
    assert (decision.action, decision.step) == ("resume", 10)
    said = f"attempt 1 ended at step 10: a {kind} ending at port 4001; goes on from step 10"
    assert decision.sentence == said
    assert next_of(kind, checkpoint=0).action == "first"


@pytest.mark.parametrize("kind", ["invalid", "illegal_instruction", "arguments", "out_of_memory", "gave_up"])
def test_what_would_come_again_stops(kind: str) -> None:
    decision = next_of(kind)
    assert decision.action == "stop"
    assert decision.sentence.startswith(f"attempt 1 ended at step 10: a {kind} ending at port 4001; ")


@pytest.mark.parametrize("kind", ["failed", "killed"])
def test_the_same_failure_at_the_same_step_stops(kind: str) -> None:
    stuck = {"step": 7, "began_at_step": 5, "checkpoint": 5}
    assert next_of(*[kind] * (SAME_FAILURE - 1), **stuck).action == "resume"
    assert next_of(*[kind] * SAME_FAILURE, **stuck).action == "stop"
    assert next_of("failed", "lost", "failed", **stuck).action == "resume"
    assert next_of(*[kind] * SAME_FAILURE).action == "resume"  # each came further


@pytest.mark.parametrize("kind", OUTSIDE)
def test_without_progress_it_stops_however_attempts_end(kind: str) -> None:
    stuck = {"began_at_step": 5, "checkpoint": 5}
    assert next_of(*[kind] * (NO_PROGRESS - 1), **stuck).action == "resume"
    assert next_of(*[kind] * NO_PROGRESS, **stuck).action == "stop"
    assert next_of(*[kind] * NO_PROGRESS).action == "resume"


def test_the_cap_over_all() -> None:
    facts = Facts(max_attempts=3, total=100)
    known = attempts("lost", "lost", "lost")
    assert decide(known[:2], facts, 20).action == "resume"
    assert decide(known, facts, 30).action == "stop"
    assert "`resilience.max_attempts`" in decide(known, facts, 30).sentence


def test_the_end_of_training() -> None:
    assert decide(attempts("ended"), FACTS, 100).action == "finished"
    assert decide(attempts("ended", step=100, checkpoint=0), FACTS, 0).action == "finished"  # it saves nothing
    assert decide(attempts("killed", step=100, checkpoint=0), FACTS, 0).action == "first"
    assert decide(attempts("ended"), Facts(total=100, exit_interval=5), 10).action == "finished"
    assert decide(attempts("failed"), FACTS, 100).action == "finished"  # behind its last save


def test_a_suspicious_node_is_left_and_stays_left() -> None:
    known = attempts("rerun", suspects=("n2",))
    away = decide(known, FACTS, 10, ["n1", "n3"])
    assert (away.action, away.exclude) == ("resume", ("n2",))
    assert away.sentence.endswith("goes on from step 10, without n2")
    assert decide(known, FACTS, 10, ["n1", "n2"]).action == "move"
    stuck = decide(known, Facts(total=100), 10, ["n1", "n2"])
    assert stuck.action == "resume"
    assert stuck.sentence.endswith("on n2 again, which is under suspicion")
    later = [*known, *attempts("rerun", "lost", suspects=("n1",))[:1], *attempts("lost")]
    assert decide(later, FACTS, 10).exclude == ("n2", "n1")


def test_ranks_that_met_a_spread_result_change_places() -> None:
    """Each rank on another node than the one on which it met the result, the new node among them or not."""
    known = [replace(attempts("rerun")[0], met=((1, "n2"), (0, "n1")))]
    assert first_node(attempts("rerun"), ["n1", "n2"]) == 0
    assert [first_node(known, nodes) for nodes in (["n3", "n4"], ["n1", "n3"], ["n1", "n2"], ["n2", "n1"])] == [
        0,
        1,
        1,
        0,
    ]
    assert first_node(known, []) == first_node(known, ["n1"]) == 0
    spread = [replace(known[0], met=tuple((place, f"n{place}") for place in range(1000)))]
    assert first_node(spread, [f"n{place}" for place in range(1000)]) == 1


def test_reruns_have_their_own_cap() -> None:
    assert next_of(*["rerun"] * (MOST_RERUNS - 1)).action == "resume"
    assert next_of(*["rerun"] * MOST_RERUNS).action == "stop"
    assert next_of("rerun", "rerun", "lost", "rerun").action == "resume"


def test_it_never_begins_at_random_where_there_was_a_checkpoint() -> None:
    decision = decide(attempts("lost"), FACTS, 0)
    assert decision.action == "stop"
    assert decision.sentence == "the checkpoint of step 10 is gone, and training would begin at random weights"


def test_what_a_person_forgave_does_not_count() -> None:
    known = attempts("invalid")
    assert decide(known, FACTS, 10).action == "stop"
    pardoned = [Attempt(1, known[0].ending, step=10, checkpoint=10, forgiven=True)]
    assert decide(pardoned, FACTS, 10).action == "resume"
    again = [*pardoned, Attempt(2, Ending("arguments", "again"))]
    assert decide(again, FACTS, 10).action == "stop"


class Run:
    """A run directory with the files that `retry.py` reads, and nothing else."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self.path = path
        said = {"requeue": True, "max_attempts": 10, "world": 4, "ranks_per_node": 2, **facts}
        (path / "retry.json").write_text(json.dumps(said))
        (path / "end").write_text("100\n0\n")
        (path / "argv.resume").write_text("")

    def retry(self, *words: str, **env: str) -> list[str]:
        """Run the real command, as `train.sh` does."""
        script = Path(moekit.job.__file__).parent / "retry.py"
        command = [sys.executable, str(script), *words]
        done = subprocess.run(
            command, cwd=self.path, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **env}
        )
        self.said = done.stderr
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def rank(self, attempt: int, rank: int, code: int, reason: str = "ok", at: float = 1.0) -> None:
        folder = self.path / "attempts" / str(attempt) / "exit"
        folder.mkdir(exist_ok=True)
        (folder / f"rank{rank}.json").write_text(json.dumps({"code": code, "reason": reason, "time": at}))

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_text())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_attempts_begin_and_end(run: Run) -> None:
    assert run.retry("start", "n1", "n2", SLURM_JOB_ID="17") == ["go", "1", "argv.first", "0"]
    assert "attempt 1 with argv.first: begins at the beginning" in run.said
    begun = run.json("attempts/1/decision.json")
    assert (begun["job"], begun["nodes"], begun["action"], begun["step"]) == ("17", ["n1", "n2"], "first", 0)
    for rank in range(4):
        run.rank(1, rank, 0)
    assert run.retry("end", "1", "n1", "n2") == ["requeue", ""]
    ended = run.json("attempts/1/end.json")
    assert (ended["kind"], ended["code"], ended["checkpoint"]) == ("ended", 1, 0)
    assert run.json("decision.json")["action"] == "first"


def test_an_attempt_whose_batch_shell_died_is_put_down_by_the_next(run: Run) -> None:
    run.retry("start", "n1", "n2")
    run.rank(1, 0, 143, "SIGTERM")
    assert run.retry("start", "n1", "n3") == ["go", "2", "argv.first", "0"]
    ended = run.json("attempts/1/end.json")
    assert (ended["kind"], ended["code"]) == ("lost", None)
    assert [one.ending.kind for one in read_attempts(run.path, read_facts(run.path))][:1] == ["lost"]


def test_what_a_lost_attempt_saved_is_missed_when_it_is_gone(run: Run) -> None:
    run.retry("start", "n1", "n2")
    said = "  successfully saved checkpoint from iteration       {} [ t 1/1, p 1/1 ] to checkpoints\n"
    (run.path / "attempts/1/train.log").write_text(said.format(4) + said.format(8))
    assert run.retry("start", "n1", "n2") == ["exit", "1"]
    assert "the checkpoint of step 8 is gone, and training would begin at random weights" in run.said
    assert run.json("attempts/1/end.json")["checkpoint"] == 8


def test_half_written_files_of_an_attempt_count_as_none(run: Run) -> None:
    run.retry("start", "n1", "n2")
    (run.path / "attempts/1/decision.json").write_text('{"time": 17')
    (run.path / "attempts/1/end.json").write_text('{"kind": "inv')
    (run.path / "attempts/1/exit").mkdir()
    (run.path / "attempts/1/exit/rank0.json").write_text('{"code"')
    assert run.retry("start", "n1", "n2") == ["go", "2", "argv.first", "0"]


def test_exit_16_leaves_the_node_of_the_rank_that_met_it(run: Run) -> None:
    run.retry("start", "n1", "n2")
    log = "ERROR: Rank 3, node n2, device 1, iteration #7: First rerun: unexpected result is reproducible ...!\n"
    (run.path / "attempts/1/train.log").write_text(log)
    for rank in range(4):
        run.rank(1, rank, 16, "SystemExit: 16")
    assert run.retry("end", "1", "n1", "n2") == ["requeue", "n2"]
    assert run.retry("start", "n1", "n2") == ["requeue", "n2"]
    assert run.retry("start", "n1", "n3") == ["go", "2", "argv.first", "0"]


def test_a_result_that_spread_leaves_one_node_and_turns_the_others(run: Run) -> None:
    run.retry("start", "n1", "n2")
    met = "ERROR: Rank {}, node {}, device 0, iteration #7: First rerun: unexpected result is reproducible ...!\n"
    (run.path / "attempts/1/train.log").write_text(met.format(2, "n2") + met.format(0, "n1"))
    run.rank(1, 0, 16, "SystemExit: 16")
    assert run.retry("end", "1", "n1", "n2") == ["requeue", "n2"]
    assert run.retry("start", "n1", "n3") == ["go", "2", "argv.first", "1"]
    assert run.json("attempts/2/decision.json")["nodes"] == ["n3", "n1"]
    same = "Got rescheduled on the same GPU. Need to resume again from the same checkpoint (node: n3, gpu: 1)\n"
    (run.path / "attempts/2/train.log").write_text(same)
    run.rank(2, 0, 16, "SystemExit: 16")
    assert run.retry("end", "1", "n3", "n1") == ["requeue", "n2"]  # nothing was met on n3
    assert "a step was to be repeated on another GPU than 1 of n3, and was not, exit 16" in run.said


def test_cancelled_by_a_person_it_does_not_come_back(run: Run) -> None:
    run.retry("start", "n1", "n2")
    for rank in range(4):
        run.rank(1, rank, 0)
    (run.path / "attempts/1/cancelled").touch()
    assert run.retry("end", "0", "n1", "n2") == ["exit", "0"]


def test_what_a_person_cancelled_is_no_failure(run: Run) -> None:
    for number in range(1, 5):
        assert run.retry("start", "n1", "n2") == ["go", str(number), "argv.first", "0"]
        (run.path / f"attempts/{number}/cancelled").touch()
        (run.path / f"attempts/{number}/train.log").write_text("srun: error: n1: task 0: Terminated\n")
        assert run.retry("end", "143", "n1", "n2") == ["exit", "143"]
    assert "`moekit cancel` ended it" in run.said


def test_without_requeue_a_job_ends_as_its_training_did(tmp_path: Path) -> None:
    run = Run(tmp_path, requeue=False)
    run.retry("start", "n1", "n2")
    run.rank(1, 0, 1, "ValueError: no")
    assert run.retry("end", "1", "n1", "n2") == ["exit", "1"]
    run.retry("start", "n1", "n2")
    for rank in range(4):
        run.rank(2, rank, 0)
    assert run.retry("end", "1", "n1", "n2") == ["exit", "0"]


def test_a_directory_that_cannot_be_written_is_one_message(run: Run) -> None:
    (run.path / "attempts").write_text("no folder")
    with pytest.raises(AssertionError, match=r"moekit: the run directory .* cannot be read or written: .*File exists"):
        run.retry("start", "n1", "n2")
    assert "Traceback" not in run.said
