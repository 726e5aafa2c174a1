"""How sparse an MoE can be and still be served by a pool of GPUs of its own: Step-3's bound (arXiv 2507.19427)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Server:
    """What bounds the experts' side of a deployment that splits attention and experts."""

    name: str
    fp8_tflop_s: float
    """Of one GPU, dense."""
    memory_gb_s: float
    """Of one GPU."""
    network_gb_s: float
    """Of all the GPUs of one server together."""


H800 = Server("H800", fp8_tflop_s=1979, memory_gb_s=3350, network_gb_s=8 * 50)

_TIME_PER_TOKEN_S = 0.050
"""20 tokens a second to each user."""
_TURNS = 3
"""A token's time is divided over attention, experts and the way between them."""
_BYTES_OUT, _BYTES_BACK = 1, 2
"""A value travels to the experts in FP8 and back in bf16."""


def least_activated_share(hidden: int, layers: int, server: Server = H800) -> float:
    """The least share of a layer's experts that a token may meet, shared ones counted, if experts are to be busy.

    An FP8 weight read once serves two operations a token, so an expert is bound by computing from
    `fp8_tflop_s / (2 memory_gb_s)` tokens on: the pool's batch is that over the share. In a layer's part of a turn the
    network must carry the whole batch there and back. What it carries grows with the width, and a layer's part shrinks
    with the depth. Put together here from the paper's argument; at DeepSeek-V3's width and depth it is the 0.058 that
    handbook 4 quotes.
    """
    tokens_of_an_expert = server.fp8_tflop_s * 1e12 / (2 * server.memory_gb_s * 1e9)
    layer_s = _TIME_PER_TOKEN_S / _TURNS / layers
    carried_tokens = server.network_gb_s * 1e9 * layer_s / ((_BYTES_OUT + _BYTES_BACK) * hidden)
    return tokens_of_an_expert / carried_tokens
