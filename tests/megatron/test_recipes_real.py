"""Every shipped recipe, as the real Megatron reads it: what a launch hands over passes its stages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.judges import questions
from moekit.launch.run_files import run_arguments
from moekit.megatron.flags import argv
from moekit.megatron.real import judge_all
from moekit.megatron.stages import Parameters, Question
from moekit.megatron.table import check, parse_values
from moekit.megatron.table import load as load_table
from moekit.megatron.verdict import Verdict
from moekit.recipe.load import load
from moekit.recipe.patterns import LayerPattern

pytestmark = pytest.mark.megatron

TABLE = load_table("0.19.2")
HERE = [name for name in share.shipped_recipes() if load(name).recipe.megatron.version == TABLE.version]
"""Recipes for the Megatron that is here; of others tests/settings/recorded.yaml says what it takes of them."""
STARTS = [(name, resume) for name in HERE for resume in (False, True)]
VOCABULARY = ["--vocab-size", "128256"]
"""What the tokenizer of the handbook's models says."""
NOT_JUDGED = {
    "container": ("package transformer_engine",),
    "build": (
        *("vocabulary", "FP8", "sequence parallel", "multi-latent attention", "flex dispatcher"),
        *("delayed weight gradients", "MoE with tensor parallel"),
    ),
}
"""What a CPU has none of, among what shipped recipes ask for."""


def words(name: str, resume: bool = False) -> list[str]:
    return argv(run_arguments(load(name).recipe, Path(name).name, "/shared", resume=resume))


def question(name: str, resume: bool, *more: str) -> Question:
    """What is asked of a recipe, for the machine it is made for."""
    asked = questions(load(name), find_cluster(share.made_for(name)))["first"]
    return replace(asked, argv=[*words(name, resume), *more])


SIZED = {
    "dense": question("dense", False, *VOCABULARY),
    "first_moe": question("first_moe", False, *VOCABULARY),
    "quickstart": question("quickstart", False, "--vocab-size", "4096"),
    "warmup over the whole schedule": question("dense", False, "--lr-warmup-iters", "4768"),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[Any, list[Verdict]]:
    """All answers, from one import of Megatron."""
    asked = {start: question(*start) for start in STARTS} | SIZED
    return dict(zip(asked, judge_all(list(asked.values())), strict=True))


@pytest.mark.parametrize(("name", "resume"), STARTS)
def test_megatron_takes_it(name: str, resume: bool, verdicts: dict[Any, list[Verdict]]) -> None:
    found = {verdict.stage: verdict for verdict in verdicts[name, resume]}
    for stage in ("parse", "validate", "config", "container", "schedule", "groups", "build"):
        unjudged = NOT_JUDGED.get(stage, ())
        assert found[stage].answer == "passed" or found[stage].feature in unjudged, found[stage]


@pytest.mark.parametrize(("name", "resume"), STARTS)
def test_the_table_takes_it(name: str, resume: bool) -> None:
    assert check(words(name, resume), TABLE) == []


def test_the_handbooks_models_have_the_handbooks_sizes(verdicts: dict[Any, list[Verdict]]) -> None:
    dense, moe = verdicts["dense"], verdicts["first_moe"]
    assert dense[-1] == Verdict("build", "passed", parameters=Parameters(1_219_037_184, 0, 1_219_037_184))
    assert moe[-1].answer == "passed"
    assert moe[-1].parameters is not None
    assert (moe[-1].parameters.total, moe[-1].parameters.active) == (6_858_278_912, 1_221_134_336)


def test_the_quickstart_has_the_size_it_says(verdicts: dict[Any, list[Verdict]]) -> None:
    moe = verdicts["quickstart"]
    assert moe[-1].parameters is not None
    said = (share.folder("recipes") / "quickstart.yaml").read_text()
    assert f"{moe[-1].parameters.total:,} parameters, of which a token uses {moe[-1].parameters.active:,}" in said


def test_this_judge_can_say_no(verdicts: dict[Any, list[Verdict]]) -> None:
    short = verdicts["warmup over the whole schedule"]
    assert (short[-1].stage, short[-1].answer) == ("schedule", "refused")


PARSE = """
import enum, json, os, sys
output = os.dup(1)
os.dup2(2, 1)  # what Megatron prints goes to standard error
from moekit.job import cuda_on_cpu
cuda_on_cpu.install(device="meta", capability=(9, 0))
from megatron.training.arguments import parse_args
def plain(value):
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value
answers = []
for words in json.load(sys.stdin):
    sys.argv = ["pretrain_gpt.py", *words]
    answers.append({key: plain(value) for key, value in vars(parse_args()).items()})
with os.fdopen(output, "w") as pipe:
    json.dump(answers, pipe, default=str)
"""


@pytest.fixture(scope="module")
def parsed() -> list[dict[str, Any]]:
    """What Megatron's own parser makes of every start."""
    text = json.dumps([words(*start) for start in STARTS])
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=text, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


READ_BY_MEGATRON: dict[str, Callable[[str], Any]] = {
    "linear_attention_freq": int,
    "moe_layer_freq": lambda text: list(LayerPattern.parse(text).layers),
    "window_attn_skip_freq": int,
    "window_size": lambda text: [int(number) for number in text.split(",")],
}
"""What our table leaves as text."""


def test_our_reading_is_megatrons(parsed: list[dict[str, Any]]) -> None:
    """Every value that our table reads from a command line, Megatron's parser reads as well."""
    for start, theirs in zip(STARTS, parsed, strict=True):
        ours = parse_values(words(*start), TABLE)
        assert len(ours) > 50
        for dest, value in ours.items():
            value = READ_BY_MEGATRON[dest](value) if dest in READ_BY_MEGATRON else value
            assert theirs[dest] == value, (start, dest, theirs[dest], value)


def test_nothing_is_set_that_no_word_says(parsed: list[dict[str, Any]]) -> None:
    """Each field's value arrives in Megatron's `args`: what the recipe says and what Megatron got are the same."""
    recipe = load("first_moe").recipe
    theirs = parsed[STARTS.index(("first_moe", False))]
    assert theirs["num_layers"] == recipe.model.num_layers
    assert theirs["moe_router_topk"] == recipe.router.topk
    assert theirs["moe_router_load_balancing_type"] == ["aux_loss"]
    assert theirs["moe_aux_loss_coeff"] == [1e-3]
    assert theirs["lr"] == recipe.schedule.lr
    assert theirs["add_bias_linear"] is False
    assert theirs["save"] is None


def test_resume_says_nothing_of_the_first_checkpoint() -> None:
    first, resume = words("upcycle"), words("upcycle", resume=True)
    assert "--moe-use-upcycling" in first
    assert "--moe-use-upcycling" not in resume
    assert first[first.index("--load") + 1] == "/shared/runs/dense_save/checkpoints"
    assert resume[resume.index("--load") + 1] == "checkpoints"
