"""The calls of Slurm's clients. Here stand-ins on PATH misbehave in every way; tests/slurm has the real ones."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from many_runs import make_clients, make_runs

from moekit.launch import slurm
from moekit.problems import MoekitError
from moekit.runs.look import all_runs, look

Client = Callable[[str, str], None]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Put a shell script on PATH in the place of one of Slurm's commands; each call adds a line to `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(name: str, body: str) -> None:
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/calls\n{body}\n')
        (folder / name).chmod(0o755)

    for name in ("squeue", "sacct", "scontrol", "scancel", "sbatch"):
        put(name, "exit 0")
    return put


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_what_hangs_is_ended_with_all_it_started(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client("sbatch", f"sleep 600 & echo $! >{tmp_path}/pid; wait")
    monkeypatch.setattr(slurm, "SUBMIT_TIMEOUT_S", 1)
    began = time.monotonic()
    with pytest.raises(slurm.Unanswered, match="Slurm does not answer: `sbatch` took longer than 1 s"):
        slurm.submit(tmp_path)
    assert time.monotonic() - began < 20
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be taken note of does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_job_is_submitted_from_its_folder(client: Client, tmp_path: Path) -> None:
    client("sbatch", 'echo "sbatch: lua: welcome" >&2; echo "Motd: 3"; pwd; echo "17;alps"')
    assert slurm.submit(tmp_path, ["--dependency=afterok:3"]) == "17;alps"
    assert calls(tmp_path) == [f"sbatch --parsable --chdir={tmp_path} --dependency=afterok:3 job.sbatch"]


def test_sbatch_without_a_job_may_have_submitted_it(client: Client, tmp_path: Path) -> None:
    client("sbatch", "echo thank you")
    with pytest.raises(slurm.Unanswered, match="sbatch names no job, it prints `thank you`"):
        slurm.submit(tmp_path)
    client("sbatch", 'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv" >&2; exit 1')
    with pytest.raises(slurm.Unanswered, match="sbatch had no answer from Slurm: Socket timed out"):
        slurm.submit(tmp_path)


def test_an_outer_job_says_nothing_about_a_new_one(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CPU_BIND", "SLURM_MEM_PER_NODE", "SBATCH_PARTITION", "PMIX_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("SQUEUE_STATES", "SACCT_FORMAT", "_SLURM_SPANK_OPTION_pyxis_image", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/of-this-cluster.conf")
    monkeypatch.setenv("MY_SLURM_X", "stays")
    client("sbatch", f"env | grep -E 'SLURM|SBATCH|PMI|SQUEUE|SACCT' | sort >{tmp_path}/env; echo 1")
    slurm.submit(tmp_path)
    kept = ["MY_SLURM_X=stays", "SLURM_CONF=/etc/slurm/of-this-cluster.conf", "SLURM_TIME_FORMAT=%s"]
    assert (tmp_path / "env").read_text().splitlines() == kept


def test_one_squeue_and_one_sacct_for_all(client: Client, tmp_path: Path) -> None:
    client("squeue", 'echo "1|RUNNING|None|0|1|N/A|1|n1|here|x|/f|"')
    client("sacct", 'echo "2|TIMEOUT|None|0:0|1|2|1|n1|here|x|/f"')
    found = slurm.jobs([str(number) for number in range(1, 500)])
    assert {job: found[job].state for job in found} == {"1": "RUNNING", "2": "TIMEOUT"}
    assert [call.split()[0] for call in calls(tmp_path)] == ["squeue", "sacct"]
    assert "--jobs=2,3,4," in calls(tmp_path)[1]


def test_jobs_of_other_clusters(client: Client, tmp_path: Path) -> None:
    """Numbers repeat from cluster to cluster."""
    client("squeue", 'echo "7|RUNNING|None|0|1|N/A|1|n1|a|x|/f|"; echo "7|PENDING|None|0|1|N/A|1||b|y|/g|"')
    client("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    found = slurm.jobs(["7;a", "7;b"])
    assert {job: found[job].state for job in found} == {"7;a": "RUNNING", "7;b": "PENDING"}
    assert all("--clusters=a,b" in call and "--jobs=7,7" in call for call in calls(tmp_path))
    slurm.cancel(["7;a", "8;a", "9;b"])
    assert calls(tmp_path)[-2:] == ["scancel --clusters=a 7 8", "scancel --clusters=b 9"]


def test_without_accounting_what_is_forgotten_is_left_out(client: Client) -> None:
    client("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    client("sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    assert slurm.jobs(["1"]) == {}


def test_scontrol_tells_where_squeue_cannot(client: Client, tmp_path: Path) -> None:
    client("squeue", 'echo "squeue: error: Invalid job format specification" >&2; exit 1')
    client("scontrol", f"cat {Path(__file__).parent}/slurm/scontrol-22.05.txt")
    found = slurm.jobs(["2", "9"])
    assert (found["2"].exit_code, found["9"].state) == ("3:0", "RUNNING")
    assert calls(tmp_path)[1] == "scontrol --oneliner show job"


def test_a_silent_sacct_leaves_what_squeue_said(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client("squeue", 'echo "1|RUNNING|None|0|1|N/A|1|n1|here|x|/f|"')
    client("sacct", "sleep 600")
    monkeypatch.setattr(slurm, "QUERY_TIMEOUT_S", 2)
    with pytest.raises(slurm.Unanswered) as silent:
        slurm.jobs(["1", "2"])
    assert list(silent.value.known) == ["1"]


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not slurm.available()
    with pytest.raises(MoekitError, match="`sbatch` is not on PATH"):
        slurm.submit(tmp_path)


def test_a_thousand_runs_cost_two_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And later, once their ends are put down, one: for those that run."""
    make_runs(tmp_path, 1000)
    clients = make_clients(tmp_path / "bin", tmp_path, 1000)
    monkeypatch.setenv("PATH", f"{clients}:{os.environ['PATH']}")
    for programs in (["squeue", "sacct"], ["squeue"]):
        (clients / "calls").write_text("")
        seen, problems = look(all_runs([tmp_path]))
        assert not problems
        words = [one.state.word for one in seen]
        assert {word: words.count(word) for word in words} == {
            "timeout": 600,
            "running": 200,
            "failed": 100,
            "completed": 100,
        }
        assert [call.split()[0] for call in (clients / "calls").read_text().splitlines()] == programs
