"""slurm/train.sh, run by bash with a scheduler and an interpreter that record what they are given."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import checkpoint_double
import pytest

from moekit.cluster.profile import Cluster, find_cluster
from moekit.launch.folders import claim, write
from moekit.launch.script import slurm_files
from moekit.recipe.load import Loaded

RECORD = """
import json, os, sys
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
json.dump(seen, open(sys.argv[0] + ".json", "w"))
"""
SRUN = """
options = [word for word in sys.argv[1:] if word.startswith("--")]
given = dict(option[2:].partition("=")[::2] for option in options)
env = dict(os.environ)
image = json.loads(env.pop("TEST_IMAGE", "{}"))
kept = given.get("container-env", "").split(",")
env.update({name: value for name, value in image.items() if name not in kept or name not in env})
where = given.get("container-workdir", ".")
sys.stdout.flush()
done = subprocess.run(sys.argv[1 + len(options):], env=env, cwd=where)
print("srun was here", flush=True)
sys.exit(done.returncode)
"""


@dataclass
class Job:
    """One run directory, and the machine around it."""

    folder: Path
    bin: Path

    def run(self, **env: str | None) -> subprocess.CompletedProcess[str]:
        given = self.environment(**env)
        return subprocess.run(["bash", "job.sbatch"], cwd=self.folder, env=given, capture_output=True, text=True)

    def environment(self, **env: str | None) -> dict[str, str]:
        path = f"{self.bin}:/usr/bin:/bin"
        slurm = {
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NODEID": "1",
            "TEST_HOSTS": "n1\nn2\n",
        }
        return {name: value for name, value in {"PATH": path, **slurm, **env}.items() if value is not None}

    def seen(self, program: str) -> dict:
        return json.loads((self.bin / f"{program}.json").read_text())


@pytest.fixture
def job(tmp_path: Path, recipe_of: Callable[..., Loaded]) -> Callable[..., Job]:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text('#!/bin/bash\n[[ $* == "show hostnames n[1-2]" ]] && printf %s "$TEST_HOSTS"\n')
    (tools / "srun").write_text(f"#!{sys.executable}\nimport subprocess\n{RECORD}\n{SRUN}")
    (tools / "scancel").write_text('#!/bin/bash\necho "$@" >>told\n')
    (tools / "python").write_text(f"#!{sys.executable}\n{RECORD}\nprint('trained')\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)

    def make(text: str = "", **changes: object) -> Job:
        folder = tmp_path / "it's $HOME" / "runs" / "x"
        cluster: Cluster = replace(find_cluster("aws-p5"), **{"preflight": False, **changes})
        claim(folder)
        write(folder, slurm_files(recipe_of(text, base="dense"), "x", cluster))
        return Job(folder, tools)

    return make


BEGINS = "moekit: attempt 1 with argv.first: begins at the beginning"


def test_a_whole_attempt(job: Callable[..., Job]) -> None:
    it = job()
    done = it.run()
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, BEGINS)
    assert done.stdout == "attempt 1 on n[1-2], log in attempts/1/train.log\n"
    assert [path.name for path in (it.folder / "jobs").iterdir()] == ["123456"]
    assert (it.folder / "attempts/1/train.log").read_text() == "trained\nsrun was here\n"
    assert it.seen("srun")["argv"] == [
        *(it.folder / "argv.srun").read_text().splitlines(),
        f"--container-workdir={it.folder}",
        *["bash", "train.sh", "node", "n1:23456", "123456.1", "argv.first", "0"],
    ]
    trained = it.seen("python")
    assert trained["cwd"] == str(it.folder)
    assert trained["argv"] == [
        *["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=8", "--rdzv-backend=static"],
        *["--rdzv-conf=timeout=1800", "--max-restarts=0"],
        *["--rdzv-id=123456.1", "--rdzv-endpoint=n1:23456", "--node-rank=1", "job/entry.py"],
        *(it.folder / "argv.first").read_text().splitlines(),
    ]
    assert trained["env"]["MOEKIT_ATTEMPT"] == "1"
    assert trained["env"]["MOEKIT_DEVICE"] == "gpu"
    assert trained["env"]["MOEKIT_MEGATRON"] == "/fsx/moekit/Megatron-LM"
    assert trained["env"]["NCCL_SOCKET_IFNAME"] == "^lo,docker0,veth_def_agent"


def test_every_argument_arrives_intact(job: Callable[..., Job]) -> None:
    text = """
moe: {num_experts: 8, ffn_hidden_size: 1024, layer_freq: "([0]*1+[1]*15)"}
megatron: {extra: ["--a", "$HOME", "it's", '"', "a b", "*", "\\\\", "$(touch p)", "; touch p", "é", "-n", "#"]}
"""
    it = job(text)
    assert it.run().returncode == 0
    argv = it.seen("python")["argv"]
    assert "([0]*1+[1]*15)" in argv
    start = argv.index("--a")
    assert argv[start + 1 : start + 12] == [
        "$HOME", "it's", '"', "a b", "*", "\\", "$(touch p)", "; touch p", "é", "-n", "#"
    ]  # fmt: skip
    assert not (it.folder / "p").exists()


def test_the_environment_wins_over_the_image_and_over_the_scripts_own_names(job: Callable[..., Job]) -> None:
    names = ("argv", "id", "endpoint", "torchrun", "head", "nodes", "srun", "folder", "NCCL_DEBUG")
    hostile = {name: f"it's ${name}" for name in names}
    it = job(f"runtime: {{environment: {json.dumps({**hostile, 'UNSET_ME': None})}}}")
    image = {"NCCL_DEBUG": "WARN", "UNSET_ME": "image", "LD_LIBRARY_PATH": "/image/lib", "IMAGE_ONLY": "1"}
    done = it.run(TEST_IMAGE=json.dumps(image), UNSET_ME="outside", MOEKIT_ROUTING_TRACE_LAST_ITERS="9")
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, BEGINS)
    seen = it.seen("python")["env"]
    assert {name: seen[name] for name in hostile} == hostile
    assert "UNSET_ME" not in seen
    assert "MOEKIT_ROUTING_TRACE_LAST_ITERS" not in seen
    assert seen["IMAGE_ONLY"] == "1"
    assert seen["LD_LIBRARY_PATH"] == "/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:/image/lib"
    assert it.seen("python")["argv"][7:9] == ["--rdzv-id=123456.1", "--rdzv-endpoint=n1:23456"]


def test_library_folders_without_any_in_the_image(job: Callable[..., Job]) -> None:
    it = job()
    it.run()
    assert it.seen("python")["env"]["LD_LIBRARY_PATH"] == "/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib"


def test_a_virtual_environment_stays_outside(job: Callable[..., Job]) -> None:
    it = job()
    path = f"/my/venv/bin:{it.bin}:/my/venv/bin:/usr/bin:/bin:/my/venv/bin"
    it.run(VIRTUAL_ENV="/my/venv", PYTHONPATH="/my/code", PYTHONHOME="/my/python", PATH=path)
    for program in ("srun", "python"):
        seen = it.seen(program)["env"]
        assert "VIRTUAL_ENV" not in seen
        assert "PYTHONHOME" not in seen
        assert seen["PATH"] == f"{it.bin}:/usr/bin:/bin"
    assert it.seen("python")["env"]["PYTHONPATH"] == f"{it.folder}/job"
    assert it.seen("python")["env"]["PYTHONNOUSERSITE"] == "1"


def test_the_images_python_path_is_kept(job: Callable[..., Job]) -> None:
    it = job()
    it.run(TEST_IMAGE='{"PYTHONPATH": "/opt/image"}')
    assert it.seen("python")["env"]["PYTHONPATH"] == f"{it.folder}/job:/opt/image"


def test_attempts_are_counted_and_a_checkpoint_is_resumed(job: Callable[..., Job]) -> None:
    it = job("checkpoint: {save: true, save_interval: 10}")
    assert "moekit: attempt 1 with argv.first: " in it.run().stderr
    (it.folder / "checkpoints/iter_0000005").mkdir(parents=True)  # a save that was never completed
    assert "moekit: attempt 2 with argv.first: " in it.run().stderr
    checkpoint_double.save(it.folder / "checkpoints", 10)
    (it.folder / "attempts/9").mkdir()
    (it.folder / "attempts/latest").mkdir()
    assert "moekit: attempt 10 with argv.resume: " in it.run().stderr
    argv = it.seen("python")["argv"]
    assert argv[argv.index("--load") + 1] == "checkpoints"
    assert "--rdzv-id=123456.10" in argv


def test_ranks_change_places_where_all_met_a_doubtful_result(job: Callable[..., Job]) -> None:
    """All nodes are the same again; rank 0 is on the second now, and this is node 1 of the job."""
    it = job()
    assert it.run().returncode == 0
    (it.folder / "attempts/1/decision.json").write_text('{"nodes": ["n1", "n2"]}')
    (it.folder / "attempts/1/end.json").write_text('{"kind": "rerun", "ranks": [8, 0]}')
    done = it.run()
    assert "attempt 2 with argv.first" in done.stderr
    assert it.seen("srun")["argv"][-4:] == ["n2:23456", "123456.2", "argv.first", "1"]
    assert "--node-rank=0" in it.seen("python")["argv"]


@pytest.mark.parametrize("hosts", ["", "\n"])
def test_no_head_node_is_fatal(job: Callable[..., Job], hosts: str) -> None:
    it = job()
    done = it.run(TEST_HOSTS=hosts)
    assert done.returncode == 1
    assert done.stderr == "train.sh: `scontrol show hostnames` names no node for SLURM_JOB_NODELIST=n[1-2]\n"
    assert not (it.bin / "srun.json").exists()
    assert not (it.folder / "attempts").exists()


def test_a_failing_scontrol_is_fatal(job: Callable[..., Job]) -> None:
    it = job()
    assert it.run(SLURM_JOB_NODELIST=None).returncode == 1
    assert not (it.bin / "srun.json").exists()


def test_outside_a_job(job: Callable[..., Job]) -> None:
    it = job()
    done = it.run(SLURM_JOB_ID=None)
    assert done.returncode == 1
    assert done.stderr == f"train.sh: this is no Slurm job: run `sbatch job.sbatch` in {it.folder}\n"


def test_the_exit_code_is_that_of_the_training(job: Callable[..., Job]) -> None:
    it = job()
    (it.bin / "python").write_text("#!/bin/bash\necho failed >&2\nexit 7\n")
    done = it.run()
    assert done.returncode == 7
    assert (it.folder / "attempts/1/train.log").read_text() == "failed\nsrun was here\n"


UNTIL_TOLD = """#!/bin/bash
touch training
for ((i = 0; i < 200; i++)); do
    if [[ -e told ]]; then
        mkdir -p "attempts/$MOEKIT_ATTEMPT/exit"
        for ((rank = 0; rank < RANKS; rank++)); do
            echo '{"code": 0, "reason": "SystemExit: 0", "time": 1.0}' >"attempts/$MOEKIT_ATTEMPT/exit/rank$rank.json"
        done
        sleep 0.3
        exit 1
    fi
    sleep 0.05
done
"""


@pytest.mark.parametrize(("ranks", "code"), [(16, 0), (15, 1)])
def test_signals_are_handed_on_and_the_ranks_say_how_it_ended(job: Callable[..., Job], ranks: int, code: int) -> None:
    it = job("parallel: {gpus: 16}\nresilience: {exit_signal_handler: true}")
    (it.bin / "python").write_text(UNTIL_TOLD)
    process = subprocess.Popen(
        ["bash", "job.sbatch"], cwd=it.folder, env=it.environment(RANKS=str(ranks)), stdout=subprocess.PIPE, text=True
    )
    while not (it.folder / "training").exists():
        assert process.poll() is None
        time.sleep(0.02)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.1)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert (it.folder / "told").read_text() == "--signal=TERM 123456\n--signal=USR1 123456\n"
    assert out.splitlines()[1:] == ["SIGTERM is handed on to all nodes", "SIGUSR1 is handed on to all nodes"]


def test_a_port_in_use_is_left_alone(job: Callable[..., Job]) -> None:
    it = job()
    with socket.create_server(("127.0.0.1", 23456)), socket.create_server(("", 23457)):
        assert it.run().returncode == 0
    assert it.seen("srun")["argv"][-4] == "n1:23458"
    it.run(SLURM_JOB_ID="9999")
    assert it.seen("srun")["argv"][-4] == "n1:29999"


def test_a_missing_secret_stops_before_srun(job: Callable[..., Job]) -> None:
    it = job("runtime: {secrets: [HF_TOKEN]}")
    done = it.run()
    assert done.returncode != 0
    assert "HF_TOKEN: is a secret of this run" in done.stderr
    assert not (it.bin / "srun.json").exists()
    assert it.run(HF_TOKEN="a b").returncode == 0
    assert it.seen("python")["env"]["HF_TOKEN"] == "a b"


def test_without_a_container(job: Callable[..., Job]) -> None:
    it = job(container="none", image=None, library_path=None, python="/usr/bin/env")
    assert it.run(LD_LIBRARY_PATH="/site/lib").returncode != 0  # env does not know torchrun's options
    assert it.seen("srun")["argv"][5:7] == ["--cpus-per-task=96", "bash"]
    assert it.seen("srun")["env"]["LD_LIBRARY_PATH"] == "/site/lib"
    assert "env: " in (it.folder / "attempts/1/train.log").read_text()


def test_a_folder_that_cannot_be_written(job: Callable[..., Job]) -> None:
    it = job()
    (it.folder / "attempts").write_text("a file")
    done = it.run()
    assert done.returncode == 1
    assert "attempts" in done.stderr
    assert not (it.bin / "srun.json").exists()
