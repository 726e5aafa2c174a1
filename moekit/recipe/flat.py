"""Files of one level, a cluster's profile and a data set's description: read by the loader of recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moekit.problems import MoekitError, Problem
from moekit.recipe import nodes
from moekit.recipe.build import build
from moekit.recipe.load import Source


def parse[T](
    cls: type[T],
    text: str,
    shown: str,
    problems_of: Callable[[T, Source], Iterable[Problem]],
    worded: Callable[[Problem], Problem],
) -> T:
    """An instance of dataclass `cls` from a YAML text that is called `shown`.

    `worded` says a problem in the words of such files: hints of YAML's are for recipes.

    Raises:
        MoekitError: with every problem of the file, in the order of its lines.
    """
    problems: list[Problem] = []
    try:
        tree = nodes.parse(text, shown, problems)
    except MoekitError as unreadable:
        raise MoekitError(*map(worded, unreadable.problems)) from None
    made = build(cls, tree, problems)
    problems += problems_of(made, Source(shown, tree))
    if problems:
        raise MoekitError(*sorted(map(worded, problems), key=_line))
    return made


def missing(source: Source, required: Iterable[str]) -> Iterator[Problem]:
    """Fields that must be said and are null; those that are not there at all are the builder's to tell."""
    for name in required:
        node: Any = source.find(name)
        if isinstance(node, nodes.Scalar) and node.is_null:
            yield Problem(source.where(name), f"`{name}` is missing")


def _line(problem: Problem) -> int:
    return int(line) if (line := problem.where.rpartition(":")[2]).isdigit() else 0
