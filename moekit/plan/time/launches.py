"""How many operations the host launches for a part of a layer: where kernels are short, it is what a step waits for."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.run import Facts
from moekit.plan.shape import Shape
from moekit.plan.time.communication import FLEX

_OF = {"*": (24, 26), "+": (36, 40), "G": (70, 90), "M": (60, 80), "-": (10, 12), "output": (14, 12)}
"""Launches of a part, forward and backward: read off Megatron's modules, one each for a kernel of torch, Transformer
Engine or NCCL, and several for each of a scan's many Triton kernels, which Python launches slower. They are counts of
work for Python, and one constant gives them a time."""
_UNFUSED_POSITIONS = 20, 26
"""What it adds to latent attention to turn queries and keys piece by piece."""
_EXPERTS = {"router": (30, 24), "sort": (14, 14), "exchange": (16, 14), "experts": (8, 10), "shared": (12, 12)}
_TENSOR = {"E": 2, "output": 4}
"""More of them each way where tensor-parallel ranks gather and scatter: 8 in all other parts."""
_QUANTIZED = 1.3
"""In FP8 a layer quantizes as well."""
_GRAPHED = 0.1
"""What is left of launches in a graph."""
_MODULES = {"*": ("attn",), "+": ("attn",), "G": ("attn", "mamba"), "M": ("mamba",), "-": ("mlp",)}
_EXPERT_MODULES = {"router": ("moe", "moe_router"), "sort": ("moe", "moe_preprocess"), "shared": ("moe", "moe_router")}
_GAP_S = 1.5e-6
"""Between kernels on the GPU, whoever launches them. Assumed."""
_TENSORS = {"*": 5, "+": 8, "G": 8, "M": 8, "-": 3, "E": 3}
"""Weights of a part, experts apart."""
_OF_TENSOR = 3
"""Launches of a step for each weight: its gradient cut and cast for the optimizer, its new value cast and put back
 (core/optimizer/distrib_optimizer.py, loops over parameters)."""


def launches(facts: Facts, candidates: Candidates, shape: Shape, part: str) -> dict[str, Floats]:
    """Launches of one part for a micro batch, `# (2, candidate)`, and the GPU's own gaps between kernels."""
    pieces = _pieces(facts, candidates, shape, part)
    quantized = _QUANTIZED if (facts.fp8 or facts.fp4) and part != "output" else 1.0
    host = sum((number * share for number, share in pieces), start=np.zeros((2, candidates.number)))
    kernels = sum((number for number, _ in pieces), start=np.zeros((2, candidates.number)))
    return {"launches": host * quantized, "memory": kernels * quantized * _GAP_S}


def _pieces(facts: Facts, candidates: Candidates, shape: Shape, part: str) -> list[tuple[Floats, float]]:
    """Launches of each piece of a part, and what CUDA graphs leave of them to the host."""
    one_way = np.where(candidates.tensor > 1, float(_TENSOR.get(part, 8)), 0.0)
    tensor = np.stack([one_way, one_way])
    if part == "E":
        return [*_of_experts(facts, candidates, shape), (tensor, left(facts, ("moe",)))]
    number = np.array(_OF[part], dtype=np.float64)
    if part == "+" and not facts.latent_rope_fusion:
        number = number + _UNFUSED_POSITIONS
    return [(number[:, None] + tensor, left(facts, _MODULES.get(part, ())))]


def _of_experts(facts: Facts, candidates: Candidates, shape: Shape) -> list[tuple[Floats, float]]:
    assert shape.experts is not None
    here = shape.experts.number / candidates.expert
    each = {name: np.array(pair, dtype=np.float64)[:, None] for name, pair in _EXPERTS.items()}
    # the flex dispatchers' libraries count, permute and send in a few kernels
    fewer = np.where(np.isin(candidates.dispatcher, FLEX), 0.5, 1.0)
    each["sort"] = each["sort"] * (1 if facts.permute_fusion else 2) * fewer
    each["exchange"] = each["exchange"] * fewer
    each["experts"] = each["experts"] + _of_each_expert(facts, shape.experts.bias) * np.stack([here, 2 * here])
    if not shape.experts.shared_width:
        del each["shared"]
    wide = np.ones((2, candidates.number))
    return [(number * wide, left(facts, _EXPERT_MODULES.get(name, ("moe",)))) for name, number in each.items()]


def _of_each_expert(facts: Facts, bias: bool) -> float:
    """Launches that every local expert needs forward: two multiplications from C++, and where they are in FP8 what
    quantizes, or a bias in torch; one kernel for all of them with Transformer Engine's operation fuser."""
    if facts.op_fuser:
        return 0.0
    quantized = 4.0 if facts.fp8_recipe == "tensorwise" else 2.0  # which looks for each expert's scale
    return (quantized if facts.fp4 or facts.fp8 else 0.8) + (3.0 if bias else 0.0)


def left(facts: Facts, modules: tuple[str, ...]) -> float:
    """What of a module's launches CUDA graphs leave to the host."""
    if facts.graphs == "none":
        return 1.0
    if facts.graphs == "full_iteration" or "full_iteration" in facts.graph_modules:
        return 0.0
    covered = not facts.graph_modules or any(module in facts.graph_modules for module in modules)
    return _GRAPHED if covered else 1.0


def of_step(candidates: Candidates, shape: Shape) -> Floats:
    """Launches of a step for all weights of a stage, whatever their size: `# (candidate, stage)`."""
    tensors = np.zeros(candidates.layers.shape)
    for letter, number in candidates.parts.items():
        own = np.full(candidates.number, float(_TENSORS[letter]))
        if letter == "E" and shape.experts is not None:
            own = own + 2 * shape.experts.number / candidates.expert + (2 if shape.experts.shared_width else 0)
        tensors = tensors + number * own[:, None]
    return tensors * _OF_TENSOR
