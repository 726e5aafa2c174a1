"""What one part of a layer does with one micro batch on one GPU, in seconds forward and backward, by term."""

from __future__ import annotations

import numpy as np

from moekit.plan.time import gemm as on_gpu
from moekit.plan.time.bench import DENSE, Bench, Work, feed_forward, norm, residual, total
from moekit.plan.time.experts import experts_of_layer
from moekit.plan.time.launches import launches
from moekit.plan.time.mixers import delta, grouped, latent, mamba


def work(bench: Bench, letter: str) -> Work:
    """All of one part (`moekit.plan.shape`), with the norm before and the sum behind it."""
    inner = {"*": grouped, "+": latent, "G": delta, "M": mamba, "-": _dense, "E": experts_of_layer}[letter]
    return total(
        inner(bench), norm(bench), residual(bench), launches(bench.facts, bench.candidates, bench.shape, letter)
    )


def _dense(bench: Bench) -> Work:
    of = bench.shape.dense
    assert of is not None
    return feed_forward(bench, of.width, of.matrices)


def output(bench: Bench) -> Work:
    """The output layer in bf16, and the loss over a vocabulary's scores."""
    hidden, own = bench.shape.hidden, bench.shape.rows / bench.tensor
    wide, deep = own, np.full(bench.candidates.number, float(hidden))
    scores = bench.tokens * own
    forward, backward = {"te": (4, 4), "native": (18, 8)}.get(bench.facts.cross_entropy, (34, 14))
    return total(
        {DENSE: on_gpu.linear(bench.hardware, "bf16", bench.tokens, wide, deep, 1, bench.facts.grad_bytes)},
        bench.moved(scores * forward, scores * backward),
        bench.gathers(hidden),
        norm(bench),
        launches(bench.facts, bench.candidates, bench.shape, "output"),
    )


def depth(bench: Bench) -> Work:
    """One prediction depth: three norms, the projection of state and token, a layer, the output layer again."""
    hidden = bench.shape.hidden
    return total(
        *[norm(bench)] * 3,
        bench.linear(bench.tokens, hidden / bench.tensor, 2 * hidden),
        bench.gathers(hidden),
        *[work(bench, letter) for letter in bench.shape.depth],
        output(bench),
    )
