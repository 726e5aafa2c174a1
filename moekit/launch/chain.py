"""Jobs that wait for others: a run for the one whose checkpoint it begins from, and the links of a long run.

Two kinds of `--dependency`, neither of which can leave a job pending for ever:

    singleton        a link of a chain: begins when all earlier jobs of its name have ended, however they did, goes on
                     from the last checkpoint, and ends at once where training is finished (train.sh)
    afterok:ID       begins when that job has ended well. With `--kill-on-invalid-dep=yes`, since Slurm else keeps it
                     in the queue once the other has failed. Slurm takes an id that it has forgotten for one that ended
                     well, so a dependency is only said of a job that is in the queue now

Every link of a chain that waits for another run says both: were the first cancelled, the second would begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moekit.launch.rundir import run_dir
from moekit.launch.slurm_text import number
from moekit.problems import Problem, error
from moekit.recipe.load import Loaded
from moekit.runs.look import look_at

MOST_LINKS = 100
"""Of one chain; Slurm's own limits on jobs of one user are often lower (`MaxSubmitJobs`)."""
SINGLETON = "singleton"


def options(after: Sequence[str], links: int) -> list[str]:
    """What sbatch is told of each of a run's `links` jobs, which begin once the jobs in `after` have ended well."""
    waits = [f"afterok:{number(job)}" for job in after] + ([SINGLETON] if links > 1 else [])
    if not waits:
        return []
    return [f"--dependency={','.join(waits)}", *(["--kill-on-invalid-dep=yes"] if after else [])]


def problems(loaded: Loaded, links: int) -> list[Problem]:
    """Why a recipe cannot be trained by jobs that follow each other; empty for a single job."""
    if links == 1:
        return []
    if not 1 < links <= MOST_LINKS:
        return [Problem("", f"`--chain {links}` is no number of jobs", f"1 to {MOST_LINKS}")]
    if loaded.recipe.checkpoint.save:  # and then at an interval, as a rule has it
        return []
    what = f"`{loaded.name}` saves no checkpoint, and each job of a chain goes on from the last one"
    hint = "set `checkpoint.save` and `checkpoint.save_interval`"
    return [Problem(loaded.source.where("checkpoint.save", "checkpoint"), what, hint)]


def parents_first(loaded: Sequence[Loaded]) -> list[Loaded]:
    """The runs in their order, but each behind the one whose checkpoint it begins from.

    Raises:
        MoekitError: some wait for each other.
    """
    by_name = {one.name: one for one in loaded}
    ordered: dict[str, Loaded] = {}

    def add(one: Loaded, children: tuple[str, ...]) -> None:
        if one.name in children:
            steps = " → ".join([*children, one.name])
            raise error(f"runs begin from each other's checkpoints: {steps}", where=_place(one))
        parent = one.recipe.checkpoint.from_run
        if parent in by_name:
            add(by_name[parent], (*children, one.name))
        ordered.setdefault(one.name, one)

    for one in loaded:
        add(one, ())
    return list(ordered.values())


def awaited_runs(loaded: Loaded, shared_root: str | Path) -> set[str]:
    """The run that a recipe begins from, where that has a job in the queue and no complete checkpoint yet."""
    parent = loaded.recipe.checkpoint.from_run
    return {parent} if parent and _last_job(parent, shared_root) else set()


def parents_jobs(loaded: Loaded, submitted: Mapping[str, str], shared_root: str | Path) -> list[str]:
    """The job that a run waits for: the last one of the run it begins from, of this launch or of an earlier one.

    `submitted` are the last jobs of this launch's runs, by name.
    """
    parent = loaded.recipe.checkpoint.from_run
    job = submitted.get(parent) or _last_job(parent, shared_root) if parent else None
    return [job] if job else []


def _last_job(name: str, shared_root: str | Path) -> str | None:
    """The last job in the queue of a run that has no complete checkpoint yet."""
    run = run_dir(shared_root, name)
    if not run.recipe.is_file() or run.latest_checkpoint.is_file():
        return None
    seen, _ = look_at(run)
    return seen.state.live[-1].id if seen.state.live else None


def _place(loaded: Loaded) -> str:
    return loaded.source.where("checkpoint.from_run")
