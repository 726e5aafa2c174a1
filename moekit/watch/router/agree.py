"""How far two runs' routers choose alike, from traces of the same tokens (handbook 4, on training and rollout)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moekit.launch.rundir import RunDir
from moekit.problems import error
from moekit.watch.metrics import attempts
from moekit.watch.router.grid import Grid, Layer, attempt_args
from moekit.watch.router.loads import Counts, disagreement
from moekit.watch.router.newest import newest_calls, traced_steps

_ALL = 1 << 62
_SAME_TOKENS = ("seq_length", "micro_batch_size", "global_batch_size", "seed", "data_path", "moe_router_topk")
_Calls = dict[Layer, Counts]
"""`# (token, choice)` of all calls of one layer on one place of the ranks, masked rows as -1."""


@dataclass(frozen=True)
class Disagreement:
    """Two numbers that are not each other's measure: a tenth of the choices may touch nearly all tokens."""

    other: str
    step: int
    choices: float
    """Share of choices, one a token and layer, whose set of experts differs."""
    tokens: float
    """Share of tokens that differ in at least one layer."""
    compared: int
    """Tokens that both traces have in all common layers."""
    layers: dict[str, float]
    """The first share, by layer."""
    left_out: int
    """Ranks' places whose records do not match: some are missing on a side."""


def disagree(run: RunDir, other: RunDir) -> Disagreement:
    """Compare the choices of two runs at the last step that both have traced.

    The traces have no token ids. Rows are taken for the same tokens where step, rank, micro batch and row are, which
    holds for two runs that read the same data in the same order; other sizes or seeds are refused.

    Raises:
        MoekitError: the runs cannot be compared, or have no traced step in common.
    """
    grids = [_grid(run), _grid(other)]
    one, two = (grid.args for grid in grids)
    if (grids[0].experts.world_size, grids[0].pipeline) != (grids[1].experts.world_size, grids[1].pipeline):
        raise error("the runs are on different numbers of ranks or stages, so rows are not the same tokens")
    for name in _SAME_TOKENS:
        if one.get(name) != two.get(name):
            raise error(f"the runs have different `--{name.replace('_', '-')}`, so rows are not the same tokens")
    folders = [_steps(run, grids[0]), _steps(other, grids[1])]
    common = folders[0].keys() & folders[1].keys()
    if not common:
        raise error(
            f"runs `{run.path.name}` and `{other.path.name}` have no traced step in common",
            "`monitor.routing_trace` traces the first steps",
        )
    step = max(common)
    found = [_places(grid, folder[step], step) for grid, folder in zip(grids, folders, strict=True)]
    return _compared(other.path.name, step, *found)


def _grid(run: RunDir) -> Grid:
    args = attempt_args(run)
    return Grid.from_args(args[max(args)])


def _steps(run: RunDir, grid: Grid) -> dict[int, Path]:
    """By traced step, the folder of the newest attempt that has it, on the first rank of any pipeline stage."""
    found: dict[int, Path] = {}
    for number in attempts(run.path):
        folder = run.attempt(number).routing
        firsts = (stage * grid.stage_ranks for stage in range(grid.pipeline))
        steps = set().union(*(traced_steps(folder / f"router_trace_rank{rank}.jsonl") for rank in firsts))
        found |= dict.fromkeys(steps, folder)
    return found


def _places(grid: Grid, folder: Path, step: int) -> dict[int, _Calls]:
    """By the rank's place in its stage, whose tokens are the same on all stages."""
    found: dict[int, dict[Layer, list[Counts]]] = {}
    for stage, rank in grid.tracing_ranks():
        path = folder / f"router_trace_rank{stage * grid.stage_ranks + rank}.jsonl"
        for at, key, chosen in newest_calls(path, grid.experts.num_experts, _ALL, step + 1, Counter()):
            if at < step:
                break
            found.setdefault(rank, {}).setdefault(grid.layer(key, stage), []).append(chosen)
    return {place: {layer: np.concatenate(calls) for layer, calls in by.items()} for place, by in found.items()}


def _compared(name: str, step: int, one: dict[int, _Calls], two: dict[int, _Calls]) -> Disagreement:
    both = sorted(one.keys() & two.keys())
    layers = sorted(set.intersection(*(one[place].keys() & two[place].keys() for place in both))) if both else []
    parts = []
    for place in both:
        sides = [[side[place][layer] for layer in layers] for side in (one, two)]
        if len({calls.shape for side in sides for calls in side}) == 1:
            parts.append([np.stack(side, axis=1) for side in sides])  # (token, layer, choice)
    if not parts:
        raise error(f"no rank's records of step {step} match in both runs: some are missing on a side")
    left, right = (np.concatenate(side) for side in zip(*parts, strict=True))
    tokens = (left >= 0).all(axis=(1, 2)) & (right >= 0).all(axis=(1, 2))
    left, right = left[tokens], right[tokens]
    by_layer = {layer.name: disagreement(left[:, [n]], right[:, [n]])[0] for n, layer in enumerate(layers)}
    left_out = len(one.keys() | two.keys()) - len(parts)
    return Disagreement(name, step, *disagreement(left, right), len(left), by_layer, left_out)
