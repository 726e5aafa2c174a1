"""A launch is killed at any moment, and two are made at once: Slurm has one job at most, and the next command knows."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster
from test_runs import jobs_of, profile, run_of, state_of  # noqa: F401  # a fixture among them

from moekit import cli
from moekit.launch import several, submit  # noqa: F401  # imported before the fork
from moekit.problems import MoekitError
from moekit.runs import cancelling  # noqa: F401
from moekit.runs.look import look_at

pytestmark = pytest.mark.slurm

KILLS = 30


@pytest.fixture
def closed(slurm: Cluster) -> object:
    """The partition takes jobs and starts none."""
    slurm.call("scontrol", "update", "partitionname=gpu", "state=down")
    yield
    slurm.call("scancel", "--partition=gpu")
    slurm.call("scontrol", "update", "partitionname=gpu", "state=up")


def begin(out: Path, *words: str) -> int:
    """`moekit WORDS` in a process of its own, which has imported everything already; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with out.open("w") as file:
            sys.stdout, sys.stderr, sys.argv = file, file, ["moekit", *words]
            try:
                cli.main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            file.flush()
    finally:
        os._exit(code)


def end(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_at_30_moments(slurm: Cluster, profile: Path, closed: object, tmp_path: Path) -> None:  # noqa: F811
    began = time.monotonic()
    pid = begin(tmp_path / "out", "launch", "first_moe", "--name", "whole")
    while not any((run_of(slurm, "whole").path / "submissions").glob("1.json")) or jobs_of(slurm, "whole") == []:
        assert time.monotonic() < began + 60, (tmp_path / "out").read_text()
    longest_s = time.monotonic() - began
    end(pid)
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    met = []
    for number in range(KILLS):
        name = f"killed_{number}"
        pid = begin(tmp_path / "out", "launch", "first_moe", "--name", name)
        time.sleep(moments.uniform(0, 1.2 * longest_s))
        os.kill(pid, signal.SIGKILL)
        end(pid)
        met.append(check_and_go_on(slurm, profile, name, f"seed {seed}, number {number}"))
    print(f"seed {seed}, {longest_s:.2f} s:", {word: met.count(word) for word in met})
    assert len(set(met)) > 1, met


def check_and_go_on(slurm: Cluster, profile: Path, name: str, case: str) -> str:  # noqa: F811
    """What the killed launch left is told rightly, and the next command ends with the one job."""
    run = run_of(slurm, name)
    if not run.path.exists():
        assert jobs_of(slurm, name) == [], case
        end(begin(profile.with_name("out"), "launch", "first_moe", "--name", name))
        word = "nothing"
    else:
        seen, problems = look_at(run)
        word = seen.state.word
        assert not problems, case
        if word == "pending":
            assert seen.state.job is not None
            assert [seen.state.job.id] == jobs_of(slurm, name), case
            with pytest.raises(MoekitError, match="has a job already"):
                submit.resume(run)
        else:
            assert word in ("written", "lost"), case
            submit.resume(run)
    assert state_of(slurm, name) == "pending", case
    assert len(jobs_of(slurm, name)) == 1, case
    return word


def test_two_launches_at_once(slurm: Cluster, profile: Path, closed: object, tmp_path: Path) -> None:  # noqa: F811
    for number in range(5):
        name = f"twice_{number}"
        pids = [begin(tmp_path / f"out{two}", "launch", "first_moe", "--name", name) for two in range(2)]
        assert sorted(map(end, pids)) == [0, 1], [(tmp_path / f"out{two}").read_text() for two in range(2)]
        assert len(jobs_of(slurm, name)) == 1
        assert state_of(slurm, name) == "pending"


def test_two_resumes_at_once(slurm: Cluster, profile: Path, closed: object, tmp_path: Path) -> None:  # noqa: F811
    for number in range(5):
        name = f"resumed_{number}"
        assert end(begin(tmp_path / "out", "launch", "first_moe", "--name", name, "--no-submit")) == 0
        pids = [begin(tmp_path / f"out{two}", "resume", name) for two in range(2)]
        assert sorted(map(end, pids)) == [0, 1], [(tmp_path / f"out{two}").read_text() for two in range(2)]
        assert len(jobs_of(slurm, name)) == 1
        assert state_of(slurm, name) == "pending"
