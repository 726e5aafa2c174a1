"""What a launch puts into a run's directory: arguments with the paths that it decides, and the text of every file.

A run's own paths are relative in every file: the text is the same wherever the run lies, and a dry run shows what a
launch writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import moekit
from moekit.launch.flat import flat_yaml
from moekit.launch.rundir import RunDir, data_dir, hash_table_file, run_dir, tokenizer_dir
from moekit.megatron.flags import Argument, arguments, argv
from moekit.problems import error
from moekit.recipe.load import Loaded
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import total_steps

PROJECT = "moekit"
"""The tracker project that runs are sent to."""

_FIRST_START_ONLY = ("moe.use_upcycling", "checkpoint.finetune", "checkpoint.no_load_optim", "checkpoint.no_load_rng")
"""Fields about the checkpoint a run begins from. On its own they would lose its step and optimizer, and Megatron stops
at upcycling where a checkpoint already is (megatron/training/training.py:2145 at 0.19.2)."""
_WEIGHT = re.compile(r"\d+\.?\d*|\.\d+")
"""Stands before a shard's prefix, where they are blended."""


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
