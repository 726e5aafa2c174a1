"""What a CPU cannot do, taken out of a recipe so that the rest can be rehearsed.

`INSTEAD` says for every limit of `moekit.megatron.cpu_limits` what the recipe says in its place; what only worked with
something that is gone follows by the rules of `moekit.recipe.rules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moekit.megatron import flags, table
from moekit.megatron.cpu_limits import Limit, cpu_limits
from moekit.megatron.table import FlagTable, occurrences
from moekit.recipe.rules import violations
from moekit.recipe.schema import Recipe
from moekit.rehearse.edit import changed, value
from moekit.rehearse.instead import FURTHER, INSTEAD, NO_STEP

INSTALLED = Recipe().megatron.version
"""The megatron-core that the extra `local` installs."""


@dataclass
class Rest:
    """What is left of a recipe."""

    recipe: Recipe
    why: dict[str, str] = field(default_factory=dict)
    """Why a field changed, by dotted name."""
    limits: list[Limit] = field(default_factory=list)
    """What was taken out or replaced."""


def without_limits(recipe: Recipe, on_cpu: bool) -> Rest:
    """A recipe less all that keeps it from a step here.

    `on_cpu`: for processes of their own on a CPU; else for stage `step`, which itself replaces what it can.
    """
    rest = Rest(recipe)
    if on_cpu:
        _change(rest, {"runtime.device": "cpu"}, "two processes on a CPU")
    _without_limits(rest, on_cpu)
    _for_installed(rest)
    unset_dependents(rest, recipe)
    return rest


def _without_limits(rest: Rest, on_cpu: bool) -> None:
    for limit in limits_of(rest.recipe):
        if limit.feature in NO_STEP:
            limit = replace(limit, build="counted")
        rest.limits.append(limit)
        if limit.build == "replaced" and not on_cpu:
            continue
        instead = INSTEAD[limit.feature]
        changes = {name: to(rest.recipe) if callable(to) else to for name, to in instead.items()}
        if "megatron.extra" in changes:
            changes["megatron.extra"] = options_left(rest.recipe, changes["megatron.extra"])
        _change(rest, changes, f"{limit.feature}: {limit.reason}")


def limits_of(recipe: Recipe) -> list[Limit]:
    """Every limit that a recipe meets."""
    words = flags.argv(flags.arguments(recipe))
    values = table.parse_values(words, table.load(recipe.megatron.version))
    return cpu_limits(values) + [limit for limit, applies in FURTHER if applies(values)]


def _change(rest: Rest, changes: Mapping[str, Any], why: str) -> None:
    new = {name: to for name, to in changes.items() if value(rest.recipe, name) != to}
    rest.recipe = changed(rest.recipe, new)
    rest.why |= dict.fromkeys(new, why)


def options_left(recipe: Recipe, beginnings: Iterable[str]) -> tuple[str, ...] | None:
    """`megatron.extra` less the options that begin so."""
    known = table.load(recipe.megatron.version)
    kept = [words for name, words in _options(recipe, known) if not name.startswith(tuple(beginnings))]
    return tuple(word for words in kept for word in words) or None


def _options(recipe: Recipe, known: FlagTable) -> list[tuple[str, tuple[str, ...]]]:
    """Each option of `megatron.extra`, with its words."""
    extra = recipe.megatron.extra or ()
    found = list(occurrences(extra, known))
    starts = [one.position for one in found]
    ends = [*starts[1:], len(extra)]
    return [(one.name, extra[one.position : end]) for one, end in zip(found, ends, strict=False)]


def _for_installed(rest: Rest) -> None:
    """Leave out what another Megatron has, and say the installed one."""
    version = rest.recipe.megatron.version
    if version == INSTALLED:
        return
    known, older = table.load(INSTALLED), table.load(version)
    reason = f"{INSTALLED}, which is installed here, does not have it"
    limit = Limit(f"options of Megatron {version}", reason, "impossible")
    arguments = [argument for argument in flags.arguments(rest.recipe) if argument.field != "megatron.extra"]
    owners = [argument.field for argument in arguments for _ in argument.words]
    gone: dict[str, Any] = {owners[c.position]: None for c in table.check(flags.argv(arguments), known)}
    if extra := [name for name, _ in _options(rest.recipe, older) if name.partition("=")[0] not in known]:
        gone["megatron.extra"] = options_left(rest.recipe, extra)
    if gone:
        rest.limits.append(limit)
    _change(rest, gone, f"{limit.feature}: {reason}")
    _change(rest, {"megatron.version": INSTALLED}, "the Megatron that is installed here")


def unset_dependents(rest: Rest, whole: Recipe) -> None:
    """Unset what a rule says does not go without what was taken out."""
    before = {violation.what for violation in violations(whole, _DESK)}
    for _ in range(_MOST_DEPENDENTS):
        new = [v for v in violations(rest.recipe, _DESK) if v.level == "error" and v.what not in before]
        gone = [(name, v.what) for v in new for name in v.fields if _may_go(name, rest)]
        if not gone:
            return
        name, what = gone[0]
        _change(rest, {name: None}, what)


_MOST_DEPENDENTS = 40


def _may_go(name: str, rest: Rest) -> bool:
    """Whether a field is the user's to be unset: set, not changed already, and no part of what every run needs."""
    if "." not in name or name in rest.why or name in _NEEDED or name.startswith("runtime.environment"):
        return False
    return value(rest.recipe, name) is not None


_NEEDED = (
    *("model.stack", "model.hybrid_layer_pattern", "model.num_layers", "model.hidden_size", "model.transformer_impl"),
    *("moe.num_experts", "moe.layer_freq", "router.topk", "parallel.gpus", "runtime.device"),
)


@dataclass(frozen=True)
class _Desk:
    """A machine of which nothing is known."""

    name: str = "this machine"
    gpu: str = "h100"
    gpus_per_node: int = 8
    fabric: str = "ib"
    transformer_engine: str | None = None
    cuda: str | None = None
    torch: str | None = None
    environment: Mapping[str, str | None] | None = None


_DESK = _Desk()
