"""A data set description, `datasets/*.yaml`: which text becomes token files, with which tokenizer, and how."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from moekit import share
from moekit.data.dataset_rules import NO_END, REQUIRED, problems_of
from moekit.problems import Problem, did_you_mean, error, shortened
from moekit.recipe import flat, nodes
from moekit.recipe.load import is_there, show
from moekit.recipe.schema.markers import AtLeast

HINTS = {
    "`moekit new NAME --from first_moe` writes a recipe": "the shipped `fineweb_edu` is one to begin from",
    "a recipe is a page of YAML: is this the right file?": "a data set's description is a page of YAML",
    "a recipe is two levels": "a data set's description is one",
    "inherit with `base:`": "write the values out: a data set's description inherits from none",
    "one file holds one recipe": "one file describes one data set",
    "`moekit schema` lists every field": "`moekit schema dataset --markdown` lists every field",
}
"""What recipes are told about a text that is no plain YAML, and what a data set's description is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One data set to prepare. Null is unset."""

    name: str
    """The data set's name, as a recipe's `data.name` says it: `<shared_root>/data/<name>`."""
    source: tuple[str, ...]
    """Where the text lies: files, folders or patterns with `*`, each a local path or `hf://datasets/OWNER/NAME/PATH`
    (`NAME@REVISION` holds it at a branch, tag or commit). A path that is not absolute is taken from the folder of this
    file."""
    format: Literal["parquet", "jsonl"] | None = None
    """What the files are. Null: what their names end in."""
    text_key: str = "text"
    """The column or key that holds a document's text; `text` where nothing is said."""
    id_key: str = "id"
    """The column or key that holds a document's id, which says whether it is kept; `id` where nothing is said."""
    tokenizer: str
    """The tokenizer's name, as a recipe's `data.tokenizer` says it: `<shared_root>/tokenizers/<tokenizer>`."""
    tokenizer_source: str | None = None
    """Where `moekit data tokenizer` takes it from: a repository `OWNER/NAME` of the Hugging Face Hub, or a local folder
    from `/` or `.` on. Null: it is put there by other means."""
    tokenizer_revision: str | None = None
    """The repository's branch, tag or commit. Null: its newest."""
    tokenizer_copy: str | None = None
    """A repository with the same tokenizer that asks for no permission: named where `tokenizer_source` refuses."""
    end_of_document: str
    """The token put after each document. The same letters within a text are tokenized as text."""
    vocab_size: Annotated[int | None, AtLeast(1)] = None
    """Token ids that the tokenizer must have, added ones among them. Null: whatever it has."""
    keep_fraction: Annotated[float | None, AtLeast(0)] = None
    """Share of the documents that is kept, chosen by a hash of each document's id. Null: all."""
    tasks: Annotated[int, AtLeast(1)] = 1
    """Shards, and tasks that make them: each takes its share of the files, so there may not be more of them than files.
    One where nothing is said."""
    cpus_per_task: Annotated[int, AtLeast(1)] = 1
    """Worker processes of a task; each tokenizes one file at a time, on one thread. One where nothing is said."""
    memory_gib: Annotated[int, AtLeast(1)] = 2
    """Memory of a task: 1 GiB for each of its workers, more where `max_document_mib` is more than 4. 2 where nothing is
    said."""
    time_limit_min: Annotated[int | None, AtLeast(1)] = None
    """Minutes a task gets on Slurm. Null: the profile's `max_time_min`, else the partition's own."""
    max_running: Annotated[int | None, AtLeast(1)] = None
    """Tasks that run on Slurm at the same time. Null: as many as there is room for."""
    max_document_mib: Annotated[int, AtLeast(1)] = 4
    """Longer documents are cut into pieces of this size, at a line's end where there is one, before they are tokenized;
    the pieces' tokens follow each other as one document. 4 where nothing is said."""


def find_dataset(given: str) -> Dataset:
    """The data set description of a path or of a shipped name.

    Raises:
        MoekitError: with every problem of the file, each with its file and line.
    """
    path, shown = _find(given)
    return parse_dataset(nodes.read_text(path, shown), shown, path.absolute().parent)


def parse_dataset(text: str, shown: str, folder: Path) -> Dataset:
    """The data set that a YAML text describes, called `shown` in messages; raises like `find_dataset`.

    Local paths in it come out absolute, taken from `folder`.
    """
    dataset = flat.parse(Dataset, text, shown, problems_of, _of_a_dataset)
    local = dataset.tokenizer_source and dataset.tokenizer_source.startswith((".", "/"))
    return replace(
        dataset,
        source=tuple(one if one.startswith("hf://") else _absolute(one, folder) for one in dataset.source),
        tokenizer_source=_absolute(dataset.tokenizer_source or "", folder) if local else dataset.tokenizer_source,
    )


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / path)


def _of_a_dataset(problem: Problem) -> Problem:
    """A problem of YAML, whose hints are for recipes, in the words of a data set's description."""
    if problem.what in ("`end_of_document` is empty", "`end_of_document` is missing"):
        return replace(problem, hint=NO_END)
    if problem.hint == "write `null` to unset it" and problem.what.split("`")[1] in REQUIRED:
        return replace(problem, hint="")
    return replace(problem, hint=HINTS.get(problem.hint, problem.hint))


def shipped_datasets() -> list[str]:
    """The names under which shipped descriptions can be given."""
    return sorted(path.stem for path in share.folder("datasets").glob("*.yaml"))


def _find(given: str) -> tuple[Path, str]:
    """The file of a description, and how to call it: by its path, or by a name, here or among the shipped ones.

    Messages name a data set by its `name`, so `-` stands for `_` too.
    """
    path = Path(given)
    if is_there(path, given):
        return path, given
    files = [f"{word}.yaml" for word in dict.fromkeys((given, given.replace("-", "_")))] if "/" not in given else []
    for file in files:
        if is_there(Path(file), file):
            return Path(file), file
        if (shipped := share.folder("datasets") / file).is_file():
            return shipped, show(shipped)
    names = shipped_datasets()
    several = f"give a file, or a shipped one: {', '.join(names)}"
    hint = did_you_mean(path.stem, names) or several
    is_folder = given and path.is_dir()  # an empty path would be the working directory
    what = f"`{shortened(given)}` is a directory" if is_folder else f"there is no data set `{shortened(given)}`"
    raise error(what, hint)
