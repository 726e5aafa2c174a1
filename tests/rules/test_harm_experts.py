"""What goes wrong without a word in models that the rules on experts and their dispatch refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from harm import numbers_of

pytestmark = pytest.mark.megatron


def test_a_pattern_of_zeros_is_a_dense_model(here: Path) -> None:
    zeros, dense = numbers_of(here, ("tiny_moe.yaml", "moe: {layer_freq: '[0]*2'}\n"), ("tiny_dense.yaml", ""))
    assert zeros == dense


def test_deepep_displaces_ncclep() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=8,
        add_bias_linear=False,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="ncclep",
        moe_enable_deepep=True,
    )
    assert config.moe_flex_dispatcher_backend == "deepep"


@pytest.mark.parametrize(("factor", "kept"), [(0.0, 0), (1.0, 16)])
def test_a_capacity_of_zero_drops_every_token(factor: float, kept: int) -> None:
    """Eight tokens that go to two experts each, evenly over eight."""
    import torch
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    routing = torch.zeros(8, 8, dtype=torch.bool)
    for token in range(8):
        routing[token, [token, (token + 1) % 8]] = True
    weights, left = apply_router_token_dropping(routing / 2, routing, router_topk=2, capacity_factor=factor)
    assert int(left.sum()) == kept
    assert float(weights.sum()) == kept / 2
