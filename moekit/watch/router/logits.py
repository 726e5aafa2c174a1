"""The logits beside a routing trace, call by call, and what is added up of them by layer.

The tracer's hook computes them anew and keeps them as bfloat16 (megatron/core/transformer/moe/router_trace.py:403).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moekit.problems import error
from moekit.watch.counts import LayerKey
from moekit.watch.router import sidecar, trace
from moekit.watch.router.grid import Grid, Layer
from moekit.watch.router.trace import Call

NO_LOGITS = "without logits"
_VALUES = 1 << 21
"""So many logits are held at once."""


class Sum(Protocol):
    """What tokens add up to, so that processes can add up their own."""

    not_finite: int
    """Tokens that are left out: their logits hold NaN or infinity."""

    def merge(self, other: Self) -> None:
        """Take in what another has added up."""


def by_layer[S: Sum](
    folder: Path,
    grid: Grid,
    of_tokens: Callable[[NDArray[Any], NDArray[Any]], S],
    skipped: Counter[str],
    workers: int | None = None,
) -> dict[Layer, S]:
    """What `of_tokens` makes of all calls in a trace's folder (`attempts/N/routing`), by layer.

    It is given logits `# (token, expert)` and chosen experts `# (token, choice)`, and has to be picklable. `skipped`
    counts the lines that are passed over, by reason; records without usable logits are `NO_LOGITS`.

    Raises:
        MoekitError: there is no logit in it.
    """
    found: dict[Layer, S] = {}
    experts = grid.experts.num_experts
    work = partial(_add_up, folder=folder, of_tokens=of_tokens, num_experts=experts)
    for stage, paths in trace_paths(folder, grid).items():
        for part, without in trace.over(paths, work, skipped, num_experts=experts, workers=workers):
            skipped.update(without)
            for key, one in part.items():
                _take_in(found, grid.layer(key, stage), one)
    if not found:
        raise error(
            "the routing trace has no logits, so no weights",
            "set `monitor.routing_trace_capture_logits` and collect a short trace (handbook A.1)",
            str(folder),
        )
    return dict(sorted(found.items()))


def trace_paths(folder: Path, grid: Grid) -> dict[int, list[Path]]:
    """The trace files that are there of ranks with different tokens, by pipeline stage."""
    found: dict[int, list[Path]] = {}
    for stage, rank in grid.tracing_ranks():
        path = folder / f"router_trace_rank{stage * grid.stage_ranks + rank}.jsonl"
        if path.is_file():
            found.setdefault(stage, []).append(path)
    return found


def _take_in[K, S: Sum](found: dict[K, S], key: K, one: S) -> None:
    if key in found:
        found[key].merge(one)
    else:
        found[key] = one


def _add_up[S: Sum](
    calls: Iterator[Call], folder: Path, of_tokens: Callable[[NDArray[Any], NDArray[Any]], S], num_experts: int
) -> tuple[dict[LayerKey, S], Counter[str]]:
    layers: dict[LayerKey, S] = {}
    without: Counter[str] = Counter()
    for call in calls:
        path = folder / f"logits_rank{call.rank}.bin"
        if call.logits is None or call.logits.width != num_experts or (one := _of_call(call, path, of_tokens)) is None:
            without[NO_LOGITS] += 1
        else:
            _take_in(layers, call.layer, one)
    return layers, without


def _of_call[S: Sum](call: Call, path: Path, of_tokens: Callable[[NDArray[Any], NDArray[Any]], S]) -> S | None:
    """A part of the tokens at a time; None where there are none, or some of their logits are not there."""
    found: dict[None, S] = {}
    for rows, part in call.logits.cut(_VALUES) if call.logits else ():
        if (logits := sidecar.load(path, part)) is None:
            return None
        good = np.isfinite(logits).all(axis=1)
        one = of_tokens(logits[good], call.experts[rows][good])
        one.not_finite += len(good) - int(good.sum())
        _take_in(found, None, one)
    return found.get(None)
