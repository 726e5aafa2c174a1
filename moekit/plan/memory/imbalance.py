"""How many rows the busiest expert-parallel rank gets over the mean: of counts, or of a MaxVio alone.

A rank's load is the sum of its experts': one that gets everything weighs less where it has quiet neighbours (at
MaxVio 7 the handbook's busiest GPU had about twice the mean, handbook 3.3).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moekit.plan.candidates import Floats, Ints
from moekit.problems import error
from moekit.watch.counts import tokens_per_expert
from moekit.watch.layout import RankLayout


def busiest_of_counts(counts: Floats, expert_ranks: Ints) -> Floats:
    """Of tokens `# (layer, expert)`, with experts placed in their order as Megatron does. `# (candidate,)`

    A rank keeps rows of all its layers, so that its layers' loads are averaged; no less than 1.
    """
    shares = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)  # (layer, expert)
    found = np.ones(len(expert_ranks))
    for ranks in np.unique(expert_ranks):
        loads = shares.reshape(len(shares), ranks, -1).mean(axis=(0, 2))  # (rank,)
        found[expert_ranks == ranks] = max(loads.max(), 1.0)
    return found


def busiest_of_violation(violation: float, experts: int, expert_ranks: Ints) -> tuple[Floats, Floats]:
    """The least and the most that a MaxVio (busiest expert over mean, less 1) can be for a rank. `# (candidate,)`

    The least: its neighbours get nothing. The most: as many experts are as busy as tokens suffice for, side by side.
    """
    load = 1 + violation
    on_rank = experts / expert_ranks
    least = np.maximum(load / on_rank, 1.0)
    most = np.minimum(load, expert_ranks)
    return least, np.maximum(most.astype(float), least)


def read_counts(path: Path, experts: int, expert_tensor: int = 1) -> Floats:
    """Tokens of the last step that is all there in a run's `tokens_per_expert` files. `# (layer, expert)`

    `path`: that folder, a run's directory, or one of the files. How many ranks shared the experts is read from the
    files, so that they may be another layout's.

    Raises:
        MoekitError: there are no counts, they cannot be read, or they are of another number of experts.
    """
    folder = _folder(path)
    files = sorted(folder.glob("rank*.jsonl"))
    if not files:
        raise error("there are no counts of tokens per expert", "Megatron writes them to `rank*.jsonl`", str(folder))
    local = _local_experts(files[0])
    if experts % local:
        what = f"each rank has {local} experts in these counts, of which {experts} are no multiple"
        raise error(what, "the counts are those of another recipe", str(files[0]))
    ranks = experts // local
    tensor = expert_tensor if len(files) % (ranks * expert_tensor) == 0 else 1
    if len(files) % (ranks * tensor):
        what = f"{len(files)} ranks have {local} experts each, which does not make {experts}"
        raise error(what, "the counts are those of another recipe, or some ranks are missing", str(folder))
    layout = RankLayout(len(files), ranks, tensor, experts)
    whole = [step for step in tokens_per_expert(folder, layout) if step.coverage.complete and step.layers]
    if not whole:
        raise error("no step has counts of all ranks", "wait for the next, or name another run", str(folder))
    return np.array(list(whole[-1].layers.values()), dtype=float)


def _folder(path: Path) -> Path:
    for folder in (path / "checkpoints" / "tokens_per_expert", path / "tokens_per_expert"):
        if folder.is_dir():
            return folder
    if path.is_file():
        return path.parent
    if path.is_dir():
        return path
    raise error("there is no such file or folder", "name a run's `tokens_per_expert`", str(path))


def _local_experts(path: Path) -> int:
    try:
        with path.open() as file:
            return len(json.loads(file.readline())["tpe"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise error("the first line has no tokens per expert", "`tpe` has one list a micro batch", str(path)) from None
