"""`moekit launch --on docker`: one node, a stand-in for docker's client, and the real Megatron in its container."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moekit.cluster.profile import find_cluster
from moekit.launch import docker
from moekit.recipe.load import Loaded

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "slurm"))
from tiny import tiny  # noqa: E402

AWS = find_cluster("aws-p5")
HOSTILE = "it's\"$(touch${IFS}p)`p`;é"


def words_of(loaded: Loaded, outer: dict[str, str], root: str = "/data/moekit") -> docker.Container:
    return docker.container(loaded, "mine", AWS, "r.io/moe:1", Path(root), outer)


def test_the_command(recipe_of: Callable[..., Loaded]) -> None:
    text = f"runtime: {{environment: {{A_NAME: {json.dumps(HOSTILE)}, GONE: null}}, secrets: [MY_KEY]}}\n"
    made = words_of(
        recipe_of(text), {"MY_KEY": "very secret", "CUDA_VISIBLE_DEVICES": "0,1", "GONE": "x", "PATH": "/p"}
    )
    words = made.words()
    assert words[:4] == ["docker", "run", "--rm", "--init"]
    assert words[words.index("r.io/moe:1") + 1 :][:3] == ["python", "-m", "torch.distributed.run"]
    options = words[4 : words.index("r.io/moe:1")]
    assert {"--gpus=all", "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864", "--entrypoint="} < set(
        options
    )
    assert [one for one in options if one.startswith("--volume=")] == [
        "--volume=/data/moekit:/data/moekit",
        "--volume=/fsx/moekit/Megatron-LM:/fsx/moekit/Megatron-LM:ro",
    ]
    assert "--workdir=/data/moekit/runs/mine" in options
    assert {"--env=A_NAME", "--env=MY_KEY", "--env=GONE", "--env=MOEKIT_ATTEMPT", "--env=CUDA_VISIBLE_DEVICES"} < set(
        options
    )
    assert not [word for word in words if "touch" in word or "secret" in word]
    env = made.environment(3, {"MY_KEY": "very secret", "GONE": "x", "PATH": "/p", "MOEKIT_MEGATRON": "other"})
    assert (env["A_NAME"], env["MY_KEY"], env["MOEKIT_ATTEMPT"], env["PATH"]) == (HOSTILE, "very secret", "3", "/p")
    assert "GONE" not in env  # docker then unsets it in the container
    assert env["MOEKIT_MEGATRON"] == "/fsx/moekit/Megatron-LM"


def test_docker_knows_the_options(recipe_of: Callable[..., Loaded]) -> None:
    """The real client, where it is: it takes all of them, and then finds no daemon, or no such image."""
    if not shutil.which("docker"):
        assert words_of(recipe_of(), {}).words()[0] == "docker"  # nobody to ask: the stand-in refuses others too
        return
    words = [*words_of(recipe_of(), {}).words(), "job/entry.py"]
    env = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert "unknown" not in done.stderr
    assert "invalid" not in done.stderr
    assert "nowhere/docker.sock" in done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A machine with docker and one image, whose python is this one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").symlink_to(ROOT / "tests" / "launch" / "docker_standin")
    image = tmp_path / "docker" / "images" / "moe:1"
    image.mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (image / "env").write_text(f"PATH={path}\nIMAGE_SAYS=so\nNCCL_DEBUG=image\n")
    (tmp_path / "tiny.yaml").write_text(tiny(3, f"runtime: {{environment: {{A_NAME: {json.dumps(HOSTILE)}}}}}"))
    profile = "name: here\ngpus_per_node: 2\ngpu: h100\nfabric: none\ncontainer: none\n"
    (tmp_path / "here.yaml").write_text(
        f"{profile}shared_root: {tmp_path / 'root'}\nenvironment: {{NCCL_DEBUG: null}}\n"
    )
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "STANDIN_DOCKER": str(tmp_path / "docker"),
    }


def launch(tmp_path: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moekit", "launch", "tiny.yaml", "--on", "docker", *words]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)


HERE = ("--profile", "here.yaml", "--image", "moe:1")


def test_what_is_missing_is_told_at_once(tmp_path: Path, machine: dict[str, str]) -> None:
    other = launch(tmp_path, machine, "--profile", "here.yaml", "--image", "moe:2")
    assert "there is no image `moe:2` here\n    hint: `docker pull moe:2`" in other.stderr
    assert "Traceback" not in other.stderr
    (tmp_path / "docker" / "down").touch()
    down = launch(tmp_path, machine, *HERE)
    assert "docker does not answer: Cannot connect to the Docker daemon" in down.stderr
    (tmp_path / "bin" / "docker").unlink()
    nowhere = launch(tmp_path, {**machine, "PATH": "/nowhere"}, *HERE)
    assert "`docker` is not on PATH" in nowhere.stderr
    without = launch(tmp_path, machine, "--profile", "here.yaml")
    assert "no `--image` says which image of a registry to start" in without.stderr
    (tmp_path / "tiny.yaml").write_text("base: first_moe\nparallel: {gpus: 8}\n")
    several = launch(tmp_path, machine, *HERE)
    assert "the recipe trains on 4 nodes, and docker starts a container on this one" in several.stderr


def test_the_dry_run_needs_no_docker(tmp_path: Path, machine: dict[str, str]) -> None:
    done = launch(tmp_path, {**machine, "PATH": "/nowhere"}, *HERE, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("==> docker.run <==\ndocker run --rm --init --name=moekit-tiny-")
    assert HOSTILE not in done.stdout.partition("==> argv.first <==")[0].partition("recipe.yaml")[0]


@pytest.mark.train
def test_it_trains(tmp_path: Path, machine: dict[str, str]) -> None:
    done = launch(tmp_path, {**machine, "NCCL_DEBUG": "mine"}, *HERE)
    run = tmp_path / "root" / "runs" / "tiny"
    log = run / "attempts" / "1" / "train.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert "  image     moe:1\n" in done.stdout
    assert "finished at iteration 3 of 3" in done.stdout
    inside = dict(
        line.split("=", 1) for line in (tmp_path / "docker" / "environment").read_text().splitlines() if "=" in line
    )
    assert (inside["A_NAME"], inside["IMAGE_SAYS"], inside["MOEKIT_ATTEMPT"]) == (HOSTILE, "so", "1")
    assert "NCCL_DEBUG" not in inside  # the profile unsets it, the shell's and the image's
    assert not list((tmp_path / "docker" / "running").iterdir())
    again = launch(tmp_path, machine, *HERE)
    assert "is finished" in again.stdout
    status = [sys.executable, "-m", "moekit", "list", "--profile", "here.yaml"]
    listed = subprocess.run(status, cwd=tmp_path, env=machine, capture_output=True, text=True)
    assert listed.stdout.splitlines()[1].split()[:3] == ["tiny", "finished", "local"]


def test_ctrl_c_leaves_no_container(tmp_path: Path, machine: dict[str, str]) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "python").write_text("#!/bin/bash\ntrap '' TERM\ntouch ../../../started\nwhile :; do sleep 0.1; done\n")
    (fake / "python").chmod(0o755)
    env_file = tmp_path / "docker" / "images" / "moe:1" / "env"
    env_file.write_text(f"PATH={fake}:{os.environ['PATH']}\n")
    command = [sys.executable, "-m", "moekit", "launch", "tiny.yaml", "--on", "docker", *HERE]
    with subprocess.Popen(command, cwd=tmp_path, env=machine, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopped; no process is left" in said
    assert not list((tmp_path / "docker" / "running").iterdir())
    assert "rm --force moekit-tiny-" in (tmp_path / "docker" / "asked").read_text().splitlines()[-1]
