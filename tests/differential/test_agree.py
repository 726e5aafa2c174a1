"""What our rules say of random recipes, the real Megatron says too; and the machinery that finds out."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from agree import run
from asking import Answers, ask
from generate import Case, cases, fields, home, loaded, seeds, text
from generate import cluster as machine
from judged import Refusal, findings, question, refusals
from shrink import differences, shrunk
from tally import LEAST_CHANGES_OF_A_FIELD, field_of, summary
from words import VARIABLES, WORDS

from moekit.megatron.verdict import Verdict
from moekit.recipe.check import problems_of
from moekit.recipe.load import load
from moekit.recipe.values import plain_values

CI = 300


def test_every_field_gets_its_turn() -> None:
    changes = Counter(field_of(name) for case in cases(1, 10_000) for name in case.changes)
    assert {name: changes[name] for name in fields() if changes[name] < LEAST_CHANGES_OF_A_FIELD} == {}


def test_the_same_seed_draws_the_same_recipes() -> None:
    assert list(cases(7, 500)) == list(cases(7, 500))
    assert list(cases(7, 500)) != list(cases(8, 500))


def test_a_case_has_one_to_three_changes_that_change_something() -> None:
    for case in cases(2, 2_000):
        assert 1 <= len(case.changes) <= 3
        assert all(value != seeds()[case.seed].get(name, ...) for name, value in case.changes.items()), case


def test_every_kind_of_value_is_drawn() -> None:
    changes = [change for case in cases(3, 10_000) for change in case.changes.items()]
    assert {type(value) for _, value in changes} == {bool, int, float, str, list, type(None)}
    texts = {field: {str(value) for name, value in changes if name == field} for field in WORDS if field in fields()}
    assert {field for field, drawn in texts.items() if len(drawn) < 3} == set()
    variables = {name for name, _ in changes if name.startswith("runtime.environment.")}
    assert len(variables) > 0.8 * len(VARIABLES)


def test_a_recipe_is_read_as_the_file_it_would_be(tmp_path: Path) -> None:
    """What is judged is what `moekit check` reads from the text."""
    path = tmp_path / "recipe.yaml"
    for case in itertools.islice(cases(4, 100), 0, 100, 5):
        if loaded(case.values).problems:
            continue
        path.write_text(text(case.values))
        assert load(str(path)).recipe == loaded(case.values).recipe


@pytest.mark.parametrize("seed", seeds())
def test_a_seed_passes_our_rules(seed: str) -> None:
    assert [p for p in problems_of(loaded(seeds()[seed]), machine(home(seed))) if p.level == "error"] == []
    assert plain_values(loaded(seeds()[seed]).recipe) == seeds()[seed]


@pytest.mark.megatron
def test_a_seed_passes_the_real_stages() -> None:
    questions = [question(values, home(seed)) for seed, values in seeds().items()]
    said = ask(questions, Answers(None), None, len(questions))
    refused = {
        seed: [f"{verdict.stage}: {verdict.message}" for verdict in verdicts if verdict.answer == "refused"]
        for seed, verdicts in zip(seeds(), said, strict=True)
    }
    assert {seed: words for seed, words in refused.items() if words} == {}


@pytest.mark.megatron
def test_the_two_agree() -> None:
    tally = run(CI, seed=1, answers=Answers(None), steps=20)
    assert list(tally.failures(whole=False)) == [], summary(tally)


PASSED = [Verdict(stage, "passed") for stage in ("parse", "validate", "config", "container", "schedule", "groups")]


def kinds(change: dict[str, object], theirs: list[Verdict]) -> set[str]:
    values = Case("dense", change, "hopper").values
    return {finding.kind for finding in findings(values, refusals(values, "hopper"), theirs)}


def test_what_two_answers_come_to() -> None:
    refused = [*PASSED[:1], Verdict("validate", "refused", "no", "training/arguments.py:1")]
    unjudged = [*PASSED, Verdict("build", "not_judged", feature="FP8")]
    assert kinds({}, PASSED) == {"both accept"}
    assert kinds({}, refused) == {"false accept"}
    assert kinds({}, unjudged) == {"not judged"}
    assert kinds({"train.micro_batch_size": None}, refused) == {"both refuse"}
    assert kinds({"train.micro_batch_size": None}, PASSED) == {"false refusal"}
    assert kinds({"moe.layer_freq": "1 2"}, PASSED) == {"ours alone"}
    assert kinds({"log.timing_option": "bogus"}, PASSED) == {"false refusal"}
    late = [Refusal("some_rule", "groups", "what")]
    assert [finding.kind for finding in findings({}, late, refused)] == ["masked"]
    assert [finding.kind for finding in findings({}, late, PASSED)] == ["false refusal"]
    assert [finding.kind for finding in findings({}, late, PASSED[:2])] == ["not judged"]


def test_a_disagreement_shrinks_to_what_shows_it() -> None:
    """A judge made up for the test: what it dislikes is left alone, all else becomes the plain seed."""
    one = Case("deepseek", {"router.topk": 3, "log.interval": 2, "train.seed": 5}, "hopper")
    two = Case("watched", {"profile.step_end": 7}, "hopper")
    asked = Counter[int]()

    def stays(pairs: list[tuple[int, dict[str, object]]]) -> list[bool]:
        asked.update(index for index, _ in pairs)
        return [
            values.get("router.topk") == 3 and values.get("moe.num_experts") == 8
            if index == 0
            else values.get("profile.step_end") == 7 and values.get("log.params_norm") is True
            for index, values in pairs
        ]

    first, second = shrunk([one, two], stays)
    assert differences(first) == {"moe.num_experts": 8, "router.topk": 3}
    assert differences(second) == {"log.params_norm": True, "profile.step_end": 7}
    assert asked[0] < 100
    assert asked[1] < 100
