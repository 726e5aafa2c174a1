"""A world, a batch, data and a schedule that Megatron takes without a word, and what it trains."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from harm import few_steps, in_megatron
from test_rules_real import question

from moekit.cluster.profile import find_cluster
from moekit.launch.script import nodes_and_gpus
from moekit.problems import MoekitError
from moekit.recipe.load import load

pytestmark = pytest.mark.megatron

VALIDATED = """
import json, os, sys
from moekit.megatron import stages
stages.load()
asked = json.loads({question!r})
run = stages.Run(stages.Question(**asked))
stages.pretend(run.question)
stages.parse(run)
stages.validate(run)
print({asks})
"""


def validated(here: Path, change: str, asks: str) -> str:
    """An expression of Megatron's validated arguments, `run.args`."""
    (here / "r.yaml").write_text(f"base: bases/tiny_dense.yaml\n{change}")
    asked = question(load("r.yaml").recipe, find_cluster(), ())
    return in_megatron(here, VALIDATED.format(question=json.dumps(asdict(asked)), asks=asks))


WORLD = """
import os, sys
from megatron.training.arguments import parse_args
os.environ.pop("WORLD_SIZE", None)
sys.argv = ["pretrain_gpt.py"]
print(parse_args().world_size)
"""


def test_a_world_that_is_not_given_is_one_process(here: Path) -> None:
    assert in_megatron(here, WORLD) == "1"


def test_no_whole_number_of_nodes_is_another_world(here: Path) -> None:
    """torchrun starts as many processes on each node: 12 on nodes of 8 would be 8 or 16."""
    (here / "r.yaml").write_text("base: dense\nparallel: {gpus: 12}\ntrain: {global_batch_size: 480}\n")
    with pytest.raises(MoekitError, match="12"):
        nodes_and_gpus(load("r.yaml").recipe, find_cluster())


def test_a_batch_that_is_not_given_follows_the_gpus(here: Path) -> None:
    batch = "run.args.global_batch_size"
    one = validated(here, "train: {global_batch_size: null}", batch)
    two = validated(here, "train: {global_batch_size: null}\nparallel: {gpus: 4}", batch)
    assert (one, two) == ("2", "8")


def test_too_few_samples_are_no_step(here: Path) -> None:
    [nothing, one] = few_steps(
        here,
        [f"train: {{iters: null, samples: {samples}}}\nschedule: {{warmup_iters: null}}" for samples in (3, 40)],
    )
    assert len(one.losses or ()) == 3
    assert not nothing.losses


def test_data_that_is_not_named_is_made_up(here: Path) -> None:
    [mock, unnamed] = few_steps(here, ["", "data: {mock_data: null}"])
    assert unnamed.losses == mock.losses


SPLIT = """
from megatron.core.datasets import blended_megatron_dataset_config as config
def split(text):
    return config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(text))
"""


def test_signs_of_a_split_are_passed_over(here: Path) -> None:
    assert in_megatron(here, f"{SPLIT}print(split('95,-5,0') == split('95,5,0'))") == "True"


LOADER = """
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
loader = build_pretraining_data_loader(None, 0)
"""


def test_training_without_documents_has_no_loader(here: Path) -> None:
    """No documents are no data set, no data set is no loader, and without one `do_train` is false."""
    assert in_megatron(here, f"{SPLIT}{LOADER}print(split('0,100,0')[0], loader)") == "None None"


EVALUATION = """
from megatron.training import training
try:
    next(training.RerunDataIterator(loader))
except TypeError:
    print(split("100,0,0")[1:], loader, "TypeError")
"""


def test_validation_without_documents_stops(here: Path) -> None:
    """No documents are no loader, and the first batch that validation asks of it is a TypeError."""
    assert in_megatron(here, SPLIT + LOADER + EVALUATION) == "[None, None] None TypeError"


def test_without_a_choice_the_tokenizer_is_gpt2s(here: Path) -> None:
    assert validated(here, "data: {tokenizer_type: null}", "run.args.tokenizer_type") == "GPT2BPETokenizer"


RATES = """
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
def rates(lr, warmup, decay, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    [group] = optimizer.param_groups
    group.update(max_lr=lr, min_lr=0.0)
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, lr, 0.0, warmup, 10, "WSD", 0.0, 0.0, 10, "constant", False, False, decay, "linear"
    )
    found = []
    for step in steps:
        scheduler.num_steps = step
        found.append(round(scheduler.get_lr(group), 2))
    return found
"""


def test_a_rate_of_zero_learns_nothing(here: Path) -> None:
    assert in_megatron(here, f"{RATES}print(rates(0.0, 0, 5, [0, 1, 9]))") == "[0.0, 0.0, 0.0]"


def test_a_decay_within_the_warmup_jumps_down(here: Path) -> None:
    """Warmup 4 of 10: a decay of 6 begins at its end, of 9 it is far on, and the rate falls by half in a step."""
    said = in_megatron(here, f"{RATES}print([rates(1.0, 4, decay, [4, 5]) for decay in (6, 9)])")
    assert said == "[[1.0, 0.83], [1.0, 0.56]]"
