"""All that is worked out of one recipe: its model, its layout, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from moekit.plan.flops import Convention, conventions, terms
from moekit.plan.given import Given, Note
from moekit.plan.layout import Layout, layout_of
from moekit.plan.parameters import Held, Parameters, held, parameters
from moekit.plan.resolve import resolve_given
from moekit.plan.shape import Shape
from moekit.recipe.load import Loaded
from moekit.recipe.sizes import sizes, total_steps


@dataclass(frozen=True)
class Plan:
    """One recipe, worked out."""

    name: str
    shape: Shape
    layout: Layout
    parameters: Parameters
    gpus: tuple[Held, ...]
    """What one GPU holds, by pipeline rank."""
    flops: dict[str, float]
    """A token's, by what they are for, as Megatron counts; empty where no sequence length is said."""
    conventions: tuple[Convention, ...]
    tokens_per_step: int | None
    """None where the recipe does not say its batch and world."""
    steps: int | None
    """Of the whole token budget."""
    notes: tuple[Note, ...]

    @property
    def vocabulary_is_assumed(self) -> bool:
        """Whether what has to do with the vocabulary rests on an assumption."""
        return any(note.certainty == "assumed" for note in self.notes if note.name == "vocab_size")

    @property
    def model_is_assumed(self) -> bool:
        """Whether weights of the layers rest on one."""
        return any(note.certainty == "assumed" for note in self.notes if note.name != "vocab_size")

    @property
    def flops_per_token(self) -> float | None:
        """As Megatron counts them."""
        return sum(self.flops.values()) if self.flops else None


def plan_of(loaded: Loaded, vocabulary: int | None = None) -> Plan:
    """Work out a recipe; `vocabulary`: token ids, in place of what its tokenizer is known to have.

    Raises:
        MoekitError: a size is missing, or no model or layout comes of the sizes.
    """
    return plan_of_given(Given.of(loaded), vocabulary)


def plan_of_given(given: Given, vocabulary: int | None = None) -> Plan:
    """`plan_of`, of arguments that are read already."""
    loaded = given.loaded
    shape = resolve_given(given, vocabulary)
    layout = layout_of(given, shape)
    run = sizes(loaded.recipe)
    return Plan(
        name=loaded.source.shown,
        shape=shape,
        layout=layout,
        parameters=parameters(shape),
        gpus=tuple(held(shape, layout, rank) for rank in range(layout.pipeline)),
        flops=terms(shape, shape.seq_length) if shape.seq_length else {},
        conventions=conventions(shape, shape.seq_length) if shape.seq_length else (),
        tokens_per_step=run.tokens_per_step if run else None,
        steps=total_steps(loaded.recipe),
        notes=tuple(given.notes),
    )
