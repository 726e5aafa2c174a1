"""What the search's filter drops, the rules refuse; and what a layout becomes as a recipe."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moekit import share
from moekit.cluster.profile import Cluster, find_cluster
from moekit.plan.candidates import Candidates, of_run
from moekit.plan.given import Given
from moekit.plan.layout import Layout, layout_of
from moekit.plan.resolve import resolve_given
from moekit.plan.search.child import as_yaml, changes_of, child_of
from moekit.plan.search.cuts import layout_text, uneven
from moekit.plan.search.grid import KNOBS, Grid, Points, grid_of
from moekit.plan.search.legal import legal
from moekit.plan.search.rows import candidates_of
from moekit.plan.shape import Shape
from moekit.recipe.load import Loaded, load
from moekit.recipe.patterns import PipelineLayout
from moekit.recipe.rules import violations

RECIPES = [
    ("first_moe", "aws-p5", {}),
    ("dense", "aws-p5", {}),
    ("fp8", "h100-ib", {}),
    ("upcycle", "aws-p5", {}),
    ("settings/hybrid", "aws-p5", {}),
    ("settings/experts_shared", "aws-p5", {"parallel": {"gpus": 32}}),
    ("settings/mtp", "h100-ib", {"precision": {"bf16": None, "fp16": True}}),
    ("models/deepseek_v3_h100", "h100-ib", {}),
    ("models/deepseek_v3_gb200", "gb200", {}),
    ("models/qwen3_235b_h100", "h100-ib", {"parallel": {"gpus": 768}, "train": {"global_batch_size": 3072}}),
    ("models/gpt_oss_120b", "h100-ib", {"model": {"disable_bias_linear": None}}),
    ("models/mixtral_8x22b_folded", "aws-p5", {}),
    ("models/moonlight", "h100-ib", {"moe": {"ffn_hidden_size": 1400, "shared_expert_intermediate_size": 2820}}),
]
"""Recipes, the profile they are for, and what is said differently so that more of the filter has something to drop."""


@dataclass
class Asked:
    """One recipe's search before anything is walked."""

    loaded: Loaded
    target: Cluster
    shape: Shape
    layout: Layout
    grid: Grid

    def legals(self) -> Points:
        """Some legal points from all over the grid."""
        dice = np.random.default_rng(0)
        points = np.column_stack([dice.integers(size, size=200_000) for size in self.grid.sizes])
        return points[legal(self.grid, self.shape, self.loaded.recipe, self.target, points)]

    def refusals(self, point: tuple[int, ...]) -> list[str]:
        """What the rules say against a layout."""
        child = child_of(self.grid, self.loaded.recipe, self.target, point)
        return [one.what for one in violations(child, self.target) if one.level == "error"]


def asked(name: str, profile: str, fields: dict[str, Any], folder: Path) -> Asked:
    path = folder / "asked.yaml"
    path.write_text(yaml.safe_dump({"base": name, **fields}))
    loaded, target = load(str(path)), find_cluster(profile)
    given = Given.of(loaded)
    shape = resolve_given(given)
    layout = layout_of(given, shape)
    grid = grid_of(given, shape, layout, target)
    return Asked(loaded, target, shape, layout, grid)


def beside(grid: Grid, point: tuple[int, ...], dice: random.Random) -> tuple[int, ...]:
    """The point with one or two knobs turned."""
    new = list(point)
    for place in dice.sample(range(len(KNOBS)), dice.choice((1, 2))):
        new[place] = dice.randrange(grid.sizes[place])
    return tuple(new)


@pytest.mark.parametrize(("name", "profile", "fields"), RECIPES, ids=[name for name, _, _ in RECIPES])
def test_the_filter_drops_nothing_that_the_rules_accept(
    name: str, profile: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    of, dice = asked(name, profile, fields, tmp_path), random.Random(name)
    legals = of.legals()
    near = [beside(of.grid, tuple(legals[dice.randrange(len(legals))].tolist()), dice) for _ in range(300)]
    far = [tuple(dice.randrange(size) for size in of.grid.sizes) for _ in range(100)]
    points = [*dict.fromkeys((*near, *far))]
    fine = legal(of.grid, of.shape, of.loaded.recipe, of.target, np.array(points))
    own = of.refusals(of.grid.own)
    seen = Counter[str]()
    for point, is_legal in zip(points, fine.tolist(), strict=True):
        refused = [what for what in of.refusals(point) if what not in own]
        assert is_legal or refused, (point, of.grid)
        seen["dropped" if not is_legal else "refused" if refused else "taken"] += 1
    assert seen["dropped"] > 20, seen
    if not fields:
        assert own == []
        assert seen["taken"] > seen["refused"] or of.shape.window, seen


def test_the_recipes_own_layout_is_a_legal_point() -> None:
    for name, profile, more in RECIPES:
        if more:
            continue
        loaded, target = load(name), find_cluster(profile)
        given = Given.of(loaded)
        shape = resolve_given(given)
        grid = grid_of(given, shape, layout_of(given, shape), target)
        assert legal(grid, shape, loaded.recipe, target, np.array([grid.own])).all(), name
        assert changes_of(grid, loaded.recipe, target, grid.own) == {}, name


@pytest.mark.parametrize("name", [*share.shipped_recipes()])
def test_the_recipes_own_row_is_the_searchs(name: str) -> None:
    given = Given.of(load(name))
    shape = resolve_given(given)
    layout = layout_of(given, shape)
    grid = grid_of(given, shape, layout, find_cluster("h100-ib"))
    row, own = candidates_of(grid, shape, layout, np.array([grid.own])), of_run(given, shape, layout)
    for field in fields(Candidates):
        found, wanted = getattr(row, field.name), getattr(own, field.name)
        if isinstance(wanted, dict):
            assert {key: value.tolist() for key, value in found.items()} == {k: v.tolist() for k, v in wanted.items()}
        else:
            assert np.array_equal(found, wanted), field.name


@pytest.mark.parametrize(("name", "profile"), [(name, profile) for name, profile, fields in RECIPES if not fields])
def test_a_written_child_is_the_layout(name: str, profile: str, tmp_path: Path) -> None:
    """The text that `--write` writes loads as the recipe that the rules were asked about, and has its layout."""
    of, dice = asked(name, profile, {}, tmp_path), random.Random(name)
    legals = of.legals()
    own = load(name).recipe
    for number in range(12):
        point = tuple(legals[dice.randrange(len(legals))].tolist())
        path = tmp_path / f"child{number}.yaml"
        changes = changes_of(of.grid, own, of.target, point)
        path.write_text(as_yaml(name, "# a schema", "a layout", changes, own))
        child = load(str(path))
        asked_about = child_of(of.grid, own, of.target, point)
        assert child.recipe.parallel == asked_about.parallel
        for section in ("model", "moe", "train", "memory", "overlap", "runtime", "router", "balance", "precision"):
            assert getattr(child.recipe, section) == getattr(asked_about, section), (section, changes)
        given = Given.of(child)
        layout = layout_of(given, resolve_given(given))
        row = candidates_of(of.grid, of.shape, of.layout, np.array([point]))
        assert row.layers[0, : layout.pipeline].tolist() == [
            sum(len(stage.layers) for stage in rank) for rank in layout.stages
        ]
        wanted = (layout.tensor, layout.pipeline, layout.virtual, layout.context, layout.expert, layout.expert_tensor)
        names = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor")
        assert tuple(getattr(row, one)[0] for one in names) == wanted


def test_uneven_stages_are_a_layout_that_can_be_read() -> None:
    for layers, stages, depths in ((61, 8, 1), (61, 16, 0), (94, 8, 0), (94, 16, 0), (62, 4, 1), (7, 3, 1)):
        pieces = uneven(layers, stages, depths)
        text = layout_text(pieces, depths)
        read = PipelineLayout.parse(text)
        assert [stage.count("t") for stage in read.stages] == [*pieces], text
        assert read.count("m") == depths
        assert max(pieces) - min(pieces) <= 1 + depths
    assert uneven(3, 4, 0) == ()
    assert layout_text((1, 2, 2, 2, 1), 1) == "Et|(tt|)*3tmL"
