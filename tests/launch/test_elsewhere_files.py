"""What SkyPilot and Kubernetes are given, against what they document; and the command that writes it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import documented
import jsonschema
import pytest
import yaml

from moekit.cluster.profile import find_cluster
from moekit.launch import elsewhere, hf_jobs
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded, load

ROOT = Path(__file__).parents[2]
AWS = find_cluster("aws-p5")
HOSTILE = "it's\"$(touch${IFS}p)`p`;é"


def kubernetes(loaded: Loaded, name: str = "mine") -> tuple[dict, dict, dict]:
    files = elsewhere.kubernetes_files(loaded, name, AWS, "r.io/moe:1", "fsx-claim")
    config, service, job = yaml.safe_load_all(files["run.yaml"])
    return config, service, job


def test_kubernetes_is_given_what_it_documents(recipe_of: Callable[..., Loaded]) -> None:
    loaded = recipe_of("parallel: {gpus: 16}\nruntime: {secrets: [MY_KEY], time_limit_min: 30}\n")
    config, service, job = kubernetes(loaded)
    for manifest in (config, service, job):
        jsonschema.Draft7Validator(documented.KUBERNETES[manifest["kind"]]).validate(manifest)
    assert config["data"] | {} == {
        name.replace("/", "."): text for name, text in elsewhere.node_files(loaded, "mine", AWS).items()
    }
    assert len(json.dumps(config)) < 1 << 20  # a ConfigMap's most
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["activeDeadlineSeconds"] == 1800
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == "mine"
    (container,) = pod["containers"]
    run = "/fsx/moekit/runs/mine"
    assert container["command"] == ["bash", "/moekit-run/node.sh", run, "$(JOB_COMPLETION_INDEX)", "2", "mine-0.mine"]
    assert container["env"][1] == {
        "name": "MY_KEY",
        "valueFrom": {"secretKeyRef": {"name": "moekit-secrets", "key": "MY_KEY"}},
    }
    items = {item["path"]: item["key"] for item in pod["volumes"][0]["configMap"]["items"]}
    assert items["job/entry.py"] == "job.entry.py"
    assert set(items.values()) == set(config["data"])


@pytest.mark.parametrize("name", ["mine", "First_Moe.2", "a" * 100, "9lives", "_x", "First-Moe-2"])
def test_names_that_kubernetes_takes(name: str) -> None:
    called = elsewhere.kubernetes_name(name)
    assert documented.DNS_LABEL.fullmatch(f"{called}-127"), called
    assert (called == name) is (name == "mine")


def test_names_stay_apart() -> None:
    names = ["First_Moe", "first-moe", "first.moe", "first_moe", "a" * 99, "a" * 100]
    assert len({elsewhere.kubernetes_name(name) for name in names}) == len(names)


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_is_given_what_it_documents(recipe_of: Callable[..., Loaded], nodes: int) -> None:
    loaded = recipe_of(f"parallel: {{gpus: {8 * nodes}}}\nruntime: {{secrets: [MY_KEY]}}\n")
    files = elsewhere.skypilot_files(loaded, "mine", AWS, "r.io/moe:1", "fsx")
    task = yaml.safe_load(files["task.yaml"])
    jsonschema.Draft7Validator(documented.SKYPILOT).validate(task)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (nodes, "H100:8")
    assert task["resources"]["image_id"] == "docker:r.io/moe:1"
    assert task["secrets"] == {"MY_KEY": None}
    assert task["volumes"] == {"/fsx/moekit": "fsx"}
    script = f"bash() {{ printf '%s\\n' \"$@\"; }}\n{task['run'].replace('exec bash', 'bash')}"
    env = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
    done = subprocess.run(["bash", "-c", script], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["node.sh", "/fsx/moekit/runs/mine", "1", "2", "10.0.0.1"]


def test_values_reach_no_shell(recipe_of: Callable[..., Loaded]) -> None:
    loaded = recipe_of(f"runtime: {{environment: {{A_NAME: {json.dumps(HOSTILE)}}}}}\n")
    _, _, job = kubernetes(loaded)
    assert "touch" not in json.dumps(job)
    files = elsewhere.skypilot_files(loaded, "mine", AWS, "r.io/moe:1", "fsx")
    assert "touch" not in files["task.yaml"]


def test_an_image_is_a_registrys() -> None:
    assert elsewhere.image_of(AWS, "docker://nvcr.io#nvidia/pytorch:26.06-py3") == "nvcr.io/nvidia/pytorch:26.06-py3"
    with pytest.raises(MoekitError) as refused:
        elsewhere.image_of(AWS, None)
    assert "the profile's is a file: /fsx/moekit/images/pytorch-26.06-efa.sqsh" in str(refused.value)


def launch(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/nowhere", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moekit", "launch", "first_moe", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def test_the_command_writes_and_starts_nothing(tmp_path: Path) -> None:
    given = ("--profile", "aws-p5", "--volume", "fsx", "--image", "r.io/moe:1")
    done = launch(tmp_path, "--on", "kubernetes", *given, "--dry-run=k")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "1 files in k; in that folder, `kubectl apply -f run.yaml` starts it\n"
    assert [path.name for path in (tmp_path / "k").iterdir()] == ["run.yaml"]
    sky = launch(tmp_path, "--on", "skypilot", *given, "--dry-run=s")
    assert sky.stderr.endswith("in that folder, `sky launch task.yaml` starts it\n")
    assert {"task.yaml", "node.sh", "job"} <= {path.name for path in (tmp_path / "s").iterdir()}
    assert launch(tmp_path, "--on", "skypilot", *given, "--dry-run").stdout.count("==> task.yaml <==") == 1
    for words, said in (
        (("--on", "kubernetes", *given), "moekit does not start runs on kubernetes itself"),
        (("--on", "skypilot", "--profile", "aws-p5", "--dry-run"), "no `--volume` says what holds /fsx/moekit"),
        (("--on", "docker", "--flavor", "h200x8"), "`--flavor` is about `--on hf-jobs`"),
        (("--on", "local", "--image", "a:1"), "`--image` is about `--on docker` and `--on hf-jobs` and"),
        (("--detach",), "`--detach` is about `--on hf-jobs`\n    hint: leave it out, or add one of these"),
        (("--on", "docker", "--chain", "2"), "`--chain` is about jobs of Slurm"),
        (("--on", "hf-jobs"), "no `--flavor` says on which machine"),
        (("--on", "hf-jobs", "--flavor", "h200x8", "--probe"), "`--probe` counts GPUs and trains no recipe"),
    ):
        refused = launch(tmp_path, *words)
        assert refused.returncode == 1
        assert said in refused.stderr


def test_the_jobs_files_are_the_same_every_time(recipe_of: Callable[..., Loaded]) -> None:
    cluster = hf_jobs.cluster_of("h200x8", hf_jobs.IMAGE)
    assert hf_jobs.job_files(load("first_moe"), "a", cluster) == hf_jobs.job_files(load("first_moe"), "a", cluster)
