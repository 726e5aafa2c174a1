"""A run's directory: every path in it, the files that a launch puts there, and the arguments that name its paths.

`<shared_root>/runs/<name>` is the working directory of everything that runs, so its own paths are relative in every
file: the text is the same wherever it lies, and a dry run shows what a launch writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import moekit
from moekit.job import attempts
from moekit.launch.flat import flat_yaml
from moekit.megatron.flags import Argument, arguments, argv
from moekit.problems import error
from moekit.recipe.load import Loaded
from moekit.recipe.names import RUN_NAME
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import total_steps

PROJECT = "moekit"
"""The tracker project that runs are sent to."""

_FIRST_START_ONLY = ("moe.use_upcycling", "checkpoint.finetune", "checkpoint.no_load_optim", "checkpoint.no_load_rng")
"""Fields about the checkpoint a run begins from. On its own they would lose its step and optimizer, and Megatron stops
at upcycling where a checkpoint already is (megatron/training/training.py:2145 at 0.19.2)."""
_WEIGHT = re.compile(r"\d+\.?\d*|\.\d+")
"""Stands before a shard's prefix, where they are blended."""


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


def owned_arguments(recipe: Recipe, name: str, shared_root: str | Path, resume: bool) -> list[Argument]:
    """The arguments whose values the launch decides: its paths, and the run's name for the tracker.

    `resume` is for a start from the run's own checkpoint. Paths below the run directory are relative to it; those of an
    attempt say `N` where the training process puts the attempt's number in.
    """
    here, attempt = RunDir(Path()), RunDir(Path()).attempt("N")
    said: list[tuple[str, str, Iterable[object]]] = []
    if recipe.checkpoint.save:
        said.append(("checkpoint.save", "--save", [here.checkpoints]))
    if recipe.checkpoint.save and resume:
        said.append(("checkpoint.save", "--load", [here.checkpoints]))
    elif recipe.checkpoint.from_run:
        parent = run_dir(shared_root, recipe.checkpoint.from_run)
        said.append(("checkpoint.from_run", "--load", [parent.checkpoints]))
    if any(option == "--load" for _, option, _ in said) and recipe.checkpoint.exit_on_missing is None:
        # Megatron else starts from random weights, and writes over what it should have read (checkpointing.py:1700)
        said.append((said[-1][0], "--exit-on-missing-checkpoint", []))
    said += _data_arguments(recipe, shared_root)
    if recipe.monitor.routing_trace:
        said.append(("monitor.routing_trace", "--moe-routing-trace-path", [attempt.routing]))
    said += [
        ("launch", "--tensorboard-dir", [attempt.tensorboard]),
        ("launch", "--wandb-project", [PROJECT]),
        ("launch", "--wandb-exp-name", [name]),
        ("launch", "--wandb-save-dir", [f"{attempt.path}/"]),
    ]
    return [Argument(field, (option, *map(str, values))) for field, option, values in said]


def _data_arguments(recipe: Recipe, shared_root: str | Path) -> Iterable[tuple[str, str, Iterable[object]]]:
    data = recipe.data
    if data.name:
        folder = data_dir(shared_root, data.name)
        if data.shards:
            weights, prefixes = weights_and_shards(data.shards)
            paths = [folder / prefix for prefix in prefixes]
            words = [word for pair in zip(weights, paths, strict=True) for word in pair] if weights else paths
            yield "data.shards", "--data-path", words
        elif data.per_split:
            yield "data.per_split", "--per-split-data-args-path", [folder / "data-args.json"]
        else:
            yield "data.name", "--data-args-path", [folder / "data-args.txt"]
        yield "data.name", "--data-cache-path", [folder / "cache"]
    if data.tokenizer:
        yield "data.tokenizer", "--tokenizer-model", [tokenizer_dir(shared_root, data.tokenizer)]


def weights_and_shards(said: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """`data.shards` as weights, none where the shards have none, and prefixes."""
    if len(said) % 2 == 0 and all(_WEIGHT.fullmatch(word) for word in said[::2]):
        return said[::2], said[1::2]
    return (), said


def run_arguments(recipe: Recipe, name: str, shared_root: str | Path, resume: bool) -> list[Argument]:
    """All of Megatron's arguments of a run: the recipe's, then the launch's."""
    left_out = _first_start_only(recipe) if resume and recipe.checkpoint.save else set()
    said = [argument for argument in arguments(recipe) if argument.field not in left_out]
    return said + owned_arguments(recipe, name, shared_root, resume)


def _first_start_only(recipe: Recipe) -> set[str]:
    """Fields that the run's own checkpoint is loaded without; what it was saved without cannot be loaded either."""
    unsaved = {
        "checkpoint.no_load_optim": recipe.checkpoint.no_save_optim,
        "checkpoint.no_load_rng": recipe.checkpoint.no_save_rng,
    }
    return {field for field in _FIRST_START_ONLY if not unsaved.get(field)}


def is_of(run: RunDir, recipe: Recipe) -> bool:
    """Whether a run's directory holds this recipe, as it is now."""
    return run.recipe.read_text(encoding="utf-8") == flat_yaml(recipe)


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


def run_files(loaded: Loaded, name: str, shared_root: str | Path, cluster: str | None = None) -> dict[str, str]:
    """The text of every file that any run has, by its path in the run directory; the same every time.

    `cluster` is the name of the profile it is launched on, None for this machine.
    """
    recipe = flat_yaml(loaded.recipe)
    provenance = {
        "moekit": moekit.__version__,
        "megatron": loaded.recipe.megatron.version,
        "cluster": cluster,
        "recipe": loaded.name,
        "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
    }
    if loaded.group:
        provenance |= {"group": loaded.group, "compared_with": loaded.compared_with}
    here, total = RunDir(Path()), total_steps(loaded.recipe)
    return {
        str(here.recipe): recipe,
        str(here.argv_first): lines(argv(run_arguments(loaded.recipe, name, shared_root, resume=False))),
        str(here.argv_resume): lines(argv(run_arguments(loaded.recipe, name, shared_root, resume=True))),
        str(here.provenance): json.dumps(provenance, indent=2) + "\n",
        **({str(here.end): f"{total}\n{loaded.recipe.train.exit_interval or 0}\n"} if total else {}),
        **job_files(),
    }


def job_variables(recipe: Recipe) -> dict[str, str | None]:
    """What the files of `job/` do beside Megatron's options, as the variables they read (`job/entry.py`)."""
    table = hash_table_file(Path("../.."), recipe)  # a run's own paths are relative to it
    said = {
        "MOEKIT_HASH_TABLE": table,
        "MOEKIT_ROUTING_TRACE_LAST_ITERS": recipe.monitor.routing_trace_last_iters,
        "MOEKIT_DIAGNOSE_INTERVAL": recipe.monitor.diagnose_interval,
        "MOEKIT_KEEP_LAST": recipe.checkpoint.keep_last,
        "MOEKIT_KEEP_EVERY": recipe.checkpoint.keep_every,
    }
    return {name: None if value is None else str(value) for name, value in said.items()}


def job_files() -> dict[str, str]:
    """What enters the training process: the text of `moekit/job/*.py`."""
    folder = Path(moekit.__file__).parent / "job"
    sources = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    return {str(RunDir(Path()).job / path.name): path.read_text(encoding="utf-8") for path in sources}


def lines(words: Iterable[str]) -> str:
    """Words one a line, as `mapfile -t` reads them back.

    Raises:
        MoekitError: a word has a newline or a null character.
    """
    words = list(words)
    for option, word in zip(["", *words], words, strict=False):
        if "\n" in word or "\0" in word:
            what = "a newline" if "\n" in word else "a null character"
            raise error(f"`{option or word}` has {what} in its value, which no command line file carries")
    return "".join(f"{word}\n" for word in words)
