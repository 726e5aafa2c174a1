"""Each rule: a change that breaks it and no other, with its message word for word, and a change that is right."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import ALL, BROKEN, FINE, HERE, HOME, MODULES, RULES, Case, label, of_module

import moekit
from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.problems import Problem, print_problems
from moekit.recipe.check import problems_of
from moekit.recipe.load import load, load_partly
from moekit.recipe.rules import stage_of


def broken_rules(path: Path, profile: str | None) -> set[str]:
    recipe, cluster = load(str(path)).recipe, find_cluster(profile)
    return {name for name, rule in RULES.items() if list(rule(recipe, cluster))}


@pytest.mark.parametrize("case", BROKEN, ids=label)
def test_a_change_breaks_its_rule_alone(case: Case, here: Path) -> None:
    assert broken_rules(case.write(here / "broken.yaml", case.broken), case.profile) == {case.rule}


@pytest.mark.parametrize("case", FINE, ids=label)
def test_a_change_that_is_right_breaks_none(case: Case, here: Path) -> None:
    path = case.write(here / "fine.yaml", case.fine)
    assert broken_rules(path, case.profile) == set()
    assert problems_of(load_partly(str(path)), find_cluster(case.profile)) == []


@pytest.mark.parametrize("module", MODULES)
def test_messages(module: str, here: Path, golden_file: Callable[[Path, str], None]) -> None:
    """What `moekit check` says to each broken change; each message is at least one problem with a place."""
    texts = []
    for case in [case for case in of_module(module) if case.broken]:
        path = case.write(here / "broken.yaml", case.broken)
        problems = problems_of(load_partly("broken.yaml"), find_cluster(case.profile))
        assert problems, case
        change = "".join(f"    {line}\n" for line in path.read_text().splitlines())
        texts.append(f"{case.rule}\n{change}{printed(problems)}")
    golden_file(HERE / f"{module}.txt", "\n".join(texts))


def printed(problems: list[Problem]) -> str:
    """Problems as `moekit check` prints them, wherever the shipped recipes lie."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        print_problems(problems)
    return text.getvalue().replace(str(share.folder("recipes")), "recipes")


def test_every_rule_is_broken_and_kept_here() -> None:
    assert {case.rule for case in BROKEN} == set(RULES)
    assert {case.rule for case in FINE if case.rule} == set(RULES)
    assert all(case in of_module(HOME[case.rule]) for case in ALL if case.rule)


def test_every_rule_says_when_megatron_would_notice() -> None:
    assert {name: stage_of(rule) for name, rule in RULES.items()}


def test_what_megatron_never_notices_is_shown_to_harm() -> None:
    """Each refusal that Megatron does not share has a run that shows why (`test_harm.py`)."""
    unseen = {name for name, rule in RULES.items() if stage_of(rule) in ("later", "never")}
    shown = {case.rule for case in BROKEN if case.harm}
    warnings = set()
    for path in sorted(HERE.glob("*.txt")):
        for text in path.read_text().split("\n\n"):
            name, _, rest = text.partition("\n")
            if all(": warning: " in line for line in rest.splitlines() if line.startswith("broken.yaml")):
                warnings.add(name)
    assert unseen - warnings - shown == set()


def test_every_place_in_a_rule_is_reached(unreached: Callable[..., list[str]], here: Path) -> None:
    def check_all() -> None:
        for case in BROKEN:
            broken_rules(case.write(here / "broken.yaml", case.broken), case.profile)

    sources = sorted((Path(moekit.__file__).parent / "recipe" / "rules").glob("*.py"))
    assert unreached(sources, {"Violation"}, check_all) == []


BIASED = (
    *("deepseek_v3_gb200", "deepseek_v3_gb300", "deepseek_v3_h100"),
    *("glm_4_5_air", "ling_flash", "ling_mini", "moonlight"),
)
WARNED = {
    **dict.fromkeys([f"models/{name}" for name in BIASED], "0.19.2 counts for the expert bias, their balance, in bf16"),
    **dict.fromkeys(
        [f"models/{name}" for name in ("deepseek_moe_16b", "deepseek_v2_lite", "olmoe", "qwen2_57b")],
        "weights of a token's experts sum to less than 1, as in the released model",
    ),
    "settings/hash_layers": "their table comes from another model's checkpoint",
    "settings/routing_replay": "a framework for reinforcement learning hands the choices over",
}
"""Shipped recipes with a warning, and why they keep it."""


@pytest.mark.parametrize("name", share.shipped_recipes())
def test_shipped_recipes_break_none(name: str) -> None:
    recipe, cluster = load(name).recipe, find_cluster(share.made_for(name))
    found = [violation for rule in RULES.values() for violation in rule(recipe, cluster)]
    assert [violation for violation in found if violation.level == "error"] == []
    assert bool(found) == (name in WARNED)
