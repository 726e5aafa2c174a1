"""Whether the token-to-expert table that a recipe names is there, and made for its experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moekit.data.hash_table.files import Record, read_record
from moekit.data.named import facts_of
from moekit.launch.rundir import hash_table_file
from moekit.problems import MoekitError, Problem
from moekit.recipe.load import Loaded


def problems(loaded: Loaded, shared_root: Path) -> Iterator[Problem]:
    """What keeps `moe.hash_table` from being put into the run's hash layers; nothing where none is named."""
    recipe, file = loaded.recipe, hash_table_file(shared_root, loaded.recipe)
    if file is None:
        return
    try:
        record = read_record(file)
    except MoekitError as unreadable:
        yield from unreadable.problems
        return
    place = loaded.source.where("moe.hash_table")
    sizes = f"--experts {recipe.moe.num_experts} --topk {recipe.router.topk}"
    hint = f"`moekit data hash-table {recipe.data.name} {sizes} --name NAME` makes one that fits"
    if record is None:
        what = f"data set `{recipe.data.name}` has no hash table `{file.stem}`: {file}"
        yield Problem(place, what, hint.replace("NAME", file.stem).replace(" that fits", ""))
        return
    for what in _misfits(loaded, record, facts_of(file.parent.parent).vocab_size):
        yield Problem(place, f"hash table `{file.stem}` {what}", hint)


def _misfits(loaded: Loaded, record: Record, vocab_size: int | None) -> Iterator[str]:
    """Why a table is not for this recipe, each a clause about it."""
    recipe = loaded.recipe
    said, wanted = (record.experts, record.topk), (recipe.moe.num_experts, recipe.router.topk)
    if said != wanted:
        yield f"is for {said[0]} experts, top-{said[1]}, and the recipe has {wanted[0]}, top-{wanted[1]}"
    layers = recipe.moe.num_hash_layers or 0
    if record.tables > 1 and (record.tables != layers or recipe.model.stack == "hybrid"):
        yield f"has {record.tables} tables, one for each hash layer of a GPT stack, and the recipe has {layers}"
    if vocab_size is not None and record.vocab_size < vocab_size:
        yield f"knows {record.vocab_size:,} token ids, and the data has {vocab_size:,}"
