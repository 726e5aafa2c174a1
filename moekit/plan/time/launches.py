"""How many operations the host launches for a part of a layer: where kernels are short, it is what a step waits for."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.run import Facts
from moekit.plan.shape import Shape

_OF = {"*": (24, 26), "+": (44, 46), "G": (40, 50), "M": (24, 30), "-": (10, 12), "output": (14, 12)}
"""Launches of a part, forward and backward: read off Megatron's modules, one each for a kernel of torch, Transformer
Engine or NCCL. They are counts of work for Python, and one constant gives them a time."""
_EXPERTS = {"router": (30, 24), "sort": (14, 14), "exchange": (16, 14), "experts": (8, 10), "shared": (10, 12)}
_SYNCHRONIZED = 8
"""Launches that the GPU waits for behind a layer's exchange, whose sizes the host must read first."""
_QUANTIZED = 1.3
"""In FP8 a layer quantizes as well."""
_GRAPHED = 0.1
"""What is left of launches in a graph."""
_OF_LETTER = {"*": ("attn",), "+": ("attn",), "G": ("attn", "mamba"), "M": ("mamba",), "-": ("mlp",)}
_LAUNCH_GAP_S = 1.5e-6
"""Between kernels on the GPU, whoever launches them. Assumed."""


def launches(facts: Facts, candidates: Candidates, shape: Shape, part: str) -> dict[str, Floats]:
    """Launches of one part for a micro batch, `# (2, candidate)`, and the GPU's own gaps between kernels."""
    number = np.ones((2, candidates.number))
    eager = _expert_launches(facts, candidates, shape) if part == "E" else np.array(_OF[part])[:, None] * number
    if facts.fp8 and part != "output":
        eager = eager * _QUANTIZED
    kernels = _expert_launches(facts, candidates, shape, graphed=False) if part == "E" else eager
    if part != "E":
        eager = eager * left(facts, _OF_LETTER.get(part, ()))
    return {"launches": eager, "memory": kernels * _LAUNCH_GAP_S}


def left(facts: Facts, modules: tuple[str, ...]) -> float:
    """What of a module's launches CUDA graphs leave to the host."""
    if facts.graphs == "none":
        return 1.0
    if facts.graphs == "full_iteration" or "full_iteration" in facts.graph_modules:
        return 0.0
    covered = not facts.graph_modules or any(module in facts.graph_modules for module in modules)
    return _GRAPHED if covered else 1.0


def _expert_launches(facts: Facts, candidates: Candidates, shape: Shape, graphed: bool = True) -> Floats:
    assert shape.experts is not None
    here = shape.experts.number / candidates.expert
    each = {name: np.array(pair, dtype=np.float64)[:, None] for name, pair in _EXPERTS.items()}
    each["sort"] = each["sort"] * (1 if facts.permute_fusion else 2)
    each["experts"] = each["experts"] + np.stack([0.3 * here, 0.6 * here]) * (0.2 if facts.op_fuser else 1)
    if not shape.experts.shared_width:
        del each["shared"]
    by = {"router": ("moe", "moe_router"), "sort": ("moe", "moe_preprocess"), "shared": ("moe", "moe_router")}
    total: Floats = np.zeros((2, candidates.number))
    for name, number in each.items():
        total = total + number * (left(facts, by.get(name, ("moe",))) if graphed else 1.0)
    return total


def synchronized(facts: Facts, candidates: Candidates) -> Floats:
    """Launches for which the GPU waits in every layer with experts: `# (candidate,)`."""
    waits = 0.0 if left(facts, ("moe",)) == 0.0 or facts.pad_to_capacity else float(_SYNCHRONIZED)
    return np.full(candidates.number, waits)
