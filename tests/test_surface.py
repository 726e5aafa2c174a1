"""What people see of moekit from outside: the fields, their texts, the shipped recipes, the commands' weight."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin

import jsonschema
import pytest
import yaml

import moekit
from moekit import cli, share
from moekit.megatron.table import FlagTable, Option, load, shipped
from moekit.recipe.build import is_section, markers
from moekit.recipe.docs import description, reference
from moekit.recipe.jsonschema import schema, schema_text
from moekit.recipe.load import load as load_recipe
from moekit.recipe.load import sections
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import EXCEPTIONS, Flag, Owned, field_name
from moekit.recipe.sizes import sizes

ROOT = Path(moekit.__file__).parents[1]
TABLES = [load(version) for version in shipped()]
HANDBOOK = (Path(__file__).parent / "recipe" / "handbook_flags.txt").read_text().split()
RECIPES = sorted(share.folder("recipes").rglob("*.yaml"))


def said() -> Iterator[tuple[str, Any, str]]:
    """(dotted field, its type, Megatron's option) for every option that a field says."""
    for section, cls in sections():
        for name, (hint, marks) in markers(cls).items():
            for mark in marks:
                if isinstance(mark, Flag):
                    yield f"{section}.{name}", hint, mark.option
                elif isinstance(mark, Owned):
                    yield from ((f"{section}.{name}", hint, option) for option in mark.options)


SAID = list(said())
OWNED = {
    f"{section}.{name}"
    for section, cls in sections()
    for name, (_, marks) in markers(cls).items()
    if any(isinstance(mark, Owned) for mark in marks)
}
"""Fields whose options' values the launch decides."""
FLAGS = [(name, hint, option) for name, hint, option in SAID if name not in OWNED]


def options(name: str) -> list[tuple[FlagTable, Option]]:
    return [(table, option) for table in TABLES if (option := table.option(name))]


# Fields and options


@pytest.mark.parametrize("flag", HANDBOOK)
def test_one_field_says_each_flag_of_the_handbook(flag: str) -> None:
    assert len([name for name, _, option in SAID if option == flag]) == 1


def test_the_handbooks_list_is_whole() -> None:
    assert len(HANDBOOK) == len(set(HANDBOOK)) == 124
    assert all(options(flag) for flag in HANDBOOK)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.version)
def test_nothing_can_be_said_twice(table: FlagTable) -> None:
    dests = Counter(option.dest for _, _, name in SAID if (option := table.option(name)))
    assert [dest for dest, times in dests.items() if times > 1] == []


@pytest.mark.parametrize(("name", "hint", "option"), FLAGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_is_named_after_its_option(name: str, hint: Any, option: str) -> None:
    section, _, field = name.partition(".")
    assert (field == field_name(section, option)) is (name not in EXCEPTIONS)


def test_exceptions_are_few_and_are_fields() -> None:
    assert len(EXCEPTIONS) <= 15
    assert set(EXCEPTIONS) <= {name for name, _, _ in SAID}


@pytest.mark.parametrize(("name", "hint", "option"), FLAGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_has_its_options_type(name: str, hint: Any, option: str) -> None:
    found = options(option)
    assert found, f"no Megatron has {option}"
    listed = get_origin(hint) is tuple
    inner = get_args(hint)[0] if listed else hint
    for _, known in found:
        assert known.is_switch is (hint is bool)
        assert listed is (known.nargs is not None)
        if known.is_switch:
            assert known.action in ("store_true", "store_false")
        elif known.type in ("int", "float"):
            assert inner.__name__ == known.type
        else:
            assert inner is str or hasattr(inner, "parse")


def test_a_switch_that_turns_off_says_so() -> None:
    """`true` prints the option, so the field of one that stores False must read like its negation."""
    for name, hint, option in FLAGS:
        for _, known in options(option):
            if hint is bool and known.action == "store_false":
                assert re.match(r"(no|disable|untie|skip|dont)_", name.partition(".")[2]), name


# Texts


def test_every_section_and_field_has_a_text() -> None:
    assert [field.name for field in fields(Recipe)][:3] == ["base", "summary", "benchmark"]
    for section, cls in sections():
        assert (cls.__doc__ or "").strip().endswith("."), section
        for name in markers(cls):
            text = description(cls, name)
            assert len(text) > 15, f"{section}.{name}"
            assert text.endswith("."), f"{section}.{name}"
    assert all(field["description"] for field in schema()["properties"].values())


def test_recipes_may_have_two_levels_only() -> None:
    for section, cls in sections():
        assert not [name for name, (hint, _) in markers(cls).items() if is_section(hint)], section


def test_the_schema_beside_the_recipes_is_the_codes() -> None:
    assert (share.folder("recipes") / "schema.json").read_text() == schema_text(), "moekit schema > recipes/schema.json"


def test_the_page_of_fields_is_the_codes() -> None:
    assert (ROOT / "docs" / "recipe.md").read_text() == reference(), "moekit schema --markdown > docs/recipe.md"


def test_the_page_of_fields_has_every_field() -> None:
    page = reference()
    for section, cls in sections():
        for name in markers(cls):
            assert f"- **`{section}.{name}`** " in page


# Shipped recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_begins_with_its_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("$schema=")[2]).resolve() == share.folder("recipes").resolve() / "schema.json"


class AsWritten(yaml.SafeLoader):
    """YAML 1.2's numbers, as editors read them: `1e-3` is one."""


AsWritten.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def as_an_editor_reads(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=AsWritten)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_editors_take_the_shipped_recipes(path: Path) -> None:
    jsonschema.Draft7Validator(schema()).validate(as_an_editor_reads(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("router: {topkk: 8}", "'topkk' was unexpected"),
        ("routr: {topk: 8}", "'routr' was unexpected"),
        ("router: {topk: eight}", "is not of type 'integer', 'null'"),
        ("router: {topk: 0}", "less than the minimum"),
        ("moe: {dispatcher: alltoal}", "is not one of"),
        ("runtime: {device: tpu}", "is not one of"),
        ("balance: {type: [aux_loss, axu_loss]}", "'axu_loss'"),
        ("model: {swiglu: maybe}", "is not of type 'boolean', 'null'"),
    ],
)
def test_editors_underline_slips(text: str, said: str) -> None:
    errors = [error.message for error in jsonschema.Draft7Validator(schema()).iter_errors(yaml.safe_load(text))]
    assert len(errors) == 1
    assert said in errors[0]


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(schema())


# Commands


NOT_AT_THE_DESK = ("torch", "datatrove", "trackio", "transformers", "huggingface_hub", "numpy", "megatron", "pydantic")


@pytest.mark.parametrize(
    "words",
    [
        ["check", "first_moe"],
        ["show", "first_moe"],
        ["flags", "first_moe"],
        ["diff", "dense", "first_moe"],
        ["plan", "first_moe", "--explain", "parameters"],
        ["schema"],
        ["schema", "profile"],
        ["schema", "dataset"],
        ["init", "--help"],
        ["data", "--help"],
        ["launch", "first_moe", "--dry-run"],
        ["launch", "first_moe", "--on", "hf-jobs", "--flavor", "h200x8", "--dry-run"],
        ["prove"],
        ["--help"],
    ],
    ids=lambda words: " ".join(words),
)
def test_commands_at_the_desk_import_nothing_heavy(words: list[str]) -> None:
    script = (
        "import sys, moekit.cli\n"
        f"sys.argv = ['moekit', *{words!r}]\n"
        "try:\n    moekit.cli.main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        f"print([name for name in {NOT_AT_THE_DESK!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_plan_needs_no_torch() -> None:
    """Memory and time are numpy's; what is heavy beside it stays out."""
    heavy = [name for name in NOT_AT_THE_DESK if name != "numpy"]
    script = (
        "import sys, moekit.cli\n"
        "sys.argv = ['moekit', 'plan', 'first_moe']\n"
        "try:\n    moekit.cli.main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_commands() -> None:
    """The whole list; a new one is a decision."""
    assert list(cli.ROOMS) == [
        *("check", "show", "flags", "diff", "new", "schema", "rules", "import"),
        *("plan", "rehearse", "init", "image", "data", "preflight"),
        *("launch", "status", "why", "list", "logs", "cancel", "resume", "bundle"),
        *("watch", "compare", "router", "mismatch", "experts", "doctor", "profile"),
        *("track", "dashboard", "prove", "megatron"),
    ]


def test_a_command_lives_in_its_room() -> None:
    for name in cli.ROOMS:
        done = subprocess.run(
            [sys.executable, "-m", "moekit", name, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


# The handbook's numbers


@pytest.mark.parametrize("name", ["dense", "first_moe"])
def test_a_step_of_the_handbooks_models(name: str) -> None:
    recipe = load_recipe(name).recipe
    size = sizes(recipe)
    assert size is not None
    assert size.tokens_per_step == 2_097_152
    assert size.accumulation_steps == 8
    assert recipe.train.iters is not None
    assert round(recipe.train.iters * size.tokens_per_step / 1e9, 1) == 10.0
    assert recipe.train.exit_interval == 120


@pytest.mark.megatron
@pytest.mark.parametrize("name", ["dense", "first_moe"])
def test_the_trial_ends_at_the_full_learning_rate(name: str) -> None:
    """Megatron's own scheduler, with what Megatron makes of the recipe's schedule (training.py)."""
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    recipe = load_recipe(name).recipe
    schedule, batch = recipe.schedule, recipe.train.global_batch_size
    assert None not in (batch, schedule.lr, schedule.warmup_iters, schedule.decay_iters, schedule.wsd_decay_iters)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    optimizer.param_groups[0].update(max_lr=schedule.lr, min_lr=schedule.min_lr, wd_mult=1.0, lr_mult=1.0)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_iters * batch,
        lr_decay_steps=schedule.decay_iters * batch,
        lr_decay_style=schedule.decay_style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=recipe.train.iters * batch,
        wd_incr_style="constant",
        wsd_decay_steps=schedule.wsd_decay_iters * batch,
        lr_wsd_decay_style=schedule.wsd_decay_style,
    )

    def rate_after(steps: int) -> float:
        scheduler.num_steps = 0
        scheduler.step(steps * batch)
        return float(optimizer.param_groups[0]["lr"])

    assert rate_after(20) == pytest.approx(2.5e-4)
    assert rate_after(120) == 5e-4
    assert rate_after(4768 - 477) == pytest.approx(5e-4)
    assert rate_after(4768) == pytest.approx(0.0, abs=1e-9)


# The project


def test_no_path_of_this_machine_is_in_a_recipe_or_profile() -> None:
    for path in [*RECIPES, *share.folder("slurm").rglob("*")]:
        if path.is_file():
            assert str(ROOT) not in path.read_text(), path


def test_the_light_core_is_light() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=~!\[ ;]", line)[0].lower() for line in project["dependencies"]}
    assert names == {"numpy", "pyyaml", "rich", "typer"}


def imports(path: Path) -> set[str]:
    """The first names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_the_recipe_layer_needs_yaml_and_typer_only() -> None:
    for path in (ROOT / "moekit" / "recipe").rglob("*.py"):
        assert imports(path) - set(sys.stdlib_module_names) <= {"moekit", "yaml", "typer"}, path


def test_json_of_commands_is_json() -> None:
    for words in (["check", "dense", "--json"], ["show", "dense", "--json"], ["flags", "dense", "--json"]):
        done = subprocess.run([sys.executable, "-m", "moekit", *words], capture_output=True, timeout=60, check=True)
        assert isinstance(json.loads(done.stdout), Mapping | list)
