"""Hybrid stacks of Megatron's local layers: its own specification has only Transformer Engine's, which no CPU has.

Attention, dense and expert layers; Mamba, gated delta net and latent attention have no local layers. This changes its
process for good. Line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

INSTALLED = {
    "name": "local_hybrid",
    "why": "hybrid stacks are built of Megatron's local layers: Transformer Engine's, their only ones, need a GPU",
    "source": "megatron/core/models/hybrid/hybrid_layer_specs.py: hybrid_stack_spec",
}


def is_asked_for(argv: list[str]) -> bool:
    """Whether Megatron's arguments have a layer pattern, its only sign of a hybrid stack."""
    return any(
        argument.partition("=")[0] in ("--hybrid-layer-pattern", "--hybrid-override-pattern") for argument in argv
    )


def install() -> None:
    """Build hybrid stacks of local layers from here on, in place of those of Transformer Engine."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer import attention
    from megatron.training.models import hybrid

    hybrid.default_hybrid_stack_spec = stack()
    # Two norms are in no specification: behind the last layer (hybrid_block.py:215), and of queries and keys, where
    # none is in it (attention.py:1702).
    hybrid_block.TENorm = attention.TENorm = _norm()


def stack() -> Any:
    """The specification: the same layers as core/models/hybrid/hybrid_layer_specs.py has, with norms of their own."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    local, norm, add = LocalSpecProvider(), _norm(), get_bias_dropout_add
    wide, narrow = local.column_parallel_linear(), local.row_parallel_linear()
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(linear_qkv=wide, core_attention=local.core_attention(), linear_proj=narrow),
    )
    dense = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=wide, linear_fc2=narrow))
    experts = get_moe_module_spec(use_te=False, num_experts=1, moe_grouped_gemm=False)  # any number: the run's is taken

    def layer(module: Any, **parts: Any) -> Any:
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))

    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=layer(TransformerLayer, input_layernorm=norm, self_attention=attention, self_attn_bda=add),
            mlp_layer=layer(MLPLayer, pre_mlp_layernorm=norm, mlp=dense, mlp_bda=add),
            moe_layer=layer(MoETransformerLayer, pre_mlp_layernorm=norm, mlp=experts, mlp_bda=add),
        ),
    )


def _norm() -> Any:
    from megatron.core.models.backends import LocalSpecProvider

    return LocalSpecProvider().layer_norm(rms_norm=True, for_qk=False)  # torch's, of the run's kind
