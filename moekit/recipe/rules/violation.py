"""What a rule yields, and what it may know of the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from moekit.problems import Level
from moekit.recipe.schema import Recipe


class Target(Protocol):
    """The machine a recipe is checked for: what rules may ask of a cluster profile.

    A version is None where the profile does not say it; rules on versions are then silent.
    """

    @property
    def name(self) -> str:
        """The profile's name."""

    @property
    def gpu(self) -> str:
        """GPU model, such as `h100`."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node."""

    @property
    def fabric(self) -> str:
        """The network between nodes: `efa`, `ib` or `none`."""

    @property
    def transformer_engine(self) -> str | None:
        """Version of Transformer Engine."""

    @property
    def cuda(self) -> str | None:
        """Version of CUDA."""

    @property
    def torch(self) -> str | None:
        """Version of torch."""

    @property
    def environment(self) -> Mapping[str, str | None] | None:
        """Variables of the training processes, below the recipe's own."""


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


def divisors(number: int) -> str:
    """`1, 2, 4` of 4, for a hint."""
    return listed([divisor for divisor in range(1, number + 1) if number % divisor == 0])


def is_blackwell(target: Target) -> bool:
    """Whether the GPUs have compute capability 10: B200, B300 and their Grace boards."""
    return target.gpu.startswith(("b", "gb"))


def below(version: str | None, wanted: str) -> bool:
    """Whether a version is said and older than `wanted`; pre-releases and local parts (`2.13.0a0+nv`) do not count."""
    return version is not None and _numbers(version) < _numbers(wanted)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.match(r"\d*(\.\d+)*", version)[0].split(".") if part]  # type: ignore[index]
    return tuple(numbers + [0] * (4 - len(numbers)))


def variable(name: str, recipe: Recipe, target: Target) -> str | None:
    """What the training processes will find in a variable: the recipe's entry, else the profile's, else None."""
    for environment in (recipe.runtime.environment, target.environment):
        if environment is not None and name in environment:
            return environment[name]
    return None
