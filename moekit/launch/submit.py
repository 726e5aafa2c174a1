"""A run submitted to Slurm: what is missing is told first, the directory written next, and sbatch asked last.

Each step leaves files that the next command understands, wherever this one is cut off: a directory without a submission
was never submitted; a claim without an outcome says that Slurm may have the job (`runs/submissions.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.launch import provenance, slurm
from moekit.launch.checkout import look_at as look_at_checkout
from moekit.launch.data_there import PREPARED_DATA
from moekit.launch.folders import place, write
from moekit.launch.missing import as_warnings, missing, missing_secrets
from moekit.launch.rundir import RunDir, run_dir
from moekit.launch.script import slurm_files
from moekit.launch.slurm_text import Job
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import Loaded, load
from moekit.runs import submissions
from moekit.runs.history import read_history
from moekit.runs.look import Seen, look_at
from moekit.runs.state import cannot_resume

SETTLES_S = 5.0
"""The longest that Slurm may take to show a job whose sbatch was cut off."""


@dataclass(frozen=True)
class Submitted:
    """A run that Slurm has jobs of."""

    run: RunDir
    jobs: tuple[str, ...]
    """Their ids, in order."""
    first: Job | None
    """The first of them as Slurm tells it right after; None where it does not."""
    warnings: tuple[Problem, ...] = ()
    after: tuple[str, ...] = ()
    """The jobs that must have ended well before: of the run it begins from, of the index of its data."""
    exclude: tuple[str, ...] = ()
    """Nodes that Slurm is told to stay away from."""

    def as_json(self) -> dict[str, Any]:
        """What a script needs of it."""
        return {
            "run": self.run.path.name,
            "directory": str(self.run.path),
            "jobs": list(self.jobs),
            "after": list(self.after),
            "exclude": list(self.exclude),
            "state": self.first.state if self.first else None,
            "reason": self.first.reason if self.first else None,
            "start": self.first.start if self.first else None,
        }


def taken_by(name: str, cluster: Cluster) -> Problem | None:
    """Why a run cannot be called so: another has the name. One that Slurm refused does not keep it."""
    return _taken(run_dir(cluster.shared_root, name))[1]


def write_only(loaded: Loaded, name: str, cluster: Cluster) -> tuple[RunDir, list[Problem]]:
    """Write a recipe's run directory for `sbatch` by hand; what is still missing comes back as warnings.

    Raises:
        MoekitError: the name is taken, or the folder cannot be written.
    """
    run = run_dir(cluster.shared_root, name)
    if taken := _taken(run)[1]:
        raise MoekitError(taken)
    lacking = missing(loaded, cluster, os.environ)
    prepare(loaded, name, cluster, as_checked=None if lacking else True)
    return run, as_warnings(lacking)


def prepare(loaded: Loaded, name: str, cluster: Cluster, as_checked: bool | None = True) -> tuple[RunDir, int]:
    """Claim and write a run directory; it, and the number of its newest submission, for `submit_run`.

    `as_checked` says that the Megatron checkout was found to be what the recipe was checked against; None asks again.

    Raises:
        MoekitError: the name is taken, the recipe does not fit the cluster, or the folder cannot be written.
    """
    run = run_dir(cluster.shared_root, name)
    files = slurm_files(loaded, name, cluster)
    if PREPARED_DATA in (loaded.recipe.data.name, loaded.recipe.data.tokenizer):
        prepare_data(loaded, Path(cluster.shared_root))
    files = provenance.with_found(files, provenance.found_on(cluster, loaded, as_checked))
    refused, taken = _taken(run)
    if taken:
        raise MoekitError(taken)
    if refused is None:
        place(run.path, files, _remedy(name))
        return run, 0
    number, said = submissions.claim(run, refused), "written anew, and not submitted yet"
    try:
        write(run.path, files)
    except MoekitError as unwritten:
        said = unwritten.problems[0].what
        raise
    finally:
        submissions.record(run, number, "refused", said=said)
    return run, number


def submit_links(run: RunDir, newest: int, options: Sequence[str], links: int) -> Submitted:
    """Submit a run's jobs, one for each link of a chain; a refusal behind the first is a warning."""
    jobs: list[str] = []
    warnings: tuple[Problem, ...] = ()
    for link in range(links):
        try:
            jobs.append(submit_run(run, options, newest + link))
        except MoekitError as refused:
            if not jobs:
                raise
            warnings = tuple(as_warnings(list(refused.problems)))
            break
    return Submitted(run, tuple(jobs), None, warnings)


def submit_run(run: RunDir, options: Sequence[str] = (), newest: int | None = None) -> str:
    """Submit one more job of a run; its id. What comes of it is put down before and after Slurm is asked.

    `newest` is the number of the submission it follows, so that of two moekits only one submits; None: what is there.

    Raises:
        MoekitError: Slurm refuses the job, or gives no answer and has none that can be found; or another moekit is
            submitting the run.
    """
    if newest is None:
        known = submissions.read(run)
        newest = known[0].number if known else 0
    number = submissions.claim(run, newest)
    try:
        job = slurm.submit(run.path, options)
    except slurm.Unanswered as silent:
        submissions.record(run, number, "unanswered", said=silent.problems[0].what)
        return _found_again(run, number, silent.problems[0])
    except MoekitError as refused:
        submissions.record(run, number, "refused", said=refused.problems[0].what)
        raise _refused(run, refused.problems[0], options) from None
    submissions.record(run, number, "submitted", job=job)
    return job


def resume(run: RunDir, anew: bool = False, anyway: bool = False) -> Submitted:
    """Submit the next job of a run that has ended, or was never submitted, by the decision that the job itself takes.

    Where that is to stop, `anyway` goes on from the last complete checkpoint all the same, and `anew` begins anew where
    there is none. Nodes under suspicion are excluded.

    Raises:
        MoekitError: it has a job, is finished, is to stop, or would begin anew and `anew` does not say so; or what it
            was made of is no longer there.
    """
    seen, silent = settled(run, again=True)
    history = read_history(seen)
    if problem := cannot_resume(seen.files, seen.state, history.decision, anew, anyway):
        raise MoekitError(problem, *silent)
    if lacking := _lacking(run):
        raise MoekitError(*lacking)
    if history.decision and history.decision.action == "stop":
        _forgive(run, seen.files.attempt)
    without = [f"--exclude={','.join(history.exclude)}"] if history.exclude else []
    submitted = submit_links(run, seen.files.newest, without, 1)
    passed_over = tuple(Problem(str(run.checkpoints), sentence, level="warning") for sentence in history.passed_over)
    (submitted,) = looked_at([submitted])
    return replace(submitted, exclude=history.exclude, warnings=(*submitted.warnings, *passed_over))


def _forgive(run: RunDir, attempt: int) -> None:
    """Put down that a person accepts all that happened, up to the last attempt."""
    try:
        (run.attempt(attempt).path / "forgiven").touch()
    except OSError as reason:
        raise error(
            f"`{run.attempt(attempt).path}` cannot be written: {(reason.strerror or str(reason)).lower()}"
        ) from None


def _taken(run: RunDir) -> tuple[int | None, Problem | None]:
    """What lies in a run's place: the number of its newest submission if Slurm refused all of it, or a problem."""
    if not run.path.is_dir() or not any(run.path.iterdir()):
        return None, None
    name = run.path.name
    if not run.recipe.is_file():
        return None, Problem("", f"`{run.path}` already exists, and is no run", "give this one a name with `--name`")
    seen, _ = look_at(run)
    if seen.state.word == "refused" and not seen.files.attempt:
        return seen.files.newest, None
    remedy = "give this one a name with `--name`" if seen.state.word == "finished" else _remedy(name)
    return None, Problem("", f"run `{name}` exists already, and is {seen.state.word}: {run.path}", remedy)


def _remedy(name: str) -> str:
    return f"`moekit resume {name}` goes on with it; `--name` gives this one another name"


def prepare_data(loaded: Loaded, shared_root: Path) -> None:
    """Make what of a run's data and tokenizer comes with moekit, at its first use."""
    from moekit.data.quickstart import prepare_python_docs, prepare_tokenizer

    progress: Callable[[str], None] = lambda text: None  # noqa: E731
    if loaded.recipe.data.name == PREPARED_DATA:
        prepare_python_docs(shared_root, progress)
    else:
        prepare_tokenizer(shared_root, progress)


def _refused(run: RunDir, problem: Problem, options: Sequence[str]) -> MoekitError:
    asked = f"what it asks for is in {run.path}/job.sbatch, from the profile and the recipe"
    asked += "".join(f", and `{option}`" for option in options)
    return error(problem.what, "; ".join(text for text in (problem.hint, asked) if text))


def _found_again(run: RunDir, number: int, problem: Problem) -> str:
    """The job of a submission that Slurm did not answer, if it has one all the same."""
    seen, _ = look_at(run)
    for one in seen.files.submissions:
        if one.number == number and one.job:
            return one.job
    name = run.path.name
    hint = f"it may have the job all the same: `moekit status {name}` looks for it, then `moekit resume {name}` submits"
    raise error(problem.what, f"{problem.hint}; {hint}" if problem.hint else hint, str(run.path))


def settled(run: RunDir, again: bool = False) -> tuple[Seen, list[Problem]]:
    """What a run is; a job whose sbatch was cut off gets the time to show.

    A controller that hung takes what it was sent once it goes on, while it already answers other questions. `again`
    asks also for a job whose end is known.
    """
    patience = time.monotonic() + SETTLES_S
    while True:
        seen, silent = look_at(run, again)
        if seen.state.word != "lost" or time.monotonic() > patience:
            return seen, silent
        time.sleep(1)


def _lacking(run: RunDir) -> list[Problem]:
    """What a run was made of and is no longer there, or no longer the same."""
    found = provenance.read(run).get("found") or {}
    loaded = load(str(run.recipe))
    problems = missing_secrets(loaded, os.environ)
    if checkout := found.get("checkout"):
        _, other = look_at_checkout(checkout["path"], loaded.recipe.megatron.version, checkout["commit"] or "")
        problems += other
    problems += provenance.changed(found)
    return [replace(problem, where=problem.where or str(run.path)) for problem in problems]


def looked_at(submitted: Sequence[Submitted]) -> list[Submitted]:
    """Runs with their first jobs as Slurm tells them right after, asked once for all; again where it needs a moment."""
    asked = [one.jobs[0] for one in submitted]
    found: dict[str, Job] = {}
    for pause_s in (0.0, 1.0):
        time.sleep(pause_s)
        with contextlib.suppress(MoekitError):
            found = slurm.jobs(asked)
        if all(job in found and _is_placed(found[job]) for job in asked):
            break
    return [replace(one, first=found.get(one.jobs[0])) for one in submitted]


def _is_placed(job: Job) -> bool:
    """Whether a scheduler has come across a job yet."""
    return bool(job.start or job.reason or not job.waiting)
