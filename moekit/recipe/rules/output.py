"""Rules on what a run writes, and on what it is to survive."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.names import RUN_NAME
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe

CAPTURES = ("tokens_per_expert", "activations", "params", "wgrads", "dgrads")


def saving_has_an_interval(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`--save` alone is a bare assert, at validate (megatron/training/arguments.py:1322).

    An interval without `--save` saves nothing; never noticed.
    """
    checkpoint = recipe.checkpoint
    if checkpoint.save and checkpoint.save_interval is None:
        yield Violation(
            ("checkpoint.save", "checkpoint.save_interval"), "`checkpoint.save` needs `checkpoint.save_interval`"
        )
    if checkpoint.save_interval is not None and not checkpoint.save:
        yield Violation(
            ("checkpoint.save_interval", "checkpoint.save"),
            "`checkpoint.save_interval` saves nothing without `checkpoint.save`",
            "add `save: true`",
        )


def captures_have_a_place(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """They are written below `--save`: without it a TypeError at the first capture, or nothing at all; else never.

    Source: megatron/training/activation_logging.py, `ActivationLogger`.
    """
    for name in CAPTURES:
        if getattr(recipe.monitor, f"{name}_interval") and not recipe.checkpoint.save:
            yield Violation(
                (f"monitor.{name}_interval", "checkpoint.save"),
                f"`monitor.{name}_interval` writes below the checkpoints and needs `checkpoint.save`",
                "add `save: true` and a `save_interval` to `checkpoint`",
            )


def a_routing_trace_is_bounded(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron traces every step by default and the files grow without end; never noticed. Source: handbook 3.0."""
    monitor = recipe.monitor
    if not monitor.routing_trace:
        for name in (n for n in _TRACE_FIELDS if getattr(monitor, n)):
            yield Violation(
                (f"monitor.{name}", "monitor.routing_trace"),
                f"`monitor.{name}` traces nothing without `monitor.routing_trace`",
                "add `routing_trace: true`",
            )
        return
    if monitor.routing_trace_max_training_iters is None:
        yield Violation(
            ("monitor.routing_trace", "monitor.routing_trace_max_training_iters"),
            "`monitor.routing_trace` without an end writes every token of every step",
            "set `routing_trace_max_training_iters`",
            "warning",
        )
    if recipe.model.cuda_graph_impl not in (None, "none"):
        yield Violation(
            ("monitor.routing_trace", "model.cuda_graph_impl"),
            "a routing trace sees nothing inside CUDA graphs",
            "set `cuda_graph_impl: none` while you trace",
        )


def a_parent_is_the_name_of_a_run(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Anything else would be a path into another run or out of all of them; never noticed."""
    parent = recipe.checkpoint.from_run
    if parent is not None and not RUN_NAME.fullmatch(parent):
        yield Violation(
            ("checkpoint.from_run",),
            f"no run can be named `{shortened(parent)}`",
            "`checkpoint.from_run` is a run's name, its folder below `runs/`",
        )


def a_profile_has_steps(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """An end before the start profiles nothing; never noticed. Source: megatron/training/training.py."""
    profile = recipe.profile
    if profile.step_start is not None and profile.step_end is not None and profile.step_end <= profile.step_start:
        yield Violation(
            ("profile.step_end", "profile.step_start"),
            f"profile.step_end = {profile.step_end} is not behind profile.step_start = {profile.step_start}",
        )


_TRACE_FIELDS = (
    "routing_trace_max_training_iters",
    "routing_trace_last_iters",
    "routing_trace_capture_logits",
    "routing_trace_capture_hidden_states",
    "routing_trace_dump_weights",
)


RULES: tuple[Rule, ...] = (
    saving_has_an_interval,
    captures_have_a_place,
    a_routing_trace_is_bounded,
    a_parent_is_the_name_of_a_run,
    a_profile_has_steps,
)
