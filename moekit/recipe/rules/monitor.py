"""Rules on what a run records of its inside: dumps, token counts, routing traces."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.output import profiled_steps
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe

DUMPS = ("tokens_per_expert", "activations", "params", "wgrads", "dgrads")
"""What `monitor.<name>_interval` writes below the checkpoints."""
HOOKED = ("tokens_per_expert", "activations", "dgrads")
"""Those that Python hooks on the model's modules record."""


def dumps_have_a_place(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Dumps are written below `--save`: without it the first one ends the run.

    Megatron, later: a bare assert, or a TypeError, at the interval's first step
    (megatron/training/checkpointing.py:532, activation_logging.py:208).
    """
    for name in DUMPS:
        if getattr(recipe.monitor, f"{name}_interval") and not recipe.checkpoint.save:
            yield Violation(
                (f"monitor.{name}_interval", "checkpoint.save"),
                f"`monitor.{name}_interval` writes below the checkpoints and needs `checkpoint.save`",
                "add `save: true` and a `save_interval` to `checkpoint`",
            )


def weights_are_dumped_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """While weights are gathered behind the forward pass, there is no moment at which all of them are there.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1328).
    """
    if recipe.monitor.params_interval and recipe.checkpoint.save and recipe.overlap.param_gather:
        yield Violation(
            ("monitor.params_interval", "overlap.param_gather"),
            "`monitor.params_interval` excludes `overlap.param_gather`",
            "a checkpoint has the weights too; or unset `overlap.param_gather` for the run that dumps them",
        )


def hooks_run_outside_graphs(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A replayed CUDA graph runs no Python: hooks on the layers inside record nothing.

    Megatron, never: files stay empty, or lack the captured layers (megatron/core/transformer/moe/router_trace.py:23).
    """
    if recipe.model.cuda_graph_impl in (None, "none") or _captures_parts(recipe):
        return
    monitor = recipe.monitor
    hooked = [f"monitor.{name}_interval" for name in HOOKED if getattr(monitor, f"{name}_interval")]
    hooked += [f"monitor.{name}" for name in ("diagnose_interval", "routing_trace") if getattr(monitor, name)]
    for name in hooked:
        yield Violation(
            (name, "model.cuda_graph_impl"),
            f"`{name}` sees nothing inside CUDA graphs",
            "set `cuda_graph_impl: none` while you record",
        )


def _captures_parts(recipe: Recipe) -> bool:
    """Whether the graphs hold chosen modules alone; which, `megatron.extra` says."""
    return any(word in ("--cuda-graph-modules", "--cuda-graph-scope") for word in recipe.megatron.extra or ())


def layers_have_one_number(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A pipeline stage numbers the layers of each of its chunks from 0, and the records do not say which chunk.

    Megatron, never: counts and traces of several layers share one number, and their sum looks balanced (handbook A.1;
    megatron/training/activation_logging.py:131).
    A warning: the training itself is right.
    """
    if (chunks := _interleaving(recipe)) is None or not recipe.moe.num_experts:
        return
    monitor = recipe.monitor
    for name in ("tokens_per_expert_interval", "routing_trace"):
        if getattr(monitor, name):
            yield Violation(
                (f"monitor.{name}", chunks),
                f"`monitor.{name}` mixes layers up when pipeline stages are interleaved, which `{chunks}` asks for",
                "measure the balance in a run without interleaving",
                "warning",
            )


def _interleaving(recipe: Recipe) -> str | None:
    """The field that gives each pipeline rank several chunks of the model."""
    parallel = recipe.parallel
    stages = parallel.pipeline_model or 1
    layout, layers = parallel.pipeline_model_layout, parallel.num_layers_per_virtual_pipeline_stage
    if layout is not None and len(layout.stages) > stages:
        return "parallel.pipeline_model_layout"
    if (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1:
        return "parallel.num_virtual_stages_per_pipeline_rank"
    if layers and stages > 1 and (recipe.model.num_layers or 0) > layers * stages:
        return "parallel.num_layers_per_virtual_pipeline_stage"
    return None


def activations_are_dumped_as_made(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A recomputed module calls the hooks again, in the backward pass.

    Megatron, never: the dump holds what was recomputed last, after dropout drawn anew (handbook A.1).
    A warning: without dropout and noise both are the same numbers.
    """
    if recipe.monitor.activations_interval and recipe.memory.recompute_granularity:
        yield Violation(
            ("monitor.activations_interval", "memory.recompute_granularity"),
            "`monitor.activations_interval` records activations a second time when they are recomputed",
            "unset `memory.recompute_granularity` and its companions with `null` while you dump",
            "warning",
        )


def dumps_come_before_the_end(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """An interval longer than the run has no first time.

    Megatron, never: nothing is written (megatron/training/training.py:2348-2357).
    A warning: the run trains as it is written.
    """
    iters = recipe.train.iters
    for name in (*DUMPS, "diagnose"):
        interval = getattr(recipe.monitor, f"{name}_interval")
        if interval and iters and interval > iters:
            yield Violation(
                (f"monitor.{name}_interval", "train.iters"),
                f"`monitor.{name}_interval: {interval}` is beyond the end: `train.iters` is {iters}",
                level="warning",
            )


def a_profile_shows_no_diagnosis(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """In a diagnostic step moekit's hooks compute beside the training, and a profile would show what they do.

    Megatron, never: the hooks are not its own (handbook A.1).
    A warning: the run trains as it is written.
    """
    interval, steps = recipe.monitor.diagnose_interval, profiled_steps(recipe)
    if interval and (first := -(-steps.start // interval) * interval) in steps:
        shown = f"step {first}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        yield Violation(
            ("monitor.diagnose_interval", "profile.enabled"),
            f"`monitor.diagnose_interval: {interval}` makes step {first} diagnostic, and the profile shows {shown}",
            "unset it with `null` in the run that you profile, or move `profile.step_start` and `step_end`",
            "warning",
        )


def there_are_experts_to_watch(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A dense model has no router.

    Megatron, never: what is asked for is not there (megatron/training/training.py:2762).
    """
    watching = {
        "monitor.tokens_per_expert_interval": recipe.monitor.tokens_per_expert_interval,
        "monitor.routing_trace": recipe.monitor.routing_trace,
        "monitor.diagnose_interval": recipe.monitor.diagnose_interval,
        "log.moe_per_layer": recipe.log.moe_per_layer,
    }
    for name, said in watching.items():
        if said and not recipe.moe.num_experts:
            yield Violation(
                (name, "moe.num_experts"),
                f"`{name}` watches experts, and without `moe.num_experts` there are none",
                "unset it with `null`",
            )


def a_routing_trace_is_bounded(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron traces every token of every step by default, and the files grow with the run.

    Megatron, never: `train_iters` is its bound (megatron/training/training.py:3568; handbook 3.0).
    A warning: a short run may want all of it.
    """
    if recipe.monitor.routing_trace and recipe.monitor.routing_trace_max_training_iters is None:
        yield Violation(
            ("monitor.routing_trace", "monitor.routing_trace_max_training_iters"),
            "`monitor.routing_trace` without an end writes every token of every step",
            "set `routing_trace_max_training_iters`",
            "warning",
        )


def dropped_tokens_leave_no_trace(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron leaves a whole record out where a token lost one of its experts.

    Megatron, never: the trace has holes, or nothing (megatron/core/transformer/moe/router_trace.py:359; handbook 3.7).
    A warning: steps in which nothing is dropped are there.
    """
    if recipe.monitor.routing_trace and recipe.moe.expert_capacity_factor is not None:
        yield Violation(
            ("monitor.routing_trace", "moe.expert_capacity_factor"),
            "`monitor.routing_trace` skips every call in which `moe.expert_capacity_factor` drops a token",
            "trace a run without a capacity factor",
            "warning",
        )


def parts_of_a_record_have_their_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Bounds and contents of a trace or a profile say nothing where none is asked for.

    Megatron, never: they change nothing (megatron/training/training.py:3566, 3665).
    """
    history = recipe.profile.record_memory_history
    for section, whole, parts in _PARTS:
        of = getattr(recipe, section)
        for part in parts:
            value = getattr(of, part)
            said = value is not None and value is not False and not (part == "ranks" and history)
            if said and not getattr(of, whole):
                yield Violation(
                    (f"{section}.{part}", f"{section}.{whole}"),
                    f"`{section}.{part}` does nothing without `{section}.{whole}`",
                    f"add `{whole}: true`, or unset it with `null`",
                )


_PARTS = (
    (
        "monitor",
        "routing_trace",
        (
            "routing_trace_max_training_iters",
            "routing_trace_last_iters",
            "routing_trace_capture_logits",
            "routing_trace_capture_hidden_states",
            "routing_trace_dump_weights",
        ),
    ),
    ("profile", "enabled", ("use_pytorch_profiler", "step_start", "step_end", "ranks", "record_shapes")),
)


RULES: tuple[Rule, ...] = (
    dumps_have_a_place,
    weights_are_dumped_whole,
    hooks_run_outside_graphs,
    layers_have_one_number,
    activations_are_dumped_as_made,
    dumps_come_before_the_end,
    a_profile_shows_no_diagnosis,
    there_are_experts_to_watch,
    a_routing_trace_is_bounded,
    dropped_tokens_leave_no_trace,
    parts_of_a_record_have_their_whole,
)
