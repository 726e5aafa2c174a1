"""The cases of the rules: `<module>.yaml` beside this file, one list each; `fine.yaml` has further right changes.

- rule: topk_is_among_the_experts     the rule that `broken` breaks, and no other
  base: first_moe                     a shipped recipe, or a file in bases/
  broken: |
    router: {topk: 65}
  fine: |                             the nearest change that is right; optional where an earlier case has it
    router: {topk: 64}
  profile: profiles/b200.yaml         optional: the machine, else the shipped default
  harm: ignored                       what Megatron never notices: how `test_harm.py` shows that it matters
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from moekit.recipe import rules
from moekit.recipe.rules.violation import Rule

HERE = Path(__file__).parent
RULES = {rule.__name__: rule for rule in rules.RULES}
HOME = {rule.__name__: module.__name__.rpartition(".")[2] for module in rules.MODULES for rule in module.RULES}
MODULES = [module.__name__.rpartition(".")[2] for module in rules.MODULES]


@dataclass(frozen=True)
class Case:
    """One change of a recipe."""

    base: str
    rule: str = ""
    broken: str = ""
    fine: str = ""
    profile: str | None = None
    harm: str = ""

    @property
    def function(self) -> Rule:
        """The rule itself."""
        return RULES[self.rule]

    def write(self, path: Path, change: str) -> Path:
        """The changed recipe as a file in a folder where `bases` is this one's."""
        base = f"bases/{self.base}" if self.base.endswith(".yaml") else self.base
        path.write_text(f"base: {base}\n{change}")
        return path


@cache
def of_module(name: str) -> list[Case]:
    """The cases of `<name>.yaml`."""
    path = HERE / f"{name}.yaml"
    found = yaml.load(path.read_text(), Loader=yaml.CSafeLoader) if path.is_file() else None
    return [Case(**fields) for fields in found or ()]


ALL = [case for name in [*MODULES, "fine"] for case in of_module(name)]
BROKEN = [case for case in ALL if case.broken]
FINE = [case for case in ALL if case.fine]


def label(case: Case) -> str:
    """How pytest calls a case."""
    return case.rule or "fine"
