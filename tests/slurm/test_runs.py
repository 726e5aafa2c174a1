"""Runs on a real Slurm: submitted, seen, followed, cancelled, resumed. Nothing is trained: `trainer` stands in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import checkpoint_double
import pytest
from cluster import Cluster

from moekit.cluster.profile import find_cluster
from moekit.launch import slurm as clients
from moekit.launch.rundir import RunDir
from moekit.launch.submit import prepare, resume, submit_links
from moekit.problems import MoekitError
from moekit.recipe.load import load_each
from moekit.runs.look import look_at

pytestmark = pytest.mark.slurm

TRAINER = """#!/bin/bash
# In the place of Python, on each node: saves what a run's name asks for.
end() { mkdir -p "attempts/$MOEKIT_ATTEMPT/exit"; for ((r = SLURM_NODEID * 8; r < SLURM_NODEID * 8 + 8; r++)); do
    echo "{\\"code\\": $1, \\"reason\\": \\"$2\\", \\"time\\": 1.0}" >"attempts/$MOEKIT_ATTEMPT/exit/rank$r.json"; done
    exit "$1"; }
save() { mkdir -p checkpoints; cp -r ../../complete "checkpoints/$(printf iter_%07d "$1")"
    echo "$1" >checkpoints/latest_checkpointed_iteration.txt; }
[[ $SLURM_NODEID = 0 ]] && echo "attempt $MOEKIT_ATTEMPT speaks"
case $PWD in
    *waits*) sleep 60 ;;
    *fails*) end 3 "RuntimeError: no" ;;
    *saves*) trap 'save 50; end 0' TERM; while sleep 0.1; do :; done ;;
    *chain*) until [[ -e go ]]; do sleep 0.1; done ;;&
    *stops*) save 100; [[ $MOEKIT_ATTEMPT = 1 ]] && end 0; save 5000; end 0 ;;
    *) end 0 ;;
esac
"""


def make_profile(slurm: Cluster, name: str, trainer: str) -> Path:
    """A profile whose jobs run a script in the place of Python, with data and a tokenizer for `first_moe`."""
    script = slurm.shared_root / f"trainer-{name}"
    script.write_text(trainer)
    script.chmod(0o755)
    if not (slurm.shared_root / "complete").exists():
        checkpoint_double.write(slurm.shared_root / "complete")
    (slurm.shared_root / "data/fineweb-edu").mkdir(parents=True, exist_ok=True)
    (slurm.shared_root / "data/fineweb-edu/data-args.txt").touch()
    (slurm.shared_root / "tokenizers/llama-3.2").mkdir(parents=True, exist_ok=True)
    return slurm.profile(name, python=str(script))


@pytest.fixture
def profile(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_profile(slurm, "runs", TRAINER)
    monkeypatch.setenv("MOEKIT_PROFILE", str(path))
    return path


@pytest.fixture
def moekit(profile: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*words: str, code: int | None = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "moekit", *words],
            cwd=tmp_path,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    return call


Moekit = Callable[..., subprocess.CompletedProcess[str]]


def run_of(slurm: Cluster, name: str) -> RunDir:
    return RunDir(slurm.shared_root / "runs" / name)


def jobs_of(slurm: Cluster, name: str) -> list[str]:
    """All jobs that Slurm has or had of a run, in order."""
    listed = slurm.call("squeue", "-h", "-t", "all", "-o", "%i|%Z").stdout.split()
    return sorted((line.split("|")[0] for line in listed if line.endswith(f"/runs/{name}")), key=int)


def state_of(slurm: Cluster, name: str) -> str:
    seen, problems = look_at(run_of(slurm, name))
    assert not problems
    return seen.state.word


def until(slurm: Cluster, name: str, *words: str, timeout_s: float = 60) -> str:
    deadline = time.monotonic() + timeout_s
    while (word := state_of(slurm, name)) not in words:
        assert time.monotonic() < deadline, f"{name} is {word}"
        time.sleep(0.2)
    return word


def test_a_run_from_launch_to_its_end(slurm: Cluster, moekit: Moekit) -> None:
    """It stops at step 100, is resumed, and comes to its end."""
    said = json.loads(moekit("launch", "first_moe", "--name", "stops", "--json").stdout)
    (job,) = said["jobs"]
    assert said["directory"] == str(run_of(slurm, "stops").path)
    assert jobs_of(slurm, "stops") == [job]
    assert until(slurm, "stops", "completed") == "completed"
    assert (run_of(slurm, "stops").jobs / job).exists()
    shown = json.loads(moekit("status", "stops", "--json").stdout)
    assert (shown["state"], shown["job"], shown["checkpoint"], shown["attempt"]) == ("completed", job, 100, 1)
    assert "moekit resume stops" in moekit("status", "stops").stdout

    again = json.loads(moekit("resume", "stops", "--json").stdout)
    assert jobs_of(slurm, "stops") == [job, *again["jobs"]]
    followed = moekit("logs", "-f", "stops")
    assert followed.stdout == "attempt 2 speaks\n"
    assert "stops: finished" in followed.stderr
    refused = moekit("resume", "stops", code=1).stderr
    assert "run `stops` is finished, at step 5,000" in refused
    assert jobs_of(slurm, "stops") == [job, *again["jobs"]]


def test_what_a_dry_run_shows_is_submitted(slurm: Cluster, moekit: Moekit) -> None:
    """Byte for byte; only the provenance says what the cluster had."""
    shown = json.loads(moekit("launch", "first_moe", "--name", "shown", "--dry-run", "--json").stdout)
    moekit("launch", "first_moe", "--name", "shown")
    run = run_of(slurm, "shown").path
    said = json.loads((run / "provenance.json").read_text())
    found = said.pop("found")
    assert said == json.loads(shown.pop("provenance.json"))
    assert {name: (run / name).read_text() for name in shown} == shown
    assert (found["slurm"], found["checkout"], found["image"]) == (
        clients.call(["sbatch", "-V"]).out.split()[1],
        None,
        None,
    )
    assert list(found["data"]["sha256"]) == ["data-args.txt"]
    until(slurm, "shown", "completed")


def test_a_run_that_waits_or_runs_is_cancelled_and_not_resumed(slurm: Cluster, moekit: Moekit) -> None:
    moekit("launch", "first_moe", "--name", "waits")
    until(slurm, "waits", "running")
    (job,) = jobs_of(slurm, "waits")
    assert f"has a job already: {job} is running" in moekit("resume", "waits", code=1).stderr
    assert (
        f"run `waits` exists already, and is running: {run_of(slurm, 'waits').path}"
        in moekit("launch", "first_moe", "--name", "waits", code=1).stderr
    )
    assert moekit("list").stdout.splitlines()[1].split()[:3] == ["waits", "running", job]
    assert f"waits: job {job} cancelled" in moekit("cancel", "waits").stdout
    until(slurm, "waits", "cancelled")
    assert "run `waits` has no job to cancel: it is cancelled" in moekit("cancel", "waits", code=1).stderr
    assert "no complete checkpoint, so a further job would begin anew" in moekit("resume", "waits", code=1).stderr
    moekit("resume", "waits", "--anew")
    moekit("cancel", "waits")


SAVING = """base: first_moe
checkpoint: {save: true, save_interval: 100}
resilience: {exit_signal_handler: true}
"""


def test_a_chain_is_one_run_with_one_log(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:
    (tmp_path / "chain_stops.yaml").write_text(SAVING)
    said = json.loads(moekit("launch", "chain_stops.yaml", "--chain", "3", "--json").stdout)
    assert jobs_of(slurm, "chain_stops") == said["jobs"]
    assert len(said["jobs"]) == 3
    assert state_of(slurm, "chain_stops") in ("pending", "running", "completing")
    words = [sys.executable, "-m", "moekit", "logs", "-f", "chain_stops"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "attempt 1 speaks\n"
        (run_of(slurm, "chain_stops").path / "go").touch()
        out, err = follower.communicate(timeout=120)
    assert out == "attempt 2 speaks\n"  # the third job has nothing to do
    assert "chain_stops: finished" in err
    assert [slurm.wait(int(job)) for job in said["jobs"]] == ["COMPLETED"] * 3
    assert look_at(run_of(slurm, "chain_stops"))[0].files.submissions[0].job == said["jobs"][-1]


def test_a_run_is_told_to_save_and_end(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:
    (tmp_path / "saves.yaml").write_text(SAVING)
    (job,) = json.loads(moekit("launch", "saves.yaml", "--json").stdout)["jobs"]
    until(slurm, "saves", "running")
    deadline = time.monotonic() + 30
    while not run_of(slurm, "saves").attempt(1).train_log.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)  # until the trap is set
    assert moekit("cancel", "saves", "--save").stdout.startswith(f"saves: job {job} told to save and end;")
    assert until(slurm, "saves", "completed") == "completed"
    assert look_at(run_of(slurm, "saves"))[0].files.checkpoint == 50
    moekit("launch", "first_moe", "--name", "unsaving_waits")
    until(slurm, "unsaving_waits", "running")
    refused = moekit("cancel", "unsaving_waits", "--save", code=1).stderr
    assert "run `unsaving_waits` does not save when it is told to end" in refused
    moekit("cancel", "unsaving_waits")


def test_a_failure_says_its_cause(slurm: Cluster, moekit: Moekit) -> None:
    moekit("launch", "first_moe", "--name", "fails")
    until(slurm, "fails", "failed")
    shown = moekit("status", "fails").stdout
    assert "  cause       rank 0: RuntimeError: no\n" in shown
    assert "attempt 1 speaks" in moekit("logs", "fails").stdout.splitlines()


def test_everything_missing_is_told_at_once(slurm: Cluster, moekit: Moekit) -> None:
    root = slurm.shared_root / "nothing"
    root.mkdir(exist_ok=True)
    here = {"container": "pyxis", "image": "/no/image.sqsh", "megatron_path": "/no/Megatron-LM", "mounts": ["/no/m"]}
    lacking = str(slurm.profile("lacking", shared_root=str(root), **here))
    told = moekit("launch", "first_moe", "--profile", lacking, code=1).stderr
    wanted = ["/no/m,", "no image: /no/image", "checkout: /no/Megatron-LM", "no tokenizer `llama", "no data set `fine"]
    places = [told.index(text) for text in wanted]
    assert places == sorted(places)
    assert "git clone https://github.com/NVIDIA/Megatron-LM /no/Megatron-LM" in told
    assert not (root / "runs").exists()
    written = moekit("launch", "first_moe", "--profile", lacking, "--no-submit")
    assert written.stderr.count("warning: ") == len(wanted)
    assert state_of_root(root, "first_moe") == "written"


def state_of_root(root: Path, name: str) -> str:
    return look_at(RunDir(root / "runs" / name))[0].state.word


def test_a_run_submitted_by_hand_is_known(slurm: Cluster, moekit: Moekit) -> None:
    moekit("launch", "first_moe", "--name", "by_hand_waits", "--no-submit")
    assert state_of(slurm, "by_hand_waits") == "written"
    assert "never submitted" not in moekit("status", "by_hand_waits").stderr
    slurm.call("scontrol", "update", "partitionname=gpu", "state=down")
    try:
        job = slurm.submit(run_of(slurm, "by_hand_waits").path)
        assert state_of(slurm, "by_hand_waits") == "pending"  # found by its working directory, before it says its id
    finally:
        slurm.call("scontrol", "update", "partitionname=gpu", "state=up")
    until(slurm, "by_hand_waits", "running")
    assert f"job {job} cancelled" in moekit("cancel", "by_hand_waits").stdout


def test_a_refused_run_is_launched_again_under_its_name(slurm: Cluster, moekit: Moekit) -> None:
    wrong = str(slurm.profile("wrong", partition="nope", python=str(slurm.shared_root / "trainer-runs")))
    told = moekit("launch", "first_moe", "--name", "refused", "--profile", wrong, code=1).stderr
    assert "sbatch refused the job: Invalid partition name specified" in told
    assert "invalid partition specified: nope" in told
    assert state_of(slurm, "refused") == "refused"
    assert "refused: sbatch refused the job: Invalid partition" in moekit("status", "refused").stdout
    assert jobs_of(slurm, "refused") == []
    (job,) = json.loads(moekit("launch", "first_moe", "--name", "refused", "--json").stdout)["jobs"]
    assert jobs_of(slurm, "refused") == [job]
    until(slurm, "refused", "completed")


def stand_in(folder: Path, body: str) -> str:
    """A PATH whose `sbatch` is a script, with the real one as $REAL."""
    folder.mkdir()
    (folder / "sbatch").write_text(
        f'#!/bin/bash\nREAL=/usr/bin/sbatch\n[[ $1 != --version ]] || exec "$REAL" "$1"\n{body}\n'
    )
    (folder / "sbatch").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def submit(profile: Path, name: str) -> str:
    """What the launch of one run does once nothing is missing; the job."""
    (loaded,) = load_each("first_moe", name)
    run, newest = prepare(loaded, name, find_cluster(str(profile)))
    return submit_links(run, newest, (), 1).jobs[0]


def test_sbatch_hangs(slurm: Cluster, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SUBMIT_TIMEOUT_S", 2)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", stand_in(tmp_path / "bin", "sleep 600"))
        with pytest.raises(MoekitError, match=r"took longer than 2 s(.|\n)*`moekit status hung` looks for it"):
            submit(profile, "hung")
    assert state_of(slurm, "hung") == "lost"
    assert jobs_of(slurm, "hung") == []


def test_sbatch_hangs_once_the_job_is_in(
    slurm: Cluster, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "SUBMIT_TIMEOUT_S", 5)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", stand_in(tmp_path / "bin", '"$REAL" "$@" >/dev/null; sleep 600'))
        job = submit(profile, "hung_late")
    assert jobs_of(slurm, "hung_late") == [job]
    assert until(slurm, "hung_late", "completed")


def test_sbatch_says_more_than_the_id(
    slurm: Cluster, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of a site's job_submit.lua come on standard error, those of a wrapper anywhere."""
    body = """echo 'sbatch: Welcome to the cluster. Please mind the maintenance on Tuesday.' >&2
    echo 'Your quota: 17 of 20'; echo
    "$REAL" "$@"
    echo 'sbatch: warning: 3 jobs are enough' >&2; echo 'bye'"""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", stand_in(tmp_path / "bin", body))
        job = submit(profile, "noisy")
    assert jobs_of(slurm, "noisy") == [job]


def test_moekit_dies_before_it_hears_the_id(
    slurm: Cluster, moekit: Moekit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stand_in(tmp_path / "bin", '"$REAL" "$@" >/dev/null; kill -KILL $PPID')
    moekit("launch", "first_moe", "--name", "orphan", code=-9, PATH=path)
    (job,) = jobs_of(slurm, "orphan")
    assert state_of(slurm, "orphan") in ("pending", "running", "completing", "completed")
    assert look_at(run_of(slurm, "orphan"))[0].files.submissions[0].job == job
    until(slurm, "orphan", "completed")


def test_its_file_tells_a_job_that_slurm_has_forgotten(
    slurm: Cluster, moekit: Moekit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No squeue knows it any more, and nobody heard its id: but the job wrote it down, and its ranks their end."""
    path = stand_in(tmp_path / "bin", '"$REAL" "$@" >/dev/null; kill -KILL $PPID')
    moekit("launch", "first_moe", "--name", "forgotten", code=-9, PATH=path)
    (job,) = jobs_of(slurm, "forgotten")
    assert slurm.wait(int(job)) == "COMPLETED"
    (tmp_path / "bin/squeue").write_text("#!/bin/bash\nexit 0\n")
    (tmp_path / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", path)
    seen, _ = look_at(run_of(slurm, "forgotten"))
    assert (seen.state.word, seen.state.job.id if seen.state.job else None) == ("completed", job)


def test_slurm_does_not_answer(slurm: Cluster, moekit: Moekit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real controller hangs: one message, what files say, and no second job."""
    moekit("launch", "first_moe", "--name", "silent_waits")
    run = run_of(slurm, "silent_waits")
    deadline = time.monotonic() + 60
    while not run.numbers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    slurm.daemons["slurmctld"].send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(clients, "QUERY_TIMEOUT_S", 2)
            seen, (problem,) = look_at(run)
            assert problem.what == "Slurm does not answer: `squeue` took longer than 2 s"
            assert (seen.state.word, seen.files.attempt) == ("unknown", 1)
            with pytest.raises(MoekitError, match="whether run `silent_waits` has a job is not known"):
                resume(run)
            patch.setattr(clients, "SUBMIT_TIMEOUT_S", 2)
            with pytest.raises(MoekitError, match="`sbatch` took longer than 2 s"):
                submit(slurm.folder / "runs.yaml", "unheard")
    finally:
        slurm.daemons["slurmctld"].send_signal(signal.SIGCONT)
    assert until(slurm, "silent_waits", "running")
    moekit("cancel", "silent_waits")
    # sbatch was ended, but what it had sent may be taken all the same: known either way
    time.sleep(2)
    jobs = jobs_of(slurm, "unheard")
    assert len(jobs) == (state_of(slurm, "unheard") != "lost")
    print(f"{len(jobs)} jobs of a sbatch that was ended while the controller hung")
