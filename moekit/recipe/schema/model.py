"""`model`: the dense part of the transformer and what all layers share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moekit.recipe.patterns import HybridPattern, LayerPattern
from moekit.recipe.schema.markers import AtLeast, Flag
from moekit.recipe.schema.section import Section


@dataclass(init=False, repr=False, eq=False)
class Model(Section):
    """The transformer itself: sizes, attention, activation, embeddings, multi-token prediction."""

    stack: Literal["gpt", "hybrid"] | None = None
    """What the model is a stack of: transformer layers, which null is, or layers of one part each, in the order of
    `hybrid_layer_pattern`. A checkout's `pretrain_gpt.py` trains the one, `pretrain_hybrid.py` the other."""
    num_layers: Annotated[int | None, Flag("--num-layers", "2.4"), AtLeast(1)] = None
    """Layers, over all pipeline stages. Attention and feed-forward are one of a transformer, two of a hybrid stack."""
    hybrid_layer_pattern: Annotated[HybridPattern | None, Flag("--hybrid-layer-pattern", "3.5")] = None
    """`stack: hybrid`: a letter for each layer, in quotes: `"*E*E"` is attention and experts twice, `M` Mamba, `-` a
    dense feed-forward network; `|` ends a pipeline stage, `/` precedes the layers of a prediction depth."""
    hidden_size: Annotated[int | None, Flag("--hidden-size", "2.4"), AtLeast(1)] = None
    """Width of the residual stream."""
    ffn_hidden_size: Annotated[int | None, Flag("--ffn-hidden-size", "2.4"), AtLeast(1)] = None
    """Width of a dense layer's feed-forward network. An MoE layer takes `moe.ffn_hidden_size`."""
    num_attention_heads: Annotated[int | None, Flag("--num-attention-heads", "2.4"), AtLeast(1)] = None
    """Query heads."""
    group_query_attention: Annotated[bool | None, Flag("--group-query-attention")] = None
    """Several query heads share one key and value head; `num_query_groups` says how many such groups there are."""
    num_query_groups: Annotated[int | None, Flag("--num-query-groups"), AtLeast(1)] = None
    """Key and value heads with `group_query_attention`; must divide `num_attention_heads`."""
    kv_channels: Annotated[int | None, Flag("--kv-channels"), AtLeast(1)] = None
    """Width of one attention head. Null: `hidden_size` / `num_attention_heads`."""
    seq_length: Annotated[int | None, Flag("--seq-length", "2.4"), AtLeast(1)] = None
    """Tokens in one training sequence."""
    max_position_embeddings: Annotated[int | None, Flag("--max-position-embeddings"), AtLeast(1)] = None
    """Longest position the model can be given; at least `seq_length`."""
    swiglu: Annotated[bool | None, Flag("--swiglu", "3.4")] = None
    """Gated activation, silu(gate) * up: three weight matrices to a feed-forward network."""
    squared_relu: Annotated[bool | None, Flag("--squared-relu", "3.4")] = None
    """Squared ReLU in place of GELU; not together with `swiglu`."""
    quick_geglu: Annotated[bool | None, Flag("--quick-geglu")] = None
    """Gated activation by a quick approximation of GELU (gpt-oss); not together with `swiglu`."""
    glu_linear_offset: Annotated[float | None, Flag("--glu-linear-offset")] = None
    """Added to the linear branch of a gated activation (gpt-oss: 1)."""
    activation_func_clamp_value: Annotated[float | None, Flag("--activation-func-clamp-value", "3.4")] = None
    """Clips what goes into the gated activation of MoE layers at this value."""
    activation_func_tanh_clamp_scale: Annotated[float | None, Flag("--activation-func-tanh-clamp-scale", "3.4")] = None
    """SiTU-GLU: the scale of the smooth cap on the gated branch."""
    activation_func_tanh_clamp_scale_linear: Annotated[
        float | None, Flag("--activation-func-tanh-clamp-scale-linear", "3.4")
    ] = None
    """SiTU-GLU: the scale of the smooth cap on the linear branch."""
    normalization: Annotated[str | None, Flag("--normalization")] = None
    """Which normalization the layers use."""
    norm_epsilon: Annotated[float | None, Flag("--norm-epsilon"), AtLeast(0)] = None
    """Added to the variance in a normalization."""
    apply_layernorm_1p: Annotated[bool | None, Flag("--apply-layernorm-1p")] = None
    """Normalization weights are stored less one."""
    disable_bias_linear: Annotated[bool | None, Flag("--disable-bias-linear")] = None
    """Linear layers without bias."""
    add_qkv_bias: Annotated[bool | None, Flag("--add-qkv-bias")] = None
    """Bias on the query, key and value projection alone (Qwen2)."""
    qk_layernorm: Annotated[bool | None, Flag("--qk-layernorm")] = None
    """Normalizes queries and keys before they meet (Qwen3)."""
    position_embedding_type: Annotated[str | None, Flag("--position-embedding-type")] = None
    """How positions enter the model."""
    rope_type: Annotated[str | None, Flag("--rope-type")] = None
    """Multi-latent attention: plain rotary frequencies, or stretched by YaRN, which null is there."""
    rotary_base: Annotated[int | None, Flag("--rotary-base"), AtLeast(1)] = None
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float | None, Flag("--rotary-percent"), AtLeast(0)] = None
    """Share of each head that is rotated, 0 to 1."""
    use_rope_scaling: Annotated[bool | None, Flag("--use-rope-scaling")] = None
    """Llama 3's rescaling of the rotary frequencies for long context."""
    rope_scaling_factor: Annotated[float | None, Flag("--rope-scaling-factor")] = None
    """How far `use_rope_scaling` stretches."""
    rotary_scaling_factor: Annotated[float | None, Flag("--rotary-scaling-factor")] = None
    """How far YaRN stretches, in multi-latent attention or with `position_embedding_type: yarn`."""
    mscale: Annotated[float | None, Flag("--mscale"), AtLeast(0)] = None
    """YaRN: how much larger the rotated part of attention becomes as it stretches."""
    mscale_all_dim: Annotated[float | None, Flag("--mscale-all-dim"), AtLeast(0)] = None
    """YaRN: the same, for all of a head in multi-latent attention."""
    window_size: Annotated[str | None, Flag("--window-size")] = None
    """Sliding attention window as `left,right` tokens."""
    window_attn_skip_freq: Annotated[LayerPattern | None, Flag("--window-attn-skip-freq")] = None
    """Which layers have the window: N means that every N-th attends to all; a pattern or a list has one 1 (window) or 0
    for each layer. Null: all of them."""
    softmax_type: Annotated[str | None, Flag("--softmax-type")] = None
    """Attention softmax with or without a sink."""
    multi_latent_attention: Annotated[bool | None, Flag("--multi-latent-attention")] = None
    """DeepSeek's multi-latent attention in place of grouped queries."""
    q_lora_rank: Annotated[int | None, Flag("--q-lora-rank"), AtLeast(1)] = None
    """Width of the compressed queries. Null: queries are not compressed."""
    kv_lora_rank: Annotated[int | None, Flag("--kv-lora-rank"), AtLeast(1)] = None
    """Width of the compressed keys and values."""
    qk_head_dim: Annotated[int | None, Flag("--qk-head-dim"), AtLeast(1)] = None
    """Width of a head's part without positions."""
    qk_pos_emb_head_dim: Annotated[int | None, Flag("--qk-pos-emb-head-dim"), AtLeast(1)] = None
    """Width of a head's part with positions."""
    v_head_dim: Annotated[int | None, Flag("--v-head-dim"), AtLeast(1)] = None
    """Width of a head's values."""
    untie_embeddings_and_output_weights: Annotated[bool | None, Flag("--untie-embeddings-and-output-weights")] = None
    """The output layer has weights of its own. Null or false: it shares the embedding's."""
    make_vocab_size_divisible_by: Annotated[int | None, Flag("--make-vocab-size-divisible-by"), AtLeast(1)] = None
    """Embedding rows are padded to a multiple of this times the tensor-parallel size."""
    attention_dropout: Annotated[float | None, Flag("--attention-dropout"), AtLeast(0)] = None
    """Probability that an attention weight is dropped."""
    hidden_dropout: Annotated[float | None, Flag("--hidden-dropout"), AtLeast(0)] = None
    """Probability that a hidden activation is dropped."""
    init_method_std: Annotated[float | None, Flag("--init-method-std"), AtLeast(0)] = None
    """Standard deviation of the initial weights."""
    mtp_num_layers: Annotated[int | None, Flag("--mtp-num-layers", "3.6"), AtLeast(1)] = None
    """Multi-token prediction depths: each predicts one token further ahead."""
    mtp_loss_scaling_factor: Annotated[float | None, Flag("--mtp-loss-scaling-factor", "3.6"), AtLeast(0)] = None
    """Weight of the mean multi-token prediction loss."""
    mtp_detach_heads: Annotated[bool | None, Flag("--mtp-detach-heads", "3.6")] = None
    """The prediction heads train without sending gradients into the model."""
    transformer_impl: Annotated[str | None, Flag("--transformer-impl")] = None
    """Where layers come from. A CPU has only `local`; it knows no fused kernels."""
    attention_backend: Annotated[str | None, Flag("--attention-backend", "4")] = None
    """Which attention kernel Transformer Engine may take."""
    flash_attention_version: Annotated[int | None, Flag("--flash-attention-version", "4")] = None
    """Asks for this FlashAttention generation."""
    attention_softmax_in_fp32: Annotated[bool | None, Flag("--attention-softmax-in-fp32")] = None
    """Attention softmax in fp32, for the local implementation."""
    no_rope_fusion: Annotated[bool | None, Flag("--no-rope-fusion")] = None
    """Rotary embedding without the fused kernel, which needs Transformer Engine."""
    no_masked_softmax_fusion: Annotated[bool | None, Flag("--no-masked-softmax-fusion")] = None
    """Attention softmax without the fused kernel."""
    no_persist_layer_norm: Annotated[bool | None, Flag("--no-persist-layer-norm")] = None
    """Normalization without the persistent kernel, which needs Apex."""
    no_bias_swiglu_fusion: Annotated[bool | None, Flag("--no-bias-swiglu-fusion")] = None
    """SwiGLU without the fused kernel."""
    no_bias_dropout_fusion: Annotated[bool | None, Flag("--no-bias-dropout-fusion")] = None
    """Bias and dropout without the fused kernel."""
    no_gradient_accumulation_fusion: Annotated[bool | None, Flag("--no-gradient-accumulation-fusion")] = None
    """Weight gradients without the fused accumulation, which needs Apex or Transformer Engine."""
    cuda_graph_impl: Annotated[str | None, Flag("--cuda-graph-impl", "3.0")] = None
    """How layers are captured in CUDA graphs. A routing trace needs `none`: its hooks do not run in a replay."""
