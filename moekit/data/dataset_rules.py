"""What must hold in a data set's description beyond its single fields: each rule yields problems at its own lines.

A field whose value could not be read is null here, so that one slip hides no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moekit.problems import Problem, shortened
from moekit.recipe import flat, nodes
from moekit.recipe.load import Source
from moekit.recipe.names import RUN_NAME

if TYPE_CHECKING:
    from moekit.data.dataset import Dataset

REQUIRED = ("name", "source", "tokenizer", "end_of_document")

NO_END = "name the tokenizer's end token: without one, documents run into each other"
MOST_TASKS = 100_000
"""Shards are numbered by five digits."""
BYTES_A_BYTE = 140
"""Memory that tokenizing takes, for each byte of text at once (measured with Llama 3's tokenizer, 52 MB of text)."""
WORKER_GIB = 0.4
"""What a worker takes besides: Python, readers, a large tokenizer (measured: 0.35 GiB)."""

REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_ON_HUB = re.compile(rf"hf://datasets/{REPOSITORY.pattern}(@[^/@\s]+)?(/(?P<path>.*))?")
_FORMATS = {"parquet": r"\.parquet", "jsonl": r"\.(jsonl|ndjson)(\.(gz|zst|bz2|xz))?"}
_HUB_FORM = "write `hf://datasets/OWNER/NAME/PATH`, or `NAME@REVISION`"


def format_of(path: str) -> str | None:
    """What a file is by how its name ends: `parquet` or `jsonl`; None where that does not say."""
    return next((name for name, ending in _FORMATS.items() if re.search(f"{ending}$", path)), None)


def problems_of(dataset: Dataset, source: Source) -> Iterator[Problem]:
    """Everything that is wrong with a description whose fields were read one by one."""
    yield from flat.missing(source, REQUIRED)
    yield from _names(dataset, source)
    yield from _sources(dataset, source)
    yield from _format(dataset, source)
    yield from _tokenizer(dataset, source)
    yield from _numbers(dataset, source)


def _names(dataset: Dataset, source: Source) -> Iterator[Problem]:
    for field in ("name", "tokenizer"):
        name = getattr(dataset, field)
        if name is not None and not RUN_NAME.fullmatch(name):
            hint = "letters, digits, `.`, `_`, `-`, at first a letter, digit or `_`: a folder is called like it"
            yield Problem(source.where(field), f"`{field}` cannot be `{shortened(name)}`", hint)
    if dataset.name and dataset.name.endswith("-sample"):
        what = f"`name` ends in `-sample`: `{shortened(dataset.name)}`"
        yield Problem(source.where("name"), what, "so are the folders of `--limit` called: choose another")
    if dataset.name == "python-docs":
        yield Problem(source.where("name"), "`name` is `python-docs`, the quickstart's own data", "choose another")


def _sources(dataset: Dataset, source: Source) -> Iterator[Problem]:
    place = source.where("source")
    for one in dataset.source or ():
        if one.startswith("hf:"):
            found = _ON_HUB.fullmatch(one)
            if not found or re.search(r"(^|/)\.{1,2}(/|$)", found["path"] or ""):
                yield Problem(place, f"`source` has `{shortened(one)}`, no place on the Hub", _HUB_FORM)
        elif found := re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", one):
            what = f"`source` has `{shortened(one)}`; moekit reads local paths and `hf://datasets/...`"
            hint = _HUB_FORM if "huggingface.co/datasets" in one else "copy it to a folder that all nodes see"
            yield Problem(place, what, hint)
        elif one.startswith("~") or "$" in one:
            yield Problem(place, f"`source` has `{shortened(one)}`, which only a shell completes", "write it out")
    if dataset.source and len(set(dataset.source)) < len(dataset.source):
        yield Problem(place, "`source` names a place twice", "its documents would be trained on twice: leave one")


def _format(dataset: Dataset, source: Source) -> Iterator[Problem]:
    """Where the format is to follow from the files' names, no name may contradict that."""
    if dataset.format or not dataset.source:
        return
    said = {format_of(one) for one in dataset.source} - {None}
    if len(said) > 1:
        what = "`source` names both parquet and jsonl files"
        yield Problem(source.where("source"), what, "a data set has one format: write two descriptions, and blend them")
    for one in dataset.source:
        ending = re.search(r"[^./]\.([A-Za-z][A-Za-z0-9]*(\.(gz|zst|bz2|xz))?)$", one)
        if ending and not format_of(one):
            what = f"`source` has `{shortened(one)}`, and `.{ending[1]}` does not say the format"
            yield Problem(
                source.where("source"), what, "say `format: parquet` or `format: jsonl`, if it is one of them"
            )


def _tokenizer(dataset: Dataset, source: Source) -> Iterator[Problem]:
    given, place = dataset.tokenizer_source, source.where("tokenizer_source")
    is_local = bool(given and given.startswith((".", "/")))
    if given and not is_local and not REPOSITORY.fullmatch(given):
        hint = "write `OWNER/NAME`, or a local folder from `/` or `./` on"
        yield Problem(place, f"`tokenizer_source` is `{shortened(given)}`, no repository of the Hub", hint)
    for field in ("tokenizer_revision", "tokenizer_copy"):
        if getattr(dataset, field) and (is_local or _is_unset("tokenizer_source", source)):
            what = f"`{field}` does nothing without a repository as `tokenizer_source`"
            yield Problem(source.where(field), what, "leave it out, or name one")
    copy = dataset.tokenizer_copy
    if copy and not REPOSITORY.fullmatch(copy):
        what = f"`tokenizer_copy` is `{shortened(copy)}`, no repository of the Hub"
        yield Problem(source.where("tokenizer_copy"), what, "write `OWNER/NAME`")


def _is_unset(name: str, source: Source) -> bool:
    node = source.find(name)
    return node is None or (isinstance(node, nodes.Scalar) and node.is_null)


def _numbers(dataset: Dataset, source: Source) -> Iterator[Problem]:
    kept = dataset.keep_fraction
    if kept is not None and not 0 < kept <= 1:
        hint = f"for {kept:g} % write `{kept / 100:g}`" if 1 < kept <= 100 else "leave it out to keep all"
        what = f"`keep_fraction` must be more than 0 and at most 1, not {kept:g}"
        yield Problem(source.where("keep_fraction"), what, hint)
    if dataset.tasks > MOST_TASKS:
        what = f"`tasks` is {dataset.tasks:,}, more than {MOST_TASKS:,}"
        yield Problem(source.where("tasks"), what, "shards are numbered by five digits")
    document_gib = BYTES_A_BYTE * dataset.max_document_mib / 1024
    least = max(1.0, round(WORKER_GIB + document_gib, 1)) * dataset.cpus_per_task
    if dataset.memory_gib < least:
        workers = f"{dataset.cpus_per_task} worker{'s' * (dataset.cpus_per_task > 1)}"
        what = (
            f"`memory_gib` is {dataset.memory_gib}: {workers} on documents of {dataset.max_document_mib} MiB need "
            f"{least:g}"
        )
        hint = "lower `cpus_per_task` or `max_document_mib`, or ask for more"
        yield Problem(source.where("memory_gib", "cpus_per_task", "max_document_mib"), what, hint)
