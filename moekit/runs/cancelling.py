"""A run ended on purpose."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from moekit.job.attempts import read_facts
from moekit.launch import slurm
from moekit.launch.processes import LOCK
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import load
from moekit.runs.history import running_attempt
from moekit.runs.look import Seen


def cancel_jobs(seen: Seen, save: bool, silent: Sequence[Problem]) -> str:
    """Cancel all jobs of a run; what was done, in a sentence.

    With `save` those that run are only told to save and end, as the scheduler tells them before a time limit.

    Raises:
        MoekitError: it has no job, Slurm does not answer, or its training does not save when told to.
    """
    name, live, attempt = seen.files.name, seen.state.live, running_attempt(seen)
    if silent:
        raise MoekitError(*silent)
    if not live:
        raise error(f"run `{name}` has no job to cancel: it is {seen.state.word}", where=str(seen.files.run.path))
    if save and any(not job.waiting for job in live):
        _refuse_unless_it_saves(seen)
    # a job that does not train yet, or no more, has nothing to save
    told = [job.id for job in live if save and attempt and job == seen.state.job]
    if attempt:
        _keep_from_coming_back(seen, attempt, must=bool(told))
    if ended := [job.id for job in live if job.id not in told]:
        slurm.cancel(ended)
    if told:
        slurm.cancel(told, ["--signal=TERM"])
        cancelled = f", job {', '.join(ended)} cancelled" if ended else ""
        return f"{name}: job {', '.join(told)} told to save and end{cancelled}; `moekit status {name}` says when it has"
    saved = seen.files.checkpoint
    onward = f"; `moekit resume {name}` goes on from step {saved:,}" if saved else ", and there is no checkpoint"
    return f"{name}: job {', '.join(ended)} cancelled{onward}"


def _keep_from_coming_back(seen: Seen, attempt: int, must: bool) -> None:
    """Put down, for the end of the attempt, that its job does not put itself back into the queue.

    It must where the job is only signalled; one that Slurm ends finds that out from Slurm.
    """
    folder = seen.files.run.attempt(attempt).path
    try:
        (folder / "cancelled").touch()
    except OSError as reason:
        if must and read_facts(seen.files.run.path).requeue:
            what = f"`{folder}` cannot be written: {(reason.strerror or str(reason)).lower()}"
            raise error(what, "the job would come back: `scancel` ends it") from None


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
