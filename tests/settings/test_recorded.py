"""What the real Megatron says of every shipped recipe is what recorded.yaml keeps, and docs/recipes.md tells."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import catalogue
import pytest
import recorded
from differences import base_name, base_of

from moekit.launch.judges import MADE_UP_VOCABULARY
from moekit.megatron.verdict import Verdict
from moekit.recipe.load import load

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
VOCABULARY = 128_256
"""Entries of the handbook's tokenizer (2.3)."""


@pytest.fixture(scope="module")
def asked() -> tuple[dict[str, list[Verdict]], dict[str, Verdict]]:
    return recorded.ask()


@pytest.mark.megatron
def test_the_verdicts_are_those_on_record(
    asked: tuple[dict[str, list[Verdict]], dict[str, Verdict]], golden_file: Callable[[Path, str], None]
) -> None:
    whole, steps = asked
    golden_file(
        recorded.FILE, recorded.text({name: recorded.told(name, whole[name], steps[name]) for name in recorded.NAMES})
    )


def test_none_is_refused() -> None:
    refused = {name: said for name, said in recorded.kept().items() if "refused" in " ".join(said.values())}
    assert refused == {}


def test_every_recipe_takes_steps_with_what_a_cpu_can_do() -> None:
    assert [name for name, said in recorded.kept().items() if not said["step"].startswith("passed")] == []


def test_the_page_is_made_from_the_recipes(golden_file: Callable[[Path, str], None]) -> None:
    assert set(recorded.kept()) == set(recorded.NAMES)
    golden_file(PAGE, catalogue.page(recorded.kept()))


COUNT = re.compile(r"([\d,]+) parameters, of which a token uses\s+([\d,]+)")
UNBUILT = {"settings/experts_latent": 16 * 2 * 2048 * 1024 + 16 * 2048 * 64}
"""What no CPU builds, by what it has more than first_moe: two projections, and a router twice as wide."""
COUNTED = [name for name in recorded.NAMES if name.startswith("settings/") and COUNT.search(catalogue.comment(name))]
FIRST_MOE = (6_858_278_912, 1_221_134_336)


@pytest.mark.megatron
@pytest.mark.parametrize("name", COUNTED)
def test_a_setting_says_how_many_parameters_megatron_builds(
    name: str, asked: tuple[dict[str, list[Verdict]], dict[str, Verdict]]
) -> None:
    if name in UNBUILT:
        counted = [number + UNBUILT[name] for number in FIRST_MOE]
    else:
        built = asked[0][name][-1].parameters
        assert built
        rows = (MADE_UP_VOCABULARY - VOCABULARY) * (load(name).recipe.model.hidden_size or 0)
        counted = [built.total - rows, built.active - rows]
    said = COUNT.search(catalogue.comment(name))
    assert said
    assert [int(number.replace(",", "")) for number in said.groups()] == counted


SAME = {
    *("dense_save", "dense_continued", "trace_logits", "timers"),
    *("check_spikes", "profile_torch", "permute_fusion", "routing_replay", "deterministic"),
    *("mtp_detached", "quickstart_dense_continued", "quickstart_squared_relu_continued", "quickstart_deterministic"),
    "quickstart_repeated",
}
"""Settings that leave training as it is: they record it, or do the same in another way. Of a pipeline the first stage
is what takes steps here, and does not see what the last detaches."""


@pytest.mark.megatron
def test_steps_differ_where_a_setting_trains_otherwise_and_nowhere_else(
    asked: tuple[dict[str, list[Verdict]], dict[str, Verdict]],
) -> None:
    """Losses and gradient norms of three steps, to the last bit, against the base's."""
    steps = {name: (step.losses, step.grad_norms) for name, step in asked[1].items() if step.answer == "passed"}
    same = {
        Path(name).name
        for name, result in steps.items()
        if name.startswith("settings/") and base_of(name) and result == steps.get(base_name(name))
        if not recorded.taken_out(name)
    }
    assert same == SAME
