"""Runs where there is no Slurm: the files that any node needs, and SkyPilot's and Kubernetes' own descriptions of them.

No engine of ours: `sky launch` and `kubectl apply` take what is written here. Values of a recipe or a profile are in
files that are read word by word (`argv.*`, `environment.sh`); the one command that a shell reads is `node.sh` with its
paths quoted.
"""

from __future__ import annotations

import json
import re
import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from moekit.cluster.profile import Cluster
from moekit.launch.run_files import lines, run_files
from moekit.launch.rundir import run_dir
from moekit.launch.script import environment, environment_script, nodes_and_gpus, retry_facts, torchrun_words
from moekit.problems import error
from moekit.recipe.load import Loaded
from moekit.recipe.schema import Recipe

SECRETS = "moekit-secrets"
"""The Kubernetes Secret that holds a run's secrets, by their names."""
FILES = "/moekit-run"
"""Where a run's files are mounted, to be put into its directory."""
_HERE = Path(__file__).parent
_SKYPILOT_GPU = {"a100": "A100-80GB"}
_LONGEST_NAME = 50
"""Of a Kubernetes Job: a pod's host name is the job's, a dash and a number, 63 characters at most."""


def node_files(loaded: Loaded, name: str, cluster: Cluster) -> dict[str, str]:
    """Every file of a run for nodes without Slurm, by its path in the run directory; the same every time.

    Raises:
        MoekitError: the recipe does not fit the profile's nodes, or names a variable that a job cannot get.
    """
    recipe = loaded.recipe
    nodes_and_gpus(recipe, cluster)
    facts = {**json.loads(retry_facts(recipe, cluster)), "requeue": False}  # there is no queue to go back into
    return {
        "node.sh": (_HERE / "elsewhere_node.sh").read_text(encoding="utf-8"),
        "agree.py": (_HERE / "elsewhere_agree.py").read_text(encoding="utf-8"),
        "environment.sh": environment_script(environment(recipe, cluster), recipe.runtime.secrets or ()),
        "retry.json": json.dumps(facts, indent=1) + "\n",
        "argv.torchrun": lines(torchrun_words(recipe, cluster)),
        **run_files(loaded, name, cluster.shared_root, cluster.name),
    }


def image_of(cluster: Cluster, given: str | None) -> str:
    """The image that a registry has: what was given, else the profile's if that is no file.

    Raises:
        MoekitError: there is neither.
    """
    image = given or cluster.image or ""
    if not image or image.startswith(("/", ".")):
        what = "no `--image` says which image of a registry to start"
        own = f", and the profile's is a file: {image}" if image else ""
        hint = "`images/efa.Dockerfile` builds one: push it, and name it as REGISTRY/NAME:TAG"
        raise error(what + own, hint)
    return image.removeprefix("docker://").replace("#", "/")


def skypilot_files(loaded: Loaded, name: str, cluster: Cluster, image: str, volume: str) -> dict[str, str]:
    """A run's files with `task.yaml`: in their folder, `sky launch task.yaml` starts it."""
    return {**node_files(loaded, name, cluster), "task.yaml": _yaml(task(loaded.recipe, name, cluster, image, volume))}


def task(recipe: Recipe, name: str, cluster: Cluster, image: str, volume: str) -> dict[str, Any]:
    """SkyPilot's task (docs.skypilot.co, `reference/yaml-spec`).

    Its `workdir` brings the files to every node; the shared folder is a volume, which all nodes mount.
    """
    nodes, gpus = nodes_and_gpus(recipe, cluster)
    run = shlex.quote(str(run_dir(cluster.shared_root, name).path))
    head = 'head=$(head -n 1 <<<"$SKYPILOT_NODE_IPS")'
    said: dict[str, Any] = {
        "name": kubernetes_name(name),
        "num_nodes": nodes,
        "workdir": ".",
        "resources": {
            "accelerators": f"{_SKYPILOT_GPU.get(cluster.gpu, cluster.gpu.upper())}:{gpus}",
            "image_id": f"docker:{image}",
        },
        "volumes": {cluster.shared_root: volume},
        "run": f'{head}\nexec bash node.sh {run} "$SKYPILOT_NODE_RANK" "$SKYPILOT_NUM_NODES" "$head"\n',
    }
    if nodes > 1 and cluster.fabric != "none":
        said["resources"]["network_tier"] = "best"
    if recipe.runtime.secrets:
        said["secrets"] = dict.fromkeys(recipe.runtime.secrets)  # null: asked for with `--secret NAME`
    return said


def kubernetes_files(loaded: Loaded, name: str, cluster: Cluster, image: str, volume: str) -> dict[str, str]:
    """One file, for `kubectl apply -f`: the run's files, a name for its first node, and its job."""
    files = node_files(loaded, name, cluster)
    return {
        "run.yaml": "---\n".join(_yaml(one) for one in manifests(loaded.recipe, name, cluster, image, volume, files))
    }


def manifests(
    recipe: Recipe, name: str, cluster: Cluster, image: str, volume: str, files: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A ConfigMap, a headless Service and an indexed Job (Kubernetes' API reference, `v1` and `batch/v1`).

    A pod of an indexed Job is called by the Job's name and its index, which the Service makes a host name: the first
    is the rendezvous. Pods that fail end the Job: those left would wait for ranks that are gone.
    """
    called, keys = kubernetes_name(name), {file.replace("/", "."): file for file in files}
    labels = {"app.kubernetes.io/name": "moekit", "moekit/run": called}
    meta = {"name": called, "labels": labels}
    nodes, _ = nodes_and_gpus(recipe, cluster)
    job: dict[str, Any] = {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": labels}, "spec": pod(recipe, name, cluster, image, volume, keys)},
    }
    if limit_min := recipe.runtime.time_limit_min or cluster.time_limit_min:
        job["activeDeadlineSeconds"] = limit_min * 60
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {key: files[keys[key]] for key in keys}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            # the first node is looked for before it is ready
            "spec": {"clusterIP": "None", "selector": {"moekit/run": called}, "publishNotReadyAddresses": True},
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job},
    ]


def pod(
    recipe: Recipe, name: str, cluster: Cluster, image: str, volume: str, keys: Mapping[str, str]
) -> dict[str, Any]:
    """One node: its GPUs, the run's files, the shared folder, and shared memory as large as the node's."""
    nodes, gpus = nodes_and_gpus(recipe, cluster)
    called, run = kubernetes_name(name), str(run_dir(cluster.shared_root, name).path)
    reference = {secret: {"secretKeyRef": {"name": SECRETS, "key": secret}} for secret in recipe.runtime.secrets or ()}
    container: dict[str, Any] = {
        "name": "train",
        "image": image,
        # Kubernetes puts the index in for $(...); no shell reads it
        "command": ["bash", f"{FILES}/node.sh", run, "$(JOB_COMPLETION_INDEX)", str(nodes), f"{called}-0.{called}"],
        "env": [
            {
                "name": "JOB_COMPLETION_INDEX",
                "valueFrom": {
                    "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
                },
            },
            *({"name": secret, "valueFrom": source} for secret, source in reference.items()),
        ],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "volumeMounts": [
            {"name": "files", "mountPath": FILES},
            {"name": "shared", "mountPath": cluster.shared_root},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if cluster.fabric != "none":
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA locks memory
    return {
        "restartPolicy": "Never",
        "subdomain": called,
        "containers": [container],
        "volumes": [
            {"name": "files", "configMap": {"name": called, "items": [{"key": k, "path": f} for k, f in keys.items()]}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": volume}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def kubernetes_name(name: str) -> str:
    """A run's name as Kubernetes takes it: small letters, digits and dashes; another run's never becomes the same."""
    called = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    if called == name and len(called) <= _LONGEST_NAME and called[0].isalpha():
        return called
    return f"run-{called[: _LONGEST_NAME - 13]}".rstrip("-") + f"-{zlib.crc32(name.encode()):08x}"


class _Dumper(yaml.SafeDumper):
    """YAML in which a text of several lines stands as it is, where YAML can say it so."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
