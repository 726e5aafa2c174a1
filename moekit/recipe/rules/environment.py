"""Rules on the variables around the training processes."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.names import VARIABLE, variable_problem
from moekit.recipe.rules.violation import Rule, Target, Violation, variable
from moekit.recipe.schema import Recipe


def variables_can_be_set(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A variable of the job's shell or of Slurm breaks the job itself, or is lost without a word.

    Megatron, never: a launch refuses it (moekit/recipe/names.py).
    """
    for name in recipe.runtime.environment or {}:
        if reason := variable_problem(name):
            field = f"runtime.environment.{name}"
            yield Violation((field,), f"`{field}` {reason[0]}", reason[1])


def secrets_are_names(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The job's shell asks for each secret by its name.

    Megatron, never: bash stops the job before it starts (moekit/launch/script.py).
    """
    for secret in recipe.runtime.secrets or ():
        if not VARIABLE.fullmatch(secret) or variable_problem(secret):
            yield Violation(
                ("runtime.secrets",),
                f"`runtime.secrets` has `{shortened(secret)}`, which is no name of a secret variable",
                "it lists names such as `HF_TOKEN`; their values stay in your shell",
            )


def every_rank_sees_its_gpu(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each of a node's processes takes the GPU of its number among those that CUDA_VISIBLE_DEVICES names.

    Megatron, first step: `invalid device ordinal`, as each rank takes its own
    (megatron/training/initialize.py:282).
    """
    visible, gpus = variable("CUDA_VISIBLE_DEVICES", recipe, target), recipe.parallel.gpus
    if visible is None or gpus is None:
        return
    named, wanted = len([device for device in visible.split(",") if device.strip()]), min(gpus, target.gpus_per_node)
    if named < wanted:
        yield Violation(
            ("runtime.environment.CUDA_VISIBLE_DEVICES", "parallel.gpus"),
            f"CUDA_VISIBLE_DEVICES names {named} GPU{'s' * (named != 1)}, and a node of this run takes {wanted}",
            "leave it out: Slurm gives a job its GPUs",
        )


def the_allocator_is_told_in_its_words(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """torch reads its allocator's settings as `name:value,name:value`, and a switch as True or False.

    Megatron, first step: `Unrecognized key` or `Expected 'True' or 'False'`, at the first tensor on a GPU
    (torch, c10/core/AllocatorConfig.h).
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        for setting in (variable(name, recipe, target) or "").split(","):
            key, colon, value = (part.strip() for part in setting.partition(":"))
            switch = key == "expandable_segments" and value not in ("True", "False")
            if setting.strip() and (not colon or switch) and "[" not in setting and "]" not in setting:
                yield Violation(
                    (f"runtime.environment.{name}",),
                    f"{name} has `{shortened(setting.strip())}`, which torch does not read",
                    "write it as `expandable_segments:True`",
                )


def caches_are_each_nodes_own(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Caches are guarded by file locks, which shared file systems may not have.

    Megatron, later: ranks wait for a lock without end, or read a file that another one is writing (seen on FSx:
    huggingface/datasets issue 329, huggingface_hub issue 2399).
    A warning: many shared file systems do have them.
    """
    if (recipe.parallel.gpus or 1) <= target.gpus_per_node:
        return
    for name in _CACHES:
        folder = variable(name, recipe, target)
        if folder and folder.startswith(_SHARED):
            yield Violation(
                (f"runtime.environment.{name}", "parallel.gpus"),
                f"{name} is `{shortened(folder)}`, a cache that several nodes share",
                "put it on each node, such as below `/tmp`",
                "warning",
            )


_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TRITON_CACHE_DIR")
_SHARED = ("/fsx", "/lustre", "/nfs", "/efs", "/shared", "/home", "/mnt/fsx", "/mnt/lustre", "/mnt/nfs")
"""Where clusters usually have what all nodes see."""


def enroot_is_the_sites(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """pyxis unpacks images before the training processes have an environment, by the site's own settings.

    Megatron, never: the variable reaches nobody (NVIDIA/pyxis issue 43).
    A warning: it harms nothing.
    """
    for name, value in (recipe.runtime.environment or {}).items():
        if name.startswith("ENROOT_") and value is not None:
            yield Violation(
                (f"runtime.environment.{name}",),
                f"pyxis ignores {name}: where images are unpacked is the site's to say",
                "unset it with `null`; administrators set it in enroot.conf",
                "warning",
            )


def trackers_are_elsewhere(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The training processes write their metrics to files; who sends them on runs beside them.

    Megatron, never: the variable reaches no tracker (moekit/job/wandb_face.py).
    A warning: it harms nothing.
    """
    for name, value in (recipe.runtime.environment or {}).items():
        if name.startswith(("TRACKIO_", "WANDB_")) and value is not None:
            yield Violation(
                (f"runtime.environment.{name}",),
                f"{name} reaches no tracker: the training processes write files",
                "unset it with `null`; set it in the shell that shows the dashboard",
                "warning",
            )


RULES: tuple[Rule, ...] = (
    variables_can_be_set,
    secrets_are_names,
    every_rank_sees_its_gpu,
    the_allocator_is_told_in_its_words,
    caches_are_each_nodes_own,
    enroot_is_the_sites,
    trackers_are_elsewhere,
)
