"""Rules on positions and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def positions_cover_the_sequence(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A sequence has no more tokens than the model has positions.

    Megatron, validate: `max_position_embeddings (16) must be greater than or equal to seq_length (32)`
    (megatron/training/arguments.py:1314).
    """
    length, positions = recipe.model.seq_length, recipe.model.max_position_embeddings
    if length and positions and length > positions:
        yield Violation(
            ("model.max_position_embeddings", "model.seq_length"),
            f"model.max_position_embeddings = {positions} is below model.seq_length = {length}",
            f"use at least {length}",
        )


def gpt_has_no_relative_positions(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Relative positions are of another model (T5): this one trains without any.

    Megatron, never: its GPT looks for learned, rotary and YaRN positions (megatron/core/models/gpt/gpt_model.py:174).
    """
    if recipe.model.position_embedding_type == "relative":
        yield Violation(
            ("model.position_embedding_type",),
            "`position_embedding_type: relative` gives a GPT no positions at all",
            "use `rope`; say `none` where no positions are meant",
        )


def multimodal_positions_have_sections(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """mRoPE divides a head between time, height and width.

    Megatron, validate: `--mrope-section should be set` (megatron/training/arguments.py:1589).
    """
    if recipe.model.position_embedding_type == "mrope" and "--mrope-section" not in (recipe.megatron.extra or ()):
        yield Violation(
            ("model.position_embedding_type", "megatron.extra"),
            "`position_embedding_type: mrope` needs `--mrope-section` in `megatron.extra`",
            "text alone takes `rope`",
        )


def rotated_heads_are_even(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Rotation takes a head's channels in pairs.

    Megatron, first step: `The size of tensor a (15) must match the size of tensor b (16)`
    (megatron/core/models/common/embeddings/rope_utils.py:136, yarn_rotary_pos_embedding.py:139).
    """
    model = recipe.model
    width, share = _head_width(recipe), model.rotary_percent
    part = width is not None and share is not None and share < 1 and model.position_embedding_type == "rope"
    if width and width % 2 and not part and _rotates(recipe) and not model.multi_latent_attention:
        yield Violation(
            ("model.kv_channels", "model.position_embedding_type"),
            f"a head's {width} channels are an odd number, and `position_embedding_type: "
            f"{model.position_embedding_type}` rotates pairs",
            "make `model.kv_channels` even",
        )


def _head_width(recipe: Recipe) -> int | None:
    """Width of one head; unset is the model's divided by the heads (arguments.py:1292)."""
    model = recipe.model
    if model.kv_channels or not (model.hidden_size and model.num_attention_heads):
        return model.kv_channels
    return model.hidden_size // model.num_attention_heads


def _rotates(recipe: Recipe) -> bool:
    """Whether positions are rotations; latent attention always rotates."""
    kind = recipe.model.position_embedding_type
    rotary = "--use-rotary-position-embeddings" in (recipe.megatron.extra or ())
    return kind in ("rope", "yarn", "mrope") or rotary or bool(recipe.model.multi_latent_attention)


def rotation_has_rotary_positions(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """These say how positions are rotated.

    Megatron, never: positions of another type do not look at them (megatron/core/models/gpt/gpt_model.py:174).
    """
    if _rotates(recipe):
        return
    kind = recipe.model.position_embedding_type or "learned_absolute"
    for name in ("rotary_base", "rotary_percent", "use_rope_scaling"):
        if getattr(recipe.model, name) not in (None, False):
            yield Violation(
                (f"model.{name}", "model.position_embedding_type"),
                f"`model.{name}` does nothing with `position_embedding_type: {kind}`",
                "add `position_embedding_type: rope`, or unset this with `null`",
            )


def rotated_shares_are_shares(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """More than a whole head cannot be rotated.

    Megatron, never: a share of 1 or above is the whole
    (megatron/core/models/common/embeddings/rotary_pos_embedding.py:74).
    """
    share = recipe.model.rotary_percent
    if share is not None and share > 1 and _rotates(recipe):
        yield Violation(
            ("model.rotary_percent",),
            f"model.rotary_percent = {share} is above 1",
            "it is a share: 1 is the whole head",
        )


def latent_attention_says_what_rotates(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Latent attention rotates `qk_pos_emb_head_dim` channels of a head, which are its rotated share already.

    Megatron, never: YaRN, its type where none is given, does not look at the share; `rope_type: rope` takes it of those
    channels, and rotates fewer (megatron/core/transformer/multi_latent_attention.py:181; Megatron-Bridge pull request
    4271). A warning: it trains, with YaRN as without the share.
    """
    model = recipe.model
    if not model.multi_latent_attention or model.rotary_percent is None or model.rotary_percent >= 1:
        return
    what = "does nothing with `multi_latent_attention` and its YaRN"
    if model.rope_type == "rope":
        what = "leaves some of the channels of `qk_pos_emb_head_dim` unrotated"
    yield Violation(
        ("model.rotary_percent", "model.rope_type", "model.multi_latent_attention"),
        f"model.rotary_percent = {model.rotary_percent} {what}",
        "unset it with `null`: `qk_pos_emb_head_dim` says how much of a head is rotated",
        "warning",
    )


def llama_stretches_by_eight(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's trainer does not hand this factor on to the model, which keeps its own.

    Megatron, never: `gpt_config_from_args` has `rope_scaling` alone (megatron/training/argument_utils.py:484).
    """
    factor = recipe.model.rope_scaling_factor
    if recipe.model.use_rope_scaling and factor is not None and factor != 8:
        yield Violation(
            ("model.rope_scaling_factor", "model.use_rope_scaling"),
            f"model.rope_scaling_factor = {factor} is not used: Megatron stretches by 8",
            "unset it with `null`",
        )


def stretches_are_yarns(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """YaRN's numbers are of YaRN's positions, or of latent attention.

    Megatron, never: nothing else looks at them (megatron/training/argument_utils.py:359-390).
    """
    model = recipe.model
    if model.multi_latent_attention or model.position_embedding_type == "yarn":
        return
    for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim"):
        if getattr(model, name) is not None:
            yield Violation(
                (f"model.{name}", "model.position_embedding_type"),
                f"`model.{name}` needs `multi_latent_attention` or `position_embedding_type: yarn`",
                "add one of them, or unset this with `null`",
            )


def latent_rotation_fuses_yarn(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The fused rotation of latent attention is YaRN's; that is its type where none is given.

    Megatron, config: `apply_rope_fusion for MLA only works with YARN RoPE`
    (megatron/core/transformer/transformer_config.py:2967).
    """
    model = recipe.model
    fused = model.position_embedding_type == "rope" and not model.no_rope_fusion
    if model.multi_latent_attention and fused and model.rope_type == "rope":
        yield Violation(
            ("model.no_rope_fusion", "model.rope_type", "model.multi_latent_attention"),
            "`rope_type: rope` with `model.multi_latent_attention` has no fused rotation",
            "add `no_rope_fusion: true`",
        )


def yarn_is_of_latent_attention(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Other attention takes YaRN by its positions.

    Megatron, config: `Common attention only support rope_type="rope"` (megatron/training/argument_utils.py:339).
    """
    if recipe.model.rope_type == "yarn" and not recipe.model.multi_latent_attention:
        yield Violation(
            ("model.rope_type", "model.multi_latent_attention"),
            "`rope_type: yarn` needs `model.multi_latent_attention`",
            "`model: {position_embedding_type: yarn}` in its place",
        )


def predictions_have_rotary_positions(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A prediction depth shifts tokens, and only these positions follow. Megatron's own type is `learned_absolute`.

    Megatron, validate: `Multi-Token Prediction (MTP) is not supported with learned_absolute position embedding type`
    (megatron/training/arguments.py:857).
    """
    kind = recipe.model.position_embedding_type or "learned_absolute"
    if recipe.model.mtp_num_layers and kind not in ("rope", "none", "relative"):
        yield Violation(
            ("model.mtp_num_layers", "model.position_embedding_type"),
            f"`model.mtp_num_layers` does not go with `position_embedding_type: {kind}`",
            "use `rope` or `none`",
        )


def predictions_are_detached_where_they_are(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without prediction depths there are no heads to detach.

    Megatron, never: only the prediction block looks at it (megatron/core/transformer/multi_token_prediction.py:1694).
    """
    if recipe.model.mtp_detach_heads and not recipe.model.mtp_num_layers:
        yield Violation(
            ("model.mtp_detach_heads", "model.mtp_num_layers"),
            "`model.mtp_detach_heads` does nothing without `model.mtp_num_layers`",
            "add that, or unset this with `null`",
        )


def predictions_are_recomputed_one_by_one(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A prediction depth is a block of its own.

    Megatron, first step: `recompute_num_layers must be 1 for MTP recompute`
    (megatron/core/transformer/multi_token_prediction.py:1419).
    """
    memory = recipe.memory
    if not recipe.model.mtp_num_layers or memory.recompute_granularity != "full":
        return
    if memory.recompute_method == "uniform" and (memory.recompute_num_layers or 1) != 1:
        yield Violation(
            ("memory.recompute_num_layers", "model.mtp_num_layers"),
            f"memory.recompute_num_layers = {memory.recompute_num_layers} does not go with `model.mtp_num_layers`",
            "use 1",
        )


RULES: tuple[Rule, ...] = (
    positions_cover_the_sequence,
    gpt_has_no_relative_positions,
    multimodal_positions_have_sections,
    rotated_heads_are_even,
    rotation_has_rotary_positions,
    rotated_shares_are_shares,
    latent_attention_says_what_rotates,
    llama_stretches_by_eight,
    stretches_are_yarns,
    latent_rotation_fuses_yarn,
    yarn_is_of_latent_attention,
    predictions_have_rotary_positions,
    predictions_are_detached_where_they_are,
    predictions_are_recomputed_one_by_one,
)
