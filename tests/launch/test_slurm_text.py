"""Parsers against what real Slurms printed, 22.05 and 24.11, and against lines after the manual of 24.11."""

from dataclasses import replace
from pathlib import Path

import pytest

from moekit.launch import slurm_text
from moekit.launch.slurm_text import Job

PRINTED = Path(__file__).parent / "slurm"
FOLDER = "/fsx/moekit/runs/x"


def printed(name: str) -> str:
    return (PRINTED / name).read_text()


def told(jobs: list[Job]) -> dict[str, tuple[str, str, str]]:
    return {job.id: (job.state, job.reason, job.exit_code) for job in jobs}


def test_squeue_22_05() -> None:
    jobs = slurm_text.squeue_jobs(printed("squeue-22.05.txt"))
    assert told(jobs) == {
        "1": ("COMPLETED", "", "0:0"),
        "2": ("FAILED", "NonZeroExitCode", "3:0"),
        "3": ("FAILED", "JobLaunchFailure", "0:9"),
        "4": ("CANCELLED", "", "0:15"),
        "5": ("PENDING", "DependencyNeverSatisfied", ""),
        "6": ("COMPLETED", "", "0:0"),
        "7": ("COMPLETED", "", "0:0"),
        "8": ("COMPLETED", "", "0:0"),
        "9": ("RUNNING", "", ""),
        "10": ("PENDING", "BeginTime", ""),
        "11": ("PENDING", "JobHeldUser", ""),
    }
    by_id = {job.id: job for job in jobs}
    assert by_id["9"] == Job(
        "9", "RUNNING", start=1796011215, node_count=1, nodes="n1", name="runs", folder=FOLDER, cluster="moekit"
    )
    assert (by_id["10"].start, by_id["10"].end, by_id["10"].nodes) == (1796014815, None, "")  # when it is expected
    assert (by_id["11"].start, by_id["4"].end) == (None, 1796011186)


def test_squeue_of_other_clusters_22_05() -> None:
    """A federation's or another cluster's, whose heading is printed in spite of --noheader in some versions."""
    jobs = slurm_text.squeue_jobs("CLUSTER: moekit\n" + printed("squeue-clusters-22.05.txt"))
    assert {job.cluster for job in jobs} == {"moekit"}
    assert [job.id for job in jobs] == ["4", "1", "8"]


def test_sacct_22_05() -> None:
    jobs = slurm_text.sacct_jobs(printed("sacct-22.05.txt"))
    assert told(jobs) == {
        "1": ("COMPLETED", "", "0:0"),
        "2": ("FAILED", "", "3:0"),
        "3": ("FAILED", "", "0:9"),
        "4": ("CANCELLED", "", "0:0"),  # `CANCELLED by 0`
        "6_0": ("COMPLETED", "", "0:0"),
        "6_1": ("COMPLETED", "", "0:0"),
        "7": ("COMPLETED", "", "0:0"),
    }
    assert {job.folder for job in jobs} == {FOLDER}


def test_scontrol_22_05() -> None:
    """The same jobs, told by another command."""
    jobs = {job.id: job for job in slurm_text.scontrol_jobs(printed("scontrol-22.05.txt"))}
    for job in slurm_text.squeue_jobs(printed("squeue-22.05.txt")):
        if job.id != "6":  # an array, of which scontrol has a line for each task
            mine = jobs[job.id]
            assert (mine.state, mine.start, mine.end, mine.nodes) == (job.state, job.start, job.end, job.nodes)
            assert (mine.name, mine.folder, mine.exit_code) == (job.name, job.folder, job.exit_code)


def test_squeue_24_11() -> None:
    """Exit codes are no longer what wait(2) gave, and reasons name signals."""
    jobs = slurm_text.squeue_jobs(printed("squeue-24.11.txt"))
    assert told(jobs) == {
        "1": ("COMPLETED", "", "0:0"),
        "2": ("FAILED", "NonZeroExitCode", "3:0"),
        "3": ("FAILED", "RaisedSignal:9(Killed)", "0:9"),
        "4": ("CANCELLED", "", "0:15"),
        "5": ("PENDING", "DependencyNeverSatisfied", ""),
        "6": ("COMPLETED", "", "0:0"),
        "7": ("COMPLETED", "", "0:0"),
        "8": ("RUNNING", "", ""),
        "9": ("PENDING", "BeginTime", ""),
        "10": ("PENDING", "JobHeldUser", ""),
    }
    by_id = {job.id: job for job in jobs}
    assert (by_id["8"].nodes, by_id["8"].node_count, by_id["9"].start) == ("n[1-2]", 2, 1796017551)
    scontrol = {job.id: job for job in slurm_text.scontrol_jobs(printed("scontrol-24.11.txt"))}
    for job in jobs:
        if job.id != "6":  # an array
            assert scontrol[job.id] == replace(job, cluster="")


def test_squeue_after_the_manual() -> None:
    jobs = {job.id: job for job in slurm_text.squeue_jobs(printed("squeue-made-up.txt"))}
    assert [job.node_count for job in jobs.values()] == [2, 2, 1, 1, 1024]
    assert jobs["123457"].waiting
    assert jobs["123458"].exit_code == "0:125"
    assert jobs["123458"].ended
    assert not jobs["123459"].ended  # a state that 22.05 does not have
    assert jobs["123460"].reason.startswith("ReqNodeNotAvail, Unavailable")
    assert jobs["123460"].folder == "/fsx/moekit/runs/wi|de"


def test_sacct_and_scontrol_after_the_manual() -> None:
    jobs = slurm_text.sacct_jobs(printed("sacct-made-up.txt"))
    assert [job.state for job in jobs] == ["TIMEOUT", "CANCELLED", "NODE_FAIL"]
    assert (jobs[1].start, jobs[1].nodes, jobs[1].reason) == (None, "", "AssocGrpGRES")
    (job,) = slurm_text.scontrol_jobs(printed("scontrol-made-up.txt"))
    assert (job.state, job.reason, job.folder) == ("RUNNING", "", "/fsx/moekit/runs/first_moe")
    assert (job.nodes, job.node_count, job.name) == ("nid[005212-005213]", 2, "first_moe")


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("17\n", "17"),
        ("17;alps\n", "17;alps"),
        ("67108865;fed-a.site\n", "67108865;fed-a.site"),
        ("Welcome! You have 12 jobs.\n17\n", "17"),
        ("17\nThank you for saving energy 100\n", "17"),
        ("budget left: 9000\n\n17 \n\n", "17"),
        ("Submitted batch job 17\n", "17"),
        ("Submitted batch job 17 on cluster alps\n", "17"),
        ("", None),
        ("queued\n", None),
        ("17.5\n", None),
    ],
)
def test_the_id_is_found_among_noise(printed: str, job: str | None) -> None:
    assert slurm_text.submitted_id(printed) == job


@pytest.mark.parametrize(
    ("stderr", "why", "more"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "Invalid partition name specified",
            "invalid partition specified: nope",
        ),
        ("sbatch: error: Invalid --time specification\n", "Invalid --time specification", ""),
        ("sbatch: fatal: no", "no", ""),
        ("", "it said nothing", ""),
        (
            printed("sbatch-lua-22.05.txt"),
            "Invalid account or account/partition combination specified",
            "Welcome to the cluster. Please mind the maintenance on Tuesday.; "
            "Jobs need an account: see https://wiki.example.org/accounts",
        ),
    ],
)
def test_a_refusal_is_in_slurms_words(stderr: str, why: str, more: str) -> None:
    assert slurm_text.refusal(stderr) == (why, more)


@pytest.mark.parametrize(
    ("stderr", "silent"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", True),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", False),
    ],
)
def test_no_answer_is_no_refusal(stderr: str, silent: bool) -> None:
    assert slurm_text.no_answer(stderr) == silent
