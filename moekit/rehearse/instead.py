"""For every limit of a CPU, what a recipe says in the place of what meets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from moekit.job import gpt
from moekit.megatron.cpu_limits import Limit, Values
from moekit.recipe.patterns import HybridPattern
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import expert_tensor_ranks

Instead = Mapping[str, Any]
"""A field to what it says instead: a value, or a function of the recipe. `megatron.extra` has the beginnings of the
options that go."""


def _local_hybrid(recipe: Recipe) -> HybridPattern | None:
    """A hybrid stack with attention in the place of Mamba and latent attention, and without prediction depths."""
    pattern = recipe.model.hybrid_layer_pattern
    return pattern and HybridPattern.parse(pattern.text.partition("/")[0].translate(str.maketrans("MG+D", "****")))


def _yarn_factor(recipe: Recipe) -> float | None:
    return recipe.model.rotary_scaling_factor if recipe.model.position_embedding_type == "yarn" else None


def _unless_sharded(recipe: Recipe) -> str | None:
    return None if recipe.checkpoint.format in ("fsdp_dtensor", "torch_dcp") else recipe.checkpoint.format


def _unsets(*fields: str) -> dict[str, None]:
    return dict.fromkeys(fields)


def _recomputed(recipe: Recipe) -> tuple[str, ...] | None:
    """The modules that are computed again, less those that a CPU cannot."""
    return tuple(name for name in recipe.memory.recompute_modules or () if name not in _ASK_THE_ENGINE) or None


def _recomputes(recipe: Recipe) -> str | None:
    """Nothing, rather than the attention, which is Megatron's where no module is named."""
    return recipe.memory.recompute_granularity if _recomputed(recipe) else None


_ASK_THE_ENGINE = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")
"""Modules whose output is dropped until it is computed again (core/tensor_parallel/random.py:693)."""


_LOCAL_SWIGLU = {
    "model.no_bias_swiglu_fusion": lambda recipe: recipe.model.swiglu or recipe.model.no_bias_swiglu_fusion
}

INSTEAD: dict[str, Instead] = {
    "sequence parallel": _unsets("parallel.sequence"),
    "context parallel": {
        "parallel.context": 1,
        "parallel.cp_comm_type": None,
        "megatron.extra": ("--hierarchical-context-parallel",),
    },
    "multi-latent attention": {
        **_unsets("model.multi_latent_attention", "model.rope_type", "model.mscale", "model.mscale_all_dim"),
        "model.rotary_scaling_factor": _yarn_factor,
    },
    "latent MoE": _unsets("moe.latent_size"),
    "flex dispatcher": {
        "moe.dispatcher": "alltoall",
        **_unsets("moe.flex_dispatcher_backend", "moe.enable_deepep", "moe.expert_rank_capacity_factor"),
        **_unsets("moe.dispatch_fwd_dtype", "moe.combine_bwd_dtype"),
    },
    "layernorm-1p": _unsets("model.apply_layernorm_1p"),
    "experimental attention": {
        "megatron.extra": ("--experimental-att", "--linear-", "--dsa-", "--no-dsa-", "--disable-dsa-")
    },
    "Mamba or latent attention in a hybrid stack": {"model.hybrid_layer_pattern": _local_hybrid},
    "CUDA graphs": {
        "model.cuda_graph_impl": None,
        "megatron.extra": ("--cuda-graph", "--enable-cuda-graph", "--external-cuda-graph"),
    },
    "MoE with tensor parallel": {"parallel.expert_tensor": expert_tensor_ranks, "parallel.tensor_model": 1},
    "grouped experts with a bias": _unsets("moe.grouped_gemm"),
    "FP8": {
        **_unsets("precision.fp8_format", "precision.fp8_recipe", "precision.fp8_param_gather"),
        **_unsets("precision.reuse_grad_buf_for_mxfp8_param_ag", "precision.fp8_margin", "precision.no_fp8_wgrad"),
        **_unsets("precision.fp8_amax_history_len", "precision.fp8_amax_compute_algo"),
        **_unsets("precision.first_last_layers_bf16", "router.padding_for_quantization"),
        "megatron.extra": ("--fp8",),
    },
    "FP4": {
        **_unsets("precision.fp4_format", "precision.fp4_recipe", "precision.fp4_param_gather"),
        **_unsets("precision.first_last_layers_bf16", "router.padding_for_quantization"),
        "megatron.extra": ("--fp4",),
    },
    "Transformer Engine's operation fuser": _unsets("memory.use_transformer_engine_op_fuser"),
    "attention logit limits": {"log.max_attention_logit": None, "megatron.extra": ("--qk-clip",)},
    "activation offloading": {
        **_unsets("memory.fine_grained_activation_offloading", "moe.paged_stash", "moe.expert_rank_capacity_factor"),
        "megatron.extra": ("--cpu-offloading", "--moe-paged-stash", "--fine-grained-offloading"),
    },
    "delayed weight gradients": _unsets("overlap.delay_wgrad_compute"),
    "fully sharded data parallel": {
        **_unsets("parallel.use_megatron_fsdp", "parallel.data_sharding_strategy"),
        "parallel.use_distributed_optimizer": True,
        "checkpoint.format": _unless_sharded,
        "megatron.extra": ("--use-torch-fsdp2", "--torch-fsdp2", "--fsdp-", "--megatron-fsdp-"),
    },
    "Transformer Engine's layers": {"model.transformer_impl": "local", **_LOCAL_SWIGLU},
    "rotary embedding fusion": {"model.no_rope_fusion": True},
    "activation dumps": _unsets("monitor.activations_interval", "monitor.dgrads_interval"),
    "masked softmax fusion": {"model.no_masked_softmax_fusion": True},
    "gradient accumulation fusion": {"model.no_gradient_accumulation_fusion": True},
    "persistent layer norm": {"model.no_persist_layer_norm": True},
    "MoE permute and router fusion": _unsets("moe.permute_fusion", "router.fusion"),
    "emerging optimizers": {
        "optimizer.name": "adam",
        **_unsets("optimizer.muon_extra_scale_factor", "optimizer.muon_momentum", "optimizer.muon_num_ns_steps"),
        **_unsets("optimizer.muon_scale_mode", "optimizer.muon_tp_mode", "router.skip_muon"),
        "megatron.extra": ("--muon", "--lion", "--soap"),
    },
    "precision-aware optimizer": {
        **_unsets("optimizer.use_precision_aware_optimizer", "optimizer.main_grads_dtype"),
        **_unsets("optimizer.main_params_dtype", "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"),
    },
    "batch-invariant kernels": _unsets("precision.batch_invariant_mode"),
    "recomputation of norms and activations": {
        "memory.recompute_granularity": _recomputes,
        "memory.recompute_modules": _recomputed,
    },
    "memory history": _unsets("profile.record_memory_history"),
    "Nsight Systems": _unsets("profile.enabled"),
    "GPU sniff test": _unsets("monitor.gpu_sniff_test_interval"),
    "the optimizer's CUDA graph": {"megatron.extra": ("--optimizer-cuda-graph",)},
    "NCCL user buffers": {"megatron.extra": ("--use-nccl-ub",)},
    "tensor-parallel overlap": {"overlap.tp_comm_overlap": None, "megatron.extra": ("--tp-comm", "--disable-tp-comm")},
    "reinforcement learning": {
        "parallel.rl_inference_expert_model": None,
        "megatron.extra": ("--perform-rl-step", "--grpo", "--rl-", "--no-rl-", "--langrl"),
    },
    "training script": {
        "megatron.extra": ("--fim", "--logits-load", *(f"--{dest.replace('_', '-')}" for dest in gpt.OF_A_CHECKOUT))
    },
    "checkpoint's own arguments": {"megatron.extra": ("--use-checkpoint-args", "--pretrained-checkpoint")},
}
"""What a recipe says where a limit applies, by the limit's feature."""

UPCYCLING = Limit("upcycling", "made-up ranks have no dense checkpoint to begin from; two real ones do", "counted")
"""Of rank 0 of a world alone."""

NO_STEP = ("activation dumps",)
"""Limits for which stage `step`, unlike `build`, has nothing in their place."""


def _on(*dests: str) -> Callable[[Values], bool]:
    return lambda values: any(values.get(dest) for dest in dests)


def _emerging(values: Values) -> bool:
    """Muon, Lion, Soap and their like (core/optimizer/__init__.py:757)."""
    return values.get("optimizer") not in (None, "adam", "sgd") and find_spec("emerging_optimizers") is None


FURTHER: list[tuple[Limit, Callable[[Values], bool]]] = [
    (Limit("emerging optimizers", "their package, emerging_optimizers, is not installed here", "counted"), _emerging),
    (
        Limit("precision-aware optimizer", "its kernels are Transformer Engine's", "counted"),
        _on("use_precision_aware_optimizer"),
    ),
    (Limit("batch-invariant kernels", "they are Transformer Engine's", "counted"), _on("batch_invariant_mode")),
    (Limit("tensor-parallel overlap", "its buffers are Transformer Engine's", "counted"), _on("tp_comm_overlap")),
    (
        Limit(
            "recomputation of norms and activations",
            "it asks Transformer Engine whether FP8 is on (core/tensor_parallel/random.py:693)",
            "counted",
        ),
        lambda values: any(name in _ASK_THE_ENGINE for name in values.get("recompute_modules") or ()),
    ),
    (Limit("memory history", "it is of GPU memory", "counted"), _on("record_memory_history")),
    (
        Limit("Nsight Systems", "it watches what GPUs do", "counted"),
        lambda values: bool(values.get("profile")) and not values.get("use_pytorch_profiler"),
    ),
    (Limit("GPU sniff test", "it times what GPUs do", "counted"), _on("gpu_sniff_test_interval")),
    (Limit("the optimizer's CUDA graph", "a CPU has none", "counted"), _on("optimizer_cuda_graph")),
    (Limit("NCCL user buffers", "they are GPU memory", "counted"), _on("nccl_ub")),
    (Limit("reinforcement learning", "it needs an inference engine", "counted"), _on("perform_rl_step")),
    (
        Limit("training script", "it takes the script of a Megatron-LM checkout", "counted"),
        _on(*gpt.OF_A_CHECKOUT),
    ),
    (
        Limit("checkpoint's own arguments", "the checkpoint is not here", "counted"),
        _on("use_checkpoint_args", "pretrained_checkpoint"),
    ),
]
"""What keeps a recipe from a step besides `cpu_limits`, which are about building a model."""
