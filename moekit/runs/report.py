"""What is said of runs: after a launch, as a list, and of one in full; as text, or as JSON for a script."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from moekit.job.endings import first_cause
from moekit.launch.several import Launched
from moekit.launch.slurm_text import Job
from moekit.problems import MoekitError, print_problems
from moekit.recipe.load import load
from moekit.runs.look import Seen
from moekit.runs.state import Files, State

if TYPE_CHECKING:
    from moekit.launch.submit import Submitted

_COLUMNS = ("RUN", "STATE", "JOB", "STEP", "CHECKPOINT", "WHEN")
_BROKE = ("failed", "out_of_memory", "killed", "node_fail", "boot_fail", "launch_failed")
"""States of a run that ended against everybody's will, and may say why."""


def say_submitted(submitted: Submitted, profile: str | None, as_json: bool) -> None:
    """Print a launch's last words."""
    print_problems(submitted.warnings)
    if as_json:
        print(json.dumps(submitted.as_json(), indent=1))
        return
    name = submitted.run.path.name
    print(f"{name}: {_submitted(submitted)}")
    print(f"  directory   {submitted.run.path}")
    print(f"  next        moekit logs -f {name}{with_profile(profile)}")


def say_several(launched: Sequence[Launched], profile: str | None, as_json: bool) -> None:
    """Print the last words of a launch of several runs: a line for each."""
    for one in launched:
        print_problems(one.submitted.warnings if one.submitted else ())
    if as_json:
        print(json.dumps([_launched_as_json(one) for one in launched], indent=1))
        return
    width = max(len(one.run.path.name) for one in launched)
    for one in launched:
        print(f"{one.run.path.name:{width}}  {_what_became(one)}")
    print(f"  directory   {launched[0].run.path.parent}")
    print(f"  next        moekit status{with_profile(profile)}")


def _what_became(launched: Launched) -> str:
    if launched.submitted:
        return _submitted(launched.submitted)
    return (
        f"is there already: {_sentence(launched.before.files, launched.before.state)}"
        if launched.before
        else "not submitted"
    )


def _submitted(submitted: Submitted) -> str:
    """A run's jobs, those it waits for, and when it starts."""
    behind = f" behind {', '.join(submitted.after)}" if submitted.after else ""
    many = "s" * (len(submitted.jobs) > 1)
    return f"job{many} {', '.join(submitted.jobs)} submitted{behind}, {_expected(submitted.first)}"


def _launched_as_json(launched: Launched) -> dict[str, Any]:
    if launched.submitted:
        return {**launched.submitted.as_json(), "submitted": True}
    if launched.before:
        return {**as_json(launched.before), "submitted": False}
    return {"run": launched.run.path.name, "directory": str(launched.run.path), "jobs": [], "submitted": False}


def with_profile(profile: str | None) -> str:
    """The words that a further command needs to find the same cluster."""
    return f" --profile {profile}" if profile and profile != os.environ.get("MOEKIT_PROFILE") else ""


def table(seen: Sequence[Seen]) -> list[str]:
    """A line for each run, below a heading."""
    rows = [_COLUMNS, *(_row(one) for one in seen)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def full(seen: Seen, profile: str | None) -> Iterator[str]:
    """All that is known of one run, a fact a line."""
    files, state = seen.files, seen.state
    yield f"{files.name}: {_sentence(files, state)}"
    yield from _facts(files, state)
    if said := _next(files, state):
        yield f"  next        {said.replace('NAME', f'{files.name}{with_profile(profile)}')}"


def as_json(seen: Seen) -> dict[str, Any]:
    """The same for a script; times in seconds since 1970."""
    files, state = seen.files, seen.state
    job = state.job
    return {
        "run": files.name,
        "state": state.word,
        "detail": state.detail or None,
        "directory": str(files.run.path),
        "on": "local" if files.local else "slurm",
        "job": job.id if job else None,
        "jobs": [one.id for one in state.live],
        "start": job.start if job else None,
        "end": job.end if job else None,
        "nodes": job.nodes or None if job else None,
        "exit_code": job.exit_code or None if job else None,
        "attempt": files.attempt or None,
        "step": files.step or None,
        "checkpoint": files.checkpoint or None,
        "total": files.total,
    }


def when(seconds: float | None) -> str:
    """A time on the clock of this machine; empty for none."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M") if seconds else ""


def distance(seconds: float) -> str:
    """How long: 40 s, 12 min, 3 h 5 min, 2 d 4 h."""
    minutes = int(abs(seconds)) // 60
    if minutes < 1:
        return f"{int(abs(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def say_problems(problems: Iterable[Any]) -> None:
    """Print what kept a command from knowing better, each thing once."""
    sys.stdout.flush()
    print_problems(list(dict.fromkeys(problems)))


def _row(seen: Seen) -> tuple[str, ...]:
    files, state = seen.files, seen.state
    step = f"{files.step:,}" if files.step else ""
    if files.total and files.attempt:
        step = f"{files.step:,}/{files.total:,}"
    checkpoint = f"{files.checkpoint:,}" if files.checkpoint else ""
    job = "local" if files.local else ", ".join(one.id for one in state.live) or (state.job.id if state.job else "")
    return files.name, state.word, job, step, checkpoint, _moment(files, state)


def _moment(files: Files, state: State) -> str:
    job = state.job
    if job and job.waiting:
        why = f" ({state.detail})" if state.detail else ""
        return f"expected {when(job.start)}{why}" if job.start else f"start not known yet{why}"
    if job and job.end:
        return f"ended {when(job.end)}"
    if job and job.start:
        return f"since {when(job.start)}"
    return when(files.time)


def _sentence(files: Files, state: State) -> str:
    job = state.job
    if job and job.waiting:
        return f"{state.word}, {_expected(job)}"
    if job and not job.ended and job.start:
        return f"{state.word} for {distance(time.time() - job.start)} on {_on(job)}"
    ended = f", ended {when(job.end)}" if job and job.end else ""
    ran = f" after {distance(job.end - job.start)}" if job and job.end and job.start and job.nodes else ""
    code = f", exit code {job.exit_code}" if job and job.exit_code not in ("", "0:0") else ""
    detail = f": {state.detail}" if state.detail else ""
    early = " before the end of training" if state.word == "completed" and files.total else ""
    return f"{state.word}{early}{detail}{ended}{ran}{code}"


def _expected(job: Job | None) -> str:
    """When a job starts, as Slurm tells it."""
    if job is None:
        return "start not known yet"
    if not job.waiting:
        return f"{job.state.lower()} on {_on(job)}"
    why = f" ({job.reason})" if job.reason else ""
    if not job.start:
        return f"start not known yet{why}"
    left_s = job.start - time.time()
    return f"expected to start {when(job.start)}{f', in {distance(left_s)}' if left_s > 0 else ''}{why}"


def _on(job: Job) -> str:
    return f"{job.node_count} node{'s' * (job.node_count > 1)}{f', {job.nodes}' if job.nodes else ''}"


def _facts(files: Files, state: State) -> Iterator[str]:
    if state.job:
        others = [one for one in state.live if one.id != state.job.id]
        more = "".join(f"; {one.id} {one.state.lower()}" for one in others)
        yield f"  job         {state.job.id}{more}"
    if files.attempt:
        of = f" of {files.total:,}" if files.total else ""
        saved = f", last complete checkpoint at step {files.checkpoint:,}" if files.checkpoint else ", no checkpoint"
        yield f"  step        {files.step:,}{of}{saved}"
        yield f"  attempt     {files.attempt}, log in {files.run.attempt(files.attempt).train_log}"
    if state.word in _BROKE and (cause := _cause(files, state)):
        yield f"  cause       {cause}"
    yield f"  directory   {files.run.path}"


def _cause(files: Files, state: State) -> str:
    """What broke, as far as the files tell."""
    if files.attempt:
        return first_cause(files.run.attempt(files.attempt).path, _processes(files))
    if state.job and (log := files.run.job_log(state.job.id)).is_file():  # it ended before training began
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""


def _processes(files: Files) -> int:
    """How many ranks the run has."""
    with contextlib.suppress(MoekitError):
        return load(str(files.run.recipe)).recipe.parallel.gpus or 1
    return len(files.exits)


def _next(files: Files, state: State) -> str:
    if files.local:
        return "" if state.word == "finished" else "the `moekit launch` that began it goes on with it"
    if state.active:
        return "moekit logs -f NAME"
    if state.word == "finished":
        return ""
    if state.word == "refused":
        return "the same launch again, once what it asks for is mended"
    begins = files.attempt and not files.checkpoint
    return "moekit resume NAME" + (" --anew, since there is no complete checkpoint" if begins else "")
