"""Random recipes: one to three changes of a small recipe that is right.

A change is drawn from the schema and Megatron's option table, never from the rules. The same seed gives the same
recipes, and every field gets its turn: `cases` goes through all of them again and again.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from words import BOGUS, LARGEST, VARIABLES, WORDS

from moekit.cluster.profile import Cluster, find_cluster
from moekit.megatron.table import FlagTable, Option
from moekit.megatron.table import load as load_table
from moekit.recipe import nodes
from moekit.recipe.build import build, is_section, markers
from moekit.recipe.load import Loaded, Source, field_that_says, fields_by_option, load, sections
from moekit.recipe.patterns import HybridPattern, LayerPattern, PipelineLayout
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import AtLeast, Flag
from moekit.recipe.values import plain_values

HERE = Path(__file__).parent
Values = dict[str, Any]
"""A recipe as plain values by dotted name; environment variables one by one, as `runtime.environment.NAME`."""

MEGATRON = "0.19.2"
PROFILES = {"hopper": "aws-p5", "blackwell": str(HERE / "profiles" / "blackwell.yaml")}
ON_BLACKWELL = ("mxfp8", "nvfp4")
"""Seeds that are right on Blackwell only; all others are on Hopper, the shipped profile."""
NOT_DRAWN = ("base", "summary", "megatron.version")
"""Fields that no run is different for, and the one that makes it a run of another Megatron than the installed one."""


@dataclass(frozen=True)
class Case:
    """One generated recipe."""

    seed: str
    """The seed recipe that is changed, a file of `seeds/`."""
    changes: Values
    """New values by dotted name; None unsets the field."""
    profile: str
    """The machine, one of `PROFILES`."""

    @property
    def values(self) -> Values:
        """The whole recipe."""
        return changed(seeds()[self.seed], self.changes)


def changed(values: Values, changes: Values) -> Values:
    """`values` with changes made; None unsets, but for a variable, which it makes sure is unset."""
    merged = {**values, **changes}
    return {name: value for name, value in merged.items() if value is not None or _is_variable(name)}


def _is_variable(name: str) -> bool:
    return name.startswith("runtime.environment.")


@functools.cache
def seeds() -> dict[str, Values]:
    """The seed recipes, flat."""
    found = {path.stem: plain_values(load(str(path)).recipe) for path in sorted((HERE / "seeds").glob("*.yaml"))}
    return {name: {key: v for key, v in values.items() if key != "summary"} for name, values in found.items()}


@functools.cache
def cluster(profile: str) -> Cluster:
    """The machine of that name."""
    return find_cluster(PROFILES[profile])


def home(seed: str) -> str:
    """The profile for which a seed is right."""
    return "blackwell" if seed in ON_BLACKWELL else "hopper"


def text(values: Values) -> str:
    """A recipe's YAML, which is JSON below the first level."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, *rest = name.split(".", 2)
        if not rest:
            tree[section] = value
        elif len(rest) == 1:
            tree.setdefault(section, {})[rest[0]] = value
        else:
            tree.setdefault(section, {}).setdefault(rest[0], {})[rest[1]] = value
    return "".join(f"{section}: {_line(value)}\n" for section, value in tree.items())


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_line(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def loaded(values: Values, name: str = "recipe") -> Loaded:
    """The recipe as `moekit check` sees it; what its fields cannot take is among its problems."""
    problems: list[Any] = []
    shown = f"{name}.yaml"
    tree = nodes.parse(text(values), shown, problems)
    recipe = build(Recipe, tree, problems, elsewhere=field_that_says)
    return Loaded(recipe, Source(shown, tree), name, tuple(problems))


@functools.cache
def fields() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every field that is drawn, with its type and markers."""
    found = {name: marked for name, marked in markers(Recipe).items() if not is_section(marked[0])}
    found |= {f"{section}.{name}": marked for section, cls in sections() for name, marked in markers(cls).items()}
    return {name: marked for name, marked in found.items() if name not in NOT_DRAWN}


def cases(seed: int, count: int) -> Iterator[Case]:
    """So many cases. Each turn through all fields, in a new order, gives every field the first change of one case."""
    rng = random.Random(seed)
    names: list[str] = []
    for _ in range(count):
        if not names:
            names = list(fields())
            rng.shuffle(names)
        yield _case(rng, names.pop())


def _case(rng: random.Random, first: str) -> Case:
    """A case whose first change is of that field; half the time in a seed that sets it, where one does."""
    having = [name for name, values in seeds().items() if _sets(values, first)]
    seed = rng.choice(having if having and rng.random() < 0.5 else list(seeds()))
    values, changes = seeds()[seed], Values()
    for position in range(rng.choice((1, 2, 2, 3, 3))):
        field = first if position == 0 else _another(rng, first, values)
        name, value = _draw(rng, field, values | changes)
        if name not in changes:
            changes[name] = value
    other = rng.random() < 0.1
    profile = home(seed)
    return Case(seed, changes, profile if not other else "hopper" if profile == "blackwell" else "blackwell")


def _sets(values: Values, field: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for name in values)


def _another(rng: random.Random, first: str, values: Values) -> str:
    """A further field: of the same section, of those that are set, or any."""
    section = first.rpartition(".")[0]
    same = [name for name in fields() if name.rpartition(".")[0] == section]
    said = [name for name in fields() if name in values]
    return rng.choice(rng.choice((same, said, list(fields()))))


def _draw(rng: random.Random, field: str, values: Values) -> tuple[str, Any]:
    """A dotted name and a value for it that differs from its present one."""
    if field == "runtime.environment":
        name = rng.choice(list(VARIABLES))
        there = values.get(f"{field}.{name}")
        return f"{field}.{name}", rng.choice([value for value in VARIABLES[name] if value != there])
    present = values.get(field)
    if present is not None and rng.random() < 0.3:
        return field, None
    for _ in range(20):
        value = _value(rng, field, values)
        if value != present:
            return field, value
    return field, None


def _value(rng: random.Random, field: str, values: Values) -> Any:
    hint, marks = fields()[field]
    if field == "megatron.extra":
        return _extra(rng, values)
    if get_origin(hint) is tuple:
        return _several(rng, field, get_args(hint)[0], marks, values)
    return _one(rng, field, hint, marks, values)


def _one(rng: random.Random, field: str, hint: Any, marks: tuple[Any, ...], values: Values) -> Any:
    """One value of a type."""
    least = next((mark.least for mark in marks if isinstance(mark, AtLeast)), None)
    choices = _choices(marks)
    if hint is bool:
        return rng.random() < 0.95
    if get_origin(hint) is Literal:
        return rng.choice(get_args(hint))
    if hint is LayerPattern:
        return _pattern(rng, values.get("model.num_layers") or 4)
    if hint is PipelineLayout:
        return _layout(rng, values)
    if hint is HybridPattern:
        return "".join(rng.choice(("*E", "*-", "ME")) for _ in range((values.get("model.num_layers") or 4) // 2)) or "*"
    if choices:
        return rng.choice((*choices, *choices, BOGUS if hint is str else 99))
    if hint is int:
        return _integer(rng, field, least, values)
    if hint is float:
        return _float(rng, least, values.get(field))
    return rng.choice(WORDS[field])


def _several(rng: random.Random, field: str, hint: Any, marks: tuple[Any, ...], values: Values) -> list[Any]:
    """A list: of one to three elements, and once in a while of one for each layer."""
    length = rng.choice((1, 1, 2, 3, 3, values.get("model.num_layers") or 4))
    return [
        _one(rng, field, hint, marks, {name: v for name, v in values.items() if name != field}) for _ in range(length)
    ]


@functools.cache
def _tables() -> tuple[FlagTable, ...]:
    """The installed Megatron's options, and those of the one that has the rest."""
    return load_table(MEGATRON), load_table("d6316eb45")


def _choices(marks: tuple[Any, ...]) -> tuple[Any, ...]:
    option = next((mark.option for mark in marks if isinstance(mark, Flag)), "")
    return next((found.choices for table in _tables() if (found := table.option(option)) and found.choices), ())


def _integer(rng: random.Random, field: str, least: float | None, values: Values) -> int:
    """Small, a neighbour of what is there, a prime, a power of two, another field's value, rarely none or negative."""
    there = values.get(field)
    others = [value for value in values.values() if isinstance(value, int) and not isinstance(value, bool)]
    kinds: list[tuple[int, ...]] = [
        (1, 2, 3, 4, 5, 6, 8),
        (7, 11, 13, 17, 31),
        (16, 32, 64, 128, 1000),
        tuple(others) or (1,),
        (0, -1),
    ]
    if isinstance(there, int):
        kinds += [(there - 1, there + 1, 2 * there, there // 2)] * 3
    largest = LARGEST.get(field, 1 << 20)
    fitting = [[n for n in kind if n <= largest and (least is None or n >= least)] for kind in kinds]
    return rng.choice(rng.choice([kind for kind in fitting if kind]))


def _float(rng: random.Random, least: float | None, there: Any) -> float:
    found = [0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 1e-3, 1e-8, 100.0, -1.0]
    if isinstance(there, float):
        found += [there / 2, there * 2, there * 10]
    return rng.choice([number for number in found if least is None or number >= least])


def _pattern(rng: random.Random, layers: int) -> str:
    """Which layers are MoE: for as many layers as there are, for one more or less, none of them, or no pattern."""
    length = max(1, layers + rng.choice((0, 0, 0, 1, -1)))
    dense = rng.randint(0, length)
    bits = [rng.choice("01") for _ in range(length)]
    return rng.choice(
        (
            str(rng.randint(1, layers + 1)),
            f"[{','.join(bits)}]",
            f"([0]*{max(1, dense)}+[1]*{max(1, length - dense)})",
            f"[1]*{length}",
            rng.choice((f"[0]*{length}", "[0,2]", "[1]*", "0")),
        )
    )


def _layout(rng: random.Random, values: Values) -> str:
    """Stages for the pipeline's ranks, or one more, with every layer or one missing; now and then no layout."""
    stages = (values.get("parallel.pipeline_model") or 1) * rng.choice((1, 1, 2)) + rng.choice((0, 0, 0, 1))
    layers = (values.get("model.num_layers") or 4) + rng.choice((0, 0, 0, -1, 1))
    depths = rng.choice((values.get("model.mtp_num_layers") or 0, values.get("model.mtp_num_layers") or 0, 1))
    cuts = sorted(rng.randint(0, layers) for _ in range(stages - 1))
    parts = ["t" * (end - start) for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    found = f"E{'|'.join(parts)}{rng.choice(('', '', '|'))}{'m' * depths}L"
    return rng.choice((found, found, found, found, found.replace("L", ""), found.replace("E", "tE"), "Et*2|x"))


def _extra(rng: random.Random, values: Values) -> list[str]:
    """An option that no field says, with a value of its type."""
    option = rng.choice(_unsaid())
    words = [option.name]
    if not option.is_switch:
        count = option.nargs if isinstance(option.nargs, int) else 1
        words += [_word(rng, option) for _ in range(count)]
    return words


@functools.cache
def _unsaid() -> tuple[Option, ...]:
    """The installed Megatron's options that no field sets, one spelling of each."""
    table = _tables()[0]
    said = {found.dest for name in fields_by_option() if (found := table.option(name))}
    options = [found for name in table.entries if (found := table.option(name)) and name != "--help"]
    return tuple({option.dest + option.action: option for option in options if option.dest not in said}.values())


def _word(rng: random.Random, option: Option) -> str:
    if option.choices:
        return str(rng.choice(option.choices))
    kinds = {"int": ("1", "2", "8", "0"), "float": ("0.5", "1.0", "0.0"), "bool": ("1",)}
    return rng.choice(kinds.get(option.type, ("1", "text")))
