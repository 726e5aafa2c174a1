"""What a CPU cannot do: the only place that knows.

Without a GPU there is no Transformer Engine, and Megatron's own local layers do less. No fault of the recipe: the
real stages answer "not judged" where a limit applies, and a local run on a CPU is refused with its reason.
Line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Values = Mapping[str, Any]
"""Megatron's arguments by dest: of `moekit.megatron.table.parse_values`, or `vars(args)` of Megatron's own."""


@dataclass(frozen=True)
class Limit:
    """One feature that a CPU does not have."""

    feature: str
    """In the handbook's words."""
    reason: str
    """Why, as the end of a sentence: "..., since <reason>"."""
    build: Literal["impossible", "counted", "replaced"]
    """What it means to stage `build`: no model can be built; one can, of as many parameters, which proves nothing of
    the feature; or the stage builds an equal in its place and so can judge the model."""


def cpu_limits(values: Values) -> list[Limit]:
    """Every limit that a command line meets, those that prevent building first."""
    return [limit for limit, applies in _LIMITS if applies(values)]


def _is_on(*dests: str) -> Callable[[Values], bool]:
    """Whether one of these is set to something: what Megatron leaves off is None, False or absent."""
    return lambda values: any(values.get(dest) for dest in dests)


def _above_one(dest: str) -> Callable[[Values], bool]:
    return lambda values: (values.get(dest) or 1) > 1


def _unless_off(dest: str) -> Callable[[Values], bool]:
    """Of what Megatron does unless told not to."""
    return lambda values: bool(values.get(dest, True))


def _sequence_parallel(values: Values) -> bool:
    return bool(values.get("sequence_parallel")) and _above_one("tensor_model_parallel_size")(values)


def _moe_tensor_parallel(values: Values) -> bool:
    return bool(values.get("num_experts")) and _above_one("tensor_model_parallel_size")(values)


def _grouped_with_bias(values: Values) -> bool:
    grouped = bool(values.get("num_experts")) and bool(values.get("moe_grouped_gemm"))
    return grouped and _transformer_engine(values) and _unless_off("add_bias_linear")(values)


def _flex(values: Values) -> bool:
    return values.get("moe_token_dispatcher_type") == "flex" or bool(values.get("moe_enable_deepep"))


def _hybrid_pattern(values: Values) -> set[str]:
    return set(values.get("hybrid_layer_pattern") or values.get("hybrid_override_pattern") or "")


_WITH_LOCAL_LAYERS = set("*-E|")


def _cuda_graphs(values: Values) -> bool:
    chosen = (values.get("cuda_graph_impl") or "none") != "none"
    return chosen or _is_on("enable_cuda_graph", "external_cuda_graph")(values)


def _transformer_engine(values: Values) -> bool:
    return bool(values.get("transformer_impl", "transformer_engine") != "local")


def _rope_fusion(values: Values) -> bool:
    return values.get("position_embedding_type") == "rope" and _unless_off("apply_rope_fusion")(values)


_LIMITS: list[tuple[Limit, Callable[[Values], bool]]] = [
    (
        Limit(
            "sequence parallel",
            "torch's norm, the local layers' own, takes no sequence parallel (core/transformer/torch_norm.py:50)",
            "impossible",
        ),
        _sequence_parallel,
    ),
    (
        Limit(
            "context parallel",
            "only Transformer Engine's attention has it (core/transformer/dot_product_attention.py:57)",
            "impossible",
        ),
        _above_one("context_parallel_size"),
    ),
    (
        Limit(
            "multi-latent attention",
            "the local attention takes no separate key width (core/transformer/multi_latent_attention.py)",
            "impossible",
        ),
        _is_on("multi_latent_attention"),
    ),
    (
        Limit(
            "latent MoE",
            "its projections are Transformer Engine's (core/transformer/moe/moe_layer.py:266)",
            "impossible",
        ),
        _is_on("moe_latent_size"),
    ),
    (
        Limit("flex dispatcher", "DeepEP, HybridEP and NCCL EP run on GPUs only", "impossible"),
        _flex,
    ),
    (
        Limit(
            "layernorm-1p",
            "torch's norm, the local layers' own, has no zero-centred weight (core/transformer/torch_norm.py:44)",
            "impossible",
        ),
        _is_on("layernorm_zero_centered_gamma"),
    ),
    (
        Limit(
            "experimental attention",
            "its layers are Transformer Engine's (core/models/gpt/experimental_attention_variant_module_specs.py:442)",
            "impossible",
        ),
        _is_on("experimental_attention_variant"),
    ),
    (
        Limit(
            "Mamba or latent attention in a hybrid stack",
            "they, and prediction depths, are of GPUs alone (core/models/hybrid/hybrid_layer_specs.py)",
            "impossible",
        ),
        lambda values: not _hybrid_pattern(values) <= _WITH_LOCAL_LAYERS,
    ),
    (Limit("CUDA graphs", "a CPU has none", "impossible"), _cuda_graphs),
    (
        Limit(
            "MoE with tensor parallel",
            "Megatron trains it with sequence parallel only, which the local layers do not have",
            "counted",
        ),
        _moe_tensor_parallel,
    ),
    (
        Limit(
            "grouped experts with a bias",
            "the local layers add it where Transformer Engine's grouped ones fuse it",
            "counted",
        ),
        _grouped_with_bias,
    ),
    (Limit("FP8", "its kernels are Transformer Engine's", "counted"), _is_on("fp8")),
    (Limit("FP4", "its kernels are Transformer Engine's", "counted"), _is_on("fp4")),
    (
        Limit("Transformer Engine's operation fuser", "there is no Transformer Engine", "counted"),
        _is_on("use_transformer_engine_op_fuser"),
    ),
    (
        Limit("attention logit limits", "Transformer Engine's attention reports them", "counted"),
        _is_on("qk_clip", "log_max_attention_logit"),
    ),
    (
        Limit("activation offloading", "there is no GPU memory to move from", "counted"),
        _is_on("fine_grained_activation_offloading", "cpu_offloading_num_layers", "moe_paged_stash"),
    ),
    (
        Limit("delayed weight gradients", "Transformer Engine's linear layers delay them", "counted"),
        _is_on("delay_wgrad_compute"),
    ),
    (
        Limit("fully sharded data parallel", "it shards GPU memory", "counted"),
        _is_on("use_megatron_fsdp", "use_torch_fsdp2"),
    ),
    (
        Limit("Transformer Engine's layers", "it runs on GPUs only; `--transformer-impl local` runs here", "replaced"),
        _transformer_engine,
    ),
    (Limit("rotary embedding fusion", "the kernel is Transformer Engine's", "replaced"), _rope_fusion),
    (
        Limit(
            "activation dumps",
            "they look for Transformer Engine's layers (training/activation_logging.py:105, dgrad_logging.py:89)",
            "replaced",
        ),
        _is_on("save_activations_interval", "save_dgrads_interval"),
    ),
    (
        Limit("masked softmax fusion", "its kernel is a CUDA extension", "replaced"),
        _unless_off("masked_softmax_fusion"),
    ),
    (
        Limit("gradient accumulation fusion", "its kernel is a CUDA extension", "replaced"),
        _unless_off("gradient_accumulation_fusion"),
    ),
    (
        Limit("persistent layer norm", "torch's norm, the local layers' own, has none", "replaced"),
        lambda values: not values.get("no_persist_layer_norm"),
    ),
    (
        Limit("MoE permute and router fusion", "the kernels are Transformer Engine's", "replaced"),
        _is_on("moe_permute_fusion", "moe_router_fusion"),
    ),
]
