"""Rules on communication behind computation, and on CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below
from moekit.recipe.schema import Recipe


def gathers_overlap_behind_reductions(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights are gathered behind the forward pass only where gradients are reduced behind the backward one.

    Megatron, validate: `Must use --overlap-param-gather with --overlap-grad-reduce`
    (megatron/training/arguments.py:994).
    """
    if recipe.overlap.param_gather and not recipe.overlap.grad_reduce:
        yield Violation(
            ("overlap.param_gather", "overlap.grad_reduce"),
            "`overlap.param_gather` needs `overlap.grad_reduce`",
            "`overlap: {grad_reduce: true}`",
        )


def gathers_overlap_what_is_divided(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a divided optimizer state there are no weights to gather.

    Megatron, validate: `--overlap-param-gather only supported with distributed optimizer, megatron fsdp, or dist_muon`
    (megatron/training/arguments.py:991).
    """
    parallel = recipe.parallel
    divided = parallel.use_distributed_optimizer or parallel.use_megatron_fsdp or recipe.optimizer.name == "dist_muon"
    if recipe.overlap.param_gather and not divided:
        yield Violation(
            ("overlap.param_gather", "parallel.use_distributed_optimizer"),
            "`overlap.param_gather` needs `parallel.use_distributed_optimizer`",
            "`parallel: {use_distributed_optimizer: true}`",
        )


def buckets_belong_to_overlapped_reductions(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Gradients that are reduced after the backward pass go in one piece: the size of a bucket says nothing.

    Megatron, never: it drops the size without a word (megatron/training/training.py:1565).
    """
    overlap = recipe.overlap
    if overlap.ddp_bucket_size and not overlap.grad_reduce and not recipe.parallel.use_megatron_fsdp:
        yield Violation(
            ("overlap.ddp_bucket_size", "overlap.grad_reduce"),
            "`overlap.ddp_bucket_size` does nothing without `overlap.grad_reduce`",
            "add that, or unset this with `null`",
        )


def tensor_overlap_needs_sequence_parallel(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What is exchanged behind matrix multiplications are sequence-parallel activations; Megatron has none at size 1.

    Megatron, validate: `Tensor parallel communication/GEMM overlap can happen only when sequence parallelism is
    enabled` (megatron/training/arguments.py:1402).
    """
    parallel, divided = recipe.parallel, (recipe.parallel.tensor_model or 1) > 1
    if recipe.overlap.tp_comm_overlap and not (parallel.sequence and divided):
        yield Violation(
            ("overlap.tp_comm_overlap", "parallel.sequence", "parallel.tensor_model"),
            "`overlap.tp_comm_overlap` needs `parallel.sequence` and `parallel.tensor_model` above 1",
            "`parallel: {sequence: true}`" if divided else "unset `overlap.tp_comm_overlap` with `null`",
        )


def unoverlapped_interleaving_needs_three_stages(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Between two ranks the sends and receives of an interleaved schedule would meet in one batch.

    Megatron, validate: `When interleaved schedule is used and p2p communication overlap is disabled,
    pipeline-model-parallel size should be greater than 2` (megatron/training/arguments.py:972).
    """
    if recipe.overlap.no_overlap_p2p_communication and recipe.parallel.pipeline_model == 2 and interleaves(recipe):
        yield Violation(
            ("overlap.no_overlap_p2p_communication", "parallel.pipeline_model"),
            "`overlap.no_overlap_p2p_communication` with virtual stages needs `parallel.pipeline_model` above 2",
            "unset `overlap.no_overlap_p2p_communication` with `null`",
        )


def interleaves(recipe: Recipe) -> bool:
    """Whether a rank holds more than one virtual stage (megatron/training/arguments.py:906-944)."""
    parallel, stages = recipe.parallel, recipe.parallel.pipeline_model or 1
    if parallel.pipeline_model_layout is not None:
        return len(parallel.pipeline_model_layout.stages) > stages
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank > 1
    each = parallel.num_layers_per_virtual_pipeline_stage
    counted = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    layers = (recipe.model.num_layers or 0) + sum(map(bool, counted))
    return each is not None and layers // stages > each


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

    Megatron, config: `disable full recomputation when enabling overlap_moe_expert_parallel_comm`, `disable moe in
    recompute_modules ...` (megatron/core/transformer/transformer_config.py:2688, 2697); handbook 3.7.
    """
    memory = recipe.memory
    if not recipe.overlap.moe_expert_parallel_comm:
        return
    if memory.recompute_granularity == "full":
        yield Violation(
            (OVERLAP, "memory.recompute_granularity"),
            f"`{OVERLAP}` excludes `recompute_granularity: full`",
            "`memory: {recompute_granularity: selective, recompute_modules: [layernorm, moe_act], "
            "recompute_method: null, recompute_num_layers: null}`",
        )
    if memory.recompute_granularity == "selective" and "moe" in (memory.recompute_modules or ()):
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
    if recipe.overlap.moe_expert_parallel_comm and stages > 1 and not interleaves(recipe):
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


OVERLAP, DELAY = "overlap.moe_expert_parallel_comm", "overlap.delay_wgrad_compute"
OFF = f"unset `{OVERLAP}` with `null`"
OFF_HERE = "unset it with `null`"


RULES: tuple[Rule, ...] = (
    gathers_overlap_behind_reductions,
    gathers_overlap_what_is_divided,
    buckets_belong_to_overlapped_reductions,
    tensor_overlap_needs_sequence_parallel,
    unoverlapped_interleaving_needs_three_stages,
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
)
