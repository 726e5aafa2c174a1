"""Rules on what a run says of itself: scalars and profiles."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below, listed
from moekit.recipe.schema import Recipe


def memory_reports_come_with_a_line(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Memory is reported where a line is printed. Unset, `log.interval` is 100.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1330).
    """
    every, interval = recipe.log.interval or 100, recipe.log.memory_interval
    if interval and interval % every:
        default = "" if recipe.log.interval else ", Megatron's default"
        yield Violation(
            ("log.memory_interval", "log.interval"),
            f"`log.memory_interval: {interval}` is no multiple of `log.interval`, which is {every}{default}",
        )


def attention_logits_need_a_transformer_engine(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine reports the largest attention logit from 2.9 on.

    Megatron, validate: `only supported with TE >= 2.9.0` (megatron/training/arguments.py:1567).
    """
    if recipe.log.max_attention_logit and below(target.transformer_engine, "2.9"):
        yield Violation(
            ("log.max_attention_logit",),
            "`log.max_attention_logit` needs Transformer Engine 2.9 or later;"
            f" {target.name} has {target.transformer_engine}",
            "unset it with `null`, or take a newer image",
        )


def attention_logits_are_transformer_engines(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's own attention keeps no logits to report.

    Megatron, first step: an AttributeError, `current_max_attn_logits` (megatron/core/optimizer/qk_clip.py:26).
    """
    if recipe.log.max_attention_logit and recipe.model.transformer_impl == "local":
        yield Violation(
            ("log.max_attention_logit", "model.transformer_impl"),
            "`log.max_attention_logit` asks Transformer Engine's attention, which `transformer_impl: local` replaces",
        )


def attention_logits_are_read_in_half_precision(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron looks for the layers inside the wrapper that half precision puts around a model.

    Megatron, first step: an AttributeError, no attribute `module` (megatron/core/optimizer/qk_clip.py:23).
    """
    if recipe.log.max_attention_logit and not (recipe.precision.bf16 or recipe.precision.fp16):
        yield Violation(
            ("log.max_attention_logit", "precision.bf16"),
            "`log.max_attention_logit` needs `precision.bf16` or `precision.fp16`",
        )


def a_torch_profile_has_steps(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """PyTorch's profiler wants a step to record. Unset, the first is 10 and 12 the one before which it ends.

    Megatron, first step: `Invalid profiler schedule arguments` (megatron/training/training.py:3681).
    """
    if recipe.profile.enabled and recipe.profile.use_pytorch_profiler:
        yield from _steps_in_order(recipe)


def an_nsight_profile_has_steps(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A profile that is to end before it begins has no end. Unset, it begins at step 10 and ends before step 12.

    Megatron, never: Nsight records from the first step on to the end (megatron/training/training.py:3197, 3734).
    """
    if recipe.profile.enabled and not recipe.profile.use_pytorch_profiler:
        yield from _steps_in_order(recipe)


def _steps_in_order(recipe: Recipe) -> Iterator[Violation]:
    profile, (start, end) = recipe.profile, _profiled(recipe)
    if end <= start:
        default = "" if profile.step_end is not None else ", Megatron's default"
        named = ("step_end", "step_start") if profile.step_end is not None else ("step_start", "step_end")
        yield Violation(
            (f"profile.{named[0]}", f"profile.{named[1]}"),
            f"`profile.step_end` is {end}{default}, not behind `profile.step_start: {start}`",
            f"set `step_end` to {start + 1} or more",
        )


def _profiled(recipe: Recipe) -> tuple[int, int]:
    """The first step that is profiled, and the one before which it ends (megatron/training/config/common_config.py)."""
    start, end = recipe.profile.step_start, recipe.profile.step_end
    return 10 if start is None else start, 12 if end is None else end


def profiled_steps(recipe: Recipe) -> range:
    """The steps, counted from 1, that a profile shows: PyTorch's profiler is a step ahead of Nsight's.

    PyTorch's moves on ahead of each step, from 0 (megatron/training/training.py:3680, 3733); Nsight's begins ahead of
    step `step_start` counted from 0 and ends behind `step_end` steps (:3734, :3197).
    """
    start, end = _profiled(recipe)
    if not recipe.profile.enabled:
        return range(0)
    return range(max(start, 1), end) if recipe.profile.use_pytorch_profiler else range(start + 1, end + 1)


def a_profile_ends_within_the_run(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """PyTorch's profiler writes its file once it has recorded its last step.

    Megatron, never: there is no file (megatron/training/training.py:3680-3690).
    """
    train, profile = recipe.train, recipe.profile
    ends = {"train.iters": train.iters, "train.exit_interval": train.exit_interval}
    last, name = min(((steps, name) for name, steps in ends.items() if steps), default=(None, ""))
    start, end = _profiled(recipe)
    if profile.enabled and profile.use_pytorch_profiler and last and start < end and end > last:
        yield Violation(
            ("profile.step_end", "profile.enabled", name),
            f"the profile ends at step {end}, and the run at {last}, by `{name}`",
            f"set `profile.step_end` to {last} or less",
        )


def profiled_ranks_are_in_the_world(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A rank that does not exist profiles nothing.

    Megatron, never: it asks each rank whether it is listed (megatron/training/training.py:3666).
    """
    ranks, gpus = recipe.profile.ranks or (), recipe.parallel.gpus
    missing = [rank for rank in ranks if gpus and not 0 <= rank < gpus]
    if recipe.profile.enabled and missing:
        yield Violation(
            ("profile.ranks", "parallel.gpus"),
            f"`profile.ranks` has {listed(missing)}, and the last rank of `parallel.gpus: {gpus}` is {(gpus or 1) - 1}",
        )


def shapes_are_nsights(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only the Nsight profile takes shapes from this option.

    Megatron, never: PyTorch's profiler has an option of its own (megatron/training/training.py:3688, 3736).
    """
    profile = recipe.profile
    if profile.enabled and profile.use_pytorch_profiler and profile.record_shapes:
        yield Violation(
            ("profile.record_shapes", "profile.use_pytorch_profiler"),
            "`profile.record_shapes` does nothing for PyTorch's profiler",
            "use `megatron.extra: [--pytorch-profiler-collect-shapes]`",
        )


def memory_history_is_of_the_last_rank(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The last rank writes the snapshot, and records only where it is among the profiled ones.

    Megatron, never: a snapshot without history (megatron/training/training.py:2817, utils/utils.py:29).
    """
    ranks, gpus = recipe.profile.ranks, recipe.parallel.gpus
    if recipe.profile.record_memory_history and ranks and gpus and gpus - 1 not in ranks:
        yield Violation(
            ("profile.record_memory_history", "profile.ranks"),
            f"`profile.record_memory_history` is the last rank's, {gpus - 1}, which `profile.ranks` leaves out",
            f"add {gpus - 1} to `profile.ranks`",
        )


RULES: tuple[Rule, ...] = (
    memory_reports_come_with_a_line,
    attention_logits_need_a_transformer_engine,
    attention_logits_are_transformer_engines,
    attention_logits_are_read_in_half_precision,
    a_torch_profile_has_steps,
    an_nsight_profile_has_steps,
    a_profile_ends_within_the_run,
    profiled_ranks_are_in_the_world,
    shapes_are_nsights,
    memory_history_is_of_the_last_rank,
)
