"""What a recipe says of a run beside its model and its layout: number formats, the optimizer, fusions, routing.

Read from the arguments as the model is (`moekit.plan.given`); line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moekit.plan.given import Given

Sharding = Literal["none", "optimizer", "fsdp"]
"""What data-parallel ranks divide: nothing, the optimizer's state, or what `fsdp_strategy` says."""

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Of one element, by Megatron's name of a format."""

RUN_DEFAULTS: dict[str, Any] = {
    "activation_offload_fraction": 1.0,
    "apply_rope_fusion": True,
    "attention_dropout": 0.1,
    "bias_swiglu_fusion": True,
    "create_attention_mask_in_dataloader": True,
    "cross_entropy_fusion_impl": "native",
    "cuda_graph_impl": "none",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "fp8_recipe": "delayed",
    "gradient_accumulation_fusion": True,
    "hidden_dropout": 0.1,
    "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32",
    "min_offloaded_tensor_size": 1024 * 1024,
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "allgather",
    "num_distributed_optimizer_instances": 1,
    "optimizer": "adam",
    "optimizer_offload_fraction": 1.0,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
}
"""Megatron's, by dest, of options that no weight depends on; `tests/plan` holds them against the real parser."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What every layout of a recipe has alike."""

    seq_length: int
    weight_bytes: int
    """Of one element of the weights that are computed with: 2 in bf16 and fp16, else 4."""
    float16: bool
    """fp16, which scales its loss and always keeps fp32 main weights."""
    fp8: str | None
    """`e4m3` or `hybrid`; None: matrices are multiplied in the weights' format."""
    fp8_recipe: str
    fp8_weights: bool
    """Weights are stored and gathered in FP8 (`--fp8-param-gather`)."""
    fp4: bool
    grad_bytes: int
    """Of one element of the buffer that gradients are summed in (training/arguments.py:1186)."""
    sharding: Sharding
    fsdp_strategy: str
    """`no_shard`, `optim`, `optim_grads` or `optim_grads_params`."""
    optimizer_instances: int
    """Copies of the divided optimizer state."""
    optimizer: str
    whole_tensors: bool
    """Ranks that divide the state take whole tensors (core/optimizer/layer_wise_optimizer.py without a layout)."""
    precision_aware: bool
    main_weight_bytes: int
    """Of the optimizer's own weights; 2 in fp16 are the low bits to bf16 weights' high ones."""
    first_moment_bytes: int
    second_moment_bytes: int
    optimizer_offload: float
    """Share of the optimizer's state that lives on the host."""
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    delay_wgrad: bool
    grad_fusion: bool
    """Weight gradients are summed into their buffer by the matrix multiplication."""
    bucket_size: int | None
    """Elements; None is Megatron's own."""
    transformer_engine: bool
    attention_backend: str
    fused_attention: bool
    """Scores are never written whole (flash or cuDNN attention)."""
    context_all_to_all: bool
    """Context-parallel ranks exchange heads (`--cp-comm-type a2a`), not keys and values in a ring."""
    rope_fusion: bool
    cross_entropy: str
    """`none`, `native` or `te`: which fusion."""
    hidden_dropout: float
    attention_dropout: float
    attention_mask: bool
    """The data loader makes a mask of sequence x sequence."""
    router_bytes: int
    """Of one routing score."""
    grouped_gemm: bool
    permute_fusion: bool
    activation_fusion: bool
    """Gate, activation and routing weight in one kernel, which keeps its inputs alone."""
    deterministic: bool
    clamped: bool
    """The gate's inputs are clamped first, in passes of their own."""
    latent_rope_fusion: bool
    """Latent attention turns its positions in one kernel, an experimental one."""
    probs_on_input: bool
    capacity: float | None
    """`--moe-expert-capacity-factor`; None: nothing is dropped."""
    pad_to_capacity: bool
    rank_capacity: float | None
    """`--moe-expert-rank-capacity-factor`."""
    paged_stash: bool
    """Experts' activations are kept in pages, of the rows that are there."""
    quantization_padding: bool
    shared_overlap: bool
    balancing: tuple[str, ...]
    groups: int
    """Groups of experts that a token chooses among, 1 without a limit."""
    group_topk: int
    """How many of them it may choose from."""
    tensor_overlap: bool
    """Tensor parallelism's exchange runs under its matrices (`--tp-comm-overlap`)."""
    activation_offload: float
    """Share of the offloaded modules' inputs that moves."""
    offload_least: int
    """Elements below which a tensor stays."""
    graphs: str
    """`none`, `local`, `transformer_engine` or `full_iteration`: whose CUDA graphs."""
    graph_modules: tuple[str, ...]
    op_fuser: bool
    """Feed-forward layers through Transformer Engine's operation fuser."""


def facts_of(given: Given) -> Facts:
    """The facts of a recipe.

    Raises:
        MoekitError: no sequence length is said.
    """

    def said(dest: str) -> Any:
        value = given(dest)
        return RUN_DEFAULTS.get(dest) if value is None else value

    half = bool(given("bf16") or given("fp16"))
    aware = bool(given("use_precision_aware_optimizer"))
    backend = str(said("attention_backend"))
    balancing = said("moe_router_load_balancing_type")
    return Facts(
        seq_length=given.needed("seq_length", "model.seq_length"),
        weight_bytes=2 if half else 4,
        float16=bool(given("fp16")),
        fp8=given("fp8"),
        fp8_recipe=str(said("fp8_recipe")),
        fp8_weights=bool(given("fp8") and given("fp8_param_gather")),
        fp4=bool(given("fp4")),
        grad_bytes=_grad_bytes(given, str(said("main_grads_dtype"))),
        sharding=_sharding(given),
        fsdp_strategy=str(said("data_parallel_sharding_strategy")),
        optimizer_instances=int(said("num_distributed_optimizer_instances")),
        optimizer=str(said("optimizer")),
        whole_tensors="muon" in str(said("optimizer")) and given("use_layer_wise_param_layout") is False,
        precision_aware=aware,
        main_weight_bytes=BYTES[str(said("main_params_dtype"))] if aware else 4,
        first_moment_bytes=BYTES[str(said("exp_avg_dtype"))] if aware else 4,
        second_moment_bytes=BYTES[str(said("exp_avg_sq_dtype"))] if aware else 4,
        optimizer_offload=float(said("optimizer_offload_fraction")) if given("optimizer_cpu_offload") else 0.0,
        overlap_grad_reduce=bool(given("overlap_grad_reduce")),
        overlap_param_gather=bool(given("overlap_param_gather")),
        delay_wgrad=bool(given("delay_wgrad_compute")),
        grad_fusion=bool(said("gradient_accumulation_fusion")),
        bucket_size=given("ddp_bucket_size"),
        transformer_engine=said("transformer_impl") == "transformer_engine",
        attention_backend=backend,
        fused_attention=said("transformer_impl") == "transformer_engine" and backend not in ("unfused", "local"),
        context_all_to_all="a2a" in (given("cp_comm_type") or []),
        rope_fusion=bool(said("apply_rope_fusion")),
        cross_entropy=str(said("cross_entropy_fusion_impl")) if given("cross_entropy_loss_fusion") else "none",
        hidden_dropout=float(said("hidden_dropout")),
        attention_dropout=float(said("attention_dropout")),
        attention_mask=bool(said("create_attention_mask_in_dataloader")),
        router_bytes={"fp32": 4, "fp64": 8, None: 2 if half else 4}[given("moe_router_dtype")],
        grouped_gemm=bool(given("moe_grouped_gemm")),
        permute_fusion=bool(given("moe_permute_fusion")),
        activation_fusion=_activation_fusion(given, bool(said("bias_swiglu_fusion"))),
        deterministic=bool(given("deterministic_mode")),
        clamped=given("activation_func_clamp_value") is not None,
        latent_rope_fusion=bool(given("mla_rope_fusion") or given("enable_experimental"))
        and bool(said("apply_rope_fusion")),
        probs_on_input=bool(given("moe_apply_probs_on_input")),
        capacity=given("moe_expert_capacity_factor"),
        pad_to_capacity=bool(given("moe_pad_expert_input_to_capacity")),
        rank_capacity=given("moe_expert_rank_capacity_factor"),
        paged_stash=bool(given("moe_paged_stash")),
        quantization_padding=bool(given("moe_router_padding_for_quantization") or given("moe_router_padding_for_fp8")),
        shared_overlap=bool(given("moe_shared_expert_overlap")),
        balancing=tuple(map(str, balancing)) if isinstance(balancing, list) else (str(balancing),),
        groups=int(given("moe_router_num_groups") or 1),
        group_topk=int(given("moe_router_group_topk") or 1),
        tensor_overlap=bool(given("tp_comm_overlap")),
        activation_offload=float(said("activation_offload_fraction")),
        offload_least=int(said("min_offloaded_tensor_size")),
        graphs=_graphs(given, str(said("cuda_graph_impl"))),
        graph_modules=tuple(map(str, given("cuda_graph_modules") or given("cuda_graph_scope_deprecated") or ())),
        op_fuser=bool(given("use_transformer_engine_op_fuser")),
    )


def dispatcher_of(given: Given) -> str:
    """`alltoall`, `allgather`, or the flex dispatcher's library: `deepep`, `hybridep` or `ncclep`."""
    kind = str(given("moe_token_dispatcher_type") or RUN_DEFAULTS["moe_token_dispatcher_type"])
    if kind != "flex":
        return kind
    if given("moe_enable_deepep"):
        return "deepep"
    return str(given("moe_flex_dispatcher_backend") or RUN_DEFAULTS["moe_flex_dispatcher_backend"])


def _grad_bytes(given: Given, main: str) -> int:
    if not given("bf16"):
        return 4 if not given("fp16") or given("accumulate_allreduce_grads_in_fp32") else 2
    if given("grad_reduce_in_bf16"):
        return 2
    return 4 if given("accumulate_allreduce_grads_in_fp32") else BYTES[main]


def _sharding(given: Given) -> Sharding:
    if given("use_megatron_fsdp") or given("use_torch_fsdp2"):
        return "fsdp"
    return "optimizer" if given("use_distributed_optimizer") else "none"


def _activation_fusion(given: Given, gated: bool) -> bool:
    """core/transformer/moe/experts.py:827: of SwiGLU and quick GEGLU, and of a squared ReLU that asks for it."""
    if given("squared_relu"):
        return bool(given("use_fused_weighted_squared_relu"))
    return gated and bool(given("swiglu") or given("quick_geglu"))


def _graphs(given: Given, impl: str) -> str:
    if given("enable_cuda_graph"):
        return "local"
    return "transformer_engine" if given("external_cuda_graph") else impl
