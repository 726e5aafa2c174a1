"""What model a recipe describes: every size that decides a weight, with Megatron's own answers where it is silent.

A layer is a text of one letter a part, those of `model.hybrid_layer_pattern`: `*` grouped attention, `+` latent
attention, `G` gated delta net, `M` Mamba, `-` a dense feed-forward network, `E` experts. A transformer's layer has two
(`*-`, `*E`), a hybrid stack's one.
"""

from __future__ import annotations

from dataclasses import dataclass

from moekit.plan.given import Note


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Attention of several query heads to a key and value head."""

    heads: int
    groups: int
    width: int
    """Of one head."""
    gate: bool
    """Queries are twice as wide: half of them gates the output."""
    input_bias: bool
    output_bias: bool
    norm_weights: int
    """Vectors of `width` in each of the two norms of queries and keys: 0 without, 1 RMSNorm, 2 LayerNorm."""
    sinks: bool
    """One learned logit to a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """DeepSeek's attention over compressed keys and values."""

    heads: int
    query_rank: int | None
    """None: queries are not compressed."""
    rank: int
    width: int
    """A head's part without positions."""
    position_width: int
    value_width: int
    norm_weights: int
    output_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Gated delta net."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    kernel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """A Mamba layer."""

    heads: int
    width: int
    groups: int
    state: int
    kernel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A dense feed-forward network."""

    width: int
    matrices: int
    """3 with a gate, else 2."""
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A layer's routed experts, router and shared expert."""

    number: int
    topk: int
    width: int
    latent: int | None
    """The experts' outer width; None is the model's."""
    latent_norm: bool
    """Before latent output is projected up."""
    norm_behind: bool
    """Behind the experts of a shortcut."""
    matrices: int
    bias: bool
    shared_width: int
    """0: there is none."""
    shared_gate: bool
    router_bias: bool
    """A bias that follows the load: a buffer in Megatron, an element of released checkpoints."""

    @property
    def activated_share(self) -> float:
        """Experts a token meets, shared ones in units of a routed one's width, over routed (handbook 4)."""
        return (self.topk + self.shared_width / self.width) / self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One model, resolved."""

    stack: str
    """`gpt` or `hybrid`."""
    hidden: int
    layers: tuple[str, ...]
    depth: str
    """The parts of one prediction depth."""
    depths: int
    """Prediction depths."""
    depth_copies: int
    """Depths with weights of their own: 1 where they repeat one."""
    depths_counted_linear: int
    """Depths that Megatron's count of operations takes for a gated delta net, going on with the layers' pattern."""
    attention: Grouped | Latent
    delta: Delta | None
    mamba: Mamba | None
    dense: Dense | None
    experts: Experts | None
    vocabulary: int
    rows: int
    """Rows of the embedding: the vocabulary, padded as Megatron does."""
    tied: bool
    positions: int
    """Rows of a learned embedding of positions, 0 without."""
    norm_weights: int
    """Vectors in one norm: 1 RMSNorm, 2 LayerNorm."""
    seq_length: int | None
    swiglu: bool
    """Whether `--swiglu` is said, the only gate that Megatron's count of operations knows."""
    window: int | None
    """Tokens that windowed layers look back, itself apart; None: no layer is windowed."""
    windowed: tuple[bool, ...]
    """Which layers are. `# (layer)`"""
    notes: tuple[Note, ...]
    """What the recipe does not say."""

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any("E" in layer for layer in self.layers)

    def part_count(self, letter: str) -> int:
        """Parts of a kind in all layers, prediction depths apart."""
        return sum(layer.count(letter) for layer in self.layers)
