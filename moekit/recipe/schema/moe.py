"""`moe`, `router` and `balance`: the experts, who chooses them, and what keeps their load even."""

from dataclasses import dataclass
from typing import Annotated

from moekit.recipe.patterns import LayerPattern
from moekit.recipe.schema.markers import AtLeast, Flag
from moekit.recipe.schema.section import Section


@dataclass(init=False, repr=False, eq=False)
class Moe(Section):
    """The experts: how many, how wide, in which layers, and how tokens reach them."""

    num_experts: Annotated[int | None, Flag("--num-experts", "2.5"), AtLeast(1)] = None
    """Routed experts in each MoE layer. Null: the model is dense."""
    ffn_hidden_size: Annotated[int | None, Flag("--moe-ffn-hidden-size", "2.5"), AtLeast(1)] = None
    """Width of one expert. `router.topk` times this beside `model.ffn_hidden_size` compares active widths."""
    layer_freq: Annotated[LayerPattern | None, Flag("--moe-layer-freq", "3.5")] = None
    """Which layers are MoE: N means every N-th, beginning with the first; a pattern such as `([0]*1+[1]*15)` or a list
    has one 0 (dense) or 1 (MoE) for each layer. Null: all of them."""
    dispatcher: Annotated[str | None, Flag("--moe-token-dispatcher-type", "2.5")] = None
    """How tokens travel to their experts; `alltoall` runs on every fabric."""
    flex_dispatcher_backend: Annotated[str | None, Flag("--moe-flex-dispatcher-backend", "3.7")] = None
    """Which library carries the tokens when `dispatcher` is `flex`."""
    enable_deepep: Annotated[bool | None, Flag("--moe-enable-deepep")] = None
    """The older way to ask for DeepEP; `flex_dispatcher_backend: deepep` says the same."""
    deepep_num_sms: Annotated[int | None, Flag("--moe-deepep-num-sms"), AtLeast(1)] = None
    """Streaming multiprocessors DeepEP may take."""
    hybridep_num_sms: Annotated[int | None, Flag("--moe-hybridep-num-sms"), AtLeast(1)] = None
    """Streaming multiprocessors HybridEP may take."""
    dispatch_fwd_dtype: Annotated[str | None, Flag("--moe-dispatch-fwd-dtype", "3.7")] = None
    """Number format of tokens on their way to experts; needs the `ncclep` backend."""
    combine_bwd_dtype: Annotated[str | None, Flag("--moe-combine-bwd-dtype", "3.7")] = None
    """Number format of gradients on their way back to experts; needs the `ncclep` backend."""
    grouped_gemm: Annotated[bool | None, Flag("--moe-grouped-gemm", "2.5")] = None
    """All local experts in one grouped matrix multiplication."""
    single_grouped_weight: Annotated[bool | None, Flag("--moe-single-grouped-weight", "3.6")] = None
    """Local experts' weights as one tensor; Muon then needs Transformer Engine 2.14 or later."""
    permute_fusion: Annotated[bool | None, Flag("--moe-permute-fusion", "3.7")] = None
    """Sorts tokens by expert with a fused kernel."""
    expert_capacity_factor: Annotated[float | None, Flag("--moe-expert-capacity-factor", "3.7"), AtLeast(0)] = None
    """An expert takes at most this many times its even share; the rest is dropped. Null: nothing is dropped."""
    pad_expert_input_to_capacity: Annotated[bool | None, Flag("--moe-pad-expert-input-to-capacity", "3.7")] = None
    """Every expert's input has the capacity's length; needs `expert_capacity_factor`."""
    token_drop_policy: Annotated[str | None, Flag("--moe-token-drop-policy")] = None
    """Which tokens are dropped over capacity."""
    expert_rank_capacity_factor: Annotated[
        float | None, Flag("--moe-expert-rank-capacity-factor", "3.7"), AtLeast(0)
    ] = None
    """Like `expert_capacity_factor`, for all experts of a rank together."""
    paged_stash: Annotated[bool | None, Flag("--moe-paged-stash", "3.7")] = None
    """Keeps expert activations in pages of a shared buffer; needs `expert_rank_capacity_factor`."""
    shared_expert_intermediate_size: Annotated[
        int | None, Flag("--moe-shared-expert-intermediate-size", "3.4"), AtLeast(1)
    ] = None
    """Width of the expert that every token passes. Null: there is none."""
    shared_expert_gate: Annotated[bool | None, Flag("--moe-shared-expert-gate", "3.4")] = None
    """A learned gate on the shared expert's output (Qwen2-MoE)."""
    shared_expert_overlap: Annotated[bool | None, Flag("--moe-shared-expert-overlap", "3.7")] = None
    """Runs the shared expert while tokens travel."""
    use_grouped_gemm_for_shared_expert: Annotated[bool | None, Flag("--use-grouped-gemm-for-shared-expert", "3.4")] = (
        None
    )
    """The shared expert through the grouped kernel as well."""
    latent_size: Annotated[int | None, Flag("--moe-latent-size", "3.4"), AtLeast(1)] = None
    """Experts work in a space of this width, below `model.hidden_size`. Null: in the full width."""
    use_norm_before_up_proj: Annotated[bool | None, Flag("--moe-use-norm-before-up-proj", "3.4")] = None
    """Normalizes latent expert output before it is projected up."""
    num_hash_layers: Annotated[int | None, Flag("--moe-num-hash-layers", "3.2"), AtLeast(0)] = None
    """The first so many MoE layers choose experts by a table of token ids (DeepSeek-V4)."""
    hash_table: str | None = None
    """The table of hash layers, of those that `moekit data hash-table` made for `data.name`, by its name. Null: that of
    the checkpoint the run begins from, else Megatron's placeholder, which sends ids in turns."""
    shortcut_connection: Annotated[bool | None, Flag("--moe-shortcut-connection", "3.5")] = None
    """The MoE reads what the attention before it read (ScMoE); needs the hybrid stack."""
    shortcut_parallel: Annotated[bool | None, Flag("--moe-shortcut-parallel", "3.5")] = None
    """With `shortcut_connection`: really overlaps the token exchange with the attention."""
    shortcut_post_norm: Annotated[bool | None, Flag("--moe-shortcut-post-norm", "3.5")] = None
    """With `shortcut_connection`: a normalization behind the experts."""
    use_upcycling: Annotated[bool | None, Flag("--moe-use-upcycling", "3.6")] = None
    """Experts begin as copies of a dense checkpoint's feed-forward layers; only in a run's first start."""
    upcycling_granularity: Annotated[int | None, Flag("--moe-upcycling-granularity", "3.6"), AtLeast(1)] = None
    """Into how many slices each dense feed-forward layer is cut for upcycling."""
    enable_routing_replay: Annotated[bool | None, Flag("--moe-enable-routing-replay", "4")] = None
    """Replays recorded routing choices (reinforcement learning)."""


@dataclass(init=False, repr=False, eq=False)
class Router(Section):
    """How a token's scores are made and which experts they choose."""

    topk: Annotated[int | None, Flag("--moe-router-topk", "2.5"), AtLeast(1)] = None
    """Experts each token is sent to."""
    dtype: Annotated[str | None, Flag("--moe-router-dtype", "3.1")] = None
    """Number format of the routing scores. Null: the model's, where rounding can change which experts win."""
    score_function: Annotated[str | None, Flag("--moe-router-score-function", "3.1")] = None
    """From logits to scores."""
    pre_softmax: Annotated[bool | None, Flag("--moe-router-pre-softmax", "3.1")] = None
    """Softmax over all experts before the top-k instead of over the chosen ones after it; needed with `topk: 1`."""
    topk_scaling_factor: Annotated[float | None, Flag("--moe-router-topk-scaling-factor", "4")] = None
    """Multiplies the chosen experts' weights."""
    num_groups: Annotated[int | None, Flag("--moe-router-num-groups", "3.7"), AtLeast(1)] = None
    """Group-limited routing: into how many groups experts are divided."""
    group_topk: Annotated[int | None, Flag("--moe-router-group-topk", "3.7"), AtLeast(1)] = None
    """Group-limited routing: how many groups a token may choose from."""
    fusion: Annotated[bool | None, Flag("--moe-router-fusion", "3.3")] = None
    """Top-k and aux loss through fused kernels."""
    padding_for_quantization: Annotated[bool | None, Flag("--moe-router-padding-for-quantization", "3.7")] = None
    """Pads each expert's tokens in the routing map to what FP8 and FP4 kernels need."""
    input_jitter_eps: Annotated[float | None, Flag("--moe-input-jitter-eps", "3.1"), AtLeast(0)] = None
    """Multiplies the router's input by noise of 1 plus or minus this."""
    z_loss_coeff: Annotated[float | None, Flag("--moe-z-loss-coeff", "3.1"), AtLeast(0)] = None
    """Weight of the z-loss, which keeps logits small."""
    skip_muon: Annotated[bool | None, Flag("--moe-router-skip-muon", "3.6")] = None
    """With Muon: the router's weights stay on the scalar optimizer."""


@dataclass(init=False, repr=False, eq=False)
class Balance(Section):
    """What keeps the experts' load even, and the controls that prove it."""

    type: Annotated[tuple[str, ...] | None, Flag("--moe-router-load-balancing-type", "3.3")] = None
    """One balancing method or a list; with a list `aux_loss_coeff` has one value for each."""
    aux_loss_coeff: Annotated[tuple[float, ...] | None, Flag("--moe-aux-loss-coeff", "3.3"), AtLeast(0)] = None
    """Weight of the balancing loss. Null is Megatron's 0: an aux loss is then chosen but does nothing."""
    enable_expert_bias: Annotated[bool | None, Flag("--moe-router-enable-expert-bias", "3.3")] = None
    """A bias on each expert's score that follows its load and only touches the choice (DeepSeek-V3)."""
    bias_update_rate: Annotated[float | None, Flag("--moe-router-bias-update-rate", "3.3"), AtLeast(0)] = None
    """How far the expert bias moves a step."""
    quantile_balancing_ema: Annotated[float | None, Flag("--moe-router-quantile-balancing-ema", "3.3"), AtLeast(0)] = (
        None
    )
    """Smoothing of quantile balancing's thresholds over steps. Null: each batch alone."""
    force_load_balancing: Annotated[bool | None, Flag("--moe-router-force-load-balancing", "3.3")] = None
    """Random, even routing: measures speed, trains nothing. Only with `benchmark: true`."""
    force_biased: Annotated[float | None, Flag("--moe-router-force-biased", "3.3")] = None
    """Routing with a random fixed bias of this size: measures skew. Only with `benchmark: true`."""
