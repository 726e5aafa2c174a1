"""Rules on CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below, variable
from moekit.recipe.schema import Recipe


def graphs_of_layers_are_not_recomputed_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A graph of a layer holds its forward pass once; full recomputation runs it again outside.

    Megatron, config: `full recompute is only supported with full iteration CUDA graph`
    (megatron/core/transformer/transformer_config.py:2523).
    """
    if graphed(recipe) in ("local", "transformer_engine") and recipe.memory.recompute_granularity == "full":
        yield Violation(
            (GRAPHS, "memory.recompute_granularity"),
            f"`cuda_graph_impl: {graphed(recipe)}` excludes `recompute_granularity: full`",
            "use `selective` with `memory.recompute_modules`, or `model: {cuda_graph_impl: none}`",
        )


def graphs_of_an_iteration_check_no_nan(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The check brings the loss to the host in the middle of what is captured. fp16's loss scaling turns it off itself.

    Megatron, validate: `--no-check-for-nan-in-loss-and-grad should be set with --cuda-graph-impl=full_iteration`
    (megatron/training/arguments.py:1196).
    """
    scales = recipe.precision.fp16 and "--loss-scale" not in (recipe.megatron.extra or ())
    if graphed(recipe) == "full_iteration" and not (recipe.monitor.no_check_for_nan_in_loss_and_grad or scales):
        yield Violation(
            (GRAPHS, "monitor.no_check_for_nan_in_loss_and_grad"),
            "`cuda_graph_impl: full_iteration` needs `monitor.no_check_for_nan_in_loss_and_grad`",
            "`monitor: {no_check_for_nan_in_loss_and_grad: true}`",
        )


def graphs_find_their_memory_where_it_was(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Memory that grows in segments moves buffers which NCCL registered in a graph: an illegal access.

    Megatron, validate: `Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access when using CUDA Graph with
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` (megatron/training/arguments.py:1881).
    """
    allocator = variable("PYTORCH_CUDA_ALLOC_CONF", recipe, target) or ""
    if (
        graphed(recipe) == "transformer_engine"
        and "expandable_segments:True" in allocator
        and variable("NCCL_GRAPH_REGISTER", recipe, target) != "0"
    ):
        yield Violation(
            (GRAPHS, "runtime.environment.PYTORCH_CUDA_ALLOC_CONF", "runtime.environment.NCCL_GRAPH_REGISTER"),
            "`cuda_graph_impl: transformer_engine` with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True needs "
            "NCCL_GRAPH_REGISTER=0",
            '`runtime: {environment: {NCCL_GRAPH_REGISTER: "0"}}`',
        )


def graphs_repeat_no_random_numbers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What a graph computes again must come out the same, which dropout and jitter do not.

    Megatron, config: `attention dropout is not supported with graphed attention recomputation`, `hidden dropout ...`,
    `moe_input_jitter_eps ...` (megatron/core/transformer/transformer_config.py:2545, 2553, 2568). Both dropouts are 0.1
    and `recompute_modules` is core_attn where nothing is said.
    """
    model, memory = recipe.model, recipe.memory
    if not graphed(recipe) or _in_parts(recipe) or memory.recompute_granularity != "selective":
        return
    again = {*(memory.recompute_modules or ("core_attn",))}
    random = (
        ("model.attention_dropout", 0.1 if model.attention_dropout is None else model.attention_dropout, {"core_attn"}),
        ("model.hidden_dropout", 0.1 if model.hidden_dropout is None else model.hidden_dropout, {"mlp", "moe"}),
        ("router.input_jitter_eps", recipe.router.input_jitter_eps, {"moe"}),
    )
    for field, value, modules in random:
        on = value is not None if field == "router.input_jitter_eps" else value != 0
        if on and again & modules:
            yield Violation(
                (field, GRAPHS, "memory.recompute_modules"),
                f"`{field}` of {value} excludes `{min(again & modules)}` recomputed in a CUDA graph",
                f"unset `{field}` with `null`" if field == "router.input_jitter_eps" else f"set `{field}` to 0",
            )


def graphs_of_layers_offload_nothing(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's own graphs of whole layers hold the activations that offloading would move.

    Megatron, config: `fine-grained activation offloading with cuda_graph_impl='local' ...`
    (megatron/core/transformer/transformer_config.py:2601, 2607).
    """
    if graphed(recipe) == "local" and recipe.memory.fine_grained_activation_offloading and not _in_parts(recipe):
        yield Violation(
            (GRAPHS, "memory.fine_grained_activation_offloading"),
            "`cuda_graph_impl: local` excludes `memory.fine_grained_activation_offloading`",
            "`model: {cuda_graph_impl: transformer_engine}`, or unset the offloading with `null`",
        )


def graphs_of_an_iteration_bound_offloading(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a bound, copies to the host would end outside what is captured.

    Megatron, config: `fine_grained_offloading_max_inflight_offloads must be a non-negative integer when using
    fine-grained activation offloading with full-iteration CUDA graphs`
    (megatron/core/transformer/transformer_config.py:2635).
    """
    option = "--fine-grained-offloading-max-inflight-offloads"
    offloads = recipe.memory.fine_grained_activation_offloading
    if graphed(recipe) == "full_iteration" and offloads and option not in (recipe.megatron.extra or ()):
        yield Violation(
            (GRAPHS, "memory.fine_grained_activation_offloading"),
            f"`cuda_graph_impl: full_iteration` with `memory.fine_grained_activation_offloading` needs `{option}`",
            f"`megatron: {{extra: [{option}, 1]}}`",
        )


def graphs_of_experts_have_fixed_sizes(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """How many tokens an expert gets is only known on the host, which a graph never asks: dropless experts cannot be
    captured. A capacity and padding to it fix the sizes, and so does a capacity of the rank.

    Megatron, first step: CUDA's `operation not permitted when stream is capturing`, at the copy to the host
    (megatron/core/transformer/moe/token_dispatcher.py:463); where `--cuda-graph-modules moe` says the same, config has
    `moe cuda graph is only supported with drop-padding MoE`.
    """
    moe = recipe.moe
    fixed = moe.expert_capacity_factor is not None and moe.pad_expert_input_to_capacity
    if (
        graphed(recipe)
        and not _in_parts(recipe)
        and moe.num_experts
        and not fixed
        and moe.expert_rank_capacity_factor is None
        and moe.dispatcher != "flex"
    ):
        yield Violation(
            (GRAPHS, "moe.pad_expert_input_to_capacity", "moe.expert_capacity_factor"),
            f"`cuda_graph_impl: {graphed(recipe)}` captures whole layers, whose experts here have no fixed size",
            "`moe: {expert_capacity_factor: 1.0, pad_expert_input_to_capacity: true}`, or "
            "`megatron: {extra: [--cuda-graph-modules, attn]}`",
        )


def graphs_delay_gradients_from_2_10(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Older layers cannot leave their weight gradients out of a graph.

    Megatron, config: `TE version >= 2.10.0 is required for delay_wgrad_compute with partial cuda graph`
    (megatron/core/transformer/transformer_config.py:2754).
    """
    version = target.transformer_engine
    if graphed(recipe) == "transformer_engine" and recipe.overlap.delay_wgrad_compute and below(version, "2.10"):
        yield Violation(
            (GRAPHS, "overlap.delay_wgrad_compute"),
            "`cuda_graph_impl: transformer_engine` with `overlap.delay_wgrad_compute` needs Transformer Engine 2.10; "
            f"{target.name} has {version}",
            "unset one of them with `null`",
        )


def graphed(recipe: Recipe) -> str | None:
    """How graphs are captured; None where they are not."""
    return None if recipe.model.cuda_graph_impl == "none" else recipe.model.cuda_graph_impl


def _in_parts(recipe: Recipe) -> bool:
    """Whether only chosen modules of a layer are captured."""
    return "--cuda-graph-modules" in (recipe.megatron.extra or ())


GRAPHS = "model.cuda_graph_impl"


RULES: tuple[Rule, ...] = (
    graphs_of_layers_are_not_recomputed_whole,
    graphs_of_an_iteration_check_no_nan,
    graphs_find_their_memory_where_it_was,
    graphs_repeat_no_random_numbers,
    graphs_of_layers_offload_nothing,
    graphs_of_an_iteration_bound_offloading,
    graphs_of_experts_have_fixed_sizes,
    graphs_delay_gradients_from_2_10,
)
