"""The recipe's shape: frozen dataclasses whose fields say Megatron's options, two levels, `section.field`.

A field is Megatron's option in snake case, less what its section already says (`markers.field_name`). Null is unset
everywhere: nothing is printed and Megatron's own default holds, unless the field's text says more.
"""

from dataclasses import dataclass, field
from typing import Annotated

from moekit.recipe.schema.markers import FreeText
from moekit.recipe.schema.model import Model
from moekit.recipe.schema.moe import Balance, Moe, Router
from moekit.recipe.schema.scale import Memory, Overlap, Parallel, Precision
from moekit.recipe.schema.section import Section
from moekit.recipe.schema.train import Checkpoint, Data, Optimizer, Schedule, Train
from moekit.recipe.schema.watch import Log, Monitor, Profile, Resilience, Runtime

__all__ = ["Recipe"]


@dataclass(init=False, repr=False, eq=False)
class Megatron(Section):
    """Which Megatron, and what no field says."""

    version: str = "0.19.2"
    """The Megatron whose options the recipe is checked against: `0.19.2`, or `d6316eb45`, the handbook's commit."""
    extra: tuple[str, ...] | None = None
    """Further arguments, word by word, for options that no field says; checked against the same table."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, whole: what is not said here, Megatron decides."""

    base: str | None = None
    """The recipe this one changes: a path from this file's folder, or the name of a shipped one."""
    summary: Annotated[str | None, FreeText()] = None
    """One sentence for people."""
    benchmark: bool | None = None
    """A control run that measures and does not train: allows forced routing."""
    megatron: Megatron = field(default_factory=Megatron)
    model: Model = field(default_factory=Model)
    moe: Moe = field(default_factory=Moe)
    router: Router = field(default_factory=Router)
    balance: Balance = field(default_factory=Balance)
    parallel: Parallel = field(default_factory=Parallel)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    overlap: Overlap = field(default_factory=Overlap)
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    monitor: Monitor = field(default_factory=Monitor)
    resilience: Resilience = field(default_factory=Resilience)
    profile: Profile = field(default_factory=Profile)
    runtime: Runtime = field(default_factory=Runtime)
