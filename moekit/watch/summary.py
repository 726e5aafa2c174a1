"""What is to be said of a run at its end: its loss, its router before and after, and where to go on.

`load_summary` reads the run directory; `moekit/watch/render.py` makes text of what it found.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moekit.problems import MoekitError
from moekit.share import program
from moekit.track.dashboard import dashboard_lines, trackio_dir
from moekit.watch.counts import IntervalCounts, LayerKey, RankLayout, tokens_per_expert
from moekit.watch.evenness import max_vio
from moekit.watch.metrics import LOSS, MetricsReader, at_end, attempts, last_step, merge

_VALIDATION = "lm loss validation"
LAST_STEPS = 10
"""The final loss is the mean of so many steps; a single one is noise."""
_WINDOW_LIMIT = 50
"""Counted iterations at either end that are kept at most, however long the run."""


@dataclass(frozen=True)
class LayerBalance:
    """One router in the first and in the last counted iterations of a run."""

    name: str
    load_before: list[int]
    load_after: list[int]
    """Tokens `# (expert,)`, added up over those iterations."""
    max_vio_before: float
    max_vio_after: float
    """Mean over those iterations."""


@dataclass(frozen=True)
class Balance:
    """The routers of a run in the first and in the last tenth of its counted iterations, at most 50 of them.

    MaxVio `before` and `after` are means over the layers.
    """

    layers: list[LayerBalance]
    max_vio_before: float
    max_vio_after: float
    iterations_before: tuple[int, int]
    iterations_after: tuple[int, int]
    """(first, last) of the window."""
    balancing: list[str]
    """Megatron's `--moe-router-load-balancing-type`; empty where no coefficient makes it act."""
    experts: int
    topk: int

    @property
    def ceiling(self) -> float:
        """MaxVio when every token goes to the same `topk` experts."""
        return self.experts / self.topk - 1


@dataclass(frozen=True)
class SummaryData:
    """Everything the summary says."""

    name: str
    run_dir: str
    attempts: int
    finished: bool
    """Whether the newest attempt came to the end of training by itself."""
    step: int
    """The newest attempt's last; what an earlier one logged beyond it is left out."""
    train_iters: int | None
    loss: list[tuple[int, float]]
    validation: list[tuple[int, float]]
    """(step, nats per token); steps without a finite value are left out."""
    final_loss: float | None
    tokens_per_s: float | None
    """All ranks together, from the median iteration."""
    tokens: int | None
    training_s: float
    """From the first to the last line of each attempt, added up: Megatron's start and the data are not in it."""
    balance: Balance | None
    missing: list[str]
    """Sentences on what is not shown, and why."""
    dashboard: list[str]
    relaunch: str

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for `--json`."""
        values = asdict(self)
        if self.balance is not None:
            values["balance"]["ceiling"] = self.balance.ceiling
        return values


def load_summary(run_dir: Path, recipe: str | None = None) -> SummaryData:
    """Read the summary of a run, whatever of it is there.

    Args:
        run_dir: `<shared_root>/runs/<name>`.
        recipe: how the next command should name the recipe; the run's own copy where None.
    """
    reader = MetricsReader(run_dir)
    steps = reader.poll()
    newest, history, args = max(attempts(run_dir), default=0), merge(steps), reader.config
    step = last_step(steps, newest) or max(history, default=0)
    history = {number: metrics for number, metrics in history.items() if number <= step}
    loss, validation = _finite(history, LOSS), _finite(history, _VALIDATION)
    missing = []
    if not loss:
        missing.append(
            "No loss was logged" + (" that is a number." if any(LOSS in m for m in history.values()) else ".")
        )
    elif skipped := sum(LOSS in metrics for metrics in history.values()) - len(loss):
        missing.append(f"The loss was not a number at {skipped} steps; they are left out.")
    if loss and not validation:
        missing.append("No validation loss was logged, so nothing is said about unseen text.")
    balance, reason = _load_balance(run_dir, args)
    missing += [reason] if reason else []
    batch_tokens = _batch_tokens(args)
    project = str(args.get("wandb_project") or "moekit")
    return SummaryData(
        name=run_dir.resolve().name,
        run_dir=str(run_dir),
        attempts=len(attempts(run_dir)),
        finished=newest in reader.finished and _at_end(step, args),
        step=step,
        train_iters=args.get("train_iters"),
        loss=loss,
        validation=validation,
        final_loss=fmean(value for _, value in loss[-LAST_STEPS:]) if loss else None,
        tokens_per_s=_tokens_per_s(history, batch_tokens),
        tokens=None if batch_tokens is None else step * batch_tokens,
        training_s=sum(last - first for first, last in reader.spans.values()),
        balance=balance,
        missing=missing,
        dashboard=dashboard_lines(trackio_dir(run_dir), project, os.environ),
        relaunch=shlex.join([program("moekit"), "launch", recipe or str(run_dir / "recipe.yaml"), "--name", "other"]),
    )


def _at_end(step: int, args: dict[str, Any]) -> bool:
    """Whether training ends at `step`; taken for granted where Megatron's arguments do not count iterations."""
    total, log_interval = args.get("train_iters"), args.get("tensorboard_log_interval")
    return not total or at_end(step, total, args.get("exit_interval"), log_interval)


def _finite(history: dict[int, dict[str, float]], name: str) -> list[tuple[int, float]]:
    found = ((step, metrics[name]) for step, metrics in history.items() if name in metrics)
    return [(step, value) for step, value in found if math.isfinite(value)]


def _batch_tokens(args: dict[str, Any]) -> int | None:
    """Tokens of one iteration."""
    batch, length = args.get("global_batch_size"), args.get("seq_length")
    return int(batch) * int(length) if batch and length else None


def _tokens_per_s(history: dict[int, dict[str, float]], batch_tokens: int | None) -> float | None:
    """From `iteration-time`, which Megatron logs at its log interval as the mean since the one before."""
    seconds = [metrics["iteration-time"] for metrics in history.values() if metrics.get("iteration-time")]
    return batch_tokens / median(seconds) if seconds and batch_tokens else None


def _load_balance(run_dir: Path, args: dict[str, Any]) -> tuple[Balance | None, str]:
    """The router's part, or why there is none; neither for a dense run."""
    try:
        layout = RankLayout.from_args(args)
        if layout is None:
            return None, "" if args else "Megatron's arguments were not recorded, so the router is not shown."
        return _balance(run_dir, layout, args)
    except MoekitError as refused:
        return None, f"The router is not shown: {refused.problems[0].what}."


def _balance(run_dir: Path, layout: RankLayout, args: dict[str, Any]) -> tuple[Balance | None, str]:
    folder = run_dir / "checkpoints" / "tokens_per_expert"
    first: list[IntervalCounts] = []
    last: deque[IntervalCounts] = deque(maxlen=_WINDOW_LIMIT)
    lost = whole = 0
    for interval in tokens_per_expert(folder, layout):
        if not interval.coverage.complete:
            lost += 1
            continue
        whole += 1
        last.append(interval)
        if len(first) < _WINDOW_LIMIT:
            first.append(interval)
    if whole < 2:
        seen = f"{whole} complete, {lost} incomplete" if whole or lost else "none"
        return None, f"Too few tokens-per-expert counts ({seen}) in `{folder}`, so the router is not shown."
    tenth = min(max(1, whole // 10), _WINDOW_LIMIT)
    before, after = first[:tenth], list(last)[-tenth:]
    layers = [_layer_balance(key, before, after) for key in before[0].layers]
    balance = Balance(
        layers=layers,
        max_vio_before=fmean(layer.max_vio_before for layer in layers),
        max_vio_after=fmean(layer.max_vio_after for layer in layers),
        iterations_before=(before[0].iteration, before[-1].iteration),
        iterations_after=(after[0].iteration, after[-1].iteration),
        balancing=_balancing(args),
        experts=layout.num_experts,
        topk=int(args.get("moe_router_topk") or 1),
    )
    return balance, f"{lost} of {lost + whole} counts lack a rank or a layer; they are left out." if lost else ""


def _balancing(args: dict[str, Any]) -> list[str]:
    kinds, coefficients = args.get("moe_router_load_balancing_type") or [], args.get("moe_aux_loss_coeff") or 0
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    return [kind for kind, factor in zip(kinds, coefficients, strict=False) if "aux_loss" not in kind or factor]


def _layer_balance(key: LayerKey, before: Sequence[IntervalCounts], after: Sequence[IntervalCounts]) -> LayerBalance:
    def load(intervals: Sequence[IntervalCounts]) -> list[int]:
        return [sum(column) for column in zip(*(interval.layers[key] for interval in intervals), strict=True)]

    def mean_max_vio(intervals: Sequence[IntervalCounts]) -> float:
        values = (max_vio(interval.layers[key]) for interval in intervals)
        return fmean([value for value in values if value is not None] or [0.0])

    return LayerBalance(key.name, load(before), load(after), mean_max_vio(before), mean_max_vio(after))
