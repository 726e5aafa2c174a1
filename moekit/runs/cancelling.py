"""A run ended on purpose."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from moekit.launch import slurm
from moekit.launch.processes import LOCK
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import load
from moekit.runs.look import Seen


def cancel_jobs(seen: Seen, save: bool, silent: Sequence[Problem]) -> str:
    """Cancel all jobs of a run; what was done, in a sentence.

    With `save` those that run are only told to save and end, as the scheduler tells them before a time limit.

    Raises:
        MoekitError: it has no job, Slurm does not answer, or its training does not save when told to.
    """
    name, live = seen.files.name, seen.state.live
    if silent:
        raise MoekitError(*silent)
    if not live:
        raise error(f"run `{name}` has no job to cancel: it is {seen.state.word}", where=str(seen.files.run.path))
    told = [job.id for job in live if save and not job.waiting]
    if told:
        _refuse_unless_it_saves(seen)
    if ended := [job.id for job in live if job.id not in told]:
        slurm.cancel(ended)
    if told:
        slurm.cancel(told, ["--signal=TERM"])
        cancelled = f", job {', '.join(ended)} cancelled" if ended else ""
        return f"{name}: job {', '.join(told)} told to save and end{cancelled}; `moekit status {name}` says when it has"
    saved = seen.files.checkpoint
    onward = f"; `moekit resume {name}` goes on from step {saved:,}" if saved else ", and there is no checkpoint"
    return f"{name}: job {', '.join(ended)} cancelled{onward}"


def cancel_local(seen: Seen) -> str:
    """Stop a training on this machine as Ctrl-C in its terminal does; what was done, in a sentence.

    Raises:
        MoekitError: it is not running, or may not be stopped from here.
    """
    run = seen.files.run
    with contextlib.suppress(OSError, ValueError):
        if seen.files.locked:
            pid = int((run.path / LOCK).read_text())
            os.kill(pid, signal.SIGINT)
            return f"{seen.files.name}: process {pid} on this machine told to stop"
    raise error(
        f"run `{seen.files.name}` is not being trained on this machine: it is {seen.state.word}", "", str(run.path)
    )


def _refuse_unless_it_saves(seen: Seen) -> None:
    recipe = load(str(seen.files.run.recipe)).recipe
    if not recipe.resilience.exit_signal_handler or not recipe.checkpoint.save:
        wanted = "`resilience.exit_signal_handler` and `checkpoint.save`"
        what = f"run `{seen.files.name}` does not save when it is told to end: its recipe lacks {wanted}"
        raise error(what, "without `--save` it is ended at once", str(seen.files.run.recipe))
