"""What two runs must have in common for their numbers to say something, and why they do not where they do not.

Megatron saves an upcycled model as iteration 1 without optimizer state, then trains it from iteration 0 on the data
behind the dense run's (megatron/training/training.py:2182, 2229; checkpointing.py:2499 at 0.19.2). So the dense run
goes on without its optimizer state too: step n of the MoE is step N + n of the dense one, both with the n-th learning
rate of a schedule that begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from moekit.problems import Problem
from moekit.prove.compare import LEARNING_RATE, Pair
from moekit.prove.runs import SOFTWARE, Run
from moekit.recipe.values import order, plain_values

_SHARED = ("megatron", "model", "train", "optimizer", "schedule", "precision", "data")
"""Sections of a dense run and of its MoE that must say the same ..."""
_FREE = {
    *("model.ffn_hidden_size", "data.num_workers"),
    *("train.exit_interval", "train.eval_interval", "train.eval_iters"),
}
"""... but for these, which say how long it trains, what it validates, or the width by another name."""
_WHY = {
    "train.iters": ": the order of the data depends on it, so a run ends early by `train.exit_interval`",
    "train.samples": ": the order of the data depends on it, so a run ends early by `train.exit_interval`",
}
OWN_INITIALISATION = "two such runs are no nearer than any two models: 2.72 apart at iteration 4 in handbook 2.5"


def of_one_checkpoint(dense: Run, moe: Run) -> Iterator[Problem]:
    """Why a dense run and an MoE do not go on from the same weights, over the same data, by the same schedule."""
    yield from _kinds(dense, moe)
    parent = dense.loaded.recipe.checkpoint.from_run
    upcycled = moe.loaded.recipe.moe.use_upcycling and moe.loaded.recipe.checkpoint.from_run
    if not upcycled:
        what = f"run `{moe.name}` begins from its own initialisation, so its losses show nothing here"
        hint = f"{OWN_INITIALISATION}; set `moe.use_upcycling` and `checkpoint.from_run`"
        yield Problem(_at(moe, "moe.use_upcycling"), what, hint)
    elif parent != upcycled:
        begins = f"run `{parent}`" if parent else "no run"
        what = f"run `{dense.name}` goes on from {begins}, `{moe.name}` from `{upcycled}`"
        yield Problem(_at(dense, "checkpoint.from_run"), what, "both must go on from one checkpoint")
    if not dense.loaded.recipe.checkpoint.no_load_optim:
        what = f"run `{dense.name}` takes its optimizer and schedule over, and an upcycled model begins with new ones"
        yield Problem(_at(dense, "checkpoint.no_load_optim"), what, "set `checkpoint.no_load_optim: true`")
    for run in (dense, moe):
        if run.loaded.recipe.checkpoint.finetune:
            what = f"run `{run.name}` begins the data anew"
            yield Problem(_at(run, "checkpoint.finetune"), what, "unset `checkpoint.finetune`")
    names = {name for run in (dense, moe) for name in plain_values(run.loaded.recipe)}
    shared = [name for name in names if name.partition(".")[0] in _SHARED and name not in _FREE]
    yield from _other_values(dense, moe, shared)
    yield from _other_software(dense, moe)


def _kinds(dense: Run, moe: Run) -> Iterator[Problem]:
    if dense.loaded.recipe.moe.num_experts:
        what = f"run `{dense.name}` is an MoE; the first run is the dense one, the second its MoE"
        yield Problem(_at(dense, "moe.num_experts"), what)
    if not moe.loaded.recipe.moe.num_experts:
        what = f"run `{moe.name}` has no experts; the first run is the dense one, the second its MoE"
        yield Problem(_at(moe, "moe.num_experts"), what)


def one_expert(dense: Run, moe: Run) -> Iterator[Problem]:
    """Why the second run is not the first with one expert in the place of each feed-forward layer."""
    recipe = moe.loaded.recipe
    if recipe.moe.num_experts and (recipe.moe.num_experts, recipe.router.topk) != (1, 1):
        what = f"run `{moe.name}` sends tokens to {recipe.router.topk} of {recipe.moe.num_experts} experts"
        yield Problem(_at(moe, "moe.num_experts"), what, "only one expert computes what a dense layer does")
    yield from _logged((dense, moe), zeros=True)


def slices(dense: Run, moe: Run) -> Iterator[Problem]:
    """Why a token's slices do not add up to the dense layer: that takes a function Megatron's scaling is exact for."""
    recipe = moe.loaded.recipe
    granularity = recipe.moe.upcycling_granularity or 1
    if recipe.moe.num_experts and (granularity < 2 or recipe.moe.num_experts < 2 * granularity):
        what = f"run `{moe.name}` has {recipe.moe.num_experts} experts of granularity {granularity}"
        yield Problem(_at(moe, "moe.upcycling_granularity"), what, "slices are proven with at least two copies of each")
    elif recipe.moe.num_experts and recipe.router.topk != granularity:
        what = (
            f"run `{moe.name}` sends tokens to {recipe.router.topk} experts, and {granularity} make up the dense layer"
        )
        yield Problem(_at(moe, "router.topk"), what)
    if recipe.router.pre_softmax:
        what = (
            f"run `{moe.name}` weighs experts before their choice, and Megatron then scales as if all weighed the same"
        )
        yield Problem(_at(moe, "router.pre_softmax"), what, "unset `router.pre_softmax`")
    if not recipe.model.squared_relu:
        hint = "use `model.squared_relu`: its square and one more factor make up the scale exactly, SwiGLU's do nearly"
        what = f"run `{moe.name}` has an activation for which Megatron's scaling of slices is not exact"
        yield Problem(_at(moe, "model.squared_relu", "model.swiglu"), what, hint)
    yield from _logged((dense, moe), zeros=False)


def twice(first: Run, second: Run) -> Iterator[Problem]:
    """Why two runs are not the same recipe, trained twice by the same software."""
    names = {name for run in (first, second) for name in plain_values(run.loaded.recipe)}
    yield from _other_values(first, second, names - {"summary"})
    yield from _other_software(first, second)
    yield from _logged((first, second), zeros=True)


def in_deterministic_mode(runs: Iterable[Run]) -> Iterator[Problem]:
    """Which runs are not meant to be reproducible."""
    for run in runs:
        if not run.loaded.recipe.precision.deterministic_mode:
            what = f"run `{run.name}` is not in deterministic mode, so that it repeats, or does not, shows nothing"
            yield Problem(_at(run, "precision.deterministic_mode"), what, "`--without A B` takes such runs")


def schedule(pairs: list[Pair], dense: Run, moe: Run) -> Iterator[Problem]:
    """Where the learning rates of steps that belong together differ: then the schedules are not aligned."""
    for pair in pairs:
        first, second = pair.first.get(LEARNING_RATE), pair.second.get(LEARNING_RATE)
        if first != second:
            what = (
                f"learning rates differ: {first} at `{dense.name}`'s step {pair.first_step}, {second} at `{moe.name}`'s"
            )
            yield Problem("", f"{what} step {pair.second_step}", "the schedules begin at different steps")
            return


def enough(pairs: list[Pair], wanted: int, runs: tuple[Run, Run]) -> Iterator[Problem]:
    """Where there is too little to compare."""
    if len(pairs) < wanted:
        what = f"`{runs[0].name}` and `{runs[1].name}` have {len(pairs)} steps in common, and this takes {wanted}"
        yield Problem("", what, "let both train on, or see whether the same command has more to do")


def _other_values(first: Run, second: Run, names: Iterable[str]) -> Iterator[Problem]:
    one, other = plain_values(first.loaded.recipe), plain_values(second.loaded.recipe)
    for name in sorted(names, key=order):
        if one.get(name) != other.get(name):
            said = (
                f"`{name}` is {_word(one.get(name))} in `{first.name}` and {_word(other.get(name))} in `{second.name}`"
            )
            yield Problem(_at(second, name), said + _WHY.get(name, ""), "both runs must say the same")


def _word(value: Any) -> str:
    return "unset" if value is None else str(value)


def _other_software(first: Run, second: Run) -> Iterator[Problem]:
    for name in SOFTWARE:
        one, other = first.software[name], second.software[name]
        if one != other:
            what = f"run `{first.name}` was trained with {name} {one or 'none'}, `{second.name}` with {other or 'none'}"
            yield Problem(second.shown, what, "a proof holds for one software: train both with it")


def _logged(runs: Iterable[Run], zeros: bool) -> Iterator[Problem]:
    """Which runs do not log what is compared, at every step."""
    for run in runs:
        log = run.loaded.recipe.log
        if (log.tensorboard_interval or 1) != 1:
            what = f"run `{run.name}` logs every {log.tensorboard_interval} steps, and each is compared"
            yield Problem(_at(run, "log.tensorboard_interval"), what, "set `log.tensorboard_interval: 1`")
        if zeros and not log.num_zeros_in_grad:
            what = f"run `{run.name}` does not count the zeros of its gradient"
            yield Problem(_at(run, "log.num_zeros_in_grad"), what, "set `log.num_zeros_in_grad: true`")


def _at(run: Run, *names: str) -> str:
    return run.loaded.source.where(*names)
