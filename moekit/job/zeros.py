"""Exact zeros of each expert's weight gradient, after the accumulation and before the optimizer (handbook 3.7, A.1).

Under NVFP4 they are the sign of what underflows. Gradients are read where the optimizer is about to: summed over micro
batches and data parallel ranks, neither clipped nor unscaled. The distributed optimizer has a part of each summed
gradient on each rank, and each rank counts its part; without it all replicas hold all, and the first one counts.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

_WEIGHT = re.compile(r"(?:local_experts\.(\d+)\.)?linear_fc[12]\.weight(\d*)")
"""SequentialMLP's `local_experts.3.linear_fc1.weight`, the grouped layers' `linear_fc1.weight3`."""


def watch(hooked: ExitStack, optimizer: Any, samples: list[Any]) -> None:
    """Count when `optimizer` steps; `hooked` lets go of it."""
    step = optimizer.step

    def count_and_step(*arguments: Any, **named: Any) -> Any:
        for sample in samples:
            sample.measure("zeros", zeros, optimizer)
        return step(*arguments, **named)

    optimizer.step = count_and_step
    hooked.callback(delattr, optimizer, "step")


def zeros(module: Any, optimizer: Any) -> dict[str, Any]:
    """Zeros and elements by local expert, of the part of the gradients that this rank counts."""
    import samples  # type: ignore[import-not-found]
    from megatron.core import parallel_state

    owned = shards(optimizer)
    first = parallel_state.get_expert_data_parallel_rank() == 0
    count = len(module.local_expert_indices)
    found, elements = [0] * count, [0] * count
    for name, weight in module.experts.named_parameters():
        match = _WEIGHT.fullmatch(name)
        expert = None if match is None else match[1] or match[2]
        if not expert:
            if "weight" in name:
                raise samples.Refused(f"`{name}` is not the weight of one expert")
            continue
        gradient = getattr(weight, "main_grad", None)
        if gradient is None:
            raise samples.Refused(f"`{name}` has no `main_grad`")
        part = gradient.detach().reshape(-1)
        if owned is not None:
            part = part[owned.get(weight, slice(0, 0))]
        elif not first:
            part = part[:0]
        elements[int(expert)] += part.numel()
        found[int(expert)] += part.numel() - int(part.count_nonzero())
    return {"zeros": found, "elements": elements}


def shards(optimizer: Any) -> dict[Any, slice] | None:
    """Which elements of each parameter this rank updates; None where it updates all (distrib_optimizer.py:786)."""
    inner = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    if not any(hasattr(one, "model_param_gbuf_map") for one in inner):
        return None
    owned = {}
    for one in inner:
        for weight in getattr(one, "model_param_gbuf_map", {}):
            mine = one._get_model_param_range_map(weight)["param"]
            owned[weight] = slice(mine.start, mine.end)
    return owned
