"""A run as one Hugging Face Job: the request that asks for it, and the files that it starts from. Pure.

A Job is a container on one machine, paid by the minute, which the Hub stops after 30 minutes unless told otherwise
(handbook 2.0). The run's files come from a private repository at one commit, read-only; data, tokenizer and earlier
checkpoints come from a bucket, into which logs and checkpoints go (`hf_jobs_body.sh`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moekit.cluster.profile import Cluster
from moekit.launch.checkout import HOME, git_name
from moekit.launch.elsewhere import node_files
from moekit.launch.run_files import lines
from moekit.launch.rundir import data_dir, run_dir, tokenizer_dir
from moekit.problems import MoekitError, Problem, error, shortened
from moekit.recipe.load import Loaded
from moekit.recipe.schema import Recipe

ROOT = "/moekit"
"""The shared root of the run, on the machine's own disk."""
BUCKET = "/bucket"
"""Where the bucket is mounted: runs/, data/, tokenizers/, as below a shared root."""
FILES = "/moekit-run"
"""Where the run's files are mounted."""
IMAGE = "nvcr.io/nvidia/pytorch:26.06-py3"
"""The handbook's base (2.2): one machine needs no EFA."""
PROBE_IMAGE = "pytorch/pytorch:2.6.0-cuda12.4-cudnn9-devel"
PROBE = ("python", "-c", "import torch; print(torch.cuda.device_count())")
PROBE_MIN = 10
_FLAVOR = re.compile(r"(?P<gpu>a100|h100|h200|b200|b300)(-large)?(x(?P<count>\d+))?")
LABEL = "moekit-run"
UNSEEN = "(from the environment of this shell)"
"""What stands for a secret's value wherever a request is shown."""


@dataclass(frozen=True)
class Volume:
    """What is mounted into a Job."""

    type: Literal["bucket", "dataset"]
    source: str
    mount_path: str
    read_only: bool
    revision: str | None = None
    path: str | None = None

    def as_json(self) -> dict[str, Any]:
        """As the Hub's API has it."""
        said = {"type": self.type, "source": self.source, "mountPath": self.mount_path}
        more = {"revision": self.revision, "readOnly": self.read_only, "path": self.path}
        return said | {name: value for name, value in more.items() if value is not None}


@dataclass(frozen=True)
class Request:
    """One Job, as the Hub is asked for it."""

    image: str
    command: tuple[str, ...]
    flavor: str
    timeout_s: int
    name: str
    secrets: tuple[str, ...] = ()
    """Names; their values are those of the submitting shell."""
    volumes: tuple[Volume, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """What is posted to `/api/jobs/NAMESPACE`, but for the values of secrets."""
        said: dict[str, Any] = {
            "command": list(self.command),
            "arguments": [],
            "environment": {},
            "flavor": self.flavor,
            "timeoutSeconds": self.timeout_s,
            "labels": {**self.labels, "name": self.name},
        }
        if self.secrets:
            said["secrets"] = dict.fromkeys(self.secrets, UNSEEN)
        if self.volumes:
            said["volumes"] = [volume.as_json() for volume in self.volumes]
        space = re.fullmatch(r"(?:https://)?(?:huggingface\.co|hf\.co)/spaces/(.+)", self.image)
        return said | ({"spaceId": space[1]} if space else {"dockerImage": self.image})


def cluster_of(flavor: str, image: str) -> Cluster:
    """A flavour's machine as a profile: one node of so many GPUs, without a fabric.

    Raises:
        MoekitError: it is no flavour with GPUs that Megatron trains this kind of model on.
    """
    found = _FLAVOR.fullmatch(flavor)
    if not found:
        what = f"`--flavor {shortened(flavor)}` is no machine of A100, H100, H200, B200 or B300 GPUs"
        raise error(what, "`hf jobs hardware` lists them: h200x8 has eight of 141 GB, a100x8 eight of 80 GB")
    return Cluster(
        name=f"hf-jobs-{flavor}",
        gpus_per_node=int(found["count"] or 1),
        gpu=found["gpu"],  # type: ignore[arg-type]  # one of the pattern's
        fabric="none",
        container="none",
        shared_root=ROOT,
        megatron_path=f"{ROOT}/Megatron-LM",
        torch="2.13.0" if image == IMAGE else None,
        transformer_engine="2.16.0" if image == IMAGE else None,
    )


def problems(loaded: Loaded, cluster: Cluster, timeout_min: int | None) -> list[Problem]:
    """Why a recipe cannot be one Job of a flavour."""
    recipe, place, found = loaded.recipe, loaded.source.where("parallel.gpus"), []
    gpus, each = recipe.parallel.gpus or 1, cluster.gpus_per_node
    if gpus > each:
        what = f"{gpus} GPUs are more than the {each} of one machine, and a Job is one machine"
        why = "between Jobs there is no fabric that anybody documents: the exchange of tokens would go over sockets"
        found.append(Problem(place, what, f"{why}; take a cluster, or a recipe for {each}"))
    elif gpus < each:
        what = f"the flavour has {each} GPUs, and the recipe trains on {gpus}: the others would be paid for"
        found.append(Problem(place, what, "take a smaller flavour, or set `parallel.gpus`"))
    if recipe.runtime.device == "cpu":
        what = "the recipe trains on CPUs, and a flavour's GPUs would be paid for"
        found.append(Problem(loaded.source.where("runtime.device"), what, "`--on local` trains it here"))
    if timeout_min is None:
        what = "nothing says how long the Job may take, and the Hub stops it after 30 minutes"
        place = loaded.source.where("runtime.time_limit_min", "runtime")
        found.append(Problem(place, what, "set `runtime.time_limit_min`, or give `--timeout MINUTES`"))
    return found


def timeout_min(recipe: Recipe, given: int | None) -> int | None:
    """How long a Job may take: what the command says, else the recipe; never the Hub's own."""
    return given or recipe.runtime.time_limit_min


def job_files(loaded: Loaded, name: str, cluster: Cluster) -> dict[str, str]:
    """Every file that the Job starts from, by its path in the run's folder; the same every time."""
    megatron = [HOME, git_name(loaded.recipe.megatron.version)]
    return {
        "hf_job.sh": (Path(__file__).parent / "hf_jobs_body.sh").read_text(encoding="utf-8"),
        "bring.list": lines(brought(loaded.recipe)),
        "megatron.list": lines(megatron),
        **node_files(loaded, name, cluster),
    }


def brought(recipe: Recipe) -> list[str]:
    """What a run reads that is not its own: paths in the bucket, and below the shared root alike."""
    paths = [data_dir("", recipe.data.name)] if recipe.data.name else []
    paths += [tokenizer_dir("", recipe.data.tokenizer)] if recipe.data.tokenizer else []
    paths += [run_dir("", recipe.checkpoint.from_run).checkpoints] if recipe.checkpoint.from_run else []
    return [str(path) for path in paths]


def training(
    loaded: Loaded, name: str, flavor: str, image: str, timeout: int, namespace: str, bucket: str, revision: str
) -> Request:
    """The Job that trains a run; `revision` is the commit of its files in the repository of runs."""
    volumes = (
        Volume("dataset", runs_repository(namespace), FILES, read_only=True, revision=revision, path=name),
        Volume("bucket", bucket, BUCKET, read_only=False),
    )
    command = ("bash", f"{FILES}/hf_job.sh", name, ROOT, BUCKET)
    secrets = loaded.recipe.runtime.secrets or ()
    return Request(image, command, flavor, timeout * 60, name, secrets, volumes, {LABEL: name})


def probe(flavor: str, image: str | None) -> Request:
    """The handbook's first Job: does it see all the GPUs (2.0)."""
    return Request(image or PROBE_IMAGE, PROBE, flavor, PROBE_MIN * 60, "moekit-probe")


def runs_repository(namespace: str) -> str:
    """The private repository that holds the files of runs, a folder each."""
    return f"{namespace}/moekit-runs"


def cost(usd_per_unit: float, unit: str, timeout_s: int) -> tuple[float, float]:
    """What a machine costs an hour and, to its timeout, at most; US dollars.

    Raises:
        MoekitError: the price is for a unit that nobody knows.
    """
    seconds = {"second": 1, "minute": 60, "hour": 3600}.get(unit.lower())
    if seconds is None:
        raise MoekitError(Problem("", f"the Hub's price is per `{unit}`", "`hf jobs hardware` shows it"))
    return usd_per_unit * 3600 / seconds, usd_per_unit * timeout_s / seconds
