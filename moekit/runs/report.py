"""What is said of runs: after a launch, as a list, and of one in full; as text, or as JSON for a script."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from moekit.launch.several import Launched
from moekit.launch.slurm_text import Job, number
from moekit.problems import print_problems
from moekit.runs.look import Seen
from moekit.runs.state import Files, State

if TYPE_CHECKING:
    from moekit.launch.submit import Submitted
    from moekit.runs.history import History

_BROKE = ("failed", "out_of_memory", "node_fail", "boot_fail", "launch_failed")
"""States of a job that may have ended before its training began."""
_COLUMNS = ("RUN", "STATE", "JOB", "STEP", "CHECKPOINT", "WHEN")


def say_submitted(submitted: Submitted, profile: str | None, as_json: bool, data: Sequence[str] = ()) -> None:
    """Print a launch's last words; `data` are sentences on how often it reads its data."""
    print_problems(submitted.warnings)
    if as_json:
        print(json.dumps(submitted.as_json(), indent=1))
        return
    name = submitted.run.path.name
    print(f"{name}: {_submitted(submitted)}")
    if submitted.exclude:
        print(f"  excluded    {', '.join(submitted.exclude)}")
    for sentence in data:
        print(f"  data        {sentence}")
    print(f"  directory   {submitted.run.path}")
    print(f"  metrics     moekit track {name}{with_profile(profile)}")
    print(f"  next        moekit logs -f {name}{with_profile(profile)}")


def say_several(launched: Sequence[Launched], profile: str | None, as_json: bool, data: Sequence[str] = ()) -> None:
    """Print the last words of a launch of several runs: a line for each, and `data` as for one."""
    for one in launched:
        print_problems(one.submitted.warnings if one.submitted else ())
    if as_json:
        print(json.dumps([_launched_as_json(one) for one in launched], indent=1))
        return
    width = max(len(one.run.path.name) for one in launched)
    for one in launched:
        print(f"{one.run.path.name:{width}}  {_what_became(one)}")
    for sentence in data:
        print(f"  data        {sentence}")
    print(f"  directory   {launched[0].run.path.parent}")
    print(f"  metrics     moekit track --all{with_profile(profile)}")
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


def headline(seen: Seen) -> str:
    """What a run is, in a line."""
    return f"{seen.files.name}: {_sentence(seen.files, seen.state)}"


def full(seen: Seen, history: History, profile: str | None) -> Iterator[str]:
    """All that is known of one run, a fact a line."""
    yield headline(seen)
    yield from _facts(seen, history)
    if command := next_command(seen, history, profile):
        yield f"  next        {command}"


def as_json(seen: Seen) -> dict[str, Any]:
    """What is known of a run, for a script; times in seconds since 1970."""
    files, state = seen.files, seen.state
    job = state.job
    return {
        "run": files.name,
        "state": state.word,
        "detail": state.detail or None,
        "directory": str(files.run.path),
        "on": _where(files),
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
    job = (
        _where(files) if files.local else ", ".join(one.id for one in state.live) or (state.job.id if state.job else "")
    )
    return files.name, state.word, job, step, checkpoint, _moment(files, state)


def _where(files: Files) -> str:
    return "hf-jobs" if files.elsewhere else "local" if files.local else "slurm"


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
        again = f" again, after attempt {files.attempt}" if number(job.id) in files.started else ""
        return f"{state.word}{again}, {_expected(job)}"
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


def _facts(seen: Seen, history: History) -> Iterator[str]:
    files, state = seen.files, seen.state
    if state.job:
        others = [one for one in state.live if one.id != state.job.id]
        more = "".join(f"; {one.id} {one.state.lower()}" for one in others)
        yield f"  job         {state.job.id}{more}"
    if files.attempt:
        of = f" of {files.total:,}" if files.total else ""
        saved = f", last complete checkpoint at step {files.checkpoint:,}" if files.checkpoint else ", no checkpoint"
        yield f"  step        {files.step:,}{of}{saved}"
        yield f"  attempt     {files.attempt}, log in {files.run.attempt(files.attempt).train_log}"
    if cause := _cause(seen, history):
        yield f"  cause       {cause}"
    if history.exclude:
        yield f"  excluded    {', '.join(history.exclude)}"
    yield f"  directory   {files.run.path}"


def _cause(seen: Seen, history: History) -> str:
    """Why a run stands still: what it was decided by, else how its last attempt ended."""
    files, state = seen.files, seen.state
    if state.active or state.word == "finished":
        return ""
    if history.decision and history.decision.action == "stop":
        return history.decision.sentence
    if history.starts:
        last = history.starts[-1]
        return "" if last.attempt.ending.kind == "ended" else last.cause
    if (
        state.word in _BROKE and state.job and (log := files.run.job_log(state.job.id)).is_file()
    ):  # before training began
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""


def next_command(seen: Seen, history: History, profile: str | None) -> str:
    """What one does next with a run, to be typed as it is where that is a command; empty where there is nothing."""
    files, state, decision = seen.files, seen.state, history.decision
    name = f"{files.name}{with_profile(profile)}"
    if state.word == "finished" or (decision and decision.action == "finished"):
        return ""
    if files.local:
        return "the `moekit launch` that began it goes on with it"
    if state.active:
        return f"moekit logs -f {name}"
    if state.word == "refused":
        return "the same launch again, once what it asks for is mended"
    if files.attempt and decision and not decision.step:
        return f"moekit resume {name} --anew, since there is no complete checkpoint"
    if decision and decision.action == "stop":
        return f"moekit resume {name} --anyway, once the cause is gone"
    return f"moekit resume {name}"
