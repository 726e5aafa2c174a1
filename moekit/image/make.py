"""Images made by the scripts in `images/`: here where enroot is, or on a node of a profile's by srun."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from moekit import share
from moekit.cluster.profile import Cluster
from moekit.image.failures import explained
from moekit.image.known import Known
from moekit.image.record import is_whole, record_of
from moekit.problems import error

_KEPT_LINES = 200


def import_image(image: Known, out: Path, arch: str | None, cluster: Cluster | None) -> bool:
    """Import an image as the squashfs file `out`; False where it is there already.

    Raises:
        MoekitError: another image is there, enroot is nowhere, or it fails.
    """
    if out.exists():
        _refuse_another(out, image.uri)
        return False
    _make_folder(out)
    words = [image.uri, str(out.absolute()), *([arch] if arch else [])]
    _run(f"importing {image.uri}", "import.sh", words, cluster, gpu=False)
    return True


def build_efa(base: Path, out: Path, cluster: Cluster | None) -> bool:
    """Build the image with EFA's libraries; False where it is there already.

    Raises:
        MoekitError: the base is not there or not whole, another image is there, enroot is nowhere, or the build fails.
    """
    if out.exists():
        said = record_of(out)
        if not is_whole(out) or not said or "efa" not in said:
            what = f"`{out}` is there, and nothing beside it says that it is an image with EFA"
            raise error(what, "give this one another name with `--out`, or move that one away")
        return False
    if not is_whole(base):
        what = f"there is no base image: {base}" if not base.exists() else f"the base is no whole image: {base}"
        raise error(what, f"`moekit image import pytorch --out {base}` makes it")
    _make_folder(out)
    _run("building the image", "build_efa.sh", [str(base.absolute()), str(out.absolute())], cluster, gpu=True)
    return True


def _refuse_another(out: Path, uri: str) -> None:
    said = record_of(out)
    other = "give this one another name with `--out`, or move that one away"
    if not is_whole(out):
        raise error(f"`{out}` is there, and is no whole squashfs image", other)
    if said is None:
        raise error(f"`{out}` is there, and nothing beside it says what it is", other)
    if said.get("from") != uri:
        raise error(f"`{out}` is there, and is another image: {said.get('from') or 'one that was built'}", other)


def _make_folder(out: Path) -> None:
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise error(f"`{out.parent}` cannot be made: {(reason.strerror or str(reason)).lower()}") from None


def command_for(script: str, words: Sequence[str], cluster: Cluster | None, gpu: bool) -> list[str]:
    """The command that runs a script where enroot is: here, else by srun on one of the profile's nodes.

    Raises:
        MoekitError: it is at neither.
    """
    command = ["bash", str(share.folder("images") / script), *words]
    if shutil.which("enroot"):
        return command
    if cluster is None or not shutil.which("srun"):
        what = "there is no `enroot` on this machine"
        raise error(what, "run it on a compute node, or give `--profile`: then srun runs it on one of its nodes")
    return [*srun_words(cluster, nodes=1, gpus=1 if gpu else 0), *command]


def srun_words(cluster: Cluster, nodes: int, gpus: int) -> list[str]:
    """srun and what a profile says of where to run: one task on each of some nodes, with so many GPUs."""
    options = {
        "partition": cluster.partition if gpus else cluster.cpu_partition or cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gres": f"{cluster.gres}:{gpus}" if gpus else None,
        "cpus-per-task": cluster.cpus_per_task if gpus >= cluster.gpus_per_node else None,
    }
    return ["srun", *(f"--{name}={value}" for name, value in options.items() if value is not None)]


def _run(what: str, script: str, words: Sequence[str], cluster: Cluster | None, gpu: bool) -> None:
    """Run a script and show what it prints; a failure in the user's words."""
    command = command_for(script, words, cluster, gpu)
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise explained(what, process.returncode, list(last))
