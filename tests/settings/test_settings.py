"""The settings: each changes what its summary says against its base, and passes `check`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from differences import ROOT, base_of, sections

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.run_files import run_arguments
from moekit.megatron.flags import argv
from moekit.recipe.build import markers
from moekit.recipe.check import problems_of
from moekit.recipe.load import load, load_partly
from moekit.recipe.load import sections as schema_sections
from moekit.recipe.schema.markers import Flag, Owned

SETTINGS = [name for name in share.shipped_recipes() if name.startswith("settings/")]
PLACES = re.compile(r"  \([^()]* → [^()]*\)$", re.MULTILINE)
"""Behind each line of `moekit diff`: files and lines, which a comment moves."""


@pytest.mark.parametrize("name", SETTINGS)
def test_the_difference_from_the_base(name: str, golden_file: Callable[[Path, str], None]) -> None:
    base = base_of(name)
    assert base, "a setting varies another recipe"
    done = subprocess.run(
        [sys.executable, "-m", "moekit", "diff", base, name], capture_output=True, text=True, check=True
    )
    golden_file(Path(__file__).parent / "golden" / f"{Path(name).name}.txt", PLACES.sub("", done.stdout))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_summary_ends_with_the_sections_that_change(name: str) -> None:
    """`a z-loss that keeps the router's logits small (router)`: what changes more than that is another setting."""
    summary = load(name).recipe.summary or ""
    said = re.fullmatch(r".+ \(([a-z, ]+)\)", summary)
    assert said, summary
    assert tuple(said[1].split(", ")) == sections(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_it_passes_check_and_says_where_it_is_warned(name: str) -> None:
    found = problems_of(load_partly(name), find_cluster(share.made_for(name)))
    assert [problem for problem in found if problem.level == "error"] == []
    comments = " ".join(re.findall(r"#(.*)", (ROOT / f"{name}.yaml").read_text()))
    assert bool(found) == ("`check` warns" in comments)


def nulls(name: str) -> list[str]:
    """The dotted fields that a setting's own file unsets: by themselves, or with their section."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / f"{name}.yaml").read_text())
    found = []
    for section, cls in schema_sections():
        if section in tree:
            fields = dict.fromkeys(markers(cls)) if tree[section] is None else tree[section]
            found += [f"{section}.{field}" for field, value in fields.items() if value is None]
    return found


def options(field: str) -> tuple[str, ...]:
    section, _, name = field.partition(".")
    marks = markers(dict(schema_sections())[section])[name][1]
    return tuple(
        option
        for mark in marks
        if isinstance(mark, Flag | Owned)
        for option in ((mark.option,) if isinstance(mark, Flag) else mark.options)
    )


@pytest.mark.parametrize("name", [name for name in SETTINGS if nulls(name)])
def test_what_null_undoes_is_gone_from_the_arguments(name: str) -> None:
    def words(given: str) -> list[str]:
        return argv(run_arguments(load(given).recipe, "run", "/shared", resume=False))

    undone = [option for field in nulls(name) for option in options(field)]
    assert [option for option in undone if option in words(name)] == []
    base = base_of(name)
    assert base
    assert [option for option in undone if option in words(base)], "undoes nothing"


def test_null_vanishes_where_it_matters() -> None:
    """The test above looks: these are what a deterministic run, and one without a loss, must not say."""
    assert "balance.aux_loss_coeff" in nulls("settings/balance_quantile")
    assert options("balance.aux_loss_coeff") == ("--moe-aux-loss-coeff",)
