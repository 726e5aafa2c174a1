"""A hybrid stack for a CPU, by `--spec local_hybrid stack`: Megatron's is of Transformer Engine's layers."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

backend = LocalSpecProvider()
norm = backend.layer_norm(rms_norm=True, for_qk=False)
hybrid_block.TENorm = norm  # the norm behind the last layer is in no specification

attention = ModuleSpec(
    module=SelfAttention,
    params={"attn_mask_type": AttnMaskType.causal},
    submodules=SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
    ),
)
experts = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
stack = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=get_bias_dropout_add),
        ),
    ),
)
