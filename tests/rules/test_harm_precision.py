"""What Megatron does not notice of number formats, shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.mark.megatron
def test_local_layers_have_no_quantized_multiplication() -> None:
    """FP8 and FP4 are Transformer Engine's: a context that its modules look at. Of local layers none is its module."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    for experts in (None, 8):
        classes = list(classes_of(get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=True)))
        assert "ColumnParallelLinear" in {each.__name__ for each in classes}
        assert [each for each in classes if "transformer_engine" in each.__module__] == []


def classes_of(spec: object) -> Iterator[type]:
    """Every class that a layer's specification names, however deep."""
    if isinstance(spec, type):
        yield spec
    elif callable(getattr(spec, "func", None)):  # functools.partial
        yield from classes_of(spec.func)  # type: ignore[attr-defined]
        for value in spec.keywords.values():  # type: ignore[attr-defined]
            yield from classes_of(value)
    elif hasattr(spec, "__dict__"):
        for value in vars(spec).values():
            yield from classes_of(value)


@pytest.mark.megatron
def test_one_copy_of_the_experts_is_scaled_again_and_again() -> None:
    """What Megatron FSDP does to gradients before a reduction, after each micro batch, in the buffer that sums them:
    over one rank the reduction itself changes nothing, and the first of two micro batches counts half."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    summed = torch.zeros(2, dtype=torch.bfloat16)
    for micro_batch in (0, 1):
        summed[micro_batch] += 1
        param_and_grad_buffer.gradient_reduce_preprocessing(summed, 1 / 2, DistributedDataParallelConfig())
    assert summed.tolist() == [1 / 4, 1 / 2]
