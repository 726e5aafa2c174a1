"""`moekit check --real`: the real Megatron's refusals, stage by stage, at the lines of a recipe that cause them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.judges import questions
from moekit.launch.real_check import Judged, real_check
from moekit.recipe.load import load

pytestmark = pytest.mark.megatron

# The line that is at fault, the stage, and how Megatron's own words begin.
REFUSED = {
    "misspelt": (
        "base: first_moe\nmegatron:\n  extra:\n    - --moe-router-topkk\n    - 8\n",
        ("misspelt.yaml:4", "parse", "unrecognized arguments: --moe-router-topkk 8"),
    ),
    "unknown_choice": (
        "base: first_moe\nmegatron:\n  extra: [--attention-backend, wash]\n",
        ("unknown_choice.yaml:3", "parse", "KeyError: 'wash'"),
    ),
    "bare_assert": (
        "base: first_moe\nschedule:\n  min_lr: 1e-2\n",
        ("bare_assert.yaml:3", "validate", "assert args.min_lr <= args.lr"),
    ),
    "experts": (
        "base: first_moe\nmoe:\n  num_experts: 60\n",
        ("experts.yaml:3", "validate", "Number of experts should be a multiple of expert model parallel_size"),
    ),
    "variable": (
        "base: first_moe\nruntime:\n  environment:\n    CUDA_DEVICE_MAX_CONNECTIONS: 8\nparallel: {context: 2}\n",
        ("variable.yaml:4", "validate", "Using tensor model parallelism or context parallelism require"),
    ),
    "bias": (
        "base: first_moe\nbalance:\n  enable_expert_bias: true\n",
        ("bias.yaml:3", "config", "Expert bias for aux-loss-free routing only supports 'sigmoid'"),
    ),
    "top_1": (
        "base: first_moe\nrouter:\n  topk: 1\n",
        ("top_1.yaml:3", "config", "Please use --moe-router-pre-softmax when topk is 1"),
    ),
    "no_decay": (
        "base: first_moe\nschedule:\n  wsd_decay_iters: null\n",
        ("no_decay.yaml:3", "schedule", "assert self.wsd_decay_steps is not None"),
    ),
    "world": (
        "base: first_moe\nparallel:\n  expert_model: 16\n",
        (
            "world.yaml:3",
            "groups",
            "world_size (8) is not divisible by expert_tensor_model_pipeline_parallel size (16)",
        ),
    ),
    "pattern": (
        "base: first_moe\nmoe:\n  layer_freq: ([0]*1+[1]*14)\n",
        ("pattern.yaml:3", "build", "Invalid length of moe_layer_pattern: 15, expected 16"),
    ),
}
NOT_ASKED = {
    "no_world": ("base: first_moe\nparallel:\n  gpus: null\n", "not judged: `parallel.gpus` is not set"),
    "unread": ("base: first_moe\nrouter:\n  topkk: 8\n", "not judged: not all of its fields can be read"),
}
NEWER = "base: first_moe\nmegatron: {version: d6316eb45}\nmoe: {shortcut_connection: true}\n"
RESUMED = "base: dense\ncheckpoint: {save: true, save_interval: 10}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    texts = {name: text for name, (text, _) in (REFUSED | NOT_ASKED).items()}
    for name, text in {**texts, "newer": NEWER, "resumed": RESUMED}.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def judged(folder: Path) -> dict[str, Judged]:
    """Every recipe of this file and every shipped one, judged by one Megatron."""
    from moekit.recipe.load import load_partly

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recipes = {path.stem: load_partly(path.name) for path in sorted(folder.glob("*.yaml"))}
        recipes |= {name: load(name) for name in share.shipped_recipes()}
        return real_check(recipes, find_cluster(), megatron=None, in_image=False)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_stands_at_its_line(name: str, judged: dict[str, Judged]) -> None:
    where, stage, words = REFUSED[name][1]
    (problem,) = judged[name].problems
    bare = words.startswith("assert ")
    assert problem.where == where
    assert problem.what.startswith(f"Megatron refuses at {stage}{', without a message: `' if bare else ': '}{words}")
    place = "in its parser" if name == "misspelt" else "at megatron/"
    assert problem.hint.startswith(f"Megatron 0.19.2 says it {place}")
    (line,) = judged[name].lines
    assert f"{stage} refused" in line
    last = judged[name].values["verdicts"][-1]
    assert (last["stage"], last["answer"], last["where"]) == (stage, "refused", where)


@pytest.mark.parametrize("name", NOT_ASKED)
def test_what_cannot_be_asked_is_not_judged(name: str, judged: dict[str, Judged]) -> None:
    assert judged[name] == Judged([NOT_ASKED[name][1]])


def test_options_of_another_megatron_are_not_judged(judged: dict[str, Judged]) -> None:
    assert judged["newer"].problems == []
    assert judged["newer"].lines == [
        "Megatron 0.19.2 (the recipe is for d6316eb45): parse not judged (options of Megatron d6316eb45: unrecognized "
        "arguments: --moe-shortcut-connection); validate, config, schedule, groups, build not reached"
    ]


@pytest.mark.parametrize("name", share.shipped_recipes())
def test_shipped_recipes_pass_or_say_what_is_not_judged(name: str, judged: dict[str, Judged]) -> None:
    assert judged[name].problems == []
    if load(name).recipe.parallel.gpus is None:  # a model's sizes, for recipes to inherit
        assert judged[name].lines == ["not judged: `parallel.gpus` is not set"]
        return
    verdicts = judged[name].values["verdicts"]
    elsewhere = verdicts[0]["feature"] == f"options of Megatron {load(name).recipe.megatron.version}"
    assert verdicts[0]["answer"] == "passed" or elsewhere
    assert [verdict for verdict in verdicts if verdict["answer"] != "passed" and not verdict["feature"]] == []
    for verdict in verdicts:
        if verdict["answer"] == "not_judged":
            assert f"not judged ({verdict['feature']}: " in "".join(judged[name].lines)


def test_fp8_is_not_judged_and_nothing_else(judged: dict[str, Judged]) -> None:
    passed = "Megatron 0.19.2: parse, validate, config, schedule, groups"
    made_up = "made-up vocabulary (131,072 tokens: the tokenizer is not read)"
    assert judged["first_moe"].lines == [f"{passed}, build passed; {made_up}"]
    assert judged["fp8"].lines == [f"{passed} passed; build not judged (FP8: its kernels are Transformer Engine's)"]


def test_a_start_from_the_own_checkpoint_is_asked_too(judged: dict[str, Judged]) -> None:
    starts = [verdict["start"] for verdict in judged["resumed"].values["verdicts"]]
    assert starts == ["first"] * 7 + ["resume"] * 7
    assert len(judged["resumed"].lines) == 1


def test_the_machine_is_the_profiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    cluster = replace(find_cluster(), gpu="b300", transformer_engine="2.9.0", environment={"NCCL_DEBUG": "INFO"})
    asked = questions(load("variable.yaml"), cluster)["first"]
    assert (asked.capability, asked.transformer_engine, asked.world_size) == ((10, 3), "2.9.0", 8)
    assert asked.environment is not None
    assert {"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}.items() <= asked.environment.items()
    here = questions(load("quickstart"), cluster)["first"]
    assert (here.transformer_engine, here.environment) == (None, load("quickstart").recipe.runtime.environment or {})
    assert questions(load("first_moe"), cluster, in_image=True)["first"].transformer_engine is None


def check(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moekit", "check", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_the_command(folder: Path) -> None:
    done = check("--real", "bare_assert.yaml", "unread.yaml", cwd=folder)
    dense = share.folder("recipes").resolve() / "dense.yaml"
    lr = next(number for number, line in enumerate(dense.read_text().splitlines(), 1) if line.startswith("  lr:"))
    assert done.stdout == (
        "bare_assert.yaml: Megatron 0.19.2: parse passed; validate refused; config, schedule, groups, build "
        "not reached\n"
        "unread.yaml: not judged: not all of its fields can be read\n"
    )
    ours, theirs = done.stderr.index("is above schedule.lr"), done.stderr.index("Megatron refuses")
    assert ours < theirs
    assert f"; `schedule.lr` comes from {dense}:{lr}\n" in done.stderr[theirs:]
    assert done.stderr.endswith("2 recipes: 3 problems, checked against aws-p5 (no --profile given)\n")
    assert done.returncode == 1


def test_the_command_as_json(folder: Path) -> None:
    done = check("--real", "dense", "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)["dense"]
    assert answer["problems"] == []
    assert answer["judge"]["megatron"] == "0.19.2"
    assert answer["verdicts"][-1] == {
        **{"start": "first", "stage": "build", "answer": "passed"},
        **{"message": "", "place": "", "feature": "", "where": ""},
    }


def test_no_megatron_is_said_with_what_the_rules_say(folder: Path) -> None:
    missing = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'megatron' else find(name, *more)\n"
        "from moekit import cli\n"
        "sys.argv = ['moekit', 'check', '--real', 'world.yaml']\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", missing]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("world.yaml:3: parallel.gpus = 8 cannot be divided")
    assert done.stderr.endswith(
        "error: there is no Megatron here to judge a recipe\n"
        "    hint: `pip install 'moekit[local]'` (Linux, about 3 GB), or name a checkout with `--megatron PATH`; on a "
        "cluster, `--in-image` asks that of the profile's image\n"
    )


def test_a_checkout_that_is_none(folder: Path) -> None:
    done = check("--real", "dense", "--megatron", str(folder), cwd=folder)
    assert done.stderr == f"error: `{folder}` holds no Megatron: it has no megatron/training/arguments.py\n"


def test_whom_to_ask_needs_the_question(folder: Path) -> None:
    for words in (("--in-image",), ("--megatron", "x")):
        done = check("dense", *words, cwd=folder)
        assert done.stderr == f"error: `{words[0]}` says whom `--real` asks\n    hint: add `--real`\n"
        assert done.returncode == 1
