"""What Megatron does not notice of optimizers, shown."""

from __future__ import annotations

import pytest


@pytest.mark.megatron
def test_a_stack_of_experts_goes_to_adam() -> None:
    """An expert's matrix is Muon's; the tensor of all of them is sorted with embeddings and biases, Adam's."""
    import torch
    from megatron.core.optimizer.emerging_optimizers import _default_param_overrides_factory

    ((key, override),) = _default_param_overrides_factory().items()
    one, stack = torch.zeros(128, 64), torch.zeros(8, 128, 64)
    assert override == {"optimizer": "adam"}
    assert not key.predicate(one)
    assert key.predicate(stack)
