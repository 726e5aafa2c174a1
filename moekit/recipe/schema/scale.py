"""`parallel`, `precision`, `memory` and `overlap`: how the model is laid over GPUs."""

from dataclasses import dataclass
from typing import Annotated

from moekit.recipe.patterns import PipelineLayout
from moekit.recipe.schema.markers import AtLeast, Flag
from moekit.recipe.schema.section import Section


@dataclass(init=False, repr=False, eq=False)
class Parallel(Section):
    """The world and how it is divided. Data parallel is what is left over."""

    gpus: Annotated[int | None, AtLeast(1)] = None
    """GPUs of the whole run: the world size, one process each. With `runtime.device: cpu`, processes."""
    tensor_model: Annotated[int | None, Flag("--tensor-model-parallel-size", "2.4"), AtLeast(1)] = None
    """Ranks that share each dense matrix."""
    sequence: Annotated[bool | None, Flag("--sequence-parallel")] = None
    """Splits activations over the tensor-parallel ranks as well; an MoE with `tensor_model` > 1 needs it."""
    pipeline_model: Annotated[int | None, Flag("--pipeline-model-parallel-size", "2.4"), AtLeast(1)] = None
    """Pipeline stages."""
    pipeline_model_layout: Annotated[PipelineLayout | None, Flag("--pipeline-model-parallel-layout", "3.6")] = None
    """Which layers each stage holds: `E` embedding, `t` a layer, `m` a prediction depth, `L` loss, `|` between stages,
    `(..)*n` repeats; for example `Et*3|(tt|)*6tmL`."""
    num_layers_per_virtual_pipeline_stage: Annotated[
        int | None, Flag("--num-layers-per-virtual-pipeline-stage"), AtLeast(1)
    ] = None
    """Interleaved schedule: layers in one virtual stage."""
    num_virtual_stages_per_pipeline_rank: Annotated[
        int | None, Flag("--num-virtual-stages-per-pipeline-rank"), AtLeast(1)
    ] = None
    """Interleaved schedule: virtual stages on each rank."""
    decoder_first_pipeline_num_layers: Annotated[
        int | None, Flag("--decoder-first-pipeline-num-layers"), AtLeast(1)
    ] = None
    """Layers on the first stage when stages are uneven."""
    decoder_last_pipeline_num_layers: Annotated[int | None, Flag("--decoder-last-pipeline-num-layers"), AtLeast(1)] = (
        None
    )
    """Layers on the last stage when stages are uneven."""
    account_for_embedding_in_pipeline_split: Annotated[
        bool | None, Flag("--account-for-embedding-in-pipeline-split")
    ] = None
    """Counts the embedding as a layer when layers are divided over stages."""
    account_for_loss_in_pipeline_split: Annotated[bool | None, Flag("--account-for-loss-in-pipeline-split")] = None
    """Counts the loss as a layer when layers are divided over stages."""
    context: Annotated[int | None, Flag("--context-parallel-size", "2.4"), AtLeast(1)] = None
    """Ranks that share each sequence."""
    cp_comm_type: Annotated[tuple[str, ...] | None, Flag("--cp-comm-type")] = None
    """How context-parallel ranks exchange keys and values."""
    expert_model: Annotated[int | None, Flag("--expert-model-parallel-size", "2.5"), AtLeast(1)] = None
    """Ranks over which a layer's experts are spread; must divide `moe.num_experts`."""
    expert_tensor: Annotated[int | None, Flag("--expert-tensor-parallel-size", "2.5"), AtLeast(1)] = None
    """Ranks that share each expert's matrices. Null is Megatron's: the tensor-parallel size."""
    use_distributed_optimizer: Annotated[bool | None, Flag("--use-distributed-optimizer", "2.4")] = None
    """Optimizer state is divided over the data-parallel ranks."""
    num_distributed_optimizer_instances: Annotated[
        int | None, Flag("--num-distributed-optimizer-instances"), AtLeast(1)
    ] = None
    """Copies of the divided optimizer state; more than 1 keeps its traffic within parts of the cluster."""
    use_megatron_fsdp: Annotated[bool | None, Flag("--use-megatron-fsdp")] = None
    """Megatron's fully sharded data parallel."""
    data_sharding_strategy: Annotated[str | None, Flag("--data-parallel-sharding-strategy")] = None
    """What Megatron FSDP divides."""
    use_tp_pp_dp_mapping: Annotated[bool | None, Flag("--use-tp-pp-dp-mapping")] = None
    """Pipeline neighbours before data neighbours in the rank order."""
    distributed_backend: Annotated[str | None, Flag("--distributed-backend")] = None
    """The collective library; a CPU has only `gloo`."""
    distributed_timeout_minutes: Annotated[int | None, Flag("--distributed-timeout-minutes"), AtLeast(1)] = None
    """Minutes a collective may take before the run is stopped."""
    rl_inference_expert_model: Annotated[
        int | None, Flag("--rl-inference-expert-model-parallel-size", "4"), AtLeast(1)
    ] = None
    """Reinforcement learning: the expert-parallel size while it generates."""


@dataclass(init=False, repr=False, eq=False)
class Precision(Section):
    """Number formats."""

    bf16: Annotated[bool | None, Flag("--bf16", "2.4")] = None
    """Trains in bfloat16 with fp32 main weights."""
    fp16: Annotated[bool | None, Flag("--fp16")] = None
    """Trains in float16 with loss scaling."""
    fp8_format: Annotated[str | None, Flag("--fp8-format", "3.7")] = None
    """Matrix multiplications in FP8 of this format."""
    fp8_recipe: Annotated[str | None, Flag("--fp8-recipe", "3.7")] = None
    """How FP8 values are scaled: `blockwise` on Hopper, `mxfp8` on Blackwell."""
    fp8_param_gather: Annotated[bool | None, Flag("--fp8-param-gather")] = None
    """Weights are gathered in FP8."""
    reuse_grad_buf_for_mxfp8_param_ag: Annotated[bool | None, Flag("--reuse-grad-buf-for-mxfp8-param-ag")] = None
    """MXFP8 weights are gathered through the gradients' buffer."""
    fp8_margin: Annotated[int | None, Flag("--fp8-margin")] = None
    """Spare room in FP8's scaling, in powers of two."""
    fp8_amax_history_len: Annotated[int | None, Flag("--fp8-amax-history-len"), AtLeast(1)] = None
    """Steps that delayed scaling looks back."""
    fp8_amax_compute_algo: Annotated[str | None, Flag("--fp8-amax-compute-algo")] = None
    """What delayed scaling takes from its history."""
    no_fp8_wgrad: Annotated[bool | None, Flag("--no-fp8-wgrad")] = None
    """Weight gradients stay in the higher format."""
    fp4_format: Annotated[str | None, Flag("--fp4-format", "4")] = None
    """Matrix multiplications in FP4 of this format."""
    fp4_recipe: Annotated[str | None, Flag("--fp4-recipe")] = None
    """How FP4 values are scaled."""
    fp4_param_gather: Annotated[bool | None, Flag("--fp4-param-gather", "4")] = None
    """Weights are gathered in FP4."""
    first_last_layers_bf16: Annotated[bool | None, Flag("--first-last-layers-bf16")] = None
    """The outer layers stay in bfloat16."""
    num_layers_at_start_in_bf16: Annotated[int | None, Flag("--num-layers-at-start-in-bf16"), AtLeast(0)] = None
    """How many first layers `first_last_layers_bf16` keeps."""
    num_layers_at_end_in_bf16: Annotated[int | None, Flag("--num-layers-at-end-in-bf16"), AtLeast(0)] = None
    """How many last layers `first_last_layers_bf16` keeps."""
    accumulate_allreduce_grads_in_fp32: Annotated[bool | None, Flag("--accumulate-allreduce-grads-in-fp32")] = None
    """Gradients are summed in fp32."""
    grad_reduce_in_bf16: Annotated[bool | None, Flag("--grad-reduce-in-bf16")] = None
    """Gradients are reduced in bfloat16."""
    deterministic_mode: Annotated[bool | None, Flag("--deterministic-mode", "2.5")] = None
    """Same inputs, same bits; excludes cross-entropy fusion and some kernels."""
    batch_invariant_mode: Annotated[bool | None, Flag("--batch-invariant-mode", "4")] = None
    """A sequence's result does not depend on the batch around it."""


@dataclass(init=False, repr=False, eq=False)
class Memory(Section):
    """What is computed again, moved to the host or fused so that it fits."""

    recompute_granularity: Annotated[str | None, Flag("--recompute-granularity", "2.4")] = None
    """Whole layers (`full`) or chosen modules (`selective`) are computed again in the backward pass."""
    recompute_method: Annotated[str | None, Flag("--recompute-method", "2.4")] = None
    """With `full`: every block of layers (`uniform`) or the first ones (`block`)."""
    recompute_num_layers: Annotated[int | None, Flag("--recompute-num-layers", "2.4"), AtLeast(1)] = None
    """With `full`: layers in a block."""
    recompute_modules: Annotated[tuple[str, ...] | None, Flag("--recompute-modules", "3.7")] = None
    """With `selective`: the modules computed again."""
    cross_entropy_loss_fusion: Annotated[bool | None, Flag("--cross-entropy-loss-fusion", "2.4")] = None
    """Cross-entropy without a full fp32 copy of the logits."""
    cross_entropy_fusion_impl: Annotated[str | None, Flag("--cross-entropy-fusion-impl", "2.4")] = None
    """Whose fused cross-entropy; Megatron 0.19.2 only runs `native`."""
    fine_grained_activation_offloading: Annotated[bool | None, Flag("--fine-grained-activation-offloading", "3.7")] = (
        None
    )
    """Moves the activations of `offload_modules` to the host until the backward pass."""
    offload_modules: Annotated[tuple[str, ...] | None, Flag("--offload-modules", "3.7")] = None
    """The modules whose activations move."""
    min_offloaded_tensor_size: Annotated[int | None, Flag("--min-offloaded-tensor-size", "3.7"), AtLeast(0)] = None
    """Elements below which a tensor stays."""
    activation_offload_fraction: Annotated[float | None, Flag("--activation-offload-fraction", "3.7"), AtLeast(0)] = (
        None
    )
    """Share of the activations that moves, 0 to 1."""
    delta_offload_bytes_across_pp_ranks: Annotated[int | None, Flag("--delta-offload-bytes-across-pp-ranks", "3.7")] = (
        None
    )
    """Bytes by which each later pipeline stage moves less."""
    use_transformer_engine_op_fuser: Annotated[bool | None, Flag("--use-transformer-engine-op-fuser", "3.7")] = None
    """Feed-forward layers through Transformer Engine's operation fuser."""
    empty_unused_memory_level: Annotated[int | None, Flag("--empty-unused-memory-level")] = None
    """Returns cached memory each step: 0 never, 1 after the step, 2 before it too."""


@dataclass(init=False, repr=False, eq=False)
class Overlap(Section):
    """Communication behind computation."""

    grad_reduce: Annotated[bool | None, Flag("--overlap-grad-reduce", "2.4")] = None
    """Gradients are reduced while the backward pass goes on."""
    param_gather: Annotated[bool | None, Flag("--overlap-param-gather", "2.4")] = None
    """Weights are gathered while the forward pass goes on; needs `grad_reduce` and the distributed optimizer."""
    moe_expert_parallel_comm: Annotated[bool | None, Flag("--overlap-moe-expert-parallel-comm", "3.7")] = None
    """One micro batch's token exchange behind another's computation."""
    delay_wgrad_compute: Annotated[bool | None, Flag("--delay-wgrad-compute", "3.7")] = None
    """Weight gradients later, to fill `moe_expert_parallel_comm`."""
    tp_comm_overlap: Annotated[bool | None, Flag("--tp-comm-overlap")] = None
    """Tensor-parallel exchange behind matrix multiplications."""
    no_overlap_p2p_communication: Annotated[bool | None, Flag("--no-overlap-p2p-communication")] = None
    """Pipeline sends and receives one after the other."""
    ddp_bucket_size: Annotated[int | None, Flag("--ddp-bucket-size"), AtLeast(1)] = None
    """Elements in one gradient bucket."""
