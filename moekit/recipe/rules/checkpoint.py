"""Rules on checkpoints, and on what a run begins from."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.names import RUN_NAME
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def saving_has_an_interval(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron wants to know how often.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1322).
    """
    if recipe.checkpoint.save and recipe.checkpoint.save_interval is None:
        yield Violation(
            ("checkpoint.save", "checkpoint.save_interval"), "`checkpoint.save` needs `checkpoint.save_interval`"
        )


def kept_checkpoints_are_saved_ones(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only what was saved can be kept.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1326).
    """
    saved, kept = recipe.checkpoint.save_interval, recipe.checkpoint.save_retain_interval
    if recipe.checkpoint.save and saved and kept and kept % saved:
        yield Violation(
            ("checkpoint.save_retain_interval", "checkpoint.save_interval"),
            f"`checkpoint.save_retain_interval: {kept}` is no multiple of `save_interval: {saved}`",
        )


def kept_multiples_are_saved_ones(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What stays for good is some of what is saved, and all of it where nothing is deleted.

    Megatron, never: it knows nothing of it (moekit/job/checkpoints.py).
    """
    saved, every = recipe.checkpoint.save_interval, recipe.checkpoint.keep_every
    if not recipe.checkpoint.save or not every:
        return
    if saved and every % saved:
        yield Violation(
            ("checkpoint.keep_every", "checkpoint.save_interval"),
            f"`checkpoint.keep_every: {every}` is no multiple of `save_interval: {saved}`",
        )
    if not recipe.checkpoint.keep_last:
        yield Violation(
            ("checkpoint.keep_every", "checkpoint.keep_last"),
            "`checkpoint.keep_every` does nothing without `checkpoint.keep_last`: all checkpoints stay",
            "add `keep_last: 3`, or unset it with `null`",
        )


def old_checkpoints_are_deleted_by_one(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Of two that delete, neither keeps what the other deletes.

    Megatron, never: it deletes the checkpoint before each one it saves (megatron/training/checkpointing.py:1023).
    """
    checkpoint = recipe.checkpoint
    if checkpoint.save and checkpoint.save_retain_interval and checkpoint.keep_last:
        yield Violation(
            ("checkpoint.keep_last", "checkpoint.save_retain_interval"),
            "`checkpoint.keep_last` excludes `checkpoint.save_retain_interval`, which leaves no more than one",
            "with `keep_last`, what `save_retain_interval` keeps is `keep_every`",
        )


def savings_words_are_for_a_run_that_saves(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """How to save says nothing where nothing is saved.

    Megatron, never: the run ends and leaves no checkpoint (megatron/training/training.py:3266).
    """
    if recipe.checkpoint.save:
        return
    for section, names in _OF_SAVING.items():
        for name in (name for name in names if getattr(getattr(recipe, section), name)):
            yield Violation(
                (f"{section}.{name}", "checkpoint.save"),
                f"`{section}.{name}` does nothing without `checkpoint.save`",
                "add `save: true` to `checkpoint`, or unset it with `null`",
            )


_OF_SAVING = {
    "checkpoint": (
        "save_interval",
        "save_retain_interval",
        "keep_last",
        "keep_every",
        "no_fully_parallel_save",
        "assume_constant_structure",
        "dist_optim_fully_reshardable",
        "no_save_optim",
        "no_save_rng",
    ),
    "log": ("progress",),
}


def loadings_words_are_for_a_run_that_loads(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """How to load says nothing where nothing is loaded; what makes a first start new is left out of later ones.

    Megatron, never: it trains from random weights (megatron/training/training.py:2105).
    """
    checkpoint = recipe.checkpoint
    if checkpoint.from_run:
        return
    unsaved = {"no_load_optim": checkpoint.no_save_optim, "no_load_rng": checkpoint.no_save_rng}
    for name in ("finetune", "no_load_optim", "no_load_rng", "fully_parallel_load", "dist_strictness"):
        own = checkpoint.save and (name not in _FIRST_START or unsaved.get(name))
        if getattr(checkpoint, name) and not own:
            yield Violation(
                (f"checkpoint.{name}", "checkpoint.from_run"),
                f"`checkpoint.{name}` does nothing without `checkpoint.from_run`, the run to load",
                "unset it with `null`",
            )


_FIRST_START = ("finetune", "no_load_optim", "no_load_rng")
"""Fields that a launch leaves out where a run goes on from its own checkpoint (`moekit.launch.rundir`)."""


def async_saves_have_a_worker(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron only saves in the background through a worker that stays.

    Megatron, never: it turns `--async-save` off in a warning, and every save stops training
    (megatron/training/arguments.py:1740).
    """
    checkpoint = recipe.checkpoint
    if checkpoint.async_save and checkpoint.format != "torch" and not _extra(recipe, _WORKER):
        yield Violation(
            ("checkpoint.async_save", "megatron.extra"),
            f"`checkpoint.async_save` is off without `{_WORKER}`, which no field says",
            f"add `extra: [{_WORKER}]` to `megatron`; where the image has no nvidia-resiliency-ext, also"
            " `--async-strategy, mcore`",
        )


_WORKER = "--use-persistent-ckpt-worker"


def _extra(recipe: Recipe, option: str) -> bool:
    return option in (recipe.megatron.extra or ())


def async_saves_have_their_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A checkpoint of one file a rank is written by the rank itself.

    Megatron, later: `Async checkpoint save not implemented for legacy checkpoints`, at the first one
    (megatron/training/checkpointing.py:709).
    """
    checkpoint = recipe.checkpoint
    if checkpoint.save and checkpoint.async_save and checkpoint.format == "torch":
        yield Violation(
            ("checkpoint.async_save", "checkpoint.format"),
            "`checkpoint.async_save` cannot write `checkpoint.format: torch`",
            "`torch_dist`, Megatron's default, can",
        )


def formats_have_their_parallelism(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Two formats are those of fully sharded weights.

    Megatron, validate: `only tested with FSDP` (megatron/training/arguments.py:1613, 1621).
    """
    form = recipe.checkpoint.format
    if form == "fsdp_dtensor" and not recipe.parallel.use_megatron_fsdp:
        yield Violation(
            ("checkpoint.format", "parallel.use_megatron_fsdp"),
            "`checkpoint.format: fsdp_dtensor` needs `parallel.use_megatron_fsdp`",
            "leave the format to Megatron: `torch_dist`",
        )
    if form == "torch_dcp" and not _extra(recipe, "--use-torch-fsdp2"):
        yield Violation(
            ("checkpoint.format", "megatron.extra"),
            "`checkpoint.format: torch_dcp` needs `--use-torch-fsdp2` in `megatron.extra`",
            "leave the format to Megatron: `torch_dist`",
        )


def torch_dcp_is_of_undivided_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """PyTorch's own format knows nothing of Megatron's tensor parallelism.

    Megatron, validate: `not tested with megatron tensor parallelism` (megatron/training/arguments.py:1614).
    """
    if recipe.checkpoint.format == "torch_dcp" and (recipe.parallel.tensor_model or 1) > 1:
        yield Violation(
            ("checkpoint.format", "parallel.tensor_model"),
            "`checkpoint.format: torch_dcp` excludes tensor parallelism",
            "leave the format to Megatron: `torch_dist`",
        )


def one_file_a_rank_needs_gloo(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`format: torch` gathers the distributed optimizer's state on CPUs.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1695).
    """
    gathered = recipe.parallel.use_distributed_optimizer and recipe.optimizer.name in (None, "adam", "sgd")
    if recipe.checkpoint.format == "torch" and gathered and _extra(recipe, _NO_GLOO):
        yield Violation(
            ("checkpoint.format", "parallel.use_distributed_optimizer", "megatron.extra"),
            "`checkpoint.format: torch` gathers the distributed optimizer over gloo, which `megatron.extra` disables",
            f"use `torch_dist`, or take `{_NO_GLOO}` out",
        )


_NO_GLOO = "--disable-gloo-process-groups"


def one_file_a_rank_has_no_plan(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`format: torch` writes each rank's own state as it is.

    Megatron, never: what plans a distributed checkpoint changes nothing (megatron/training/checkpointing.py:607).
    """
    checkpoint = recipe.checkpoint
    if checkpoint.format != "torch" or not (checkpoint.save or checkpoint.from_run):
        return
    for name in _OF_DISTRIBUTED:
        if getattr(checkpoint, name):
            yield Violation(
                (f"checkpoint.{name}", "checkpoint.format"),
                f"`checkpoint.{name}` does nothing for `checkpoint.format: torch`",
                "unset it with `null`, or use `torch_dist`",
            )


_OF_DISTRIBUTED = (
    "fully_parallel_load",
    "no_fully_parallel_save",
    "assume_constant_structure",
    "dist_strictness",
    "dist_optim_fully_reshardable",
)


def resharding_is_the_distributed_optimizers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Optimizer state that is not divided needs no other way to be divided again.

    Megatron, never: it changes nothing (megatron/training/checkpointing.py:490).
    """
    checkpoint, parallel = recipe.checkpoint, recipe.parallel
    divided = parallel.use_distributed_optimizer or parallel.use_megatron_fsdp or recipe.optimizer.name == "dist_muon"
    if checkpoint.save and checkpoint.dist_optim_fully_reshardable and not divided:
        yield Violation(
            ("checkpoint.dist_optim_fully_reshardable", "parallel.use_distributed_optimizer"),
            "`checkpoint.dist_optim_fully_reshardable` does nothing without `parallel.use_distributed_optimizer`",
        )


def a_saved_optimizer_can_be_divided_anew(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Saved by one rank of each group, the distributed optimizer's state keeps the layout it was saved in.

    Megatron, later: a start with other parallel sizes stops (megatron/training/arguments.py:1715).
    A warning: with the same sizes it loads.
    """
    checkpoint, optimizer = recipe.checkpoint, recipe.optimizer.name
    divided = recipe.parallel.use_distributed_optimizer and optimizer in (None, "adam", "sgd")
    if checkpoint.save and checkpoint.no_fully_parallel_save and divided and checkpoint.format != "torch":
        yield Violation(
            ("checkpoint.no_fully_parallel_save", "parallel.use_distributed_optimizer"),
            "`checkpoint.no_fully_parallel_save` ties a checkpoint of the distributed optimizer to its parallel sizes",
            "unset it with `null`",
            "warning",
        )


def mismatches_are_not_returned(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`return_*` hands a second value to the caller, and Megatron's trainer takes only one.

    Megatron, later: a TypeError at the first load (megatron/training/checkpointing.py:1602).
    """
    checkpoint, strictness = recipe.checkpoint, recipe.checkpoint.dist_strictness or ""
    loads = checkpoint.format != "torch" and (checkpoint.save or checkpoint.from_run)
    if loads and strictness.startswith("return_"):
        yield Violation(
            ("checkpoint.dist_strictness",),
            f"`checkpoint.dist_strictness: {strictness}` is for callers of Megatron's library, not for its trainer",
            f"`{strictness.replace('return', 'log')}` or `{strictness.replace('return', 'raise')}`",
        )


def a_parent_is_the_name_of_a_run(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Anything else would be a path into another run, or out of all of them.

    Megatron, never: a launch refuses it (moekit/launch/rundir.py).
    """
    parent = recipe.checkpoint.from_run
    if parent is not None and not RUN_NAME.fullmatch(parent):
        yield Violation(
            ("checkpoint.from_run",),
            f"no run can be named `{shortened(parent)}`",
            "`checkpoint.from_run` is a run's name, its folder below `runs/`",
        )


def sharded_weights_load_with_their_optimizer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without the optimizer's state Megatron makes its precise weights anew of the model's, Megatron FSDP's apart.

    Megatron, first step: before it, `Megatron-FSDP does not implement a model-to-main parameter update`
    (megatron/core/optimizer/distrib_optimizer.py:3080; Megatron-Bridge pull request 3425).
    """
    checkpoint, narrow = recipe.checkpoint, recipe.precision.bf16 or recipe.precision.fp16
    sharded = recipe.parallel.use_megatron_fsdp and recipe.megatron.version == "0.19.2"
    name = "finetune" if checkpoint.finetune else "no_load_optim" if checkpoint.no_load_optim else ""
    if sharded and narrow and checkpoint.from_run and name:
        yield Violation(
            (f"checkpoint.{name}", "parallel.use_megatron_fsdp"),
            f"`checkpoint.{name}` excludes `parallel.use_megatron_fsdp`",
            "`parallel: {use_megatron_fsdp: null, use_distributed_optimizer: true}`",
        )


RULES: tuple[Rule, ...] = (
    saving_has_an_interval,
    kept_checkpoints_are_saved_ones,
    kept_multiples_are_saved_ones,
    old_checkpoints_are_deleted_by_one,
    savings_words_are_for_a_run_that_saves,
    loadings_words_are_for_a_run_that_loads,
    async_saves_have_a_worker,
    async_saves_have_their_format,
    formats_have_their_parallelism,
    torch_dcp_is_of_undivided_layers,
    one_file_a_rank_needs_gloo,
    one_file_a_rank_has_no_plan,
    resharding_is_the_distributed_optimizers,
    a_saved_optimizer_can_be_divided_anew,
    mismatches_are_not_returned,
    a_parent_is_the_name_of_a_run,
    sharded_weights_load_with_their_optimizer,
)
