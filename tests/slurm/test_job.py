"""The job's script on a real Slurm, with an interpreter that only writes down what it is given."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_double
import pytest
from cluster import Cluster

from moekit.cluster.profile import find_cluster
from moekit.launch.folders import claim, write
from moekit.launch.script import slurm_files
from moekit.recipe.load import load

pytestmark = pytest.mark.slurm

RECORDER = f"""#!{sys.executable}
import hashlib, json, os, sys, time
env = dict(os.environ)
if "A_TOKEN" in env:
    env["A_TOKEN"] = hashlib.sha256(env["A_TOKEN"].encode()).hexdigest()
seen = {{"argv": sys.argv[1:], "env": env, "cwd": os.getcwd(), "host": os.uname().nodename}}
with open(f"seen.{{env['SLURM_NODEID']}}.json", "w") as file:
    json.dump(seen, file)
if env["MOEKIT_ATTEMPT"] == "1":
    time.sleep(float(env.get("HOLD_S", 0)))
"""
NSYS = """#!/bin/bash
printf "%s\\n" "$@" >"nsys.$SLURM_NODEID"
while [[ $1 != *recorder ]]; do shift; done
exec "$@"
"""
HOSTILE = {
    "SPACES": "  x  y  ",
    "QUOTES": """it's "quoted" '' \\\\' """,
    "DOLLAR": "$HOME ${HOME} $(touch p) `touch p`",
    "COMMAND": "a; touch p & b | c > d < e",
    "STARS": "* ? [a-z] ~ {a,b} !x #y %z",
    "EMPTY": "",
    "UNICODE": "é 日本 \U0001f600",
    "COMMAS": "a,b=c:d",
    "c_lower": "1",
    "NCCL_DEBUG": "RECIPE",
}
WORDS = ["--a", "$HOME", "it's", '"', "a b", "*", "\\", "$(touch p)", "; touch p", "é", "-n", "#"]


@pytest.fixture(scope="session")
def recorder(cluster: Cluster) -> Path:
    path = cluster.shared_root / "recorder"
    path.write_text(RECORDER)
    path.chmod(0o755)
    return path


class Job:
    """One run directory that is submitted."""

    def __init__(self, slurm: Cluster, run: Path) -> None:
        self.slurm, self.run = slurm, run

    def submit(self, *options: str, **env: str) -> int:
        return self.slurm.submit(self.run, *options, **env)

    def ends(self, *options: str, **env: str) -> str:
        self.id = self.submit(*options, **env)
        return self.slurm.wait(self.id, timeout_s=60)

    def seen(self, node: int = 0) -> dict[str, Any]:
        return json.loads((self.run / f"seen.{node}.json").read_text())

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in [*self.run.glob("slurm-*.log"), *self.run.glob("attempts/*/*.log")])


def job(slurm: Cluster, name: str, recipe: str, **profile: Any) -> Job:
    source = slurm.folder / f"{name}.recipe.yaml"
    source.write_text(f"base: {recipe}")
    fields = {"python": str(slurm.shared_root / "recorder"), **profile}
    loaded, cluster = load(str(source)), find_cluster(str(slurm.profile(name, **fields)))
    run = Path(cluster.shared_root, "runs", name)
    claim(run)
    write(run, slurm_files(loaded, name, cluster))
    return Job(slurm, run)


pytestmark = [pytestmark, pytest.mark.usefixtures("recorder")]


@pytest.mark.parametrize("container", ["none", "pyxis"])
def test_hostile_values_arrive_byte_for_byte(slurm: Cluster, container: str) -> None:
    root = slurm.shared_root / f"it's-$HOME;$(touch${{IFS}}p)-é-{container}"
    (root / "tools").mkdir(parents=True)
    python = root / "tools" / 'py"thon'
    python.write_text(RECORDER)
    python.chmod(0o755)
    text = f"""dense
runtime: {{environment: {json.dumps({**HOSTILE, "UNSET_ME": None}, ensure_ascii=False)}}}
megatron: {{extra: {json.dumps(WORDS)}}}
"""
    folders = ["/opt/it's", "/opt/$(touch p)"]
    it = job(
        slurm, "hostile", text, container=container, shared_root=str(root), python=str(python), library_path=folders
    )
    assert it.ends(UNSET_ME="outside", LD_LIBRARY_PATH="/site/lib") == "COMPLETED", it.log
    seen = it.seen()
    assert {name: seen["env"].get(name) for name in HOSTILE} == HOSTILE
    assert "UNSET_ME" not in seen["env"]
    start = seen["argv"].index("--a")
    assert seen["argv"][start : start + len(WORDS)] == WORDS
    assert seen["cwd"] == str(it.run)
    inside = container == "pyxis" and not any("image" in sentence for sentence in slurm.lacks)
    assert seen["env"]["LD_LIBRARY_PATH"] == ":".join([*folders, "/image/lib" if inside else "/site/lib"])
    assert seen["env"]["PYTHONPATH"] == f"{it.run}/job" + (":/image/python" if inside else "")
    assert not list(root.rglob("p"))
    assert not Path("p").exists()


def test_each_node_gets_its_rank_all_its_cpus_and_gpus(slurm: Cluster) -> None:
    it = job(slurm, "nodes", "dense\nparallel: {gpus: 24}")
    assert it.ends() == "COMPLETED", it.log
    for node in range(3):
        seen = it.seen(node)
        assert f"--node-rank={node}" in seen["argv"]
        assert {"--nnodes=3", "--nproc-per-node=8"} <= set(seen["argv"])
        assert seen["env"]["SLURM_CPUS_PER_TASK"] == "96"
        assert seen["env"].get("CUDA_VISIBLE_DEVICES") in ("0,1,2,3,4,5,6,7", None if slurm.lacks else "all")
    heads = {next(word for word in it.seen(node)["argv"] if word.startswith("--rdzv-endpoint=")) for node in range(3)}
    assert heads == {f"--rdzv-endpoint={it.seen(0)['host'] if not slurm.lacks else 'n1'}:{20000 + it.id % 10000}"}


def test_the_submitting_shells_python_stays_outside(slurm: Cluster, tmp_path: Path) -> None:
    it = job(slurm, "venv", "dense")
    venv = tmp_path / "venv"
    path = f"{venv}/bin:{os.environ['PATH']}"
    assert it.ends(VIRTUAL_ENV=str(venv), PYTHONPATH="/my/code", PYTHONHOME="", PATH=path) == "COMPLETED", it.log
    seen = it.seen()["env"]
    assert seen["PYTHONPATH"] == f"{it.run}/job"
    assert "VIRTUAL_ENV" not in seen
    assert str(venv) not in seen["PATH"]


def test_an_empty_environment_at_submission_reaches_no_step(slurm: Cluster) -> None:
    it = job(slurm, "bare", "dense")
    assert it.ends("--export=NONE") == "COMPLETED", it.log
    assert it.seen()["env"]["MOEKIT_DEVICE"] == "gpu"


def test_a_token_is_handed_on_and_written_nowhere(slurm: Cluster) -> None:
    token = "tok" + hashlib.sha256(os.urandom(8)).hexdigest()
    text = "dense\nruntime: {secrets: [A_TOKEN], environment: {HOLD_S: 2}}"
    it = job(slurm, "token", text, container="pyxis")
    id = it.submit(A_TOKEN=token)
    deadline = time.monotonic() + 60
    while not (it.run / "seen.0.json").exists():
        assert time.monotonic() < deadline, it.log
        assert token not in command_lines()
        time.sleep(0.05)
    assert "train.sh" in command_lines()
    assert token not in command_lines()
    said = slurm.call("scontrol", "show", "job", "-d", str(id)).stdout + slurm.call("squeue", "-O", "All").stdout
    assert slurm.wait(id, timeout_s=60) == "COMPLETED", it.log
    assert it.seen()["env"]["A_TOKEN"] == hashlib.sha256(token.encode()).hexdigest()
    assert token not in said
    files = [path for folder in (it.run, slurm.folder / "log") for path in folder.rglob("*") if path.is_file()]
    assert [path for path in [*files, slurm.record] if token.encode() in path.read_bytes()] == []


def command_lines() -> str:
    """The process list: of this machine's processes, which a node's are too."""
    return subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def taken_ports(slurm: Cluster) -> Iterator[range]:
    """Ports that something else listens on, on the first node."""
    ports = range(20000, 20500)
    script = f"""
import socket, time
held = [socket.create_server(("", port)) for port in range({ports.start}, {ports.stop})]
print("held", flush=True)
time.sleep(600)
"""
    there = [] if slurm.lacks else ["nsenter", f"--net=/proc/{slurm.daemons['n1'].pid}/ns/net"]
    holder = subprocess.Popen([*there, sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    yield ports
    holder.kill()
    holder.wait()
    holder.stdout.close()


def test_a_taken_port_is_left_alone(slurm: Cluster, taken_ports: range) -> None:
    it = job(slurm, "ports", "dense")
    assert it.ends("--nodelist=n1") == "COMPLETED", it.log
    assert 20000 + it.id % 10000 in taken_ports
    (endpoint,) = [word for word in it.seen()["argv"] if word.startswith("--rdzv-endpoint=n1:")]
    assert int(endpoint.rpartition(":")[2]) == taken_ports.stop


def wait_until_it_trains(slurm: Cluster, it: Job, id: int) -> None:
    slurm.wait(id, "RUNNING")
    deadline = time.monotonic() + 60
    while not (it.run / "seen.0.json").exists():
        assert time.monotonic() < deadline, it.log
        time.sleep(0.1)


def test_a_running_job_can_be_looked_at(slurm: Cluster) -> None:
    """It has all of its nodes; a step beside the training needs `--overlap`."""
    it = job(slurm, "beside", "dense\nruntime: {environment: {HOLD_S: 600}}")
    id = it.submit()
    wait_until_it_trains(slurm, it, id)
    step = ["srun", f"--jobid={id}", "--overlap", "--nodes=1", "--ntasks=1", "hostname"]
    done = slurm.call(*step)
    assert (done.returncode, done.stdout.strip()) == (0, it.seen()["host"]), done.stderr
    slurm.call("scancel", str(id))
    assert slurm.wait(id) == "CANCELLED"


def test_a_requeued_job_is_the_next_attempt(slurm: Cluster) -> None:
    """As an administrator may do it, where a job allows it."""
    it = job(slurm, "requeued", "dense\nruntime: {environment: {HOLD_S: 600}}")
    id = it.submit("--requeue")
    wait_until_it_trains(slurm, it, id)
    slurm.call("scontrol", "requeue", str(id))
    slurm.wait(id, "PENDING")
    slurm.call("scontrol", "update", f"JobId={id}", "StartTime=now")  # else it waits for its credentials' end
    assert slurm.wait(id, timeout_s=60) == "COMPLETED", it.log
    log = (it.run / f"slurm-{id}.log").read_text()
    assert re.findall(r"^attempt \d", log, re.MULTILINE) == ["attempt 1", "attempt 2"]
    assert f"--rdzv-id={id}.2" in it.seen()["argv"]
    assert [path.name for path in (it.run / "jobs").iterdir()] == [str(id)]


def test_nsight_starts_on_the_nodes_of_the_chosen_ranks(slurm: Cluster, tmp_path: Path) -> None:
    text = "settings/profile_nsys\nparallel: {gpus: 24}\nprofile: {ranks: [0, 9, 1]}"
    it = job(slurm, "nsight", text)
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    assert it.ends(PATH=f"{tmp_path}:{os.environ['PATH']}") == "COMPLETED", it.log
    assert sorted(path.name for path in it.run.glob("nsys.*")) == ["nsys.0", "nsys.1"]
    words = (it.run / "nsys.1").read_text().splitlines()
    assert words[: words.index(str(slurm.shared_root / "recorder"))] == [
        *(it.run / "argv.nsys").read_text().splitlines()[1:],
        "--output=attempts/1/nsys/node1",
    ]
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(words)
    assert (it.run / "attempts/1/nsys").is_dir()
    assert [it.seen(node)["argv"][:2] for node in range(3)] == [["-m", "torch.distributed.run"]] * 3


def test_without_nsight_the_job_says_so(slurm: Cluster) -> None:
    it = job(slurm, "no_nsight", "settings/profile_nsys")
    assert it.ends() == "FAILED"
    assert "train.sh: there is no `nsys` on " in it.log


def test_the_sites_setup_script_comes_first_and_the_recipe_wins(slurm: Cluster) -> None:
    script = slurm.shared_root / "it's;set$up.sh"
    script.write_text(
        'export SITE=1 BOTH=site LD_LIBRARY_PATH=/site/lib UNSEEN="$NOT_SET" argv=x ARGUMENTS="$*"\nfalse\n'
    )
    text = "dense\nruntime: {environment: {BOTH: recipe}}"
    it = job(slurm, "set_up", text, setup_script=str(script), library_path=["/efa/lib"])
    assert it.ends() == "COMPLETED", it.log
    seen = it.seen()["env"]
    assert (seen["SITE"], seen["BOTH"], seen["LD_LIBRARY_PATH"]) == ("1", "recipe", "/efa/lib:/site/lib")
    assert seen["ARGUMENTS"] == ""


def test_a_finished_run_is_left_alone(slurm: Cluster) -> None:
    it = job(
        slurm, "finished", "dense\ntrain: {iters: 20, exit_interval: 7}\ncheckpoint: {save: true, save_interval: 7}"
    )
    checkpoint_double.write(it.run / "checkpoints/release")
    (it.run / "checkpoints/latest_checkpointed_iteration.txt").write_text("release")
    for step, attempts in ((0, 1), (6, 2), (14, 2), (20, 2)):
        if step:
            checkpoint_double.save(it.run / "checkpoints", step)
        assert it.ends() == "COMPLETED", it.log
        assert len(list((it.run / "attempts").iterdir())) == attempts
    for step in (14, 20):
        assert f"training is finished, at step {step}" in it.log
    assert len(list((it.run / "jobs").iterdir())) == 4
