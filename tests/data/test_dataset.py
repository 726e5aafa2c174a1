"""Data set descriptions: what is read, what is refused, and in which words."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from moekit import share
from moekit.data import dataset, dataset_schema
from moekit.data.dataset import Dataset, find_dataset, parse_dataset, shipped_datasets
from moekit.data.dataset_rules import format_of
from moekit.problems import MoekitError
from moekit.recipe import build, nodes
from moekit.recipe.load import load

LEAST = {
    "name": "mine",
    "source": "text.parquet",
    "tokenizer": "small",
    "end_of_document": "<|end|>",
}
HUB = "hf://datasets/ours/text"
FORM = "write `hf://datasets/OWNER/NAME/PATH`, or `NAME@REVISION`"
NAME = "letters, digits, `.`, `_`, `-`, at first a letter, digit or `_`: a folder is called like it"
UNENDED = "name the tokenizer's end token: without one, documents run into each other"
SMALLER = "lower `cpus_per_task` or `max_document_mib`, or ask for more"


def parse(**changes: str | None) -> Dataset:
    lines = [f"{key}: {value}" for key, value in {**LEAST, **changes}.items() if value is not None]
    return parse_dataset("\n".join(lines) + "\n", "d", Path("/here"))


def test_only_what_cannot_be_guessed_is_needed() -> None:
    found = parse()
    assert found.source == ("/here/text.parquet",)
    assert (found.text_key, found.id_key, found.format, found.keep_fraction) == ("text", "id", None, None)
    assert (found.tasks, found.cpus_per_task, found.memory_gib, found.vocab_size) == (1, 1, 2, None)


REFUSED = [
    ({"name": None}, ["1: `name` is missing"]),
    ({"name": '""'}, ["1: `name` is empty"]),
    ({"name": "null"}, ["1: `name` is missing"]),
    ({"name": "a/b"}, ["1: `name` cannot be `a/b`", NAME]),
    ({"name": ".."}, ["1: `name` cannot be `..`", NAME]),
    ({"name": "-x"}, ["1: `name` cannot be `-x`", NAME]),
    ({"name": "x" * 101}, [f"1: `name` cannot be `{'x' * 57}...`", NAME]),
    ({"name": "mine-sample"}, ["1: `name` ends in `-sample`: `mine-sample`",
                               "so are the folders of `--limit` called: choose another"]),
    ({"name": "python-docs"}, ["1: `name` is `python-docs`, the quickstart's own data", "choose another"]),
    ({"tokenizer": "a b"}, ["3: `tokenizer` cannot be `a b`", NAME]),
    ({"tokenizer": None}, ["1: `tokenizer` is missing"]),
    ({"source": None}, ["1: `source` is missing"]),
    ({"source": "[]"}, ["2: `source` is an empty list"]),
    ({"source": '""'}, ["2: `source` is empty"]),
    ({"source": '[a.parquet, ""]'}, ["2: `source` is empty"]),
    ({"source": '"a\\nb"'}, ["2: `source` has a newline, which no command line carries"]),
    ({"source": '"a\\0b"'}, ["2: `source` has a control character ('\\x00'), which no command line carries"]),
    ({"source": "hf://ours/text"}, ["2: `source` has `hf://ours/text`, no place on the Hub", FORM]),
    ({"source": "hf://datasets/text"}, ["2: `source` has `hf://datasets/text`, no place on the Hub", FORM]),
    ({"source": f"{HUB}/../x"}, [f"2: `source` has `{HUB}/../x`, no place on the Hub", FORM]),
    ({"source": f"{HUB}@/x"}, [f"2: `source` has `{HUB}@/x`, no place on the Hub", FORM]),
    ({"source": "https://huggingface.co/datasets/a/b"},
     ["2: `source` has `https://huggingface.co/datasets/a/b`; moekit reads local paths and `hf://datasets/...`", FORM]),
    ({"source": "s3://a/b"}, ["2: `source` has `s3://a/b`; moekit reads local paths and `hf://datasets/...`",
                              "copy it to a folder that all nodes see"]),
    ({"source": "~/text"}, ["2: `source` has `~/text`, which only a shell completes", "write it out"]),
    ({"source": "$HOME/text"}, ["2: `source` has `$HOME/text`, which only a shell completes", "write it out"]),
    ({"source": "[a.parquet, a.parquet]"}, ["2: `source` names a place twice",
                                            "its documents would be trained on twice: leave one"]),
    ({"source": "[a.parquet, b.jsonl]"}, ["2: `source` names both parquet and jsonl files",
                                          "a data set has one format: write two descriptions, and blend them"]),
    ({"source": "a.csv"}, ["2: `source` has `a.csv`, and `.csv` does not say the format",
                           "say `format: parquet` or `format: jsonl`, if it is one of them"]),
    ({"format": "json"}, ["5: `format` must be one of parquet, jsonl, not `json`", "did you mean `jsonl`?"]),
    ({"end_of_document": '""'}, ["4: `end_of_document` is empty", UNENDED]),
    ({"end_of_document": "null"}, ["4: `end_of_document` is missing", UNENDED]),
    ({"end_of_document": None}, ["1: `end_of_document` is missing", UNENDED]),
    ({"tokenizer_source": "meta"}, ["5: `tokenizer_source` is `meta`, no repository of the Hub",
                                    "write `OWNER/NAME`, or a local folder from `/` or `./` on"]),
    ({"tokenizer_source": "--help/x"}, ["5: `tokenizer_source` is `--help/x`, no repository of the Hub",
                                        "write `OWNER/NAME`, or a local folder from `/` or `./` on"]),
    ({"tokenizer_source": "a/b", "tokenizer_copy": "./c"}, ["6: `tokenizer_copy` is `./c`, no repository of the Hub",
                                                            "write `OWNER/NAME`"]),
    ({"tokenizer_revision": "main"},
     ["5: `tokenizer_revision` does nothing without a repository as `tokenizer_source`", "leave it out, or name one"]),
    ({"tokenizer_source": "/t", "tokenizer_copy": "a/b"},
     ["6: `tokenizer_copy` does nothing without a repository as `tokenizer_source`", "leave it out, or name one"]),
    ({"keep_fraction": "0"}, ["5: `keep_fraction` must be more than 0 and at most 1, not 0",
                              "leave it out to keep all"]),
    ({"keep_fraction": "7.4"}, ["5: `keep_fraction` must be more than 0 and at most 1, not 7.4",
                                "for 7.4 % write `0.074`"]),
    ({"keep_fraction": "-1"}, ["5: `keep_fraction` must be at least 0, not -1"]),
    ({"keep_fraction": ".nan"}, ["5: `keep_fraction` must be a number, not `.nan`"]),
    ({"keep_fraction": "7.4%"}, ["5: `keep_fraction` must be a number, not `7.4%`"]),
    ({"tasks": "0"}, ["5: `tasks` must be at least 1, not 0"]),
    ({"tasks": "100001"}, ["5: `tasks` is 100,001, more than 100,000", "shards are numbered by five digits"]),
    ({"cpus_per_task": "12"}, ["5: `memory_gib` is 2: 12 workers on documents of 4 MiB need 12", SMALLER]),
    ({"max_document_mib": "50"}, ["5: `memory_gib` is 2: 1 worker on documents of 50 MiB need 7.2", SMALLER]),
    ({"memory_gib": "2.5"}, ["5: `memory_gib` must be an integer, not `2.5`"]),
    ({"vocab_size": "0"}, ["5: `vocab_size` must be at least 1, not 0"]),
    ({"task": "3"}, ["5: unknown field `task`", "did you mean `tasks`?"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_is_refused(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(MoekitError) as refused:
        parse(**changes)
    assert str(refused.value) == f"d:{said[0]}" + "".join(f"\n    hint: {hint}" for hint in said[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"source": HUB},
        {"source": f"{HUB}@refs%2Fconvert%2Fparquet/a/*.parquet"},
        {"source": f"{HUB}@v1/data/**/*.jsonl.zst"},
        {"source": "[/a b/ü, ../c]"},
        {"source": "/data/CC-MAIN-2013.20"},
        {"source": "a.txt", "format": "jsonl"},
        {"keep_fraction": "1"},
        {"keep_fraction": "1e-6"},
        {"text_key": "text", "id_key": "text"},
        {"tokenizer_source": "./a/b"},
        {"cpus_per_task": "12", "memory_gib": "12"},
    ],
)
def test_what_is_taken(changes: dict[str, str]) -> None:
    assert parse(**changes).name == "mine"


def test_all_problems_come_at_once_in_their_order() -> None:
    with pytest.raises(MoekitError) as refused:
        parse(name="a b", tasks="x", keep_fraction="3", source="~x", colour="red")
    assert [problem.where for problem in refused.value.problems] == ["d:1", "d:2", "d:5", "d:6", "d:7"]


def test_local_paths_are_taken_from_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    text = "\n".join(f"{key}: {value}" for key, value in LEAST.items())
    (tmp_path / "in/d.yaml").write_text(
        f"{text}\ntokenizer_source: ../tok\n".replace("text.parquet", "[x/*.parquet, /y]")
    )
    monkeypatch.chdir(tmp_path)
    found = find_dataset("in/d.yaml")
    assert found.source == (f"{tmp_path}/in/x/*.parquet", "/y")
    assert found.tokenizer_source == f"{tmp_path}/tok"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a.parquet", "parquet"),
        (f"{HUB}/a/*.parquet", "parquet"),
        ("a.jsonl", "jsonl"),
        ("a.b.jsonl.zst", "jsonl"),
        ("a.jsonl.gz", "jsonl"),
        ("a.parquet.tmp", None),
        ("parquet", None),
        ("a.json", None),
    ],
)
def test_a_name_says_the_format(path: str, said: str | None) -> None:
    assert format_of(path) == said


def test_a_shipped_one_is_found_by_the_name_that_recipes_use() -> None:
    assert find_dataset("fineweb-edu") == find_dataset("fineweb_edu")
    assert find_dataset("fineweb-edu").name == load("dense").recipe.data.name


def test_one_s_own_is_found_by_its_name_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "name: our-own\nsource: [a.jsonl]\ntokenizer: t\nend_of_document: '</s>'\n"
    Path("our_own.yaml").write_text(text)
    assert find_dataset("our-own") == find_dataset("our_own") == find_dataset("our_own.yaml")
    assert find_dataset("our-own").source == (str(tmp_path / "a.jsonl"),)


def test_an_unknown_name_is_told_the_closest() -> None:
    with pytest.raises(MoekitError) as refused:
        find_dataset("finewebedu")
    assert str(refused.value) == "error: there is no data set `finewebedu`\n    hint: did you mean `fineweb_edu`?"
    with pytest.raises(MoekitError, match="give a file, or a shipped one: fineweb_edu"):
        find_dataset("our-own")
    with pytest.raises(MoekitError, match="`/` is a directory"):
        find_dataset("/")
    with pytest.raises(MoekitError, match="cannot be read: file name too long"):
        find_dataset("x" * 300)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "d:1: is empty\n    hint: the shipped `fineweb_edu` is one to begin from"),
        ("name: &a b", "d:1: uses a YAML anchor or alias (`&a`)"
         "\n    hint: write the values out: a data set's description inherits from none"),
        ("name: a\n---\nname: b\n", "d:2: begins a second document\n    hint: one file describes one data set"),
    ],
)  # fmt: skip
def test_what_is_no_plain_yaml(text: str, said: str) -> None:
    with pytest.raises(MoekitError) as refused:
        parse_dataset(text, "d", Path("/"))
    assert said in str(refused.value)


def test_no_data_set_is_told_about_recipes() -> None:
    """Every hint of the reader that speaks of recipes has a data set's words."""
    said = re.findall(
        r'"([^"\n]*(?:recipe|`base:`)[^"\n]*)"', Path(nodes.__file__).read_text().partition("def read(")[2]
    )
    assert set(said) <= set(dataset.HINTS)
    every = Path(nodes.__file__).read_text() + Path(build.__file__).read_text()
    assert all(hint in every for hint in dataset.HINTS)


def test_each_field_is_documented() -> None:
    body = ast.parse(inspect.getsource(Dataset)).body[0].body  # type: ignore[attr-defined]
    documented = [
        one.target.id for one, after in pairwise(body) if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr)
    ]
    assert documented == [field.name for field in fields(Dataset)]


# The schema, the shipped descriptions, the page

SHIPPED = share.folder("datasets")


def test_the_schema_beside_the_descriptions_is_the_codes() -> None:
    wanted = "moekit schema dataset > datasets/schema.json"
    assert (SHIPPED / "schema.json").read_text() == dataset_schema.schema_text(), wanted
    jsonschema.Draft7Validator.check_schema(dataset_schema.schema())


@pytest.mark.parametrize("name", shipped_datasets())
def test_the_shipped_ones(name: str) -> None:
    text = (SHIPPED / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.Draft7Validator(dataset_schema.schema()).validate(yaml.safe_load(text))
    assert f"`{name}`" in (SHIPPED / "README.md").read_text()
    assert find_dataset(name).name


def test_fineweb_edu_is_what_the_recipes_train_on() -> None:
    found = find_dataset("fineweb_edu")
    recipe = load("dense").recipe
    assert (found.name, found.tokenizer) == (recipe.data.name, recipe.data.tokenizer)
    assert (found.keep_fraction, found.tasks, found.cpus_per_task, found.memory_gib) == (0.074, 100, 12, 24)
    assert (found.end_of_document, found.vocab_size) == ("<|end_of_text|>", 128_256)
    assert (found.tokenizer_source, found.tokenizer_copy) == ("meta-llama/Llama-3.2-1B", "unsloth/Llama-3.2-1B")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sourse": "x"}, "'sourse' was unexpected"),
        ({"tasks": 0}, "less than the minimum"),
        ({"keep_fraction": 7.4}, "greater than the maximum"),
        ({"keep_fraction": 0}, "less than or equal to the minimum"),
        ({"format": "csv"}, "is not one of"),
        ({"end_of_document": None}, "is not of type"),
    ],
)
def test_editors_underline_slips(changes: dict[str, Any], said: str) -> None:
    errors = list(jsonschema.Draft7Validator(dataset_schema.schema()).iter_errors({**LEAST, **changes}))
    assert said in " ".join(error.message for error in errors)


def test_the_page() -> None:
    page = (share.PACKAGE.parent / "docs/datasets.md").read_text()
    assert page.endswith(f"## Fields\n\n{dataset_schema.reference()}"), "moekit schema dataset --markdown"
    (example,) = re.findall(r"^```yaml ours.yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert parse_dataset(example, "ours.yaml", Path("/")).source[1] == "/datasets/ours/2026"
