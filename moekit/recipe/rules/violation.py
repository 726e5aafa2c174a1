"""What a rule yields, and what it may know of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from moekit.problems import Level
from moekit.recipe.schema import Recipe


class Target(Protocol):
    """The machine a recipe is checked for: what rules may ask of a cluster profile."""

    @property
    def name(self) -> str:
        """The profile's name."""

    @property
    def gpu(self) -> str:
        """GPU model, such as `h100`."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A fact of Megatron's that a recipe contradicts."""

    fields: tuple[str, ...]
    """Dotted names that together make it; the first is where it is reported."""
    what: str
    hint: str = ""
    level: Level = "error"


Rule = Callable[[Recipe, Target], Iterator[Violation]]


def listed(words: list[int] | list[str] | tuple[str, ...]) -> str:
    """`a, b, c` of a few words, for a hint."""
    return ", ".join(str(word) for word in words)
