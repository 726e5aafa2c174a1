"""`moekit init` on a real Slurm: what it finds, asks, refuses and tries."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

from moekit.cluster import init_site
from moekit.cluster.profile import find_cluster
from moekit.problems import MoekitError

pytestmark = pytest.mark.slurm


@pytest.fixture
def answers(slurm: Cluster) -> list[str]:
    return ["--shared-root", str(slurm.shared_root), "--image", str(slurm.image), "--megatron-path", "none"]


@pytest.fixture
def busy(slurm: Cluster) -> Iterator[None]:
    """Every node is taken."""
    nodes = f"--nodes={len(slurm.nodes)}"
    said = slurm.call("sbatch", "--parsable", nodes, "--exclusive", "--output=/dev/null", "--wrap", "sleep 100")
    slurm.wait(int(said.stdout), "RUNNING")
    yield
    slurm.call("scancel", said.stdout.strip())
    slurm.wait(int(said.stdout))
    slurm.ready()


def moekit(slurm: Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moekit", *words],
        cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=slurm.env(), timeout=150,
    )  # fmt: skip


def test_a_profile_is_written_and_tried(slurm: Cluster, tmp_path: Path, answers: list[str]) -> None:
    done = moekit(slurm, tmp_path, "init", *answers)
    assert done.returncode == 0, done.stderr
    first, second, third, last = done.stdout.splitlines()
    nodes = len(slurm.nodes)
    assert first == f"moekit.yaml written: {nodes} nodes of 8 h200 in partition `gpu`, fabric none, container pyxis"
    assert second.startswith("sbatch would take its jobs: the first could start at 20")
    assert third.startswith("srun ran on n") or slurm.lacks
    assert last == "next: moekit launch first_moe_smoke --profile moekit.yaml"
    found = find_cluster(str(tmp_path / "moekit.yaml"))
    assert (found.partition, found.cpu_partition, found.nodes, found.max_time_min) == ("gpu", "gpu", nodes, 7 * 24 * 60)
    assert (found.gres, found.cpus_per_task, found.max_array_tasks) == ("gpu:h200", 192, 1001)
    assert found.environment
    assert str(found.environment["NCCL_SOCKET_IFNAME"]).startswith("^lo")


def test_what_it_wrote_is_a_profile_for_jobs(slurm: Cluster, tmp_path: Path, answers: list[str]) -> None:
    assert moekit(slurm, tmp_path, "init", *answers, "--partition", "cpu").returncode == 0
    done = moekit(slurm, tmp_path, "launch", "first_moe_smoke", "--profile", "moekit.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=gpu:h200:8\n" in done.stdout
    assert "#SBATCH --partition=cpu\n" in done.stdout
    assert find_cluster(str(tmp_path / "moekit.yaml")).time_limit_min == 60  # not moekit's 120: the partition's limit


def test_a_job_runs_by_what_it_wrote(slurm: Cluster, tmp_path: Path) -> None:
    """From an empty folder to a finished job: init, launch, and the job has the profile's setup and environment."""
    root = slurm.shared_root / "by-init"
    root.mkdir()
    (root / "setup.sh").write_text("export FROM_SETUP='it ran'\n")
    trainer = root / "trainer"
    trainer.write_text(
        "#!/bin/bash\n"
        'mkdir -p "attempts/$MOEKIT_ATTEMPT/exit"\n'
        'for r in {0..7}; do echo \'{"code": 0, "reason": "", "time": 1.0}\' >"attempts/1/exit/rank$r.json"; done\n'
        'echo "$FROM_SETUP|$NCCL_SOCKET_IFNAME|$SLURM_GPUS_ON_NODE|$SLURM_JOB_PARTITION" >said\n'
    )
    trainer.chmod(0o755)
    words = ["--container", "none", "--python", str(trainer), "--setup-script", str(root / "setup.sh")]
    made = moekit(slurm, tmp_path, "init", *words, "--shared-root", str(root), "--megatron-path", "none")
    assert made.returncode == 0, made.stderr
    done = moekit(slurm, tmp_path, "launch", "first_moe_smoke", "--profile", "moekit.yaml", "--json")
    assert done.returncode == 0, done.stderr
    run = root / "runs/first_moe_smoke"
    job = int(json.loads(done.stdout)["jobs"][0])
    assert slurm.wait(job) == "COMPLETED", (run / "attempts/1/train.log").read_text()
    assert (run / "said").read_text() == "it ran|^lo|8|gpu\n"


def test_as_json(slurm: Cluster, tmp_path: Path, answers: list[str]) -> None:
    done = moekit(slurm, tmp_path, "init", "deep/er/mine.yaml", "--json", *answers)
    said = json.loads(done.stdout)
    assert said["values"]["partition"] == "gpu"
    assert said["sources"]["max_time_min"] == "scontrol show partition: MaxTime=7-00:00:00"
    assert set(said["sources"]) >= set(said["values"]) - {"environment"} | {"environment.NCCL_SOCKET_IFNAME"}
    assert said["problems"] == said["notes"] == []
    assert said["srun_host"]
    assert find_cluster(str(tmp_path / said["profile"])).name == "moekit"


def test_without_a_terminal_it_names_every_option_that_is_missing(slurm: Cluster, tmp_path: Path) -> None:
    done = moekit(slurm, tmp_path, "init")
    assert done.returncode == 1
    options = [line.split("`")[1] for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert options == ["--shared-root", "--image", "--megatron-path"]
    assert "    hint: for example `--shared-root /" in done.stderr
    without = moekit(slurm, tmp_path, "init", "--container", "none", "--shared-root", "/x")
    assert [line.split("`")[1] for line in without.stderr.splitlines() if "error: " in line] == ["--megatron-path"]
    assert list(tmp_path.iterdir()) == []


def on_a_terminal(slurm: Cluster, folder: Path, typed: str) -> tuple[int, str, str]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "moekit", "init", "--container", "pyxis"]
    asked = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=slurm.env(), text=True
    )
    os.write(ours, typed.encode())
    out, err = asked.communicate(timeout=150)
    os.close(ours)
    os.close(theirs)
    return asked.returncode, out, err


def test_on_a_terminal_it_asks(slurm: Cluster, tmp_path: Path) -> None:
    """Each question shows what Return takes; the defaults of later ones follow from the answers before."""
    code, out, err = on_a_terminal(slurm, tmp_path, f"{slurm.shared_root}\n\nnone\n")
    assert code == 0, err
    image = f"{slurm.shared_root}/images/pytorch-26.06.sqsh"
    assert f"squashfs image to train in [{image}]: " in err
    assert out.startswith("moekit.yaml written: ")
    found = find_cluster(str(tmp_path / "moekit.yaml"))
    assert (found.shared_root, found.image, found.megatron_path) == (str(slurm.shared_root), image, None)


def test_a_terminal_that_says_no_more(slurm: Cluster, tmp_path: Path) -> None:
    code, _, err = on_a_terminal(slurm, tmp_path, f"{slurm.shared_root}\n\x04")
    assert (code, list(tmp_path.iterdir())) == (1, [])
    assert "error: no answer to what `--image` says\n    hint: give the option; nothing was written\n" in err


def test_a_profile_that_is_there_is_kept(slurm: Cluster, tmp_path: Path, answers: list[str]) -> None:
    (tmp_path / "moekit.yaml").write_text("mine\n")
    done = moekit(slurm, tmp_path, "init", *answers)
    assert (done.returncode, done.stderr.splitlines()[1]) == (1, "error: `moekit.yaml` exists")
    assert (tmp_path / "moekit.yaml").read_text() == "mine\n"
    assert moekit(slurm, tmp_path, "init", *answers, "--force").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["moekit.yaml"]
    assert find_cluster(str(tmp_path / "moekit.yaml")).name == "moekit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition", "gpus"], "error: there is no partition `gpus`\n    hint: did you mean `gpu`?\n"),
        (["--shared-root", "here"], "moekit.yaml:24: `shared_root` must be an absolute path, not `here`\n"
         "    hint: all nodes must find it\n"),
        (["--account", "a b"], "moekit.yaml:8: `account` is `a b`, which no #SBATCH line carries\n"
         "    hint: write the name as Slurm prints it, without spaces\n"),
        (["--wait", "0"], "error: `--wait 0` asks no node, and the network between nodes must be known\n"
         "    hint: say it with `--fabric`\n"),
    ],
)  # fmt: skip
def test_what_is_refused(slurm: Cluster, tmp_path: Path, answers: list[str], words: list[str], said: str) -> None:
    done = moekit(slurm, tmp_path, "init", *answers, *words)
    assert done.returncode == 1
    assert "".join(line for line in done.stderr.splitlines(keepends=True) if not line.endswith("...\n")) == said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("busy")
def test_where_no_node_is_free(slurm: Cluster, tmp_path: Path, answers: list[str]) -> None:
    done = moekit(slurm, tmp_path, "init", *answers, "--wait", "1")
    assert done.returncode == 1
    assert "error: srun could not run on a node: Unable to allocate resources: " in done.stderr
    hint = "no node was free within 1 s: wait longer with `--wait`; `--fabric` goes on without asking a node"
    assert f"    hint: {hint}\n" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = moekit(slurm, tmp_path, "init", *answers, "--wait", "1", "--fabric", "ib")
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("note: no node was asked: ")
    assert notes[1].endswith("try it later: srun --partition=gpu --gres=gpu:h200:1 --mem=1024 --time=1 hostname")
    assert "sbatch would take its jobs: the first could start at 20" in done.stdout


def test_a_shared_root_that_nodes_cannot_write_to(slurm: Cluster, tmp_path: Path, answers: list[str]) -> None:
    done = moekit(slurm, tmp_path, "init", *answers, "--shared-root", "/no/such/folder")
    assert done.returncode == 0, done.stderr
    assert "cannot write to /no/such/folder: `mkdir -p /no/such/folder`, where all nodes see it" in done.stdout


def test_what_sbatch_would_refuse(slurm: Cluster) -> None:
    with pytest.raises(MoekitError) as refused:
        init_site.test_only("#!/bin/bash\n#SBATCH --partition=nope\ntrue\n")
    assert str(refused.value) == (
        "error: sbatch would refuse a job with this profile: invalid partition specified: nope; "
        "allocation failure: Invalid partition name specified"
    )


def test_a_node_that_does_not_answer(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task is given up, and nothing of it is left in the queue."""
    monkeypatch.setattr(init_site, "CLIENT_SLACK_S", 1.0)
    with pytest.raises(MoekitError) as refused:
        init_site.run_on_node(["--partition=gpu", "--mem=1000"], 2, "sleep", "50")
    assert str(refused.value) == (
        "error: a task on a node took longer than 3 s\n    hint: nodes that must start first need a longer `--wait`; "
        "`--fabric` goes on without asking a node"
    )
    left = slurm.call("squeue", "-h", "-t", "RUNNING,PENDING", "-n", f"moekit-init-{os.getpid()}", "-o", "%i").stdout
    assert left == ""


def test_a_controller_that_does_not_answer(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client goes on trying for minutes; ours is ended after its time, here two seconds instead of twenty."""
    lines = slurm.conf.read_text().splitlines()
    dead = [line for line in lines if not line.startswith("SlurmctldPort=")]
    (tmp_path / "slurm.conf").write_text("\n".join([*dead, "SlurmctldPort=1", ""]))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    real = init_site.slurm.call
    monkeypatch.setattr(init_site.slurm, "call", lambda command, timeout_s=20.0: real(command, min(timeout_s, 2.0)))
    with pytest.raises(MoekitError) as refused:
        init_site.ask_slurm()
    assert "`sinfo` took longer than 2 s" in str(refused.value)
    assert "`scontrol ping` says whether its controller is up" in str(refused.value)


# The document


PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_the_page_shows_what_it_prints_and_writes(slurm: Cluster, tmp_path: Path) -> None:
    if slurm.lacks:
        pytest.xfail(slurm.lacks[0])
    page = PAGE.read_text()
    ((command, shown),) = re.findall(r"```text\n\$ moekit ([^\n]*)\n(.*?)```", page, re.DOTALL)
    (profile,) = re.findall(r"```yaml moekit.yaml\n(.*?)```", page, re.DOTALL)
    ours = {"/shared/moekit/images/pytorch.sqsh": str(slurm.image), "/shared/moekit": str(slurm.shared_root)}
    words = [ours.get(word, word) for word in shlex.split(command)]
    done = moekit(slurm, tmp_path, *words)
    assert as_shown(done.stderr + done.stdout, ours) == as_shown(shown, {})
    assert as_shown((tmp_path / "moekit.yaml").read_text(), ours) == as_shown(profile, {})


def as_shown(text: str, paths: dict[str, str]) -> str:
    """With the page's paths, without what differs from one time to the next."""
    for theirs, here in paths.items():
        text = text.replace(here, theirs)
    text = re.sub(r"Slurm \d\d\.\d\d\.\d+", "Slurm VERSION", text)
    text = re.sub(r"\$schema=\S+", "$schema=...", re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text))
    return re.sub(r" +#", " #", re.sub(r"\bn[1-4]\b", "n1", text))
