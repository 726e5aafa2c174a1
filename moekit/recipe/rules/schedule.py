"""Rules on the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def learning_rate_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A TypeError on `None`, when the schedule is made. Source: megatron/core/optimizer_param_scheduler.py:148."""
    if recipe.schedule.lr is None:
        yield Violation(("schedule.lr",), "`schedule.lr` is missing")


def learning_rates_are_ordered(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert, at validate. Source: megatron/training/arguments.py:1320."""
    lr, min_lr = recipe.schedule.lr, recipe.schedule.min_lr
    if lr is not None and min_lr is not None and min_lr > lr:
        yield Violation(("schedule.min_lr", "schedule.lr"), f"schedule.min_lr = {min_lr} is above schedule.lr = {lr}")


def wsd_has_a_decay(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert once the model is built (megatron/core/optimizer_param_scheduler.py:164).

    A decay longer than the schedule begins before step 0; never noticed.
    """
    schedule, samples = recipe.schedule, bool(recipe.train.samples)
    if schedule.decay_style != "WSD":
        return
    unit = "samples" if samples else "iters"
    decay = schedule.wsd_decay_samples if samples else schedule.wsd_decay_iters
    whole = (
        (schedule.decay_samples or recipe.train.samples) if samples else (schedule.decay_iters or recipe.train.iters)
    )
    if decay is None:
        tenth = f"; a tenth of the schedule is {round(whole / 10)}" if whole else ""
        yield Violation(
            ("schedule.decay_style", f"schedule.wsd_decay_{unit}"),
            f"`decay_style: WSD` needs `schedule.wsd_decay_{unit}`",
            f"the length of its decay at the end{tenth}",
        )
    elif whole and decay > whole:
        yield Violation(
            (f"schedule.wsd_decay_{unit}", f"schedule.decay_{unit}", f"train.{unit}"),
            f"schedule.wsd_decay_{unit} = {decay} is longer than the schedule of {whole}",
        )


def warmup_is_within_the_schedule(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert once the model is built. Source: megatron/core/optimizer_param_scheduler.py:160."""
    schedule = recipe.schedule
    whole = schedule.decay_iters or recipe.train.iters
    if schedule.warmup_iters and whole and schedule.warmup_iters >= whole:
        yield Violation(
            ("schedule.warmup_iters", "schedule.decay_iters", "train.iters"),
            f"schedule.warmup_iters = {schedule.warmup_iters} leaves nothing of the schedule of {whole}",
        )


def one_warmup(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:1247."""
    schedule = recipe.schedule
    if schedule.warmup_fraction is not None and (schedule.warmup_iters or schedule.warmup_samples):
        yield Violation(
            ("schedule.warmup_fraction", "schedule.warmup_iters"),
            "`schedule.warmup_fraction` excludes a warmup in iterations or samples",
        )


RULES: tuple[Rule, ...] = (
    learning_rate_is_given,
    learning_rates_are_ordered,
    wsd_has_a_decay,
    warmup_is_within_the_schedule,
    one_warmup,
)
