"""How many parameters a recipe's model has, from its sizes alone: what the real Megatron's models are held against."""

from __future__ import annotations

from dataclasses import dataclass

from moekit.recipe.schema import Recipe
from moekit.recipe.schema.model import Model


@dataclass(frozen=True)
class Count:
    """Parameters of a whole model, as a checkpoint has them: with the router's biases, buffers in Megatron."""

    total: int
    """Prediction depths apart."""
    active: int
    """Those a token meets: all but the experts it is not sent to."""
    biases: int
    """The router's biases, of all layers."""
    prediction: int
    """What the prediction depths add, with all their experts."""
    prediction_biases: int


def count(recipe: Recipe, vocabulary: int) -> Count:
    """`vocabulary` rows of embedding and of output, as many as the released model has."""
    model, moe = recipe.model, recipe.moe
    hidden, layers = model.hidden_size, model.num_layers
    assert None not in (hidden, layers, moe.num_experts, recipe.router.topk)
    kinds = moe.layer_freq.is_moe(layers) if moe.layer_freq else (True,) * layers
    around = attention(model) + 2 * hidden
    routed = moe.num_experts * feed_forward(model, moe.ffn_hidden_size)
    router = hidden * moe.num_experts + (0 if model.disable_bias_linear else moe.num_experts)
    beside = around + router + feed_forward(model, moe.shared_expert_intermediate_size)
    dense = around + feed_forward(model, model.ffn_hidden_size)
    bias = moe.num_experts if recipe.balance.enable_expert_bias else 0
    met = 2 * vocabulary * hidden + hidden + sum(beside + bias if is_moe else dense for is_moe in kinds)
    experts = routed * sum(kinds)
    depth = 2 * hidden * hidden + 3 * hidden + beside + bias + routed  # a projection and three norms more
    depths = model.mtp_num_layers or 0
    return Count(
        total=met + experts,
        active=met + experts * recipe.router.topk // moe.num_experts,
        biases=bias * sum(kinds),
        prediction=depth * depths,
        prediction_biases=bias * depths,
    )


def attention(model: Model) -> int:
    hidden, heads = model.hidden_size or 0, model.num_attention_heads or 0
    if model.multi_latent_attention:
        return latent_attention(model, hidden, heads)
    width = model.kv_channels or hidden // heads
    queries = heads * width
    keys = (model.num_query_groups or heads) * width
    parameters = hidden * (queries + 2 * keys) + queries * hidden
    if model.add_qkv_bias or not model.disable_bias_linear:
        parameters += queries + 2 * keys
    if not model.disable_bias_linear:
        parameters += hidden
    if model.qk_layernorm:
        parameters += 2 * width
    return parameters + (heads if model.softmax_type == "learnable" else 0)


def latent_attention(model: Model, hidden: int, heads: int) -> int:
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    rank = model.q_lora_rank
    parameters = hidden * rank + rank + rank * query if rank else hidden * query
    parameters += hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) + model.kv_lora_rank
    parameters += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    return parameters + heads * model.v_head_dim * hidden


def feed_forward(model: Model, width: int | None) -> int:
    """Of a gated network: two matrices in, one out."""
    hidden = model.hidden_size or 0
    biases = 0 if model.disable_bias_linear or not width else 2 * width + hidden
    return 3 * hidden * (width or 0) + biases
