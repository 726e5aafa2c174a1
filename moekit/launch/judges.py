"""A recipe to the questions the real Megatron is asked, and where: here, or on a cluster in the profile's image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.launch.run_files import run_arguments
from moekit.launch.script import environment
from moekit.megatron.dump import checkout
from moekit.megatron.flags import argv
from moekit.megatron.in_image import NO_MEGATRON
from moekit.megatron.installed import Judge, find_judge
from moekit.megatron.real import judge_all
from moekit.megatron.stages import STAGES, Question
from moekit.megatron.verdict import Verdict, verdict_of
from moekit.problems import error
from moekit.recipe.load import Loaded
from moekit.recipe.schema import Recipe
from moekit.share import PACKAGE

MADE_UP_VOCABULARY = 131_072
"""Entries of the model's vocabulary where no tokenizer is read."""

CAPABILITIES = {
    "a100": (8, 0),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "gb300": (10, 3),
}
"""Compute capability of each GPU that a profile may name."""

INSIDE = "/moekit-check/moekit"
"""Where moekit's folder lies in the image."""


def questions(loaded: Loaded, cluster: Cluster, in_image: bool = False) -> dict[str, Question]:
    """What to ask of a recipe: its first start and, where the arguments differ, its start from its own checkpoint.

    In an image, Transformer Engine is the image's own, and a step is asked for too; elsewhere Megatron is told the
    profile's version. Where a tokenizer says how large the vocabulary is, which only the model asks, it is made up.
    """
    recipe = loaded.recipe
    vocabulary = ["--vocab-size", str(MADE_UP_VOCABULARY)] if makes_up_vocabulary(recipe) else []
    engine = None if in_image or recipe.runtime.device == "cpu" else cluster.transformer_engine or _SOME_ENGINE
    asked: dict[str, Question] = {}
    for start, resume in (("first", False), ("resume", True)):
        words = [*argv(run_arguments(recipe, "check", cluster.shared_root, resume=resume)), *vocabulary]
        if not asked or words != asked["first"].argv:
            asked[start] = Question(
                argv=words,
                world_size=recipe.parallel.gpus or 1,
                capability=CAPABILITIES[cluster.gpu],
                transformer_engine=engine,
                environment=_environment(recipe, cluster),
                stages=(*STAGES, "step") if in_image else STAGES,
            )
    return asked


def makes_up_vocabulary(recipe: Recipe) -> bool:
    """Whether the size of the vocabulary is a tokenizer's to say."""
    said = (recipe.data.vocab_size, *(recipe.megatron.extra or ()))
    return bool(recipe.data.tokenizer) and said[0] is None and "--padded-vocab-size" not in said


_SOME_ENGINE = Question((), 1).transformer_engine


def _environment(recipe: Recipe, cluster: Cluster) -> dict[str, str]:
    """The variables of the training processes: a local run on the CPU knows no cluster."""
    cpu = recipe.runtime.device == "cpu"
    variables: Mapping[str, str | None] = recipe.runtime.environment or {} if cpu else environment(recipe, cluster)
    return {name: value for name, value in variables.items() if value is not None}


def ask_here(asked: Sequence[Question], megatron: str = "installed") -> tuple[Judge, list[list[Verdict]]]:
    """The answers of the Megatron installed beside moekit, or of a checkout with this Python's torch.

    Raises:
        MoekitError: there is none.
    """
    path = None if megatron == "installed" else str(checkout(megatron))
    if (judge := find_judge(path)) is None:
        remedy = (
            "`pip install 'moekit[local]'` (Linux, about 3 GB), or name a checkout with `--megatron PATH`; "
            "on a cluster, `--in-image` asks that of the profile's image"
        )
        raise error("there is no Megatron here to judge a recipe", remedy)
    return replace(judge, transformer_engine=None), judge_all(asked, path)


def ask_in_image(asked: Sequence[Question], cluster: Cluster) -> tuple[Judge, list[list[Verdict]]]:
    """The answers of the Megatron that a job on this cluster would have, from one task that `srun` starts there.

    Raises:
        MoekitError: there is no Slurm, it does not run the task, or the image has no Megatron.
    """
    if shutil.which("srun") is None:
        raise error("there is no `srun` on PATH to start the image with", "`--in-image` is for a cluster's login node")
    command = srun_command(cluster)
    with tempfile.TemporaryFile("w+") as given:
        json.dump([asdict(question) for question in asked], given)
        given.seek(0)
        status, out, err = _run(command, given)
    place = f"image `{cluster.image}`" if cluster.container == "pyxis" else f"Python `{cluster.python}` of the nodes"
    if status == NO_MEGATRON:
        hint = "a checkout is named with `megatron_path` in the profile, or `--megatron PATH`"
        raise error(f"Megatron does not import in the {place}: {_reason(err)}", hint)
    if status:
        raise error(f"`srun` ended with {status} for the {place}: {_reason(err)}", f"it was `{shlex.join(command)}`")
    said = json.loads(out)
    return Judge(**said["judge"]), [[verdict_of(fields) for fields in verdicts] for verdicts in said["answers"]]


def srun_command(cluster: Cluster) -> list[str]:
    """One task without a GPU in the profile's image, to which moekit's own folder is added, read-only.

    The node's Python gets nothing else of the login node's (`-s` leaves out the home directory's packages). Without a
    container the folder must lie where the nodes see it.
    """
    options = {"job-name": "moekit-check", "partition": cluster.partition, "account": cluster.account}
    options |= {"qos": cluster.qos, "time": "10"}
    words = ["srun", "--nodes=1", "--ntasks=1"]
    words += [f"--{option}={value}" for option, value in options.items() if value is not None]
    megatron = [cluster.megatron_path] if cluster.megatron_path else []
    if cluster.container == "none":
        return [*words, cluster.python, "-s", str(PACKAGE / "megatron" / "in_image.py"), *megatron]
    if found := re.search(r"[\s,:]", str(PACKAGE)):
        raise error(f"moekit lies at `{PACKAGE}`, and no mount carries a `{found.group()}`", "install it elsewhere")
    mounts = [f"{PACKAGE}:{INSIDE}:ro", *(f"{path}:{path}:ro" for path in megatron)]
    words += [
        f"--container-image={cluster.image}",
        f"--container-mounts={','.join(mounts)}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        "--container-workdir=/",
    ]
    return [*words, cluster.python, "-s", f"{INSIDE}/megatron/in_image.py", *megatron]


def _run(command: Sequence[str], given: Any) -> tuple[int, str, str]:
    """Run `srun`; what Slurm itself says meanwhile (a queue is long) goes to standard error at once."""
    said: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen(
            command,
            env=_clean(os.environ),
            stdin=given,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process,
    ):
        try:
            for line in process.stderr or ():
                said.append(line)
                if line.startswith(("srun: ", "pyxis: ")):
                    print(line, end="", file=sys.stderr, flush=True)
        except BaseException:
            process.terminate()  # Slurm takes the task, or its place in the queue, away
            raise
        status = process.wait()
        out.seek(0)
        return status, out.read(), "".join(said)


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the virtual environment that moekit runs in, as train.sh leaves it."""
    kept = {key: value for key, value in environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    if active := environ.get("VIRTUAL_ENV"):
        folders = kept.get("PATH", "").split(os.pathsep)
        kept["PATH"] = os.pathsep.join(folder for folder in folders if folder != f"{active}/bin")
    return kept


def _reason(said: str) -> str:
    """Of all that was said the line that tells why: enroot's, pyxis', else the last that is not Slurm's summing up."""
    lines = said.strip().splitlines() or ["no message"]
    for sign in ("[ERROR]", "error: pyxis: "):
        if found := [line.partition(sign)[2].strip() for line in lines if sign in line]:
            return found[-1]
    return ([line for line in lines if not line.startswith(("srun: ", "pyxis: "))] or lines)[-1]
