"""What recomputation adds to a micro batch: the forward pass of what was not kept, exchange and launches with it."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Floats
from moekit.plan.shape import Latent
from moekit.plan.time import parts
from moekit.plan.time.bench import ATTENTION, LAUNCHES, Bench, Work, feed_forward, norm
from moekit.plan.time.experts import expert_activation
from moekit.plan.time.mixers import latent_up

_CHECKPOINT_LAUNCHES = 20
"""Of one recomputed piece: random states saved and set, the graph cut and joined again."""


def recomputed(bench: Bench, forward: Work) -> tuple[Floats, Floats]:
    """Seconds and launches, `# (candidate, stage)`; `forward` is the stage's whole forward pass by term."""
    candidates = bench.candidates
    seconds, launches = np.zeros(candidates.layers.shape), np.zeros(candidates.layers.shape)
    for letter, number in candidates.parts.items():
        if number.any():
            for module, work in _modules(bench, letter).items():
                said = candidates.recomputed.get(module)
                if said is None or not said.any():
                    continue
                times = number * (said & (candidates.recompute == "selective"))[:, None]
                seconds = seconds + times * _forward(work)[:, None]
                again = work[LAUNCHES][0] if LAUNCHES in work else np.zeros(candidates.number)
                launches = launches + times * (again + _CHECKPOINT_LAUNCHES)[:, None]
    whole = (candidates.recompute == "full")[:, None] * _share(bench)
    everything = sum(values for term, values in forward.items() if term != LAUNCHES)
    output = _forward(parts.output(bench))[:, None] * candidates.output
    return seconds + whole * np.maximum(everything - output, 0), launches + whole * forward[LAUNCHES]


def _share(bench: Bench) -> Floats:
    """Of a stage's layers, how many full recomputation covers."""
    candidates = bench.candidates
    layers = np.maximum(candidates.layers, 1)
    some = np.minimum(candidates.recompute_layers * candidates.virtual, candidates.layers.max(1))[:, None] / layers
    return np.where((candidates.recompute_method == "block")[:, None], np.minimum(some, 1.0), 1.0)


def _forward(work: Work) -> Floats:
    """A work's forward seconds, all of it."""
    return sum((values[0] for term, values in work.items() if term != LAUNCHES), start=np.zeros(1))


def _modules(bench: Bench, letter: str) -> dict[str, Work]:
    """What each module of a part computes again, by Megatron's name of it."""
    found = {"layernorm": norm(bench)}
    if letter in "*+":
        inner = parts.work(bench, letter)
        found["core_attn"] = {ATTENTION: inner[ATTENTION]}
        if isinstance(bench.shape.attention, Latent):
            found["mla_up_proj"] = latent_up(bench)
    if letter == "-" and bench.shape.dense:
        found["mlp"] = feed_forward(bench, bench.shape.dense.width, bench.shape.dense.matrices)
    if letter == "E" and (of := bench.shape.experts):
        found["moe"] = parts.work(bench, "E")
        found["moe_act"] = expert_activation(bench, of)
        if of.shared_width:
            found["shared_experts"] = feed_forward(bench, of.shared_width, of.matrices)
    return found
