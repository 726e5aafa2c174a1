"""Whether an image does what a profile says, on the nodes it is for (handbook 2.2): versions, devices, sums, a network.

srun starts it as it starts training: the profile's container, variables and library folders. What the container printed
is judged by pure functions.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moekit import share
from moekit.cluster.profile import Cluster
from moekit.image.make import srun_words
from moekit.launch.script import environment_script, mounts_of
from moekit.problems import error

_ANSWER = re.compile(r"^.*?moekit-image: (\{.*\})$", re.MULTILINE)
_NETWORK = re.compile(r"([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_BY_FABRIC = {"efa": ("Libfabric", "AWS Libfabric"), "ib": ("IB",)}
_TIME_MIN = 15


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    wanted: str = ""
    """What it should have been; empty where it is."""


def verify(image: str, cluster: Cluster, nodes: int) -> list[Finding]:
    """Look inside an image on one node of a profile, then at the network between `nodes` of them.

    Raises:
        MoekitError: the profile starts no containers, or srun gets no nodes or ends before anything is said.
    """
    if cluster.container != "pyxis":
        what = f"profile `{cluster.name}` starts no images: it has `container: {cluster.container}`"
        raise error(what, "`moekit preflight` looks at nodes as they are")
    findings = list(judge_gpus(_ask(image, cluster, "gpus", 1), cluster))
    if nodes > 1 and not [one for one in findings if one.wanted]:
        findings += judge_network(_ask(image, cluster, "network", nodes), cluster, nodes)
    return findings


def command(image: str, cluster: Cluster, mode: str, nodes: int) -> list[str]:
    """srun that asks an image: one task a node, in the container and with the variables that training has."""
    gpus = cluster.gpus_per_node if mode == "gpus" else 1
    variables = {**(cluster.environment or {}), **({"NCCL_DEBUG": "INFO"} if mode == "network" else {})}
    exports = environment_script(variables, ())
    if cluster.library_path:
        folders = shlex.quote(":".join(cluster.library_path))
        exports += f'export LD_LIBRARY_PATH={folders}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
    code = (share.folder("images") / "look_inside.py").read_text(encoding="utf-8")
    return [
        *srun_words(cluster, nodes, gpus),
        f"--time={_TIME_MIN}",
        f"--container-image={image}",
        f"--container-mounts={','.join(mounts_of(cluster))}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        *("bash", "-c", f'{exports}exec "$@"', "look", cluster.python, "-c", code, mode),
    ]


def _ask(image: str, cluster: Cluster, mode: str, nodes: int) -> str:
    words = command(image, cluster, mode, nodes)
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIME_MIN * 120,
        )
    except FileNotFoundError:
        raise error("`srun` is not on PATH", "verify an image from a login node of the cluster it is for") from None
    except subprocess.TimeoutExpired:
        raise error(f"srun got no answer in {_TIME_MIN * 2} minutes", "try when nodes are free") from None
    if len(answers(done.stdout)) < nodes:
        said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        last = next((line for line in said if "rror" in line), said[-1] if said else "it printed nothing")
        what = "the image cannot be asked" if mode == "gpus" else f"its network between {nodes} nodes cannot be tried"
        raise error(
            f"{what}, srun ended with {done.returncode}: {last}",
            "the same by hand: `srun --container-image=...` with the profile's options",
            image,
        )
    return done.stdout


def answers(text: str) -> list[dict[str, Any]]:
    """What `look_inside.py` said, on each node."""
    found = []
    for match in _ANSWER.finditer(text):
        try:
            found.append(json.loads(match[1]))
        except ValueError:
            continue
    return found


def judge_gpus(text: str, cluster: Cluster) -> Iterator[Finding]:
    """Versions, devices and sums against what a profile says."""
    said = answers(text)[0]
    for name, wanted in (("torch", cluster.torch), ("transformer_engine", cluster.transformer_engine)):
        found = str(said[name])
        yield Finding(name, found, "" if wanted is None or is_version(found, wanted) else wanted)
    devices = said["devices"]
    number, each = len(devices), cluster.gpus_per_node
    names = ", ".join(dict.fromkeys(str(device["name"]) for device in devices))
    yield Finding("devices", f"{number} {names}".strip(), "" if number == each else str(each))
    wrong = [str(at) for at, device in enumerate(devices) if not device["right"]]
    yield Finding("sum", f"wrong on device {', '.join(wrong)}" if wrong else "right on each", "right" if wrong else "")


def judge_network(text: str, cluster: Cluster, nodes: int) -> Iterator[Finding]:
    """The sum over nodes, and the network that NCCL took on each of them against the profile's fabric."""
    right = all(one["right"] for one in answers(text))
    yield Finding("sum", f"{'right' if right else 'wrong'} over {nodes} nodes", "" if right else "right")
    took = dict(_NETWORK.findall(text))
    wanted = _BY_FABRIC.get(cluster.fabric, ())
    for host, network in sorted(took.items()):
        yield Finding(f"network of {host}", network, "" if not wanted or network in wanted else wanted[0])
    if wanted and len(took) < nodes:
        yield Finding("network", f"NCCL named it on {len(took)} of {nodes} nodes", wanted[0])


def is_version(found: str, wanted: str) -> bool:
    """Whether a version is the wanted one, whatever its build: 2.13.0a0+8145d630e8.nv26.06 is 2.13.0."""
    return re.match(rf"{re.escape(wanted)}(?![\d.])", found) is not None


def remedies(findings: Sequence[Finding]) -> str:
    """What to do about what is not as it should be, in a sentence."""
    wrong = {finding.what.partition(" ")[0] for finding in findings if finding.wanted}
    if "network" in wrong:
        return (
            "NCCL's lines above `Using network` name the plugin or the library version that is missing (handbook 2.2); "
            "`moekit image build efa` makes an image with both, `library_path` and NCCL_NET_PLUGIN choose them"
        )
    if "devices" in wrong or "sum" in wrong:
        return "look at the node: `moekit preflight`"
    return "correct the profile if the image is the right one, else its `image`"
