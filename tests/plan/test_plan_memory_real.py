"""What a part of a layer keeps is what the real classes keep, and defaults are the real parser's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_recipes import written
from test_plan_real import MOE, differing

from moekit.megatron.flags import arguments, argv
from moekit.plan.candidates import of_run
from moekit.plan.given import Given
from moekit.plan.layout import layout_of
from moekit.plan.memory.activations import parts_of
from moekit.plan.memory.flight import in_flight
from moekit.plan.memory.tokens import tokens_of
from moekit.plan.resolve import resolve_given
from moekit.plan.run import facts_of
from moekit.recipe.load import Loaded, load

pytestmark = pytest.mark.megatron

LENGTH, HEAD = 64, 16
ONE: dict[str, dict[str, Any]] = {
    "parallel": {"gpus": 1},
    "model": {"num_layers": 1, "seq_length": LENGTH, "max_position_embeddings": LENGTH, "attention_dropout": 0.0,
              "hidden_dropout": 0.0},
    "train": {"micro_batch_size": 2, "global_batch_size": 2},
    "precision": {"bf16": True},
    "megatron": {"extra": ["--transformer-impl", "local"]},
}  # fmt: skip
GELU: dict[str, dict[str, Any]] = {
    "model": {"swiglu": None},
    "megatron": {"extra": ["--transformer-impl", "local", "--no-bias-gelu-fusion"]},
}
ROUTED: dict[str, dict[str, Any]] = {
    "router": {"topk": 2, "dtype": "fp32"}, "balance": {"type": ["aux_loss"], "aux_loss_coeff": [0.01]}
}  # fmt: skip


def again(module: str) -> dict[str, dict[str, Any]]:
    return {"memory": {"recompute_granularity": "selective", "recompute_modules": [module]}}


ASKED = {
    "dense": differing(ONE),
    "grouped queries": differing(ONE, {"model": {"group_query_attention": True, "num_query_groups": 2}}),
    "no gate": differing(ONE, GELU),
    "experts": differing(MOE, ONE, ROUTED),
    "more experts to a token": differing(MOE, ONE, ROUTED, {"router": {"topk": 4}}),
    "experts without a gate": differing(MOE, ONE, ROUTED, GELU),
    "a shared expert": differing(MOE, ONE, ROUTED, {"moe": {"shared_expert_intermediate_size": 128}}),
    "core attention computed again": differing(ONE, again("core_attn")),
    "dense layers computed again": differing(ONE, again("mlp")),
    "experts computed again": differing(MOE, ONE, ROUTED, again("moe")),
    "a shared expert computed again": differing(
        MOE, ONE, ROUTED, {"moe": {"shared_expert_intermediate_size": 128}}, again("shared_experts")
    ),
    "allgather": differing(MOE, ONE, ROUTED, {"moe": {"dispatcher": "allgather"}}),
}
GROUPS = {
    "attention": ("self_attention",),
    "attention core": ("self_attention.core_attention.scale_mask_softmax",),
    "experts": ("mlp.experts",),
    "router": ("mlp.router",),
    "shared expert": ("mlp.shared_experts",),
    "mlp": ("mlp", "decoder.layers.0"),
}
"""Modules of a layer by the planner's terms; the first that fits counts, longest names first."""


def group_of(module: str) -> str | None:
    inside = module.removeprefix("decoder.layers.0.")
    fitting = [(len(name), term) for term, names in GROUPS.items() for name in names if inside.startswith(name)]
    return max(fitting)[1] if fitting else None


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Loaded, dict[str, int]]]:
    folder = tmp_path_factory.mktemp("saved")
    loaded = {name: written(folder, fields, f"recipe_{index}") for index, (name, fields) in enumerate(ASKED.items())}
    questions = [{"argv": argv(arguments(one.recipe)), "world": 1} for one in loaded.values()]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_saved.py"))],
        input=json.dumps(questions), capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: (one, answer) for (name, one), answer in zip(loaded.items(), found, strict=True)}


def predicted(loaded: Loaded) -> tuple[dict[str, float], float]:
    """Bytes by term of the one layer, and of the softmax that the loss keeps."""
    given = Given.of(loaded)
    shape = resolve_given(given)
    facts, row = facts_of(given), of_run(given, shape, layout_of(given, shape))
    tokens = tokens_of(shape, facts, row, 1.0)
    parts = parts_of(shape, facts, row, tokens)
    terms: dict[str, float] = {}
    for letter in shape.layers[0]:
        for term, size in parts[letter].kept.items():
            terms[term] = terms.get(term, 0.0) + float(size[0])
    return terms, float(tokens.whole[0]) * shape.rows * 4


@pytest.mark.parametrize("name", ASKED)
def test_a_layer_keeps_what_the_real_classes_keep(name: str, answers: dict[str, tuple[Loaded, dict[str, int]]]) -> None:
    loaded, real = answers[name]
    terms, softmax = predicted(loaded)
    found: dict[str, float] = dict.fromkeys(terms, 0.0)
    for module, size in real.items():
        if term := group_of(module):
            found[term] = found.get(term, 0) + size
    # a CPU's softmax keeps its mask, which the fused kernel does without; so does what computes it again
    found["attention core" if terms["attention core"] else "attention"] -= LENGTH**2
    if "router" in terms:  # whichever of these comes first keeps the layer's input, and the layer itself some maps
        routed = ("router", "shared expert", "dispatch", "mlp")
        theirs, ours = (sum(one.pop(term, 0.0) for term in routed) for one in (found, terms))
        assert ours == pytest.approx(theirs, rel=0.25)  # maps that are no tensor of autograd's are in ours
    found["attention"] -= 4 * LENGTH * HEAD * 2  # sines and cosines, which the fused rotation does without
    for term in terms.keys() - {"norms"}:  # whose kernels are a GPU's
        assert terms[term] == pytest.approx(found[term], rel=0.01), term
    assert real[""] == pytest.approx(softmax, rel=0.01)


def test_defaults_are_the_parsers() -> None:
    """Every default that the facts of a run take is what Megatron's parser says."""
    script = (
        "import json, os\nos.environ.update(WORLD_SIZE='1', RANK='0')\n"
        "from moekit.megatron import stages\nfrom moekit.plan.run import RUN_DEFAULTS\nstages.load()\n"
        "import megatron.training.arguments as a\nfrom argparse import ArgumentParser\n"
        "parser = a.add_megatron_arguments(ArgumentParser(allow_abbrev=False))\n"
        "said = vars(parser.parse_known_args([])[0])\n"
        "text = lambda value: value if isinstance(value, (int, float, list)) else str(value).rpartition('.')[2]\n"
        "print(json.dumps({n: [text(said.get(n, 'none')), text(v)] for n, v in RUN_DEFAULTS.items()}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: theirs for name, (theirs, ours) in found.items() if theirs != ours} == {}


SCHEDULES = """
import itertools, json
from types import SimpleNamespace as Some
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

found = []
for pipeline, virtual, rounds in itertools.product((2, 4, 8), (1, 2, 5), (1, 2, 8)):
    for rank in range(pipeline):
        group = Some(size=lambda: pipeline, rank=lambda: rank)
        on = Some(pp_group=group, virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None)
        number = rounds * pipeline
        total, _, warm, left = get_pp_rank_microbatches(number, virtual, pipeline, p2p_communicator=on)
        found.append([pipeline, virtual, number, rank, warm + (left > 0)])
print(json.dumps(found))
"""


def test_micro_batches_in_flight_are_the_schedules() -> None:
    done = subprocess.run([sys.executable, "-c", SCHEDULES], capture_output=True, text=True, timeout=120, check=True)
    given = Given.of(load("models/deepseek_v3_h100"))
    shape = resolve_given(given)
    own = of_run(given, shape, layout_of(given, shape))
    for pipeline, virtual, number, rank, chunks in json.loads(done.stdout.splitlines()[-1]):
        row = replace(
            own,
            world=pipeline,
            global_batch=number,
            tensor=np.array([1]),
            pipeline=np.array([pipeline]),
            virtual=np.array([virtual]),
            micro_batch=np.array([1]),
            layers=np.ones((1, pipeline), dtype=np.int64),
        )
        assert in_flight(row)[0, rank] * virtual == chunks, (pipeline, virtual, number, rank)
