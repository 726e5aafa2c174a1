"""A run's attempts told: from files as jobs leave them, whole or not."""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import checkpoint_double
import pytest

from moekit.launch.rundir import RunDir
from moekit.launch.slurm_text import Job
from moekit.runs import submissions
from moekit.runs.history import History, read_history
from moekit.runs.look import Seen, look_at
from moekit.runs.report import full
from moekit.runs.state import judge, read_files
from moekit.runs.why import as_json, lines

BEGAN = 1.79e9
"""When the first attempt of a run here began, in seconds since 1970; each later one 1000 s later."""


class Run(RunDir):
    """A run's directory, written attempt by attempt."""

    def put(self, name: str, said: Any) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said if isinstance(said, str) else json.dumps(said))

    def begin(self, number: int, job: str = "7", step: int = 0, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        time_s = BEGAN + 1000 * number
        said = {"time": time_s, "action": "resume", "step": step, "job": job, "nodes": nodes, "exclude": []}
        self.put(f"attempts/{number}/decision.json", said)
        self.put(f"jobs/{job}", "")
        os.utime(self.path / f"jobs/{job}", (time_s - 1, time_s - 1))

    def reach(self, number: int, step: int) -> None:
        self.put(f"attempts/{number}/metrics.jsonl", f'{{"step": {step}}}\n')

    def end(self, number: int, kind: str, sentence: str, checkpoint: int = 0, ranks: tuple[int, ...] = ()) -> None:
        said = {"time": BEGAN + 1000 * number + 600, "code": 1, "checkpoint": checkpoint}
        self.put(f"attempts/{number}/end.json", {**said, "kind": kind, "sentence": sentence, "ranks": ranks})

    def submit(self, number: int, job: str, **ended: Any) -> None:
        self.submissions.mkdir(exist_ok=True)
        submissions.record(self, number, "submitted", job=job)
        if ended:
            one = submissions.Submission(number, "submitted", 0.0, job)
            submissions.record_end(self, one, Job(job, **ended))

    def seen(self, *jobs: Job) -> Seen:
        files = read_files(self)
        return Seen(files, judge(files, {job.id: job for job in jobs}))

    def history(self, *jobs: Job) -> History:
        return read_history(self.seen(*jobs))

    def told(self, *jobs: Job, width: int | None = None) -> list[str]:
        seen = self.seen(*jobs)
        return list(lines(seen, read_history(seen), None, width))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "runs" / "x")
    run.put("job.sbatch", "")
    run.put("recipe.yaml", "")
    run.put("end", "100\n0\n")
    run.put("argv.resume", "--lr\n0.001\n")
    run.put("retry.json", {"requeue": True, "max_attempts": 100, "world": 16, "ranks_per_node": 8})
    return run


@pytest.fixture
def twice(run: Run) -> Run:
    """A node's GPU was wrong, and then memory ran out."""
    run.begin(1)
    run.reach(1, 12)
    run.end(1, "rerun", "rank 9: found NaN in the loss, exit 16", 10, (9,))
    run.begin(2, step=10, nodes=("n1", "n3"))
    run.reach(2, 17)
    run.end(2, "out_of_memory", "rank 3 ran out of memory: OutOfMemoryError", 10)
    checkpoint_double.save(run.checkpoints, 10, lr=0.001)
    run.submit(1, "7", state="FAILED", start=BEGAN + 1999, end=BEGAN + 2700)
    return run


def test_each_attempt_with_its_cause_and_what_came_next(twice: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    head, empty, *table = twice.told()
    assert head.startswith("x: failed, ended 2026-")
    assert empty == ""
    assert [" ".join(line.split()) for line in table[:3]] == [
        "ATTEMPT START END STEPS JOB NODES CAUSE DECISION",
        "1 2026-09-21 14:30 2026-09-21 14:40 0-12 7 n1,n2 rank 9: found NaN in the loss, exit 16 "
        "attempt 2 goes on from step 10, without n2",
        "2 2026-09-21 14:46 2026-09-21 14:56 10-17 7 n1,n3 rank 3 ran out of memory: OutOfMemoryError stop",
    ]
    sentence = (
        "attempt 2 ended at step 17: rank 3 ran out of memory: OutOfMemoryError; it would run out again: less per GPU "
        "helps, as by `memory.recompute_granularity`"
    )
    assert table[3:] == [
        "",
        f"  decision    {sentence}",
        "  excluded    n2",
        "  next        moekit resume x --anyway, once the cause is gone",
    ]
    seen = twice.seen()
    assert f"  cause       {sentence}" in list(full(seen, read_history(seen), None))


def test_for_a_script(twice: Run) -> None:
    seen = twice.seen()
    said = json.loads(json.dumps(as_json(seen, read_history(seen), None)))
    assert [(one["attempt"], one["kind"], one["from_step"], one["step"]) for one in said["attempts"]] == [
        (1, "rerun", 0, 12),
        (2, "out_of_memory", 10, 17),
    ]
    assert (said["decision"]["action"], said["decision"]["goes_on"], said["exclude"]) == ("stop", False, ["n2"])


@pytest.mark.parametrize("width", [50, 80, 100, 140, 200])
def test_no_line_is_wider_than_the_terminal(twice: Run, width: int) -> None:
    """Only facts and the command to type may be: those are never cut."""
    told = twice.told(width=width)
    facts = [line for line in told if line.startswith(("ATTEMPT", "1 ", "2 ", "  next"))]
    assert [line for line in told if len(line) > width and (width >= 80 or line not in facts)] == []
    words = " ".join(" ".join(told).split())
    for text in ("rank 9: found NaN in", "without n2", "as by `memory.recompute_granularity`"):
        assert all(word in words.split(" ") for word in text.split())


ENDED = {"start": BEGAN + 999, "end": BEGAN + 1500, "nodes": "n[1-2]"}


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("TIMEOUT", "TIMEOUT: its job's time limit came"),
        ("CANCELLED", "CANCELLED: somebody ended its job"),
        ("NODE_FAIL", "NODE_FAIL: a node failed"),
        ("PREEMPTED", "PREEMPTED: another job took its nodes"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY: a node was out of memory"),
    ],
)
def test_slurms_word_where_no_shell_saw_the_end(run: Run, state: str, cause: str) -> None:
    run.begin(1)
    run.submit(1, "7", state=state, **ENDED)
    assert [start.cause for start in run.history().starts] == [cause]
    # the next job's start put down what it could see
    run.end(1, "lost", "Slurm took its nodes")
    run.begin(2, job="8")
    run.submit(2, "8", state="COMPLETED", start=BEGAN + 1999, end=BEGAN + 2500, nodes="n1")
    assert run.history().starts[0].cause == cause


def test_slurms_word_is_about_the_last_start_of_a_job(run: Run) -> None:
    """It came back, waited, and was cancelled then."""
    run.begin(1)
    run.end(1, "lost", "node n2 failed")
    for start, nodes in ((999, ""), (4000, "n[1-2]")):
        run.submit(1, "7", state="CANCELLED", start=BEGAN + start, end=BEGAN + 4000, nodes=nodes)
        assert run.history().starts[0].cause == "node n2 failed"


def test_a_shell_that_saw_the_end_says_more(run: Run) -> None:
    run.begin(1)
    run.end(1, "stopped", "its ranks were told to end (SIGTERM) and did not save")
    run.submit(1, "7", state="TIMEOUT", **{**ENDED, "end": BEGAN + 1630})
    (start,) = run.history().starts
    assert start.cause == "TIMEOUT: its job's time limit came; its ranks were told to end (SIGTERM) and did not save"


def running(job: str = "7") -> Job:
    return Job(job, "RUNNING", start=BEGAN + 999, node_count=2, nodes="n[1-2]")


def test_an_attempt_that_runs(run: Run) -> None:
    run.submit(1, "7")
    run.begin(1)
    run.reach(1, 5)
    history = run.history(running())
    assert [(start.running, start.cause) for start in history.starts] == [(True, "")]
    assert history.decision is None
    assert any(line.endswith("  running") for line in run.told(running()))
    assert run.told(running())[-1] == "  next        moekit logs -f x"


@pytest.mark.parametrize("how", ["it waits again", "it has just begun again", "its shell put it down"])
def test_an_attempt_does_not_run_though_its_job_is_there(run: Run, how: str) -> None:
    run.submit(1, "7")
    run.begin(1)
    job = running()
    if how == "it waits again":
        job = Job("7", "PENDING", "BeginTime")
    elif how == "it has just begun again":
        os.utime(run.jobs / "7")
    else:
        run.end(1, "failed", "no")
    history = run.history(job)
    assert not history.starts[0].running
    assert history.decision is not None
    if how == "it waits again":
        seen = run.seen(job)
        assert next(full(seen, history, None)) == "x: pending again, after attempt 1, start not known yet (BeginTime)"


@pytest.mark.parametrize("half", ["", "{", "[]", '{"time": 1'])
def test_half_written_files_are_no_reason_to_fail(run: Run, half: str) -> None:
    for name in ("retry.json", "decision.json", "attempts/1/decision.json", "attempts/1/end.json", "attempts/2/x"):
        run.put(name, half)
    run.put("attempts/1/exit/rank0.json", half)
    run.put("attempts/1/metrics.jsonl", half)
    run.put("checkpoints/latest_checkpointed_iteration.txt", half)
    run.submit(1, "7", state="FAILED", **ENDED)
    assert [start.attempt.number for start in run.history().starts] == [1, 2]
    assert run.told()


def test_a_run_without_attempts(run: Run) -> None:
    assert run.told() == ["x: written", "  decision    begins at the beginning", "  next        moekit resume x"]


def test_hundreds_of_attempts_are_told_at_once(run: Run) -> None:
    for number in range(1, 501):
        run.begin(number, step=number - 1)
        run.reach(number, number)
        run.end(number, "lost", "node n2 failed", number)
    began = time.process_time()
    assert len(run.told()) > 500
    assert time.process_time() - began < 2


def test_the_checkpoint_decides_and_is_left_as_it_is(run: Run) -> None:
    """What is not complete is passed over with a word, and stays where it is; another schedule is no way on."""
    run.begin(1)
    run.end(1, "lost", "node n2 failed", 10)
    run.submit(1, "7", state="NODE_FAIL", **ENDED)
    checkpoint_double.save(run.checkpoints, 10, lr=0.001)
    (run.checkpoints / "iter_0000020").mkdir()
    run.latest_checkpoint.write_text("20")
    before = sorted(run.checkpoints.rglob("*"))
    told = run.told()
    assert "  checkpoint  the checkpoint of iteration 20 is passed over: it is empty" in told
    assert "  decision    attempt 1 ended at step 0: node n2 failed; goes on from step 10" in told
    assert (sorted(run.checkpoints.rglob("*")), run.latest_checkpoint.read_text()) == (before, "20")
    run.put("argv.resume", "--lr\n0.002\n")
    decision = run.history().decision
    assert decision is not None
    assert (decision.action, decision.sentence) == ("stop", "the checkpoint has lr 0.001, the run 0.002")
    (run.attempt(1).path / "forgiven").touch()
    decision = run.history().decision
    assert decision is not None
    assert decision.action == "resume"


def test_five_starts_without_progress_stop_here_as_in_the_job(run: Run) -> None:
    """The last attempt's end is nowhere yet: the job's next start would put it down."""
    for number in range(1, 6):
        run.begin(number, step=10)
        if number < 5:
            run.end(number, "lost", "node n2 failed", 10)
    run.submit(1, "7", state="NODE_FAIL", start=BEGAN + 4999, end=BEGAN + 5500)
    checkpoint_double.save(run.checkpoints, 10)
    decision = run.history().decision
    assert decision is not None
    assert decision.action == "stop"
    assert "5 attempts in a row began at step 10 and saved nothing newer" in decision.sentence


def test_a_run_on_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no decisions, and its recipe says how many ranks it has."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for name in ("job.sbatch", "retry.json"):
        (run.path / name).unlink()
    run.put("recipe.yaml", "megatron: {version: 0.19.2}\nparallel: {gpus: 2}\n")
    for number, (begins, code) in enumerate(((0, 1), (10, 0)), 1):
        run.put(f"attempts/{number}/installed.json", "[]")
        os.utime(run.attempt(number).installed, (BEGAN, BEGAN))
        text = f"  successfully loaded checkpoint from checkpoints [ t 1/1, p 1/1 ] at iteration {begins}\n"
        run.put(f"attempts/{number}/train.log", text if begins else "")
        os.utime(run.attempt(number).train_log, (BEGAN, BEGAN))
        run.reach(number, begins + 5)
        for rank in range(2):
            said = {"code": code, "reason": "ValueError: no" if code else "", "time": BEGAN + 60}
            run.put(f"attempts/{number}/exit/rank{rank}.json", said)
    table = [" ".join(line.split()) for line in run.told()[2:5]]
    assert table[1:] == [
        "1 2026-09-21 14:13 2026-09-21 14:14 0-5 rank 0: ValueError: no attempt 2 goes on from step 10",
        "2 2026-09-21 14:13 2026-09-21 14:14 10-15 all ranks came to their end",
    ]
    assert run.told()[-1] == "  next        the `moekit launch` that began it goes on with it"
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [start.running for start in run.history().starts] == [False, True]


def test_an_attempt_is_read_whatever_slurm_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    run.begin(1)
    run.submit(1, "7")
    seen, problems = look_at(run)
    assert (seen.state.word, len(problems)) == ("unknown", 1)
    assert read_history(seen).decision is None
