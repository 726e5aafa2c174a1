"""What a run is, from files and jobs; and the files of its submissions."""

import fcntl
import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from moekit.job.retry import Decision
from moekit.launch.rundir import RunDir
from moekit.launch.slurm_text import Job
from moekit.problems import MoekitError
from moekit.runs import submissions
from moekit.runs.look import all_runs, find_run, look
from moekit.runs.state import Files, State, cannot_resume, judge, read_files
from moekit.runs.submissions import Submission


def files(*known: Submission, **said: object) -> Files:
    return Files(RunDir(Path("/shared/runs/x")), submissions=list(known), **said)  # type: ignore[arg-type]


def submitted(number: int = 1, job: str = "7") -> Submission:
    return Submission(number, "submitted", 1.0, job)


def ended(state: str, number: int = 1, job: str = "7", **said: str) -> Submission:
    return Submission(number, "ended", 1.0, job, ended=Job(job, state, **said))  # type: ignore[arg-type]


LOST = Submission(1, "submitting", 1.0)
IN_HAND = Submission(1, "submitting", 1.0, in_hand=True)
SAVED = {"attempt": 1, "step": 90, "checkpoint": 80, "total": 100}


@pytest.mark.parametrize(
    ("known", "jobs", "word", "detail"),
    [
        (files(), [], "written", ""),
        (files(IN_HAND), [], "submitting", ""),
        (files(LOST), [], "lost", "moekit ended before Slurm answered, and no job of it can be found"),
        (files(Submission(1, "unanswered", 1.0, said="it hung")), [], "lost", "it hung"),
        (files(Submission(1, "refused", 1.0, said="no such partition")), [], "refused", "no such partition"),
        (files(submitted()), [Job("7", "PENDING", "Resources")], "pending", "Resources"),
        (files(submitted()), [Job("7", "RUNNING")], "running", ""),
        (files(submitted()), [Job("7", "COMPLETING")], "completing", ""),
        (files(submitted()), [Job("7", "NODE_FAIL")], "node_fail", ""),
        (files(submitted()), [], "forgotten", ""),
        (files(ended("TIMEOUT")), [], "timeout", ""),
        (files(ended("TIMEOUT"), **SAVED), [], "timeout", ""),
        (files(ended("COMPLETED"), **{**SAVED, "checkpoint": 100}), [], "finished", ""),
        (files(ended("FAILED"), **{**SAVED, "checkpoint": 100}), [], "finished", ""),  # after its last save
        (files(ended("COMPLETED"), **{**SAVED, "checkpoint": 0, "step": 100}), [], "finished", ""),  # it saves nothing
        (files(ended("COMPLETED"), **SAVED), [], "completed", ""),  # told to save and end
        (files(ended("COMPLETED"), exit_interval=40, **SAVED), [], "finished", ""),
        # the first link of a chain has ended, the second runs, the third waits
        (
            files(submitted(3, "9"), submitted(2, "8"), ended("TIMEOUT")),
            [Job("8", "RUNNING"), Job("9", "PENDING", "Dependency")],
            "running",
            "",
        ),
        # a resume was refused: what the run is, and why it has no job
        (files(Submission(2, "refused", 2.0, said="no"), ended("TIMEOUT", reason="x")), [], "timeout", "no"),
    ],
)
def test_a_run_in_a_word(known: Files, jobs: list[Job], word: str, detail: str) -> None:
    state = judge(known, {job.id: job for job in jobs})
    assert (state.word, state.detail) == (word, detail)


@pytest.mark.parametrize("known", [files(), files(LOST), files(submitted())])
def test_without_an_answer_nothing_is_known(known: Files) -> None:
    assert judge(known, {}, answered=False).word == "unknown"
    assert judge(files(ended("TIMEOUT")), {}, answered=False).word == "timeout"


@pytest.mark.parametrize(
    ("known", "state", "refused"),
    [
        (files(), State("written"), None),
        (files(LOST), State("lost"), None),
        (files(**SAVED), State("timeout"), None),
        (files(attempt=1), State("failed"), "run `x` has no complete checkpoint, so a further job would begin anew"),
        (files(**SAVED), State("finished"), "run `x` is finished, at step 90"),
        (files(), State("pending", live=(Job("7", "PENDING"),)), "run `x` has a job already: 7 is pending"),
        (files(), State("submitting"), "run `x` is being submitted just now"),
        (files(), State("unknown"), "Slurm does not answer, so whether run `x` has a job is not known"),
        (files(local=True), State("stopped"), "run `x` is trained on this machine"),
    ],
)
def test_what_can_be_resumed(known: Files, state: State, refused: str | None) -> None:
    decision = Decision("resume" if known.checkpoint else "first", "it goes on", known.checkpoint)
    problem = cannot_resume(known, state, decision)
    assert (problem.what if problem else None) == refused
    if known.attempt and not known.checkpoint:
        assert cannot_resume(known, state, decision, anyway=True) == problem  # which does not say where from
        assert cannot_resume(known, state, decision, anew=True) is None


@pytest.mark.parametrize(
    ("step", "option", "does"), [(80, "anyway", "goes on from step 80"), (0, "anew", "begins anew")]
)
def test_a_run_that_is_to_stop_goes_on_when_one_says_how(step: int, option: str, does: str) -> None:
    decision = Decision("stop", "rank 0 ran out of memory", step)
    known, state = files(**SAVED), State("failed")
    problem = cannot_resume(known, state, decision)
    assert problem is not None
    assert problem.what == "run `x` does not go on: rank 0 ran out of memory"
    assert problem.hint == f"`moekit resume x --{option}` {does} all the same"
    said = {"anyway": False, "anew": False, option: True}
    assert cannot_resume(known, state, decision, **said) is None
    other = {name: not value for name, value in said.items()}
    assert cannot_resume(known, state, decision, **other) == problem


def test_a_run_is_finished_where_its_job_would_say_so() -> None:
    problem = cannot_resume(files(**SAVED), State("failed"), Decision("finished", "training is finished, at step 100"))
    assert problem is not None
    assert problem.what == "run `x` is finished, at step 90"


@pytest.mark.parametrize(
    ("ended_before_s", "started_again", "asked"), [(60, False, True), (3600, False, False), (3600, True, True)]
)
def test_a_job_that_has_ended_may_come_back(
    run: RunDir, ended_before_s: float, started_again: bool, asked: bool
) -> None:
    """While Slurm can requeue it; later its own file says so."""
    ended_at = time.time() - ended_before_s
    run.jobs.mkdir()
    (run.jobs / "7").touch()
    os.utime(run.jobs / "7", (ended_at - 5, time.time() if started_again else ended_at - 5))
    submissions.claim(run, 0)
    submissions.record(run, 1, "submitted", job="7")
    submissions.record_end(run, submissions.read(run)[0], Job("7", "NODE_FAIL", start=ended_at - 60, end=ended_at))
    assert read_files(run).job_that_may_be_back == ("7" if asked else None)
    assert read_files(run).open_jobs == []


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "x")
    run.path.mkdir(parents=True)
    (run.path / "job.sbatch").touch()
    (run.path / "recipe.yaml").touch()
    return run


def test_a_submission_is_claimed_once(run: RunDir) -> None:
    said = []

    def try_it() -> None:
        try:
            said.append(str(submissions.claim(run, 0)))
        except MoekitError as refused:
            said.append(refused.problems[0].what)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == ["1", *["`x` is being submitted by another moekit"] * 7]
    assert [path.name for path in run.submissions.iterdir()] == ["1.json"]
    assert submissions.read(run)[0].in_hand


def test_whose_claim_is_alive(run: RunDir) -> None:
    """A claim of this machine is its process's, and no later one's of the same number; another machine's gets time."""

    def write(said: dict[str, object]) -> None:
        (run.submissions / "1.json").write_text(json.dumps(said))

    process = subprocess.Popen(["sleep", "60"])
    try:
        submissions.claim(run, 0)
        said = json.loads((run.submissions / "1.json").read_text())
        began = int(Path(f"/proc/{process.pid}/stat").read_text().split()[21])
        for changes, alive in (
            ({"pid": process.pid, "began": began}, True),
            ({"pid": process.pid, "began": began - 1}, False),
            ({"host": "login2"}, True),
            ({"host": "login2", "time": time.time() - submissions.MOST_S - 1}, False),
        ):
            write({**said, **changes})
            assert submissions.read(run)[0].in_hand is alive
            assert submissions.read(run)[0].lost is not alive
        write({**said, "pid": process.pid, "began": began})
    finally:
        process.kill()
        process.wait()
    assert submissions.read(run)[0].lost
    assert said["host"] == socket.gethostname()


def test_half_a_file_is_no_submission(run: RunDir) -> None:
    submissions.claim(run, 0)
    submissions.record(run, 1, "submitted", job="7")
    (run.submissions / "2.json").write_text('{"phase": "sub')
    (run.submissions / "3.json").write_text("[]")
    (run.submissions / ".4.99").write_text("")
    assert [one.job for one in submissions.read(run)] == ["7"]


def test_jobs_that_nobody_put_down_are_adopted_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost gets its job; what somebody submitted by hand becomes a submission."""
    monkeypatch.setenv("PATH", "/nonexistent")
    submissions.claim(run, 0)
    submissions.record(run, 1, "unanswered", said="it hung")
    run.jobs.mkdir()
    for job in ("17", "21"):
        (run.jobs / job).touch()
    for _ in range(2):
        (seen,), _ = look([run])
        assert [(one.number, one.job) for one in seen.files.submissions] == [(2, "21"), (1, "17")]


def test_jobs_of_a_run_that_cannot_be_written_are_known_all_the_same(run: RunDir) -> None:
    run.jobs.mkdir()
    (run.jobs / "17").touch()
    run.submissions.touch()  # a file is in the way, as for root nothing else is
    (seen,), _ = look([run])
    assert seen.files.open_jobs == ["17"]


def local_run(path: Path, codes: dict[int, int]) -> RunDir:
    run = RunDir(path)
    (path / "attempts/1/exit").mkdir(parents=True)
    (path / "recipe.yaml").touch()
    (path / "end").write_text("300\n0\n")
    for rank, code in codes.items():
        (path / f"attempts/1/exit/rank{rank}.json").write_text(json.dumps({"code": code}))
    return run


@pytest.mark.parametrize(
    ("codes", "word"), [({}, "killed"), ({0: 0, 1: 0}, "completed"), ({0: 0, 1: 143}, "stopped"), ({0: 1}, "failed")]
)
def test_a_run_on_this_machine(tmp_path: Path, codes: dict[int, int], word: str) -> None:
    run = local_run(tmp_path / "runs/x", codes)
    (run.attempt(1).metrics).write_text('{"step": 299}\n{"event": "x"}\n{"step": 3')
    (seen,), problems = look([run])
    assert (seen.files.local, seen.state.word, seen.files.step, problems) == (True, word, 299, [])
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert judge(read_files(run), {}).word == "running"
    run.attempt(1).metrics.write_text('{"step": 300}\n')
    assert judge(read_files(run), {}).word == ("finished" if word == "completed" else word)


def test_runs_are_found_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = local_run(tmp_path / "runs/first_moe", {})
    (tmp_path / "runs/.first_moe.99").mkdir()  # being written
    (tmp_path / "runs/notes.txt").touch()
    assert [one.path for one in all_runs([tmp_path, tmp_path / "none"])] == [run.path]
    assert find_run("first_moe", [tmp_path]).path == run.path
    monkeypatch.chdir(run.path)
    assert find_run(".", []).path == run.path
    assert find_run(f"{run.path}/", []).path == run.path
    with pytest.raises(MoekitError, match="did you mean `first_moe`"):
        find_run("first_mo", [tmp_path])
    with pytest.raises(MoekitError, match="no profile says where runs lie"):
        find_run("first_moe", [])
    with pytest.raises(MoekitError, match="is no run"):
        find_run("../nothing", [])
