"""Rules on the batch, the length of a run and its validation."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


def a_micro_batch_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron has no default for it.

    Megatron, validate: a bare assert (megatron/training/arguments.py:675).
    """
    if recipe.train.micro_batch_size is None:
        yield Violation(
            ("train.micro_batch_size",),
            "`train.micro_batch_size` is missing",
            "sequences a data-parallel rank takes at a time",
        )


def a_global_batch_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The batch would follow the number of GPUs, and with it what the learning rate means.

    Megatron, never: one micro batch of each data-parallel rank is its default (megatron/training/arguments.py:685).
    """
    scheduled = "--step-batch-size-schedule" in (recipe.megatron.extra or ())
    if recipe.train.global_batch_size is None and not scheduled:
        yield Violation(
            ("train.global_batch_size",),
            "`train.global_batch_size` is missing",
            "sequences in one step, over all ranks",
        )


def micro_batches_fill_the_global_batch(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each data-parallel rank takes equally many micro batches.

    Megatron, validate: worded as a fault of evaluation, `eval_global_batch_size (250) must be divisible by`
    (megatron/training/arguments.py:694).
    """
    size = sizes(recipe)
    if size is None or size.world % size.model_ranks:
        return
    together = size.micro_batch_seqs * size.data
    if size.global_batch_seqs % together:
        yield Violation(
            ("train.global_batch_size", "train.micro_batch_size", "parallel.gpus"),
            f"train.global_batch_size = {size.global_batch_seqs} is no multiple of {together}: "
            f"train.micro_batch_size = {size.micro_batch_seqs} on {size.data} data-parallel ranks",
            f"use {max(together, round(size.global_batch_seqs / together) * together)}",
        )


def the_batch_does_not_ramp_up(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The option is read and has no effect: the batch has its full size from the first step.

    Megatron, never: the trainer does not hand it on (megatron/training/global_vars.py:127).
    """
    if recipe.train.rampup_batch_size is not None:
        yield Violation(
            ("train.rampup_batch_size",),
            "`train.rampup_batch_size` does nothing in Megatron's trainer",
            "unset it with `null`; `--step-batch-size-schedule` in `megatron.extra` changes the batch at given steps, "
            "without `train.global_batch_size`",
        )


def a_length_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The learning rate needs to know the end.

    Megatron, schedule: `either train-iters or train-samples should be provided` (megatron/training/training.py:1939).
    """
    if not recipe.train.iters and not recipe.train.samples:
        yield Violation(("train.iters",), "`train.iters` is missing", "optimizer steps of the full token budget")


def one_length(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A run counts in steps or in sequences.

    Megatron, validate: `expected iteration-based training` (megatron/training/arguments.py:1239).
    """
    if recipe.train.iters and recipe.train.samples:
        yield Violation(
            ("train.samples", "train.iters"),
            "`train.iters` and `train.samples` exclude each other",
            "unset one of them with `null`",
        )


def samples_fill_a_batch(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Fewer sequences than one step takes are no step at all.

    Megatron, never: it builds the model, trains 0 steps and ends well (`update_train_iters` of
    megatron/training/training.py).
    """
    samples, batch = recipe.train.samples, recipe.train.global_batch_size
    if samples and batch and samples < batch and not recipe.train.iters:
        yield Violation(
            ("train.samples", "train.global_batch_size"),
            f"train.samples = {samples} is below train.global_batch_size = {batch}: there is no step",
            "sequences of the full token budget",
        )


def a_seed_is_above_zero(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """0 is no seed of Megatron's.

    Megatron, first step: `Seed (0) should be a positive integer` (megatron/training/initialize.py:461).
    """
    if recipe.train.seed is not None and recipe.train.seed <= 0:
        yield Violation(("train.seed",), f"train.seed = {recipe.train.seed} is not above 0", "Megatron's own is 1234")


def evaluation_has_an_interval(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron divides by it, even where nothing is validated.

    Megatron, first step: a TypeError when the data sets are built, after the model
    (megatron/training/training.py:4481).
    """
    if recipe.train.eval_interval is None and "--full-validation" not in (recipe.megatron.extra or ()):
        yield Violation(
            ("train.eval_interval", "train.eval_iters"),
            "`train.eval_interval` is missing, and Megatron divides by it even where nothing is validated",
            "any number will do beside `eval_iters: 0`",
        )


RULES: tuple[Rule, ...] = (
    a_micro_batch_is_given,
    a_global_batch_is_given,
    micro_batches_fill_the_global_batch,
    the_batch_does_not_ramp_up,
    a_length_is_given,
    one_length,
    samples_fill_a_batch,
    a_seed_is_above_zero,
    evaluation_has_an_interval,
)
