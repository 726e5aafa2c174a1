"""Rules on the exchange of tokens behind another micro batch, and on gradients delayed to fill it."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.interleaving import virtual_stages
from moekit.recipe.rules.violation import Rule, Target, Violation, below
from moekit.recipe.schema import Recipe


def expert_overlap_has_an_exchange(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What hides behind another micro batch is the exchange of tokens between expert-parallel ranks.

    Megatron, config: `overlap_moe_expert_parallel_comm is only supported with expert model parallelism`, `... is
    supported with alltoall/flex token dispatcher` (megatron/core/transformer/transformer_config.py:2681, 2683). The
    dispatcher is allgather where nothing is said.
    """
    if not recipe.overlap.moe_expert_parallel_comm:
        return
    if (recipe.parallel.expert_model or 1) == 1:
        yield Violation((OVERLAP, "parallel.expert_model"), f"`{OVERLAP}` needs `parallel.expert_model` above 1", OFF)
    elif recipe.moe.dispatcher not in ("alltoall", "flex"):
        yield Violation(
            (OVERLAP, "moe.dispatcher"),
            f"`{OVERLAP}` needs `moe.dispatcher` alltoall or flex",
            "`moe: {dispatcher: alltoall}`",
        )


def expert_overlap_keeps_activations(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The schedule splits a layer at its exchanges, which recomputation of the whole would run again.

    Megatron, config: `disable full recomputation when enabling overlap_moe_expert_parallel_comm`, the same of a method,
    a number of layers and `moe` among the modules, even where nothing is recomputed
    (megatron/core/transformer/transformer_config.py:2688-2699); handbook 3.7.
    """
    memory, granularity = recipe.memory, recipe.memory.recompute_granularity
    if not recipe.overlap.moe_expert_parallel_comm:
        return
    for name in ("recompute_method", "recompute_num_layers"):
        if granularity is None and getattr(memory, name) is not None:
            yield Violation(
                (f"memory.{name}", OVERLAP), f"`{OVERLAP}` excludes `memory.{name}`", "unset it with `null`"
            )
    if granularity == "full":
        yield Violation(
            (OVERLAP, "memory.recompute_granularity"),
            f"`{OVERLAP}` excludes `recompute_granularity: full`",
            "`memory: {recompute_granularity: selective, recompute_modules: [layernorm, moe_act], "
            "recompute_method: null, recompute_num_layers: null}`",
        )
    if granularity != "full" and "moe" in (memory.recompute_modules or ()):
        yield Violation(
            (OVERLAP, "memory.recompute_modules"),
            f"`{OVERLAP}` excludes `moe` in `memory.recompute_modules`",
            "`memory: {recompute_modules: [layernorm, moe_act]}`",
        )


def expert_overlap_is_in_half_precision(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The split schedule is written for 16-bit models.

    Megatron, config: `overlap_moe_expert_parallel_comm is only supported with bf16 or fp16 model`
    (megatron/core/transformer/transformer_config.py:2702).
    """
    if recipe.overlap.moe_expert_parallel_comm and not (recipe.precision.bf16 or recipe.precision.fp16):
        yield Violation((OVERLAP, "precision.bf16"), f"`{OVERLAP}` needs `precision.bf16` or `precision.fp16`", OFF)


def expert_overlap_is_the_only_one_of_its_kind(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Both overlaps would place the shared expert.

    Megatron, config: `disable moe_shared_expert_overlap when enabling overlap_moe_expert_parallel_comm`
    (megatron/core/transformer/transformer_config.py:2706); handbook 3.7.
    """
    if recipe.overlap.moe_expert_parallel_comm and recipe.moe.shared_expert_overlap:
        yield Violation(
            (OVERLAP, "moe.shared_expert_overlap"),
            f"`{OVERLAP}` excludes `moe.shared_expert_overlap`",
            "unset `moe.shared_expert_overlap` with `null`",
        )


def expert_overlap_predicts_one_token_more(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The split schedule has a place for one prediction depth.

    Megatron, config: `MTP supports at most one layer when enabling overlap_moe_expert_parallel_comm`
    (megatron/core/transformer/transformer_config.py:2709).
    """
    if recipe.overlap.moe_expert_parallel_comm and (recipe.model.mtp_num_layers or 0) > 1:
        yield Violation(
            (OVERLAP, "model.mtp_num_layers"),
            f"`{OVERLAP}` allows `model.mtp_num_layers: 1` and not {recipe.model.mtp_num_layers}",
            "`model: {mtp_num_layers: 1}`",
        )


def expert_overlap_interleaves_its_stages(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Over pipeline stages the other micro batch is found in the interleaved schedule.

    Megatron, config: `If enabling EP A2A overlap, virtual_pipeline_model_parallel_size must be specified when
    pipeline_model_parallel_size > 1` (megatron/core/transformer/transformer_config.py:2675); handbook 3.7.
    """
    stages = recipe.parallel.pipeline_model or 1
    if recipe.overlap.moe_expert_parallel_comm and stages > 1 and virtual_stages(recipe) == 1:
        yield Violation(
            (OVERLAP, "parallel.pipeline_model"),
            f"`{OVERLAP}` over {stages} pipeline stages needs virtual stages",
            "`parallel: {num_virtual_stages_per_pipeline_rank: 2}`, or a layout that has them",
        )


def ncclep_overlap_keeps_expert_inputs(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The overlap frees the input that offloading would still copy.

    Megatron, config: `overlap_moe_expert_parallel_comm with ncclep does not support offloading 'expert_fc1'`
    (megatron/core/transformer/transformer_config.py:2729); handbook 3.7.
    """
    memory, moe = recipe.memory, recipe.moe
    if (
        recipe.overlap.moe_expert_parallel_comm
        and (moe.dispatcher, moe.flex_dispatcher_backend) == ("flex", "ncclep")
        and memory.fine_grained_activation_offloading
        and "expert_fc1" in (memory.offload_modules or ())
    ):
        yield Violation(
            ("memory.offload_modules", OVERLAP, "moe.flex_dispatcher_backend"),
            f"`{OVERLAP}` over `ncclep` excludes `expert_fc1` in `memory.offload_modules`",
            "leave `expert_fc1` out",
        )


def delayed_gradients_fill_expert_overlap(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weight gradients are delayed to fill the time of the exchange; alone there is none to fill.

    Megatron, config: `overlap_moe_expert_parallel_comm must be enabled when enabling delay_wgrad_compute`
    (megatron/core/transformer/transformer_config.py:2750); handbook 3.7.
    """
    if recipe.overlap.delay_wgrad_compute and not recipe.overlap.moe_expert_parallel_comm:
        yield Violation((DELAY, OVERLAP), f"`{DELAY}` needs `{OVERLAP}`", "add that, or unset this with `null`")


def delayed_gradients_are_of_transformer_engine(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only Transformer Engine's layers can give their weight gradients later.

    Megatron, validate: `Delaying wgrad compute is only supported with transformer_engine implementation`
    (megatron/training/arguments.py:1823).
    """
    if recipe.overlap.delay_wgrad_compute and recipe.model.transformer_impl not in (None, "transformer_engine"):
        yield Violation(
            (DELAY, "model.transformer_impl"), f"`{DELAY}` needs `model.transformer_impl: transformer_engine`"
        )


def delayed_gradients_find_their_version(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Older layers lose delayed gradients where reduction overlaps, or where they are not accumulated in place.

    Megatron, validate: `overlap_grad_reduce is only supported with TE >= 2.8.0 when enabling delay_wgrad_compute`,
    `disabling gradient_accumulation_fusion is only supported with TE >= 2.7.0 ...`
    (megatron/training/arguments.py:1826, 1849).
    """
    version = target.transformer_engine
    if not recipe.overlap.delay_wgrad_compute:
        return
    if recipe.overlap.grad_reduce and below(version, "2.8"):
        yield Violation(
            (DELAY, "overlap.grad_reduce"),
            f"`{DELAY}` with `overlap.grad_reduce` needs Transformer Engine 2.8; {target.name} has {version}",
            OFF_HERE,
        )
    elif recipe.model.no_gradient_accumulation_fusion and below(version, "2.7"):
        yield Violation(
            (DELAY, "model.no_gradient_accumulation_fusion"),
            f"`{DELAY}` with `model.no_gradient_accumulation_fusion` needs Transformer Engine 2.7; "
            f"{target.name} has {version}",
            OFF_HERE,
        )


def delayed_gradients_came_with_2_3(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Before, no layer of Transformer Engine could give its weight gradients later.

    Megatron, build: `Only TE with version >=2.3.0 supports delay_wgrad_compute now`
    (megatron/core/extensions/transformer_engine.py:920).
    """
    overlap, version = recipe.overlap, target.transformer_engine
    earlier = overlap.grad_reduce or recipe.model.no_gradient_accumulation_fusion  # refused when validated
    if overlap.delay_wgrad_compute and not earlier and below(version, "2.3"):
        yield Violation((DELAY,), f"`{DELAY}` needs Transformer Engine 2.3; {target.name} has {version}", OFF_HERE)


def sharded_expert_overlap_has_one_stage(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron FSDP gathers weights around one model, and an interleaved schedule has several on a rank.

    Megatron, first step: `EP overlap 1F1B with FSDP is not supported for interleaved pipeline parallelism`
    (megatron/core/pipeline_parallel/combined_1f1b.py:210).
    """
    parallel = recipe.parallel
    if recipe.overlap.moe_expert_parallel_comm and parallel.use_megatron_fsdp and virtual_stages(recipe) > 1:
        yield Violation(
            (OVERLAP, "parallel.use_megatron_fsdp", "parallel.pipeline_model"),
            f"`{OVERLAP}` with `parallel.use_megatron_fsdp` excludes virtual stages",
            "`parallel: {pipeline_model: 1}` without virtual stages",
        )


def sharded_expert_overlap_is_not_graphed_by_layer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron FSDP gathers a layer's weights where a graph of the layer would already have begun.

    Megatron, build: `1F1B overlap with FSDP does not support per-layer CUDA graphs`
    (megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:173).
    """
    layers = recipe.model.cuda_graph_impl in ("local", "transformer_engine")
    if recipe.overlap.moe_expert_parallel_comm and recipe.parallel.use_megatron_fsdp and layers:
        yield Violation(
            (OVERLAP, "parallel.use_megatron_fsdp", "model.cuda_graph_impl"),
            f"`{OVERLAP}` with `parallel.use_megatron_fsdp` excludes `cuda_graph_impl: {recipe.model.cuda_graph_impl}`",
            "`model: {cuda_graph_impl: none}`",
        )


def expert_overlap_is_graphed_in_parts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A graph of a whole layer has the exchange inside, where nothing else can come between.

    Megatron, first step: `EP overlap must be disabled when CUDA graph captures the whole MLP/MoE part`, once the graphs
    are replayed (megatron/core/transformer/transformer_layer.py:1263).
    """
    whole = recipe.model.cuda_graph_impl == "transformer_engine"
    whole = whole and "--cuda-graph-modules" not in (recipe.megatron.extra or ())
    if recipe.overlap.moe_expert_parallel_comm and whole and not recipe.parallel.use_megatron_fsdp:
        yield Violation(
            (OVERLAP, "model.cuda_graph_impl"),
            f"`{OVERLAP}` excludes `cuda_graph_impl: transformer_engine` of whole layers",
            "`megatron: {extra: [--cuda-graph-modules, attn, moe_router]}`",
        )


OVERLAP, DELAY = "overlap.moe_expert_parallel_comm", "overlap.delay_wgrad_compute"
OFF = f"unset `{OVERLAP}` with `null`"
OFF_HERE = "unset it with `null`"


RULES: tuple[Rule, ...] = (
    expert_overlap_has_an_exchange,
    expert_overlap_keeps_activations,
    expert_overlap_is_in_half_precision,
    expert_overlap_is_the_only_one_of_its_kind,
    expert_overlap_predicts_one_token_more,
    expert_overlap_interleaves_its_stages,
    ncclep_overlap_keeps_expert_inputs,
    delayed_gradients_fill_expert_overlap,
    delayed_gradients_are_of_transformer_engine,
    delayed_gradients_find_their_version,
    delayed_gradients_came_with_2_3,
    sharded_expert_overlap_has_one_stage,
    sharded_expert_overlap_is_not_graphed_by_layer,
    expert_overlap_is_graphed_in_parts,
)
