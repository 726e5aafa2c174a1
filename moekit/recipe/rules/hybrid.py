"""Rules on hybrid stacks, whose layers are attention, experts or Mamba alone, and on shortcuts between two of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, listed
from moekit.recipe.schema import Recipe

PATTERN = "model.hybrid_layer_pattern"
SHORTCUT = "moe.shortcut_connection"


def a_hybrid_stack_has_a_pattern(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The stack picks the training script, the pattern the layers.

    Megatron, never: a pattern alone is the sign of a hybrid model, and each script builds its own kind whatever it says
    (megatron/training/argument_utils.py:345; pretrain_hybrid.py of a checkout).
    """
    pattern, hybrid = recipe.model.hybrid_layer_pattern, recipe.model.stack == "hybrid"
    if hybrid == (pattern is not None):
        return
    missing = "`model.hybrid_layer_pattern`" if hybrid else "`model.stack: hybrid`"
    there = "`model.stack: hybrid`" if hybrid else "`model.hybrid_layer_pattern`"
    yield Violation(
        ("model.stack", PATTERN) if hybrid else (PATTERN, "model.stack"),
        f"{there} needs {missing}",
        'such as `hybrid_layer_pattern: "*E*E"`' if hybrid else "add it, or unset this with `null`",
    )


def a_pattern_counts_the_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A pattern says layers and prediction depths, and another number elsewhere is not read.

    Megatron, never: `--hybrid-layer-pattern is set; ignoring --num-layers` (megatron/training/arguments.py:792, 871).
    """
    model, pattern = recipe.model, recipe.model.hybrid_layer_pattern
    if pattern is None:
        return
    said = {"num_layers": ("layers", len(pattern.layers)), "mtp_num_layers": ("prediction depths", len(pattern.depths))}
    for name, (what, count) in said.items():
        if getattr(model, name) not in (None, count):
            yield Violation(
                (f"model.{name}", PATTERN),
                f"`model.{name}` is {getattr(model, name)}, and `{PATTERN}`, which holds, has {count} {what}",
                "attention and experts are layers of their own; behind each `/` stand those of a prediction depth",
            )


def a_pattern_cuts_every_stage(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Between its `|` stand the pipeline stages, equally many to each rank.

    Megatron, validate: `must be evenly divisible by --pipeline-model-parallel-size`
    (megatron/training/arguments.py:849).
    """
    pattern, ranks = recipe.model.hybrid_layer_pattern, recipe.parallel.pipeline_model or 1
    if pattern and (len(pattern.stages) > 1 or ranks == 1) and len(pattern.stages) % ranks:
        yield Violation(
            (PATTERN, "parallel.pipeline_model"),
            f"`{PATTERN}` has {len(pattern.stages)} stages, no multiple of parallel.pipeline_model = {ranks}",
            "a `|` ends each stage but the last",
        )


def an_uncut_pattern_is_cut_evenly(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a `|`, each pipeline rank has as many layers, where nothing says how many the ends have.

    Megatron, build: `must be evenly divisible by pipeline-model-parallel-size (2) when no pipe separators are
    specified` (megatron/core/models/hybrid/hybrid_layer_allocation.py:437).
    """
    pattern, ranks = recipe.model.hybrid_layer_pattern, recipe.parallel.pipeline_model or 1
    ends = [getattr(recipe.parallel, name) for name in _ENDS]
    if pattern and len(pattern.stages) == 1 and len(pattern.layers) % ranks and ends == [None, None]:
        yield Violation(
            (PATTERN, "parallel.pipeline_model"),
            f"the {len(pattern.layers)} layers of `{PATTERN}` cannot be divided evenly over {ranks} pipeline stages",
            "a `|` ends each stage but the last",
        )


def a_pattern_is_cut_in_itself(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The ways to cut a stack of transformer layers are not for a pattern.

    Megatron, validate: `should not be used with --hybrid-layer-pattern` (megatron/training/arguments.py:814-839).
    """
    pattern, parallel = recipe.model.hybrid_layer_pattern, recipe.parallel
    if pattern is None:
        return
    for name in (*_CUTS, *(_ENDS if len(pattern.stages) > 1 else ())):
        if getattr(parallel, name) not in (None, False):
            yield Violation(
                (f"parallel.{name}", PATTERN),
                f"`parallel.{name}` does not go with `{PATTERN}`",
                "unset it with `null`; a `|` in the pattern ends a stage",
            )


_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_CUTS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def experts_of_a_pattern_are_counted(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A layer `E` is made of `moe.num_experts`.

    Megatron, build: `unsupported operand type(s) for %: 'NoneType' and 'int'`
    (megatron/core/transformer/moe/moe_layer.py:185).
    """
    pattern = recipe.model.hybrid_layer_pattern
    if pattern and "E" in pattern.text and not recipe.moe.num_experts:
        yield Violation(
            (PATTERN, "moe.num_experts"),
            f"`{PATTERN}` has layers of experts, and `moe.num_experts` is not set",
            "add it; a dense feed-forward layer is `-`",
        )


def a_pattern_places_the_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Which layers have experts is the pattern's to say.

    Megatron, never: only GPT's layers look at the frequency (megatron/core/models/gpt/gpt_layer_specs.py:648).
    """
    pattern = recipe.model.hybrid_layer_pattern
    if pattern is None or not recipe.moe.num_experts:
        return
    if "E" not in pattern.text:
        yield Violation(
            ("moe.num_experts", PATTERN),
            f"`moe.num_experts` does nothing: `{PATTERN}` has no `E`",
            "put it where experts are",
        )
    elif recipe.moe.layer_freq:
        yield Violation(
            ("moe.layer_freq", PATTERN),
            f"`moe.layer_freq` does nothing: `{PATTERN}` says which layers have experts",
            "unset it with `null`",
        )


def a_hybrid_stack_is_transformer_engines(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """There is one specification of its layers, of Transformer Engine's.

    On a CPU moekit builds the stack of Megatron's local layers.

    Megatron, never: `transformer_impl` picks a GPT's layers (megatron/training/models/hybrid.py:152).
    """
    local = recipe.model.transformer_impl == "local" and recipe.runtime.device != "cpu"
    if recipe.model.hybrid_layer_pattern and local:
        yield Violation(
            ("model.transformer_impl", PATTERN),
            "`transformer_impl: local` does nothing: a hybrid stack is of Transformer Engine's layers",
            "unset it with `null`",
        )


def a_hybrid_stack_overlaps_no_micro_batches(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only GPT's layers can be scheduled one micro batch beside another.

    Megatron, first step: `couldn't find attribute build_schedule_plan`
    (megatron/core/pipeline_parallel/combined_1f1b.py:382).
    """
    if recipe.model.hybrid_layer_pattern and recipe.overlap.moe_expert_parallel_comm:
        yield Violation(
            ("overlap.moe_expert_parallel_comm", PATTERN),
            "`overlap.moe_expert_parallel_comm` does not go with a hybrid stack",
            "unset it with `null`; a shortcut hides the exchange there (recipes/settings/shortcut.yaml)",
        )


def a_shortcut_needs_the_hybrid_stack(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A shortcut is built between two layers of a hybrid stack.

    A warning, since no released Megatron has it and its answer is not seen here.

    Megatron, never: only hybrid layers read it (handbook 3.5).
    """
    if recipe.moe.num_experts and recipe.moe.shortcut_connection and recipe.model.stack != "hybrid":
        yield Violation(
            (SHORTCUT, "model.stack"),
            f"`{SHORTCUT}` works in Megatron's hybrid stack alone, not in GPT layers",
            "begin from recipes/settings/hybrid.yaml; or unset it with `null`, as `overlap.moe_expert_parallel_comm` "
            "hides the exchange without new wiring",
            "warning",
        )


def a_shortcut_is_taken_in_parallel(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """New wiring alone hides no exchange: what is learnt changes, and nothing is gained.

    A warning, since it is a way to measure what the wiring does to the loss.

    Megatron, never: the exchange stays on the main stream (handbook 3.5).
    """
    if recipe.moe.num_experts and recipe.moe.shortcut_connection and not recipe.moe.shortcut_parallel:
        yield Violation(
            (SHORTCUT, "moe.shortcut_parallel"),
            f"`{SHORTCUT}` without `moe.shortcut_parallel` overlaps nothing",
            "add `shortcut_parallel: true`",
            "warning",
        )


def a_shortcut_begins_before_the_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The router reads what the layer before it read, so each layer of experts has one of attention or Mamba before it.

    Megatron, build: `Shortcut MoE must be preceded by a Mamba, GDN, or supported attention layer` (handbook 3.5).
    """
    pattern = recipe.model.hybrid_layer_pattern
    if not (recipe.moe.num_experts and recipe.moe.shortcut_connection and pattern):
        return
    for stage in (*pattern.stages, *pattern.depths):
        if re.search(r"(?<![*+DMG])E", stage):
            yield Violation(
                (PATTERN, SHORTCUT),
                f"`{SHORTCUT}` needs attention or Mamba right before each `E`, and `{PATTERN}` has a stage `{stage}`",
                'such as `"*E*E"`',
            )
            return


def a_shortcut_excludes(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Sharded parameters, CUDA graphs, full recomputation and a shared expert behind the exchange do not go with it.

    Megatron, config: it refuses them, in words not seen here (handbook 3.5).
    """
    if not (recipe.moe.num_experts and recipe.moe.shortcut_connection):
        return
    graphs = recipe.model.cuda_graph_impl
    others = {
        "parallel.use_megatron_fsdp": recipe.parallel.use_megatron_fsdp,
        "model.cuda_graph_impl": graphs not in (None, "none"),
        "memory.recompute_granularity": recipe.memory.recompute_granularity == "full",
        "moe.shared_expert_overlap": recipe.moe.shared_expert_overlap,
    }
    if wrong := [name for name, on in others.items() if on]:
        names = listed([f"`{name}`" for name in wrong])
        yield Violation((wrong[0], SHORTCUT), f"`{SHORTCUT}` excludes {names} as set", "unset with `null`")


RULES: tuple[Rule, ...] = (
    a_hybrid_stack_has_a_pattern,
    a_pattern_counts_the_layers,
    a_pattern_cuts_every_stage,
    an_uncut_pattern_is_cut_evenly,
    a_pattern_is_cut_in_itself,
    experts_of_a_pattern_are_counted,
    a_pattern_places_the_experts,
    a_hybrid_stack_is_transformer_engines,
    a_hybrid_stack_overlaps_no_micro_batches,
    a_shortcut_needs_the_hybrid_stack,
    a_shortcut_is_taken_in_parallel,
    a_shortcut_begins_before_the_experts,
    a_shortcut_excludes,
)
