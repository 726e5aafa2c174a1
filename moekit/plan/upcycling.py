"""What MoEs a dense model's feed-forward layers can be cut and copied into (handbook 3.6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moekit.plan.flops import per_token
from moekit.plan.parameters import parameters
from moekit.plan.shape import Dense, Experts, Shape

GRANULARITIES = (1, 2, 4, 8, 16)
COPIES = (2, 4, 8, 16)
"""How often each slice is there: experts over granularity."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One MoE that a dense model can become."""

    granularity: int
    """Slices of a dense layer (`moe.upcycling_granularity`)."""
    experts: int
    topk: int
    """As many as slices: a token meets the dense layer's width again."""
    expert_width: int
    total: int
    active: int
    flops_per_token: float | None
    """None without a sequence length."""
    activated_share: float
    """Experts a token meets over routed ones."""


def dense_twin(shape: Shape, granularity: int | None = None) -> Shape:
    """The dense model that `shape` is, or that its experts come from.

    An expert is a slice of a dense layer: `granularity` of them are one, or, where that is not said, as many as a token
    meets. Shared experts and a latent space have no counterpart and are left out.
    """
    of = shape.experts
    if of is None:
        return shape
    width = of.width * (granularity or of.topk)
    layers = tuple(layer.replace("E", "-") for layer in shape.layers)
    dense = Dense(width=width, matrices=of.matrices, bias=of.bias)
    return replace(shape, layers=layers, depth=shape.depth.replace("E", "-"), dense=dense, experts=None)


def choices(shape: Shape, granularity: int | None = None) -> tuple[Choice, ...]:
    """Each granularity that divides the dense width, with each number of copies; experts in every layer.

    Megatron needs as many experts as slices times a whole number (core/transformer/moe/upcycling_utils.py:85).
    """
    dense = dense_twin(shape, granularity)
    assert dense.dense is not None
    width = dense.dense.width
    return tuple(
        _choice(dense, dense.dense, slices, copies)
        for slices in GRANULARITIES
        if width % slices == 0
        for copies in COPIES
    )


def _choice(dense: Shape, of: Dense, slices: int, copies: int) -> Choice:
    experts = Experts(
        number=slices * copies,
        topk=slices,
        width=of.width // slices,
        latent=None,
        latent_norm=False,
        norm_behind=False,
        matrices=of.matrices,
        bias=of.bias,
        shared_width=0,
        shared_gate=False,
        router_bias=False,
    )
    layers = tuple(layer.replace("-", "E") for layer in dense.layers)
    moe = replace(dense, layers=layers, depth=dense.depth.replace("-", "E"), dense=None, experts=experts)
    counted = parameters(moe)
    flops = per_token(moe, moe.seq_length) if moe.seq_length else None
    return Choice(
        slices, experts.number, slices, experts.width, counted.total, counted.active, flops, experts.activated_share
    )
