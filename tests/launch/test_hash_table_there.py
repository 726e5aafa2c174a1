from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moekit.data.hash_table.files import table_file, write_table
from moekit.data.hash_table.table import in_turns
from moekit.launch.hash_table_there import problems
from moekit.launch.run_files import job_variables
from moekit.launch.rundir import hash_table_file
from moekit.recipe.load import Loaded, load

RECIPE = """
base: first_moe
megatron: {version: d6316eb45}
moe: {num_hash_layers: 3, hash_table: even}
data: {name: words}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return load(str(tmp_path / "mine.yaml"))


def write(root: Path, experts: int = 64, topk: int = 8, tables: int = 1) -> Path:
    file = table_file(root / "data/words", "even")
    sizes = {"experts": experts, "topk": topk, "vocab_size": 100, "tables": tables}
    record = {**sizes, "method": "round-robin", "counted_tokens": 0, "max_vio": (0.0,) * tables}
    write_table(file, np.stack([in_turns(100, experts, topk)] * tables), record)
    return file


def said(loaded: Loaded, root: Path) -> list[str]:
    return [problem.what for problem in problems(loaded, root)]


def test_the_job_finds_the_table_that_the_command_writes(loaded: Loaded, tmp_path: Path) -> None:
    file = write(tmp_path)
    assert said(loaded, tmp_path) == []
    assert hash_table_file(tmp_path, loaded.recipe) == file
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    assert (run / str(job_variables(loaded.recipe)["MOEKIT_HASH_TABLE"])).resolve() == file.resolve()


def test_a_table_that_is_not_there_is_told_with_how_it_is_made(loaded: Loaded, tmp_path: Path) -> None:
    (problem,) = problems(loaded, tmp_path)
    assert problem.what.startswith("data set `words` has no hash table `even`: ")
    assert problem.hint == "`moekit data hash-table words --experts 64 --topk 8 --name even` makes one"
    assert problem.where.endswith("mine.yaml:4")
    file = write(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])  # half copied
    assert said(loaded, tmp_path)[0].startswith("data set `words` has no hash table `even`")
    file.with_suffix(".json").write_text("{}")
    assert said(loaded, tmp_path) == ["this is not what moekit writes of a table"]


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"experts": 32}, "is for 32 experts, top-8, and the recipe has 64, top-8"),
        ({"topk": 6}, "is for 64 experts, top-6, and the recipe has 64, top-8"),
        ({"tables": 2}, "has 2 tables, one for each hash layer of a GPT stack, and the recipe has 3"),
        ({"tables": 3}, None),
    ],
)
def test_a_table_for_another_model_is_refused(
    loaded: Loaded, tmp_path: Path, sizes: dict[str, int], what: str | None
) -> None:
    write(tmp_path, **sizes)
    assert said(loaded, tmp_path) == ([f"hash table `even` {what}"] if what else [])


def test_a_table_that_knows_fewer_ids_than_the_data_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "data/words/manifest.json").write_text('{"made_from": {"tokenizer.json": "0"}, "vocabulary": 101}')
    assert said(loaded, tmp_path) == ["hash table `even` knows 100 token ids, and the data has 101"]


def test_nothing_is_asked_where_no_table_is_named(tmp_path: Path) -> None:
    assert said(load("first_moe"), tmp_path) == []
