"""Rules on the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def _unit(recipe: Recipe) -> tuple[str, str]:
    """What the run counts in, and what it does not."""
    return ("samples", "iters") if recipe.train.samples and not recipe.train.iters else ("iters", "samples")


def _whole(recipe: Recipe) -> int | None:
    """Length of the schedule, in the run's unit (megatron/training/training.py:1911-1936)."""
    unit, _ = _unit(recipe)
    whole: int | None = getattr(recipe.schedule, f"decay_{unit}") or getattr(recipe.train, unit)
    return whole


def _warmup(recipe: Recipe) -> float:
    """Length of the warmup, in the run's unit."""
    if (share := recipe.schedule.warmup_fraction) is not None:
        return share * (_whole(recipe) or 0)
    warmup: int | None = getattr(recipe.schedule, f"warmup_{_unit(recipe)[0]}")
    return warmup or 0


def a_learning_rate_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron has no default for it.

    Megatron, schedule: `float() argument must be a string or a real number, not 'NoneType'`
    (megatron/core/optimizer_param_scheduler.py:148).
    """
    if recipe.schedule.lr is None:
        yield Violation(("schedule.lr",), "`schedule.lr` is missing", "the largest learning rate")


def a_learning_rate_moves_the_weights(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """With a rate of 0 the weights stay as they are; only a benchmark may.

    Megatron, never: it trains, and nothing is learnt (megatron/core/optimizer_param_scheduler.py:149).
    """
    if recipe.schedule.lr == 0 and not recipe.benchmark:
        yield Violation(("schedule.lr",), "`schedule.lr: 0` trains nothing", "a benchmark says `benchmark: true`")


def learning_rates_are_ordered(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Decay ends at the smallest rate.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1320).
    """
    lr, min_lr = recipe.schedule.lr, recipe.schedule.min_lr
    if lr is not None and min_lr is not None and min_lr > lr:
        yield Violation(
            ("schedule.min_lr", "schedule.lr"), f"schedule.min_lr = {min_lr} is above schedule.lr = {lr}", "swap them"
        )


def schedules_count_as_the_run_does(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A run in steps has a schedule in steps, one in sequences a schedule in sequences.

    Megatron, validate: `expected iteration-based learning rate decay` and its like
    (megatron/training/arguments.py:1241-1257).
    """
    unit, other = _unit(recipe)
    for name in (f"decay_{other}", f"warmup_{other}"):
        if getattr(recipe.schedule, name) and getattr(recipe.train, unit):
            yield Violation(
                (f"schedule.{name}", f"train.{unit}"),
                f"`schedule.{name}` has no meaning beside `train.{unit}`",
                f"use `{name.replace(other, unit)}`, and unset this one with `null`",
            )


def wsd_counts_as_the_run_does(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The decay at the end is in the run's unit too.

    Megatron, never: the other unit is not looked at (megatron/training/training.py:1917, 1933).
    """
    unit, other = _unit(recipe)
    if getattr(recipe.schedule, f"wsd_decay_{other}") and recipe.schedule.decay_style == "WSD":
        yield Violation(
            (f"schedule.wsd_decay_{other}", f"train.{unit}"),
            f"`schedule.wsd_decay_{other}` does nothing beside `train.{unit}`",
            f"use `wsd_decay_{unit}`, and unset this one with `null`",
        )


def wsd_has_a_decay(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Warmup, stable, decay: the last has a length.

    Megatron, schedule: a bare assert, once the model is built (megatron/core/optimizer_param_scheduler.py:164).
    """
    unit, whole = _unit(recipe)[0], _whole(recipe)
    if recipe.schedule.decay_style == "WSD" and getattr(recipe.schedule, f"wsd_decay_{unit}") is None:
        tenth = f"; a tenth of the schedule is {round(whole / 10)}" if whole else ""
        yield Violation(
            ("schedule.decay_style", f"schedule.wsd_decay_{unit}"),
            f"`decay_style: WSD` needs `schedule.wsd_decay_{unit}`",
            f"the length of its decay at the end{tenth}",
        )


def wsd_decays_after_the_warmup(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A decay that begins earlier jumps down at the end of the warmup.

    Megatron, never: it counts the decay back from the end (megatron/core/optimizer_param_scheduler.py:239).
    """
    unit, whole, warmup = _unit(recipe)[0], _whole(recipe), _warmup(recipe)
    decay = getattr(recipe.schedule, f"wsd_decay_{unit}")
    if recipe.schedule.decay_style == "WSD" and whole and decay and warmup < whole and decay > whole - warmup:
        yield Violation(
            (f"schedule.wsd_decay_{unit}", f"schedule.decay_{unit}", f"train.{unit}", f"schedule.warmup_{unit}"),
            f"schedule.wsd_decay_{unit} = {decay} is more than the warmup of {warmup:g} leaves of {whole}",
            f"use at most {int(whole - warmup)}",
        )


def wsd_words_are_for_wsd(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Another schedule has no decay of its own at the end.

    Megatron, never: only WSD looks at them (megatron/core/optimizer_param_scheduler.py:238).
    """
    if recipe.schedule.decay_style == "WSD":
        return
    for name in ("wsd_decay_iters", "wsd_decay_samples", "wsd_decay_style"):
        if getattr(recipe.schedule, name) is not None:
            yield Violation(
                (f"schedule.{name}", "schedule.decay_style"),
                f"`schedule.{name}` does nothing without `decay_style: WSD`",
                "add that, or unset this with `null`",
            )


def a_warmup_ends_within_the_schedule(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A schedule that is all warmup has no decay.

    Megatron, schedule: a bare assert, once the model is built (megatron/core/optimizer_param_scheduler.py:160).
    """
    unit, whole, warmup = _unit(recipe)[0], _whole(recipe), _warmup(recipe)
    share = recipe.schedule.warmup_fraction
    if whole and warmup >= whole:
        name = f"warmup_{unit}" if share is None else "warmup_fraction"
        yield Violation(
            (f"schedule.{name}", f"schedule.decay_{unit}", f"train.{unit}"),
            f"schedule.{name} = {getattr(recipe.schedule, name)} leaves nothing of the schedule of {whole}",
            f"use less than {whole if share is None else 1}",
        )


def one_warmup(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A share of the schedule, or a length.

    Megatron, validate: `can only specify one of lr-warmup-fraction and lr-warmup-iters`
    (megatron/training/arguments.py:1246, 1259).
    """
    name = f"warmup_{_unit(recipe)[0]}"
    if recipe.schedule.warmup_fraction is not None and getattr(recipe.schedule, name):
        yield Violation(
            ("schedule.warmup_fraction", f"schedule.{name}"),
            f"`schedule.warmup_fraction` excludes `schedule.{name}`",
            "unset one of them with `null`",
        )


def one_schedule_wins_on_resume(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The recipe's or the checkpoint's.

    Megatron, schedule: `both override and use-checkpoint are set` (megatron/core/optimizer_param_scheduler.py:176).
    """
    schedule = recipe.schedule
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        yield Violation(
            ("schedule.use_checkpoint_opt_param_scheduler", "schedule.override_opt_param_scheduler"),
            "`schedule.override_opt_param_scheduler` and `use_checkpoint_opt_param_scheduler` exclude each other",
            "unset one of them with `null`",
        )


def a_schedule_is_loaded_with_its_optimizer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What a first start leaves out of the checkpoint takes the schedule with it, and the warmup begins anew.

    Megatron, never: it reads the schedule where it reads the optimizer (megatron/training/checkpointing.py:2555, 2598;
    Megatron-LM issue 1533).
    A warning: a run's later starts do load it.
    """
    checkpoint = recipe.checkpoint
    if not (recipe.schedule.use_checkpoint_opt_param_scheduler and checkpoint.from_run):
        return
    for name in ("finetune", "no_load_optim"):
        if getattr(checkpoint, name):
            yield Violation(
                ("schedule.use_checkpoint_opt_param_scheduler", f"checkpoint.{name}"),
                f"`checkpoint.{name}` leaves the schedule of `{checkpoint.from_run}` out, which "
                "`schedule.use_checkpoint_opt_param_scheduler` asks for",
                "unset one of them with `null`",
                "warning",
            )
            return


RULES: tuple[Rule, ...] = (
    a_learning_rate_is_given,
    a_learning_rate_moves_the_weights,
    learning_rates_are_ordered,
    schedules_count_as_the_run_does,
    wsd_counts_as_the_run_does,
    wsd_has_a_decay,
    wsd_decays_after_the_warmup,
    wsd_words_are_for_wsd,
    a_warmup_ends_within_the_schedule,
    one_warmup,
    one_schedule_wins_on_resume,
    a_schedule_is_loaded_with_its_optimizer,
)
