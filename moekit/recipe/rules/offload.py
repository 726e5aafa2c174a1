"""Rules on activations that wait on the host."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below, listed, variable
from moekit.recipe.schema import Recipe


def offloading_is_switched_on(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """How much to offload says nothing where nothing is offloaded.

    Megatron, never: it keeps all activations on the GPU (megatron/core/transformer/transformer_config.py:1848).
    """
    for name in ("activation_offload_fraction", "min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks"):
        if getattr(recipe.memory, name) is not None and not recipe.memory.fine_grained_activation_offloading:
            yield Violation(
                (f"memory.{name}", OFFLOADING),
                f"`memory.{name}` does nothing without `{OFFLOADING}`",
                "add that, or unset this with `null`",
            )


def offloading_has_modules(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Activations move by module, and by itself Megatron moves none.

    Megatron, config: a bare assert (megatron/core/transformer/transformer_config.py:1852).
    """
    if recipe.memory.fine_grained_activation_offloading and not recipe.memory.offload_modules:
        yield Violation(
            (OFFLOADING, "memory.offload_modules"),
            f"`{OFFLOADING}` needs `memory.offload_modules`",
            "`memory: {offload_modules: [core_attn, attn_proj, expert_fc1]}` (handbook 3.7)",
        )


def offloaded_modules_are_known(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only the inputs of these modules can be moved.

    Megatron, config: `Invalid choices for offload_modules` (megatron/core/transformer/transformer_config.py:1864).
    """
    known = OFFLOADED if recipe.megatron.version == "0.19.2" else (*OFFLOADED, "gdp_qkv", "shortcut_post_norm")
    for module in _offloads(recipe):
        if module not in known:
            yield Violation(
                ("memory.offload_modules",), f"`{module}` cannot be offloaded", f"there are {listed(known)}"
            )


OFFLOADED = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
)


def a_projection_is_offloaded_with_its_attention(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The projection's input is the attention's output, which the attention's backward pass needs as well.

    Megatron, config: `attn_proj cannot be set to offload_modules alone without core_attn`
    (megatron/core/transformer/transformer_config.py:1869); handbook 3.7.
    """
    modules = _offloads(recipe)
    if "attn_proj" in modules and "core_attn" not in modules:
        yield Violation(
            ("memory.offload_modules",),
            "`attn_proj` in `memory.offload_modules` needs `core_attn` beside it",
            "add `core_attn`",
        )


def what_is_recomputed_is_not_offloaded(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Inside an MoE layer that is computed again there is nothing kept that could be moved.

    Megatron, config: `Cannot offload ... while recomputing the entire MoE layer`
    (megatron/core/transformer/transformer_config.py:1878); handbook 3.7.
    """
    memory = recipe.memory
    inside = sorted({"moe_act", "expert_fc1", "fused_group_mlp"}.intersection(_offloads(recipe)))
    if inside and memory.recompute_granularity == "selective" and "moe" in (memory.recompute_modules or ()):
        yield Violation(
            ("memory.offload_modules", "memory.recompute_modules"),
            f"`{inside[0]}` in `memory.offload_modules` excludes `moe` in `memory.recompute_modules`",
            "leave one of them out",
        )


def offloaded_shares_are_shares(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A share of what could move is at most all of it, and later stages never move more.

    Megatron, config: `activation_offload_fraction must be in range [0, 1]`, `delta_offload_bytes_across_pp_ranks must
    be non-negative` (megatron/core/transformer/transformer_config.py:1888, 1891).
    """
    memory = recipe.memory
    if not memory.fine_grained_activation_offloading:
        return
    if memory.activation_offload_fraction is not None and memory.activation_offload_fraction > 1:
        yield Violation(
            ("memory.activation_offload_fraction",),
            f"`memory.activation_offload_fraction` is {memory.activation_offload_fraction:g}, more than all",
            "a share from 0 to 1",
        )
    if (memory.delta_offload_bytes_across_pp_ranks or 0) < 0:
        yield Violation(
            ("memory.delta_offload_bytes_across_pp_ranks",),
            f"`memory.delta_offload_bytes_across_pp_ranks` is {memory.delta_offload_bytes_across_pp_ranks}, below 0",
            "bytes by which each later stage moves less",
        )


def fused_experts_are_offloaded_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`fused_group_mlp` is the whole of the fused experts: there must be such, and nothing of them twice.

    Megatron, config: `fused_group_mlp requires use_transformer_engine_op_fuser`, `fused_group_mlp offloads the whole
    fused grouped MLP and cannot be combined` (megatron/core/transformer/transformer_config.py:1897, 1900).
    """
    modules = _offloads(recipe)
    parts = sorted({"expert_fc1", "moe_act"}.intersection(modules))
    if "fused_group_mlp" not in modules:
        return
    if not recipe.memory.use_transformer_engine_op_fuser:
        yield Violation(
            ("memory.offload_modules", FUSER),
            f"`fused_group_mlp` in `memory.offload_modules` needs `{FUSER}`",
            "offload `expert_fc1` and `moe_act` instead",
        )
    elif parts:
        yield Violation(
            ("memory.offload_modules",),
            f"`fused_group_mlp` in `memory.offload_modules` has `{parts[0]}` in it already",
            f"leave `{parts[0]}` out",
        )


def offloading_is_transformer_engines(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only around Transformer Engine's layers are activations moved.

    Megatron, validate: `Fine-grained activation offloading is only supported with transformer_engine implementation`
    (megatron/training/arguments.py:1855).
    """
    offloads = recipe.memory.fine_grained_activation_offloading
    if offloads and recipe.model.transformer_impl not in (None, "transformer_engine"):
        yield Violation(
            (OFFLOADING, "model.transformer_impl"), f"`{OFFLOADING}` needs `model.transformer_impl: transformer_engine`"
        )


def offloading_leaves_weights(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """From Transformer Engine 2.10 on, its own offloading would move weights as well.

    Megatron, validate: `For fine-grained activation offloading with TE >= 2.10.0, NVTE_CPU_OFFLOAD_V1 should be set to
    1` (megatron/training/arguments.py:1857).
    """
    version, value = target.transformer_engine, variable("NVTE_CPU_OFFLOAD_V1", recipe, target)
    offloads = recipe.memory.fine_grained_activation_offloading
    if offloads and version is not None and not below(version, "2.10") and value != "1":
        yield Violation(
            (OFFLOADING, "runtime.environment.NVTE_CPU_OFFLOAD_V1"),
            f"`{OFFLOADING}` with Transformer Engine {version} needs NVTE_CPU_OFFLOAD_V1=1",
            '`runtime: {environment: {NVTE_CPU_OFFLOAD_V1: "1"}}`',
        )


def _offloads(recipe: Recipe) -> tuple[str, ...]:
    """The modules whose inputs move."""
    return (recipe.memory.offload_modules or ()) if recipe.memory.fine_grained_activation_offloading else ()


OFFLOADING, FUSER = "memory.fine_grained_activation_offloading", "memory.use_transformer_engine_op_fuser"


RULES: tuple[Rule, ...] = (
    offloading_is_switched_on,
    offloading_has_modules,
    offloaded_modules_are_known,
    a_projection_is_offloaded_with_its_attention,
    what_is_recomputed_is_not_offloaded,
    offloaded_shares_are_shares,
    fused_experts_are_offloaded_whole,
    offloading_is_transformer_engines,
    offloading_leaves_weights,
)
