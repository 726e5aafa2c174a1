"""Rules on what is computed again or fused."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below, listed
from moekit.recipe.schema import Recipe


def full_recompute_is_said_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Which layers are computed again follows from a method and a number.

    Megatron, config: `Using recompute_granularity: full so recompute_method must be "block" or "uniform"`,
    `... recompute_num_layers must be between` (megatron/core/transformer/transformer_config.py:1736, 1742).
    """
    memory = recipe.memory
    for name in ("recompute_method", "recompute_num_layers"):
        if memory.recompute_granularity == "full" and not getattr(memory, name):
            yield Violation(
                ("memory.recompute_granularity", f"memory.{name}"),
                f"`recompute_granularity: full` needs `memory.{name}`",
                "the dense baseline uses `uniform` with `recompute_num_layers: 1` (handbook 2.4)",
            )


def selective_recompute_has_no_method(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A method chooses whole layers; `selective` chooses modules in all of them.

    Megatron, validate: `recompute method is not yet supported for selective recomputing granularity`
    (megatron/training/arguments.py:1386).
    """
    memory = recipe.memory
    if memory.recompute_granularity == "selective" and memory.recompute_method:
        yield Violation(
            ("memory.recompute_method", "memory.recompute_granularity"),
            "`memory.recompute_method` belongs to `recompute_granularity: full`, not to `selective`",
            "unset it with `null`",
        )


def selective_recompute_counts_no_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A number chooses whole layers; `selective` chooses modules in all of them.

    Megatron, config: `When using recompute_granularity: selective recompute_num_layers must be None`
    (megatron/core/transformer/transformer_config.py:1752).
    """
    memory = recipe.memory
    if memory.recompute_granularity == "selective" and memory.recompute_num_layers and not memory.recompute_method:
        yield Violation(
            ("memory.recompute_num_layers", "memory.recompute_granularity"),
            "`memory.recompute_num_layers` belongs to `recompute_granularity: full`, not to `selective`",
            "unset it with `null`",
        )


def recomputation_is_switched_on(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """How to recompute says nothing where nothing is recomputed.

    Megatron, never: it keeps all activations and runs out of memory where the recipe meant to save it
    (megatron/core/transformer/transformer_block.py:624).
    """
    memory = recipe.memory
    names = ["recompute_method", "recompute_num_layers", "recompute_modules"]
    if recipe.overlap.moe_expert_parallel_comm:  # which refuses them anyway
        names = [] if "moe" in (memory.recompute_modules or ()) else ["recompute_modules"]
    for name in names:
        if memory.recompute_granularity is None and getattr(memory, name) is not None:
            granularity = "selective" if name == "recompute_modules" else "full"
            yield Violation(
                (f"memory.{name}", "memory.recompute_granularity"),
                f"`memory.{name}` does nothing without `memory.recompute_granularity`",
                f"`memory: {{recompute_granularity: {granularity}}}`, or unset it with `null`",
            )


def full_recompute_chooses_no_modules(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """With `full`, whole layers are computed again, whatever the list of modules says.

    Megatron, never: it recomputes everything, a third more compute than the list asks for
    (megatron/core/transformer/transformer_block.py:624).
    """
    memory = recipe.memory
    if memory.recompute_granularity == "full" and memory.recompute_modules is not None:
        yield Violation(
            ("memory.recompute_modules", "memory.recompute_granularity"),
            "`memory.recompute_modules` does nothing with `recompute_granularity: full`",
            "`memory: {recompute_granularity: selective, recompute_method: null, recompute_num_layers: null}`",
        )


def recomputed_modules_are_known(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only these modules can be computed again on their own.

    Megatron, config: `Invalid choices for recompute_modules` (megatron/core/transformer/transformer_config.py:1779).
    """
    known = RECOMPUTED if recipe.megatron.version == "0.19.2" else (*RECOMPUTED, "gdp_in_proj")
    for module in _recomputed(recipe):
        if module not in known:
            yield Violation(
                ("memory.recompute_modules",), f"`{module}` cannot be recomputed alone", f"there are {listed(known)}"
            )


RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")


def recomputed_modules_have_their_kind_of_layer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Some modules can be recomputed in one implementation of their layer only.

    Megatron, config: `moe_act in recompute_modules is only supported with moe_grouped_gemm`, `mla_up_proj ... with
    multi_latent_attention`, `gdn_norm_out ... with experimental_attention_variant='gated_delta_net'`
    (megatron/core/transformer/transformer_config.py:1785, 1790, 1799).
    """
    needs = {
        "moe_act": ("moe.grouped_gemm", bool(recipe.moe.grouped_gemm)),
        "mla_up_proj": ("model.multi_latent_attention", bool(recipe.model.multi_latent_attention)),
        "gdn_norm_out": ("megatron.extra", "gated_delta_net" in (recipe.megatron.extra or ())),
    }
    for module in _recomputed(recipe):
        field, there = needs.get(module, ("", True))
        if not there:
            what = "gated delta net" if field == "megatron.extra" else f"`{field}`"
            yield Violation(
                ("memory.recompute_modules", field),
                f"`{module}` in `memory.recompute_modules` needs {what}",
                f"leave `{module}` out",
            )


def recomputed_shared_experts_do_not_overlap(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """An overlapped shared expert runs in pieces between exchanges; a recomputed one in one piece.

    Megatron, config: `shared_experts recompute cannot work with --moe-shared-expert-overlap`
    (megatron/core/transformer/transformer_config.py:1817).
    """
    moe = recipe.moe
    if "shared_experts" in _recomputed(recipe) and moe.shared_expert_intermediate_size and moe.shared_expert_overlap:
        yield Violation(
            ("memory.recompute_modules", "moe.shared_expert_overlap"),
            "`shared_experts` in `memory.recompute_modules` excludes `moe.shared_expert_overlap`",
            "leave `shared_experts` out, or unset the overlap with `null`",
        )


def recomputed_modules_are_in_the_model(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A module that the model does not have saves no memory. A warning: what is trained is what was meant.

    Megatron, never: it passes over the name (megatron/core/transformer/transformer_layer.py:514).
    """
    moe, freq = recipe.moe, recipe.moe.layer_freq
    there = {
        "moe": bool(moe.num_experts),
        "shared_experts": bool(moe.shared_expert_intermediate_size),
        "mlp": not moe.num_experts or bool(freq and ((freq.period or 1) > 1 or 0 in freq.layers)),
    }
    for module in _recomputed(recipe):
        if not there.get(module, True):
            yield Violation(
                ("memory.recompute_modules",),
                f"the model has no `{module}` to recompute",
                f"leave `{module}` out",
                level="warning",
            )


def recomputed_layers_in_fp8_are_not_delayed(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Delayed scaling would count a value twice that is computed twice. It is Megatron's recipe where none is said.

    Megatron, config: `Delayed scaling does not support moe_act and layernorm recompute for fp8`
    (megatron/core/transformer/transformer_config.py:1823); handbook 3.7.
    """
    modules = sorted({"moe_act", "layernorm"}.intersection(_recomputed(recipe)))
    if recipe.precision.fp8_format and recipe.precision.fp8_recipe in (None, "delayed") and modules:
        yield Violation(
            ("precision.fp8_recipe", "precision.fp8_format", "memory.recompute_modules"),
            f"`fp8_recipe: delayed` excludes `{modules[0]}` in `memory.recompute_modules`",
            "`precision: {fp8_recipe: blockwise}`, on Blackwell `mxfp8`",
        )


def recomputed_layers_in_fp8_find_their_version(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Older layers keep the quantized output that recomputation means to drop.

    Megatron, config: `moe_act and layernorm recompute for fp8 needs transformer-engine>=2.6.0dev0`
    (megatron/core/transformer/transformer_config.py:1828).
    """
    precision, version = recipe.precision, target.transformer_engine
    modules = sorted({"moe_act", "layernorm"}.intersection(_recomputed(recipe)))
    if precision.fp8_format and precision.fp8_recipe not in (None, "delayed") and modules and below(version, "2.6"):
        yield Violation(
            ("memory.recompute_modules", "precision.fp8_format"),
            f"`{modules[0]}` recomputed in FP8 needs Transformer Engine 2.6; {target.name} has {version}",
            f"leave `{modules[0]}` out",
        )


def recomputed_attention_stays_in_fp8(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Recomputed attention may leave FP8. A warning: whether it does depends on Transformer Engine's kernel.

    Megatron, never: the checkpoint restores the random state and not FP8's, and the second pass may run in bfloat16
    (megatron/core/tensor_parallel/random.py, `CheckpointFunction`; Megatron-LM issue 7538).
    """
    if recipe.precision.fp8_format and "core_attn" in (recipe.memory.recompute_modules or ()) and _recomputed(recipe):
        yield Violation(
            ("memory.recompute_modules", "precision.fp8_format"),
            "`core_attn` recomputed under FP8 may run in bfloat16 the second time",
            "leave `core_attn` out: fused attention keeps little",
            level="warning",
        )


def selective_recompute_says_what(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a list, only the core of attention is computed again. A warning: it is what Megatron documents.

    Megatron, never: fused attention keeps almost nothing to recompute (25.5 to 24.9 GB in Megatron-LM issue 1225;
    megatron/core/transformer/transformer_config.py:1761, 1803).
    """
    if recipe.memory.recompute_granularity == "selective" and not recipe.memory.recompute_modules:
        cheap = "layernorm, moe_act" if recipe.moe.grouped_gemm else "layernorm"
        yield Violation(
            ("memory.recompute_granularity", "memory.recompute_modules"),
            "`recompute_granularity: selective` without `memory.recompute_modules` saves almost nothing",
            f"`memory: {{recompute_modules: [{cheap}]}}` (handbook 3.7)",
            level="warning",
        )


def fused_cross_entropy_is_native(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine's fused cross-entropy proved unstable, and Megatron switched it off.

    Megatron, validate: `Transformer Engine cross entropy loss fusion is disabled due to stability issues`
    (megatron/training/arguments.py:1642).
    """
    memory = recipe.memory
    if memory.cross_entropy_loss_fusion and memory.cross_entropy_fusion_impl == "te":
        yield Violation(
            ("memory.cross_entropy_fusion_impl",),
            "Megatron switched Transformer Engine's fused cross-entropy off",
            "`memory: {cross_entropy_fusion_impl: native}`",
        )


def _recomputed(recipe: Recipe) -> tuple[str, ...]:
    """The modules that are computed again by name."""
    selective = recipe.memory.recompute_granularity == "selective"
    return (recipe.memory.recompute_modules or ("core_attn",)) if selective else ()


RULES: tuple[Rule, ...] = (
    full_recompute_is_said_whole,
    selective_recompute_has_no_method,
    selective_recompute_counts_no_layers,
    recomputation_is_switched_on,
    full_recompute_chooses_no_modules,
    recomputed_modules_are_known,
    recomputed_modules_have_their_kind_of_layer,
    recomputed_shared_experts_do_not_overlap,
    recomputed_modules_are_in_the_model,
    recomputed_layers_in_fp8_are_not_delayed,
    recomputed_layers_in_fp8_find_their_version,
    recomputed_attention_stays_in_fp8,
    selective_recompute_says_what,
    fused_cross_entropy_is_native,
)
