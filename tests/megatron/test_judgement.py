"""A refusal of Megatron's at the field and line of a recipe, from its words and the names around its statement."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from moekit.megatron.installed import Judge
from moekit.megatron.judgement import CALLED, fair, fields_of, problem_of, summary
from moekit.megatron.stages import STAGES
from moekit.megatron.table import load as load_table
from moekit.megatron.table import shipped
from moekit.megatron.verdict import Verdict
from moekit.problems import format_problem
from moekit.recipe.load import Loaded, load

JUDGE = Judge("0.19.2")
RECIPE = """\
base: base.yaml
moe:
  num_experts: 60
router: {topk: 8}
parallel:
  pipeline_model: 2
schedule:
  min_lr: 1
  wsd_decay_iters: null
data:
  split: 100,0,0
precision:
  fp8_format: hybrid
  fp8_recipe: null
runtime:
  environment:
    NVTE_FUSED_ATTN: 1
megatron:
  extra:
    - --save-extra-things
    - --ffn-thing=3
    - wash
"""
BASE = """\
parallel:
  gpus: 8
  expert_model: 8
model:
  num_layers: 4
  attention_backend: flash
schedule: {lr: 1e-3, wsd_decay_iters: 3}
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(RECIPE)
    Path("base.yaml").write_text(BASE)
    return load("x.yaml")


@pytest.mark.parametrize(
    ("message", "names", "fields"),
    [
        # as options, as attributes, in prose; what the recipe's own file says comes first
        ("--moe-router-topk is wrong", (), ["router.topk"]),
        ("args.lr is below args.min_lr", (), ["schedule.min_lr", "schedule.lr"]),
        ("a multiple of expert model parallel_size", (), ["parallel.expert_model"]),
        ("num_moe_experts and --num-experts", (), ["moe.num_experts"]),
        ("expert model parallel_size", ("num_experts", "expert_model_parallel_size"), None),
        ("argument --fp8-format: invalid choice", (), ["precision.fp8_format"]),
        ("fp8 needs a recipe", (), ["precision.fp8_format"]),
        # English is no name
        ("cannot split or save this, the optimizer is lost", (), []),
        ("bad value for 'split'", (), ["data.split"]),
        ("expert_model_parallel_sizes", (), []),
        # of the names around a statement, those that the recipe sets
        ("no", ("swiglu", "min_lr", "lr"), ["schedule.min_lr", "schedule.lr"]),
        ("no", ("swiglu",), ["model.swiglu"]),
        ("assert self.wsd_decay_steps is not None", (), ["schedule.wsd_decay_iters", "schedule.wsd_decay_samples"]),
        # what no option of a field says
        ("world_size (8) is not divisible", (), ["parallel.gpus"]),
        ("unrecognized arguments: --save-extra-things wash", (), ["megatron.extra"]),
        ("set NVTE_FUSED_ATTN to 0", (), ["runtime.environment.NVTE_FUSED_ATTN"]),
        ("KeyError: 'flash'", (), ["model.attention_backend"]),
    ],
)
def test_the_fields_of_a_refusal(
    message: str, names: tuple[str, ...], fields: list[str] | None, loaded: Loaded
) -> None:
    fields = ["moe.num_experts", "parallel.expert_model"] if fields is None else fields
    assert fields_of(Verdict("validate", "refused", message, names=names), loaded) == fields


@pytest.mark.parametrize(
    ("verdict", "shown"),
    [
        (
            Verdict("validate", "refused", "assert args.min_lr <= args.lr", "training/arguments.py:7"),
            "x.yaml:8: Megatron refuses at validate, without a message: `assert args.min_lr <= args.lr`\n"
            "    hint: Megatron 0.19.2 says it at megatron/training/arguments.py:7; "
            "`schedule.lr` comes from base.yaml:7",
        ),
        (
            Verdict("container", "refused", "wsd_decay_steps\n  is missing.", "core/x.py:1"),
            "x.yaml:9: Megatron refuses at config: wsd_decay_steps is missing\n"
            "    hint: Megatron 0.19.2 says it at megatron/core/x.py:1; `schedule.wsd_decay_samples` is unset",
        ),
        (
            Verdict("config", "refused", "swiglu is off", "core/x.py:1", names=("swiglu", "num_moe_experts")),
            "x.yaml:3: Megatron refuses at config: swiglu is off\n"
            "    hint: Megatron 0.19.2 says it at megatron/core/x.py:1",
        ),
        (
            Verdict("parse", "refused", "unrecognized arguments: --ffn-thing=3"),
            "x.yaml:21: Megatron refuses at parse: unrecognized arguments: --ffn-thing=3\n"
            "    hint: Megatron 0.19.2 says it in its parser",
        ),
        (
            Verdict("build", "refused", "no reason", "core/x.py:1"),
            "x.yaml: Megatron refuses at build: no reason\n    hint: Megatron 0.19.2 says it at megatron/core/x.py:1",
        ),
        (
            Verdict("config", "refused", "bad", "core/x.py:1", names=("apply_rope_fusion",)),
            "base.yaml:5: Megatron refuses at config: bad\n"
            "    hint: Megatron 0.19.2 says it at megatron/core/x.py:1; `model.no_rope_fusion` is unset",
        ),
    ],
)
def test_a_refusal_as_it_is_shown(verdict: Verdict, shown: str, loaded: Loaded) -> None:
    assert format_problem(problem_of(verdict, loaded, JUDGE)) == shown


def test_another_megatron_is_named(loaded: Loaded) -> None:
    problem = problem_of(Verdict("build", "refused", "no"), loaded, Judge("0.20.0", "abcdef0123456789"))
    assert problem.hint == "Megatron 0.20.0 at abcdef012 says it in its parser; the recipe is for Megatron 0.19.2"
    assert Judge("0.20.0", "d6316eb45c").is_version("d6316eb45")
    assert not Judge("0.20.0").is_version("0.20")


def test_a_megatron_without_the_recipes_options_is_no_judge(loaded: Loaded) -> None:
    verdicts = [Verdict("parse", "refused", "unrecognized arguments: --moe-router-topk 8")]
    (judged,) = fair(verdicts, ["--moe-router-topk", "8"], loaded, Judge("0.10.0"))
    assert (judged.answer, judged.feature) == ("not_judged", "options of Megatron 0.19.2")
    assert fair(verdicts, ["--moe-router-topk", "8"], loaded, JUDGE) == verdicts
    assert fair(verdicts, ["--moe-router-topkk", "8"], loaded, Judge("0.10.0")) == verdicts


@pytest.mark.parametrize(
    ("verdicts", "line"),
    [
        (
            [Verdict(stage, "passed") for stage in STAGES],
            "Megatron 0.19.2: parse, validate, config, schedule, groups, build passed",
        ),
        (
            [
                *(Verdict(stage, "passed") for stage in STAGES[:-1]),
                Verdict("build", "not_judged", "its kernels are elsewhere.", feature="FP8"),
            ],
            "Megatron 0.19.2: parse, validate, config, schedule, groups passed; "
            "build not judged (FP8: its kernels are elsewhere)",
        ),
        (
            [*(Verdict(stage, "passed") for stage in STAGES[:3]), Verdict("container", "refused", "no")],
            "Megatron 0.19.2: parse, validate passed; config refused; schedule, groups, build not reached",
        ),
        (
            [Verdict("parse", "not_judged", "x", feature="options")],
            "Megatron 0.19.2: parse not judged (options: x); validate, config, schedule, groups, build not reached",
        ),
    ],
)
def test_one_line_for_all_stages(verdicts: list[Verdict], line: str, loaded: Loaded) -> None:
    assert summary(verdicts, STAGES, loaded, JUDGE) == line
    other = summary(verdicts, STAGES, loaded, Judge("0.20.0"))
    assert other == line.replace("0.19.2:", "0.20.0 (the recipe is for 0.19.2):")
    image = summary(verdicts, STAGES, loaded, Judge("0.19.2", transformer_engine="2.16.0"))
    assert image == line.replace("0.19.2:", "0.19.2 with Transformer Engine 2.16.0:")


DESTS = {
    option.dest for table in map(load_table, shipped()) for name in table.entries if (option := table.option(name))
}


def test_what_something_is_called_elsewhere_is_an_argument() -> None:
    assert [dest for dests in CALLED.values() for dest in dests if dest not in DESTS] == []


@pytest.mark.megatron
def test_every_argument_that_a_configuration_calls_otherwise_is_known() -> None:
    spec = find_spec("megatron")
    assert spec
    files = [Path(folder, "training", "argument_utils.py") for folder in spec.submodule_search_locations or ()]
    (text,) = (file.read_text() for file in files if file.is_file())
    renamed = [
        (
            target.slice.value,
            {a.attr for a in ast.walk(node.value) if isinstance(a, ast.Attribute) and is_args(a.value)},
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript)
        if isinstance(target.slice, ast.Constant)
    ]
    renamed = [(name, dests) for name, dests in renamed if dests and name not in dests | DESTS]
    assert len(renamed) > 20
    for name, dests in renamed:
        if any("kitchen" in dest for dest in dests):
            continue  # of a library that is not public, and no option without it
        assert set(CALLED[name]) & {known for dest in dests for known in CALLED.get(dest, (dest,))}, name


def is_args(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "args"
