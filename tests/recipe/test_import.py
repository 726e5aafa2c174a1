"""`moekit import`: scripts against their recipes and a real bash, recipes back and forth, and what is refused."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moekit import share
from moekit.launch.run_files import lines, run_arguments
from moekit.megatron.flags import arguments, argv
from moekit.megatron.table import check, parse_values, shipped
from moekit.megatron.table import load as load_table
from moekit.problems import MoekitError, Problem
from moekit.recipe import importing, nodes
from moekit.recipe.build import build, markers
from moekit.recipe.importing import import_recipe
from moekit.recipe.load import load, sections
from moekit.recipe.patterns import HybridPattern, LayerPattern, PipelineLayout
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import AtLeast, Flag
from moekit.recipe.shell import megatron_words
from moekit.recipe.shell_values import Variables, expand
from moekit.recipe.shell_words import Raw, lettered, spelled, tokens

CASES = Path(__file__).parent / "import_cases"
SCRIPTS = sorted(CASES.glob("*.sh"))
RECIPES = [Path(f"{name}.yaml") for name in share.shipped_recipes()]


def read(text: str) -> Recipe:
    problems: list[Problem] = []
    recipe = build(Recipe, nodes.parse(text, "imported", problems), problems)
    assert not problems
    return recipe


def by_option(words: list[str], version: str) -> dict[str, Any]:
    table = load_table(version)
    assert not check(words, table)
    return parse_values(words, table)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_becomes_its_recipe(script: Path) -> None:
    imported = import_recipe(script.read_text(), script.name)
    assert imported == script.with_suffix(".yaml").read_text()
    read(imported)


RECORDER = """#!/bin/bash
[ "$(basename "$0")" = srun ] && { while [[ "$1" == --* ]]; do shift; done; "$@"; exit; }
printf '%s\\n' "$@" > "$RECORD"
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_bash_starts_megatron_with_the_same_words(script: Path, tmp_path: Path) -> None:
    for program in ("torchrun", "python3", "srun"):
        (tmp_path / program).write_text(RECORDER)
        (tmp_path / program).chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    slurm = {"SLURM_NNODES": "4", "SLURM_GPUS_PER_NODE": "8"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "words"), **slurm}
    subprocess.run(["bash", script], cwd=tmp_path, env=env, capture_output=True, timeout=60, check=False)
    said = (tmp_path / "words").read_text().splitlines()
    start = next(number for number, word in enumerate(said) if word.endswith("pretrain_gpt.py"))
    assert [word.text for word in megatron_words(script.read_text(), "x", {}).words] == said[start + 1 :]


# fmt: off
PIECES = [
    'a', '-b', '$A', '${A}', '"$A c"', "'$A'", '${Z:-d e}', '"${Z:-d e}"', '\\ ', '\\$A', '"\\$A"', '"a\\b"',
    '${L[@]}', '"${L[@]}"', '$L', '"${L[*]}"', '"${NONE[@]}"', '$((N * 3 - 7 / 2))', '$((-N % 4))', '${A:+x y}',
    '${Z:+x}', '${E-f}', '""', "''", '\\\n', '"it\'s"', '"${Z:-\'q\'}"', '${Z-}', '$(( (N+1)*2 ))', 'b#', '=',
    '[0]', '"${A}"\'"\'',
]
# fmt: on
WRITTEN = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
WRITTEN = WRITTEN.filter(lambda word: not re.search(r"\$[A-Z](\\\n)?\w", word))  # another variable's name
SETTINGS = 'A="one  two"; L=(x "y z" w); NONE=(); N=11; E=""'


@settings(max_examples=150, deadline=None)
@given(st.lists(WRITTEN, min_size=1, max_size=4))
def test_words_are_those_of_bash(written: list[str]) -> None:
    line = " ".join(written)
    script = f"{SETTINGS}\nset -f\nprintf '%s\\0' start {line}"
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=30).stdout
    values = {"A": ["one  two"], "L": ["x", "y z", "w"], "NONE": [], "N": ["11"], "E": [""]}
    variables = Variables({name: [lettered(value) for value in several] for name, several in values.items()})
    raws = [token for token in tokens(lettered(line)) if isinstance(token, Raw)]
    found = [spelled(word) for raw in raws for word in expand(raw.chars, variables)]
    assert ["start", *found] == said.split("\0")[:-1]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("form", ["a word a line", "an option a line"])
def test_a_shipped_recipe_comes_back(recipe: Path, form: str) -> None:
    loaded = load(str(share.folder("recipes") / recipe))
    said = run_arguments(loaded.recipe, "run", "/fsx", resume=False)
    text = lines(argv(said)) if form == "a word a line" else "".join(f"{shlex.join(one.words)}\n" for one in said)
    version = loaded.recipe.megatron.version
    imported = read(import_recipe(text, "argv.first", version=version, gpus=loaded.recipe.parallel.gpus))
    assert argv(run_arguments(imported, "run", "/fsx", resume=False)) == argv(said)


TEXT = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
TEXT |= st.sampled_from(
    ["a b", "$HOME", "null", "~", "1e3", "'", '"', "\\", "# x", "a: b", "[x", "yes", "`id`", "$(id)"]
)
WORDS = TEXT.filter(lambda text: not text.startswith("-") and text == text.strip())
NUMBERS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(10**9), 10**9),
    float: st.floats(allow_nan=False, allow_infinity=False),
    LayerPattern: st.sampled_from(["2", "[0,1]", "([0]*1+[1]*3)"]).map(LayerPattern.parse),
    HybridPattern: st.sampled_from(["*E*E", "M-|*E/*E"]).map(HybridPattern.parse),
    PipelineLayout: st.sampled_from(["Et*3|(tt|)*2tmL", "EtL"]).map(PipelineLayout.parse),
}


def value_of(hint: Any, marks: tuple[Any, ...], choices: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Values that both the field and the option take."""
    if get_origin(hint) is tuple:
        one = value_of(get_args(hint)[0], marks, choices)
        return st.lists(one, min_size=3, max_size=3).map(tuple)
    if hint is bool:
        return st.just(True)
    if choices:
        return st.sampled_from(choices)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    least = next((mark.least for mark in marks if isinstance(mark, AtLeast)), None)
    strategy = NUMBERS.get(hint, WORDS)
    # argparse reads `-1e-05` as an option, which no recipe can help
    strategy = strategy if hint is not float else strategy.filter(lambda number: number >= 0)
    return strategy if least is None else strategy.filter(lambda number: number >= least)


@st.composite
def recipes(draw: st.DrawFn, version: str) -> Recipe:
    table, recipe = load_table(version), Recipe()
    for section, cls in sections():
        said = {}
        for name, (hint, marks) in markers(cls).items():
            option = next((table.option(mark.option) for mark in marks if isinstance(mark, Flag)), None)
            if option and draw(st.integers(0, 7)) == 0:
                said[name] = draw(value_of(hint, marks, option.choices))
        recipe = replace(recipe, **{section: replace(getattr(recipe, section), **said)})
    extra = draw(st.sampled_from([None, ("--decoupled-lr", "1e-4"), ("--use-mcore-models", "--spec", "a b", "$c")]))
    return replace(recipe, megatron=replace(recipe.megatron, version=version, extra=extra))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
@pytest.mark.parametrize("version", shipped())
def test_any_recipe_comes_back(version: str, data: st.DataObject) -> None:
    recipe = data.draw(recipes(version))
    words = argv(arguments(recipe))
    before = by_option(words, version)
    mixed = data.draw(st.permutations(arguments(recipe)))
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {shlex.join(argv(mixed))} --log-interval 1"
    imported = read(import_recipe(text, "x.sh", version=version))
    assert imported.parallel.gpus == 8
    found = argv(arguments(replace(imported, log=replace(imported.log, interval=recipe.log.interval))))
    assert by_option(found, version) == before
    assert found == words  # in the schema's order, however it was written


def test_every_field_with_an_option_comes_back() -> None:
    for version in shipped():
        table = load_table(version)
        for section, cls in sections():
            for field in fields(cls):
                hint, marks = markers(cls)[field.name]
                option = next((table.option(mark.option) for mark in marks if isinstance(mark, Flag)), None)
                if option is None:
                    continue
                value: Any = "1" if get_args(hint) != (str, ...) else "x"
                values = [] if option.is_switch else [str(option.choices[0])] if option.choices else [value]
                values *= option.nargs if isinstance(option.nargs, int) else 1
                text = shlex.join([option.name, *values])
                text = text.replace(" 1", {PipelineLayout: " EtL", HybridPattern: " ME"}.get(hint, " 1"))
                imported = import_recipe(text, "x", version=version, gpus=1)
                assert f"\n\n{section}:\n  {field.name}: " in imported.replace("  gpus: 1\n", ""), option.name


REFUSED = {
    name: tuple(rest.rstrip("\n").split("\n--- says\n"))
    for name, _, rest in (
        case.partition("\n") for case in (CASES / "refused.txt").read_text().split("=== ") if "--- says" in case
    )
}
REFUSED |= {
    "a null character": ("--bf16 \0", "x.sh: has a null character\n    hint: is this the right file?"),
    "growing variables": (
        "A=0123456789012345\n" + "A=$A$A\n" * 20 + "torchrun train.py --seed $A",
        "x.sh:1: has variables that grow beyond 1,048,576 letters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(MoekitError) as refused:
        import_recipe(text, "x.sh")
    assert str(refused.value) == message


def test_every_place_that_refuses_is_reached(unreached: Callable[..., list[str]]) -> None:
    def run_all() -> None:
        for text, _ in REFUSED.values():
            with contextlib.suppress(MoekitError):
                import_recipe(text, "x.sh")
        with contextlib.suppress(MoekitError):
            import_recipe("--bf16", "x.sh", defines={"OTHER": "1"})

    folder = Path(importing.__file__).parent
    sources = [*folder.glob("import*.py"), *folder.glob("shell*.py")]
    assert len(sources) == 7
    assert unreached(sources, {"Problem", "Unreadable", "MoekitError", "error"}, run_all) == []


def test_set_decides_what_the_script_leaves_open() -> None:
    text = 'A=(--bf16)\nif [ "$1" ]; then A+=(--fp16); fi\nexport E=$(date)\ntorchrun train.py "${A[@]}" --seed $S'
    recipe = read(import_recipe(text, "x.sh", defines={"A": "--fp16 --log-interval 5", "S": "7", "E": ""}))
    assert argv(arguments(recipe)) == ["--seed", "7", "--fp16", "--log-interval", "5"]
    assert recipe.runtime.environment is None
    with pytest.raises(MoekitError, match="`--set OTHER`: nothing here has that name"):
        import_recipe(text, "x.sh", defines={"OTHER": "1"})


def test_paths_that_the_launch_decides_need_no_value() -> None:
    text = 'torchrun train.py --save "$1" --load "$1" --tensorboard-dir $LOGS --wandb-project $(id)'
    imported = import_recipe(text, "x.sh")
    assert "save: true # was $1\n" in imported
    assert "# - --tensorboard-dir $LOGS (line 1): the launch says it\n" in imported
    assert "# - --wandb-project $(id) (line 1): the launch says it\n" in imported


def test_secrets_are_names_only() -> None:
    text = "export WANDB_API_KEY=abc123 HF_TOKEN\nexport NCCL_DEBUG=INFO\ntorchrun train.py --bf16"
    imported = import_recipe(text, "x.sh")
    assert "abc123" not in imported
    runtime = read(imported).runtime
    assert runtime.secrets == ("WANDB_API_KEY", "HF_TOKEN")
    assert runtime.environment == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("torchrun --nproc_per_node=8 --nnodes 2 train.py --bf16", 16),
        ("python -m torch.distributed.run --standalone --nproc-per-node 4 train.py --bf16", 4),
        ("srun -N 2 --ntasks-per-node=8 python train.py --bf16", 16),
        ("#SBATCH -N 3\n#SBATCH --ntasks-per-node=4\nsrun python train.py --bf16", 12),
        ("mpirun -np 16 python train.py --bf16", 16),
        ("WORLD_SIZE=$((8 * 4))\npython train.py --bf16", 32),
        ("GPUS_PER_NODE=8\nNUM_NODES=2\ntorchrun --nproc_per_node gpu --nnodes $N train.py --bf16", 16),
        ("sbatch <<EOF\n#SBATCH --nodes=2\nsrun torchrun --nnodes 2 --nproc_per_node 8 train.py --bf16\nEOF", 16),
    ],
)
def test_the_world_is_what_the_launcher_says(text: str, gpus: int) -> None:
    assert megatron_words(text, "x.sh", {}).gpus == gpus


LETTERS = " \n\t\\'\"`$(){}[]<>|&;#=+-*/:@!aN19"
PARTS = ["if ", "fi\n", "do ", "A=(", "A+=(", "${A", "$((", "<<E\n", "\nE\n", "bash -c ", "eval ", "export "]
OPTIONS = ["torchrun train.py ", "--bf16 ", "--lr ", "--data-path "]
SHELL = st.sampled_from([*LETTERS, *PARTS, *OPTIONS])


@settings(max_examples=300, deadline=None)
@given(st.lists(SHELL, max_size=40).map("".join))
def test_any_text_is_imported_or_refused(text: str) -> None:
    with contextlib.suppress(MoekitError):
        read(import_recipe(text, "x.sh", gpus=1))
