"""The rules as people read them: from their docstrings, one sentence for the fact and one for what Megatron does."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from moekit.recipe.rules import MODULES, STAGES, stage_of
from moekit.recipe.rules.violation import Rule


@dataclass(frozen=True, slots=True)
class Entry:
    """One rule in words."""

    name: str
    module: str
    """Its file in `moekit/recipe/rules/`, without `.py`."""
    stage: str
    """When Megatron itself would notice: one of `moekit.recipe.rules.STAGES`."""
    fact: str
    outcome: str
    """What Megatron does at that stage, and the source; why it is only a warning, where it is."""


def entries() -> Iterator[Entry]:
    """Every rule, in the order of the modules."""
    for module in MODULES:
        for rule in module.RULES:
            yield entry(rule, module.__name__.rpartition(".")[2])


def entry(rule: Rule, module: str) -> Entry:
    """A rule's docstring, taken apart at `Megatron, STAGE:`."""
    text = " ".join(inspect.cleandoc(rule.__doc__ or "").split())
    stage = stage_of(rule)
    fact, _, outcome = text.partition(f"Megatron, {stage}: ")
    return Entry(rule.__name__, module, stage, fact.strip(), outcome.strip())


def found(word: str) -> str:
    """All that is written of the rules with `word` in their names or texts, one after the other."""
    texts = []
    for rule in entries():
        text = f"{rule.name} ({rule.module})\n  {rule.fact}\n  Megatron, {rule.stage}: {rule.outcome}\n"
        if word.lower() in text.lower():
            texts.append(text)
    return "\n".join(texts)


def page() -> str:
    """`docs/rules.md`: every rule of every module, and how many there are of each stage."""
    rules = list(entries())
    counts = Counter(rule.stage for rule in rules)
    lines = [
        "# Rules",
        "",
        "Made by `moekit rules --markdown`; the text of each rule is its docstring in `moekit/recipe/rules/`.",
        "",
        f"`moekit check` holds a recipe against {len(rules)} facts. Each says at which stage Megatron itself would"
        " notice: its parser, validation, a configuration, the schedule, the process groups, the building of the model,"
        " the first step, later in the run, or never. Line numbers are those of megatron-core 0.19.2.",
        "",
        "| Megatron notices | rules |",
        "|---|---|",
        *(f"| {stage} | {counts[stage]} |" for stage in STAGES if counts[stage]),
        "",
    ]
    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        about = inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0]
        lines += [f"## {name}", "", " ".join(about.split()), ""]
        lines += [_line(rule) for rule in rules if rule.module == name]
        lines.append("")
    return "\n".join(lines)


def _line(rule: Entry) -> str:
    return f"- **{rule.name.replace('_', ' ')}** {rule.fact} *{rule.stage}*: {_code(rule.outcome)}"


def _code(text: str) -> str:
    """Sources as code, so that `__init__` in a path stays itself."""
    return re.sub(r"(?<![`\w/])((?:megatron|moekit|torch)/[\w/]+\.py(?::\d+(?:-\d+)?)?)", r"`\1`", text)
