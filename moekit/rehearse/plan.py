"""What a rehearsal will do with a recipe, and what comes of each part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moekit.cluster.profile import Cluster
from moekit.megatron.cpu_limits import Limit
from moekit.megatron.verdict import Verdict
from moekit.problems import Problem, error
from moekit.recipe.check import problems_of
from moekit.recipe.load import Loaded
from moekit.rehearse.edit import Change
from moekit.rehearse.small import Small, for_the_world, for_two, parent


@dataclass(frozen=True)
class Part:
    """One part of a rehearsal, and what came of it."""

    name: str
    """`full size`, `rank 0 of N`, or `two processes` with the start it is."""
    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...] = ()
    """Refusals, at the user's fields."""
    losses: tuple[float, ...] = ()
    """LM loss of each iteration, nats; it says nothing where the other ranks are made up."""
    seconds: float = 0.0
    """What it took, Megatron's import included where it is the first."""

    @property
    def answer(self) -> str:
        """`refused`, `not_judged` where nothing passed, else `passed`."""
        answers = {verdict.answer for verdict in self.verdicts}
        return next((word for word in ("refused", "passed") if word in answers), "not_judged")


@dataclass(frozen=True)
class Plan:
    """What a rehearsal will do; nothing is written yet."""

    loaded: Loaded
    cluster: Cluster
    world: Small
    two: Small
    parent: Small | None
    unready: dict[str, str] = field(default_factory=dict)
    """Parts that cannot be made small, with the reason: a rule that the small recipe breaks."""

    @property
    def left_out(self) -> list[Limit]:
        """What a CPU cannot do, and so is taken out or replaced where two processes train."""
        return list(self.two.not_judged)

    @property
    def changes(self) -> dict[str, tuple[Change, ...]]:
        """Every field that differs from the recipe, by the part."""
        changes = {f"rank 0 of {self.ranks}": self.world.changes, "two processes": self.two.changes}
        return changes | ({"parent": self.parent.changes} if self.parent else {})

    @property
    def ranks(self) -> int:
        """Of the recipe's own world."""
        return self.loaded.recipe.parallel.gpus or 1


def plan(loaded: Loaded, cluster: Cluster) -> Plan:
    """Make a recipe small, twice.

    Raises:
        MoekitError: it does not say how many GPUs it has.
    """
    if not loaded.recipe.parallel.gpus:
        raise error("`parallel.gpus` is not set", "a rehearsal keeps the layout over all of them", loaded.source.shown)
    made = Plan(loaded, cluster, for_the_world(loaded.recipe), for_two(loaded.recipe), parent(loaded.recipe))
    smalls = {f"rank 0 of {made.ranks}": made.world, "parent": made.parent, "two processes": made.two}
    for name, small in smalls.items():
        if small is not None:
            broken = [p for p in problems_of(replace(loaded, recipe=small.recipe), cluster) if p.level == "error"]
            if broken:
                made.unready[name] = broken[0].what
    return made
