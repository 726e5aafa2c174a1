"""Rules on what a run writes, and on running without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.names import RUN_NAME, VARIABLE, variable_problem
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


_TRACE_FIELDS = (
    "routing_trace_max_training_iters",
    "routing_trace_last_iters",
    "routing_trace_capture_logits",
    "routing_trace_capture_hidden_states",
    "routing_trace_dump_weights",
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


def upcycling_begins_from_a_run(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Experts then begin at random and the dense training is lost; never noticed. Source: handbook 3.6.

    Without `--save` Megatron stops at validate (megatron/training/arguments.py:1783). With other widths than the dense
    run's the load fails when the model is built. And for two reasons of 0.19.2 and of the handbook's commit it always
    fails there (megatron/training/training.py:2040-2050 and 2159-2180; handbook 2.5).
    """
    moe, model = recipe.moe, recipe.model
    if not moe.use_upcycling:
        return
    if not recipe.checkpoint.from_run:
        yield Violation(
            ("moe.use_upcycling", "checkpoint.from_run"),
            "`moe.use_upcycling` needs `checkpoint.from_run`, the dense run whose layers become experts",
        )
    if not recipe.checkpoint.save:
        yield Violation(
            ("moe.use_upcycling", "checkpoint.save"),
            "`moe.use_upcycling` needs `checkpoint.save`: the converted model is saved at once",
        )
    if moe.ffn_hidden_size and model.ffn_hidden_size and moe.ffn_hidden_size != model.ffn_hidden_size:
        granularity = moe.upcycling_granularity or 1
        yield Violation(
            ("model.ffn_hidden_size", "moe.ffn_hidden_size", "moe.upcycling_granularity"),
            f"while upcycling, model.ffn_hidden_size = {model.ffn_hidden_size} must be an expert's width: Megatron "
            f"takes the dense layers to be {granularity} times as wide",
            f"use {moe.ffn_hidden_size}, for dense layers of {moe.ffn_hidden_size * granularity}",
        )
    yield Violation(
        ("moe.use_upcycling",),
        f"Megatron {recipe.megatron.version} fails while it upcycles: it hands its loader a wrong argument name, and "
        "builds the dense model from the MoE's configuration",
        "launch it with a checkout that has both mended (handbook 2.5, 3.6)",
        "warning",
    )


def a_profile_has_steps(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """An end before the start profiles nothing; never noticed. Source: megatron/training/training.py."""
    profile = recipe.profile
    if profile.step_start is not None and profile.step_end is not None and profile.step_end <= profile.step_start:
        yield Violation(
            ("profile.step_end", "profile.step_start"),
            f"profile.step_end = {profile.step_end} is not behind profile.step_start = {profile.step_start}",
        )


def variables_can_be_set(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A variable of the job's shell or of Slurm breaks the job itself, or is lost without a word; never noticed."""
    for variable in recipe.runtime.environment or {}:
        if reason := variable_problem(variable):
            name = f"runtime.environment.{variable}"
            yield Violation((name,), f"`{name}` {reason[0]}", reason[1])
    for secret in recipe.runtime.secrets or ():
        if not VARIABLE.fullmatch(secret) or variable_problem(secret):
            yield Violation(
                ("runtime.secrets",),
                f"`runtime.secrets` has `{shortened(secret)}`, which is no name of a secret variable",
                "it lists names such as `HF_TOKEN`; their values stay in your shell",
            )


RULES: tuple[Rule, ...] = (
    saving_has_an_interval,
    captures_have_a_place,
    a_routing_trace_is_bounded,
    a_parent_is_the_name_of_a_run,
    upcycling_begins_from_a_run,
    a_profile_has_steps,
    variables_can_be_set,
)
