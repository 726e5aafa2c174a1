"""A run's directory: every path in it. `<shared_root>/runs/<name>` is the working directory of all that runs."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from moekit.job import attempts
from moekit.problems import error
from moekit.recipe.names import RUN_NAME
from moekit.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """What one start or restart leaves."""

    path: Path

    @property
    def train_log(self) -> Path:
        """Everything that torchrun and Megatron print."""
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        """One JSON line a step, written by the training process."""
        return self.path / "metrics.jsonl"

    @property
    def installed(self) -> Path:
        """What `job/` put into the training process."""
        return self.path / "installed.json"

    @property
    def software(self) -> Path:
        """Versions of what trained, and the device's name."""
        return self.path / "software.json"

    @property
    def tensorboard(self) -> Path:
        """Megatron's event files."""
        return self.path / "tensorboard"

    @property
    def routing(self) -> Path:
        """Routing traces, one file a rank."""
        return self.path / "routing"

    @property
    def diagnostics(self) -> Path:
        """What diagnostic steps saw, one file a rank."""
        return self.path / "diagnostics"

    @property
    def preflight(self) -> Path:
        """What was found of its nodes before it trained: `verdict.json`, and what that rests on."""
        return self.path / "preflight"

    @property
    def exits(self) -> Path:
        """How each rank ended, `rank<r>.json`; a rank without one was killed."""
        return self.path / "exit"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run; nobody else joins them."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe, flat and complete."""
        return self.path / "recipe.yaml"

    @property
    def argv_first(self) -> Path:
        """Megatron's arguments of the first start, one word a line."""
        return self.path / "argv.first"

    @property
    def argv_resume(self) -> Path:
        """The same for a start from the run's own checkpoint."""
        return self.path / "argv.resume"

    @property
    def end(self) -> Path:
        """Two lines: the last step of the whole training, and the multiple of steps at which it stops, or 0."""
        return self.path / "end"

    @property
    def job(self) -> Path:
        """The copy of `moekit/job/`."""
        return self.path / "job"

    @property
    def provenance(self) -> Path:
        """What made this run: versions and the recipe's hash."""
        return self.path / "provenance.json"

    @property
    def checkpoints(self) -> Path:
        """Where Megatron saves."""
        return self.path / "checkpoints"

    @property
    def latest_checkpoint(self) -> Path:
        """Megatron's file that names the last complete checkpoint's step; missing until there is one."""
        return self.checkpoints / "latest_checkpointed_iteration.txt"

    @property
    def tokens_per_expert(self) -> Path:
        """Counts of tokens that each expert received, one file a rank."""
        return self.checkpoints / "tokens_per_expert"

    @property
    def attempts(self) -> Path:
        """One folder for each start."""
        return self.path / "attempts"

    @property
    def submissions(self) -> Path:
        """What became of each submission to Slurm (`runs/submissions.py`)."""
        return self.path / "submissions"

    @property
    def jobs(self) -> Path:
        """A file for each Slurm job that started, named by its number: the job's first act."""
        return self.path / "jobs"

    def job_log(self, job: str) -> Path:
        """What a job prints outside its training, by its id."""
        return self.path / f"slurm-{job.partition(';')[0]}.log"

    def attempt(self, number: int | str) -> AttemptDir:
        """One start, from 1; the letter `N` in the arguments, where the training process puts the number in."""
        return AttemptDir(self.attempts / str(number))

    def numbers(self) -> list[int]:
        """The numbers of all starts so far, ascending."""
        return attempts.numbers(self.path)

    def new_attempt(self) -> int:
        """Make the next start's folder and return its number; two launches never get the same one."""
        return attempts.new_attempt(self.path)


def run_dir(shared_root: str | Path, name: str) -> RunDir:
    """Where the run of a name lies.

    Raises:
        MoekitError: the name could not be a folder, a job's name and a word of a command line alike.
    """
    if not RUN_NAME.fullmatch(name):
        shown = name if name.isprintable() else repr(name)
        what = f"a run cannot be named `{shown}`"
        raise error(what, "up to 100 letters, digits, `.`, `_`, `-`, at first a letter, digit or `_`: give `--name`")
    return RunDir(Path(shared_root, "runs", name))


def data_dir(shared_root: str | Path, name: str) -> Path:
    """Where a prepared data set lies."""
    return Path(shared_root, "data", name)


def tokenizer_dir(shared_root: str | Path, name: str) -> Path:
    """Where a tokenizer lies."""
    return Path(shared_root, "tokenizers", name)


def hash_table_file(shared_root: str | Path, recipe: Recipe) -> Path | None:
    """Where the table of a recipe's hash layers lies (moekit/data/hash_table/files.py); None where it names none."""
    if not recipe.moe.hash_table or not recipe.data.name:
        return None
    return data_dir(shared_root, recipe.data.name) / "hash_tables" / f"{recipe.moe.hash_table}.npy"


def checkpointed_step(run: RunDir) -> int:
    """The step of the last complete checkpoint, which Megatron names once it is whole; 0 without one."""
    folder = str(run.checkpoints)  # no `Path` below: a thousand runs are read in one go
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{folder}/latest_checkpointed_iteration.txt", encoding="utf-8") as file,  # noqa: PTH123
    ):
        step = int(file.read())
        return step if os.path.isdir(f"{folder}/iter_{step:07}") else 0  # noqa: PTH112
    return 0
