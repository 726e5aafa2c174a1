"""What it costs to let activations wait in main memory until the backward pass needs them."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Floats
from moekit.plan.shape import Grouped
from moekit.plan.time.bench import MEMORY, Bench, Work
from moekit.plan.time.experts import rows as expert_rows

_LAUNCHES = 6
"""Of one tensor, there and back: events, copies, buffers."""


def offloaded(bench: Bench, per_batch: Work, busy: Floats) -> tuple[Floats, Floats]:
    """Seconds and launches that offloading adds to a micro batch: `# (candidate, stage)`.

    Copies run beside computation: they take their bytes of the memory's bandwidth from what needs it then, and where
    the link is slower than all computation everything waits for it.
    """
    candidates = bench.candidates
    size, tensors = np.zeros(candidates.layers.shape), np.zeros(candidates.layers.shape)
    for name, (letter, width) in _inputs(bench).items():
        said = candidates.offloaded.get(name)
        if said is not None and said.any():
            of_letter = sum(
                (candidates.parts[one] for one in letter if one in candidates.parts), start=np.zeros(size.shape)
            )
            size = size + of_letter * (said * width * 2 * bench.facts.activation_offload)[:, None]
            tensors = tensors + of_letter * said[:, None]
    beside = per_batch[MEMORY] / np.maximum(busy, 1e-12)  # the share of computation that needs the memory too
    slowed = 2 * size / bench.hardware.gpu.memory * beside
    return slowed + np.maximum(2 * size / bench.hardware.gpu.host_link - busy, 0), tensors * _LAUNCHES


def _inputs(bench: Bench) -> dict[str, tuple[str, Floats]]:
    """Elements of each module's input for a micro batch, by Megatron's name, and the parts that have it."""
    hidden, of, experts = bench.shape.hidden, bench.shape.attention, bench.shape.experts
    grouped = isinstance(of, Grouped)
    query = of.heads * (of.width if isinstance(of, Grouped) else of.width + of.position_width)
    keys = 2 * of.groups * of.width if isinstance(of, Grouped) else of.heads * (of.width + of.value_width)
    value = query if grouped else of.heads * getattr(of, "value_width", 0)
    own = bench.tokens / bench.tensor
    found = {
        "attn_norm": ("*+", bench.sharded * hidden),
        "qkv_linear": ("*+", bench.sharded * hidden),
        "core_attn": ("*+", own * (query + keys)),
        "attn_proj": ("*+", own * value),
        "mlp_norm": ("-E", bench.sharded * hidden),
    }
    if experts:
        rows = expert_rows(bench, experts)
        found["expert_fc1"] = ("E", rows * (experts.latent or hidden))
        inner = experts.width / bench.candidates.expert_tensor
        found["moe_act"] = ("E", rows * (experts.matrices - 1) * inner)
        found["fused_group_mlp"] = ("E", rows * ((experts.latent or hidden) + (experts.matrices - 1) * inner))
    return found
