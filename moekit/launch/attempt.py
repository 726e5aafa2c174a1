"""One attempt of a local run: from which step to which, by what command, and followed to its end."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moekit.job.checkpoints import Found, settle
from moekit.job.endings import ended_well
from moekit.job.hooks import end_iteration
from moekit.launch.live import Display, Follow, rows_every
from moekit.launch.processes import environment, guarded, torchrun
from moekit.launch.run_files import job_variables
from moekit.launch.rundir import RunDir, checkpointed_step, run_dir
from moekit.problems import error
from moekit.recipe.load import Loaded
from moekit.recipe.sizes import Sizes, sizes, total_steps
from moekit.watch.metrics import MetricsReader, at_end, last_step

if TYPE_CHECKING:
    from moekit.launch.docker import Container

_POLL_S = 0.5


@dataclass(frozen=True)
class Plan:
    """One attempt: from which step, to which, by what."""

    loaded: Loaded
    run: RunDir
    attempt: int
    resumes: bool
    """Whether it goes on from the run's own checkpoint."""
    start: int
    """The step it goes on from; 0 from the beginning."""
    end: int
    """The step after which it ends."""
    processes: int
    device: str
    tokens_per_step: int
    said: tuple[str, ...] = ()
    """A sentence for each of the run's checkpoints that is passed over."""
    container: Container | None = None
    """Where it trains in one."""

    @property
    def command(self) -> list[str]:
        """torchrun and all its words, from the run directory; within docker's, where it trains in a container."""
        file = self.run.argv_resume if self.resumes else self.run.argv_first
        entry = (self.run.job / "entry.py").relative_to(self.run.path)
        begin = torchrun(self.processes) if self.container is None else self.container.words()
        return [*begin, str(entry), *file.read_text(encoding="utf-8").splitlines()]


def next_attempt(loaded: Loaded, run: RunDir, container: Container | None = None) -> Plan:
    """The next attempt; its folder is made.

    Raises:
        MoekitError: the run had saved a checkpoint, and none that is complete is left.
    """
    recipe = loaded.recipe
    found = _own_checkpoint(loaded, run) if recipe.checkpoint.save else Found()
    resumes = found.folder is not None
    start = found.step if resumes else _parents_step(loaded, run)
    return Plan(
        loaded=loaded,
        run=run,
        attempt=run.new_attempt(),
        resumes=resumes,
        start=start,
        end=end_iteration(start, _total_steps(loaded), recipe.train.exit_interval),
        processes=processes(loaded),
        device=recipe.runtime.device or "gpu",
        tokens_per_step=_sizes(loaded).tokens_per_step,
        said=found.said,
        container=container,
    )


def _own_checkpoint(loaded: Loaded, run: RunDir) -> Found:
    """What a start goes on from, and what is not complete out of its way; never random weights where there was one."""
    try:
        found = settle(run.checkpoints)
    except OSError as failure:
        what = f"the checkpoints cannot be looked through: {(failure.strerror or str(failure)).lower()}"
        raise error(what, where=str(failure.filename or run.checkpoints)) from None
    if found.folder is None and (run.latest_checkpoint.exists() or _has_saved(loaded, run)):
        why = f": {'; '.join(found.said)}" if found.said else ""
        what = f"run `{run.path.name}` had saved a checkpoint, and none that is complete is left{why}"
        anew = "remove the run's folder or give another name with `--name`"
        raise error(what, f"bring one back there; or, to train from the beginning, {anew}", str(run.checkpoints))
    return found


def _has_saved(loaded: Loaded, run: RunDir) -> bool:
    """Whether earlier attempts tell of a save: one came to its end, or to a step that comes only after one."""
    steps, recipe = MetricsReader(run.path).poll(), loaded.recipe
    if not steps:
        return False
    newest = max(step.attempt for step in steps)
    if ended_well(run.attempt(newest).path, processes(loaded)):
        return True
    interval, begun = recipe.checkpoint.save_interval or 0, max(step.step for step in steps) - 1
    if recipe.checkpoint.async_save:
        begun -= interval  # one save is awaited by the next
    return interval > 0 and begun // interval * interval >= min(step.step for step in steps)


def _parents_step(loaded: Loaded, run: RunDir) -> int:
    """The step of the run that a first start goes on from, where it takes its count over."""
    checkpoint = loaded.recipe.checkpoint
    if checkpoint.from_run is None or checkpoint.finetune or loaded.recipe.moe.use_upcycling:
        return 0
    return checkpointed_step(run_dir(run.path.parents[1], checkpoint.from_run))


def _sizes(loaded: Loaded) -> Sizes:
    found = sizes(loaded.recipe)
    if found is None:
        what = "a run needs `parallel.gpus`, `train.micro_batch_size`, `train.global_batch_size` and `model.seq_length`"
        raise error(what, where=loaded.source.shown)
    return found


def _total_steps(loaded: Loaded) -> int:
    """The steps of the whole budget."""
    return total_steps(loaded.recipe) or (loaded.recipe.train.samples or 0) // _sizes(loaded).global_batch_seqs


def processes(loaded: Loaded) -> int:
    """How many training processes a recipe has."""
    return loaded.recipe.parallel.gpus or 1


def is_finished(loaded: Loaded, run: RunDir) -> bool:
    """Whether the newest attempt came to the end of training: the last step, or one where `train.exit_interval` stops.

    That all processes ended well does not say so: Megatron also exits with 0 when a signal or a time limit stops it,
    and when its data have nothing to train on. A run that saves has its end's checkpoint then.
    """
    numbers, recipe = run.numbers(), loaded.recipe
    if not numbers or not ended_well(run.attempt(numbers[-1]).path, processes(loaded)):
        return False
    saved = checkpointed_step(run)
    # without a step of its own it had only to validate what was trained and saved before it
    last = last_step(MetricsReader(run.path).poll(), numbers[-1]) or saved
    total, exit_interval = _total_steps(loaded), recipe.train.exit_interval
    if recipe.checkpoint.save and saved < end_iteration(max(last - 1, 0), total, exit_interval):
        return False
    return at_end(last, total, exit_interval, recipe.log.tensorboard_interval)


def watch(plan: Plan, lock: int, display: Display) -> Follow:
    """Run an attempt to its end and show it; what it came to. How it ended, its ranks have written."""
    recipe, folder = plan.loaded.recipe, plan.run.attempt(plan.attempt)
    if plan.container is None:
        variables = recipe.runtime.environment or {}
        env = environment(plan.device, plan.processes, plan.attempt, job_variables(recipe), variables, os.environ)
    else:
        env = plan.container.environment(plan.attempt, os.environ)
    every = rows_every(recipe.log.interval or 1, plan.end)
    follow = Follow(plan.run.path, plan.attempt, plan.end, plan.tokens_per_step, every)
    with (
        display.moving("Megatron is starting", plan.end),
        guarded(plan.command, plan.run.path, env, folder.train_log, lock) as process,
    ):
        showing = True
        try:
            while process.poll() is None:
                showing = showing and _show(follow, plan, display)
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            display.move("stopping", follow.step, None)
            raise
    if not (showing and _show(follow, plan, display)):
        follow.step = last_step(MetricsReader(plan.run.path).poll(), plan.attempt)
    return follow


def _show(follow: Follow, plan: Plan, display: Display) -> bool:
    """Print the rows that are new, and bring the moving line up to date; False where that fails, once and for all.

    Training goes on without being shown: no fault of ours in reading its files may end it.
    """
    try:
        rows = follow.poll()
        while follow.problems:
            display.fact("MaxVio", f"not shown: {follow.problems.pop(0).what}")
        for row in rows:
            display.row(row, plan.end)
        if follow.step:
            text = f"iteration {follow.step} of {plan.end}" if follow.step < plan.end else "saving and validating"
            display.move(text, follow.step, follow.left_s)
    except Exception:
        traceback.print_exc()
        display.say("training goes on, though it can no longer be shown here", "yellow")
        return False
    return True
