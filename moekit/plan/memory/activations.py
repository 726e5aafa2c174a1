"""Activations that a stage keeps, under every recomputation and offload, and what it needs beside them at its worst."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moekit.plan.candidates import Candidates, Flags, Floats
from moekit.plan.memory.flight import in_flight, last_in_flight
from moekit.plan.memory.saved import Saved, saved
from moekit.plan.memory.tokens import Tokens
from moekit.plan.memory.working import working
from moekit.plan.run import Facts
from moekit.plan.shape import Shape

_ATTENTION = "*+G"


@dataclass(frozen=True)
class Part:
    """One part of a layer on one GPU, of one micro batch. `# (candidate,)`"""

    kept: dict[str, Floats]
    """Bytes by term, none of them recomputed whole."""
    moved: dict[str, Floats]
    """Of those, what waits in main memory."""
    again: Floats
    """Bytes that selective recomputation makes again in the backward pass."""
    working: Floats

    @property
    def whole(self) -> Floats:
        """Kept and computed again: all that the backward pass needs."""
        total: Floats = sum(self.kept.values(), np.zeros_like(self.again)) + self.again
        return total


@dataclass(frozen=True)
class Activations:
    """`# (candidate, stage)`"""

    kept: dict[str, Floats]
    working: Floats
    """What a layer's backward pass needs for a moment."""


def parts_of(shape: Shape, facts: Facts, c: Candidates, t: Tokens) -> dict[str, Part]:
    """By letter, those that the model has."""
    letters = {letter for letter, count in c.parts.items() if count.any()} | set(shape.depth if shape.depths else "")
    return {letter: _part(facts, c, saved(shape, facts, c, t, letter), working(shape, facts, c, t, letter))
            for letter in sorted(letters)}  # fmt: skip


def _part(facts: Facts, c: Candidates, tensors: list[Saved], own: Floats) -> Part:
    kept: dict[str, Floats] = {}
    moved: dict[str, Floats] = {}
    again = np.zeros(c.number)
    selective = c.recompute == "selective"
    for tensor in tensors:
        dropped = selective & _any(c, tensor.by)
        size: Floats = np.where(dropped, 0.0, tensor.size)
        again = again + tensor.size * dropped
        if tensor.offload in c.offloaded:
            large = size >= facts.offload_least * facts.weight_bytes
            share = large * c.offloaded[tensor.offload] * facts.activation_offload
            moved[tensor.term] = moved.get(tensor.term, np.zeros(c.number)) + size * share
        kept[tensor.term] = kept.get(tensor.term, np.zeros(c.number)) + size
    return Part(kept, moved, again, own)


def _any(c: Candidates, modules: tuple[str, ...]) -> Flags:
    flags: Flags = np.zeros(c.number, dtype=bool)
    for module in modules:
        flags = flags | c.recomputed[module]
    return flags


def activations(shape: Shape, facts: Facts, c: Candidates, t: Tokens) -> Activations:
    """All of a stage's layers, prediction depths and the ends of the model."""
    parts = parts_of(shape, facts, c, t)
    flight, last = in_flight(c), last_in_flight(c)
    full = (c.recompute == "full")[:, None]
    share = np.where(full, _share_kept_whole(c), 1.0)
    row = (t.part * shape.hidden * t.element)[:, None]
    kept: dict[str, Floats] = {}

    def add(term: str, size: Floats) -> None:
        kept[term] = kept.get(term, np.zeros(c.layers.shape)) + size

    for letter, part in parts.items():
        count = c.parts[letter] * flight * share
        for term, size in part.kept.items():
            add(term, count * size[:, None])
        for term, size in part.moved.items():
            add(term, -size[:, None] * np.maximum(count - 1, 0))  # the newest layer's are still on their way
    add("layer inputs", np.where(full, _inputs(c) * flight * row, 0.0))
    if shape.depths:
        _add_depths(add, shape, c, parts, last * c.depths, row, full)
    if facts.hidden_dropout:
        add("dropout", c.embedding * in_flight(c) * row / t.element)
    add("output", c.output * last * 2 * row)  # the final norm's input and output
    kept = {term: size for term, size in kept.items() if size.any()}
    return Activations(kept, np.where(c.exists, _working(shape, c, parts, full[:, 0]), 0.0))


def _add_depths(add: object, shape: Shape, c: Candidates, parts: dict[str, Part], last: Floats, row: Floats,
                full: Floats) -> None:  # fmt: skip
    """core/transformer/multi_token_prediction.py: two norms' inputs and their outputs side by side, a layer, a norm
    before the output layer; with full recomputation the inputs alone."""
    assert callable(add)
    add("prediction", shape.depths * last * row * np.where(full, 4, 6))
    for letter in shape.depth:
        for size in parts[letter].kept.values():
            add("prediction", shape.depths * last * np.where(full, 0.0, size[:, None]))


def _share_kept_whole(c: Candidates) -> Floats:
    """With full recomputation by block, layers behind the block are kept as without. `# (candidate, stage)`"""
    block = (c.recompute_method == "block")[:, None]
    again = np.minimum(c.recompute_layers[:, None] * c.virtual[:, None], c.layers)
    return np.where(block, 1 - again / np.maximum(c.layers, 1), 0.0)


def _inputs(c: Candidates) -> Floats:
    """Inputs that full recomputation keeps: one to a chunk, or one to each layer of a block."""
    block = (c.recompute_method == "block")[:, None]
    of_block = np.minimum(c.recompute_layers[:, None] * c.virtual[:, None], c.layers)
    of_chunks = np.ceil(c.layers / np.maximum(c.recompute_layers, 1)[:, None])
    return np.where(block, of_block, of_chunks).astype(float)


def _working(shape: Shape, c: Candidates, parts: dict[str, Part], full: Flags) -> Floats:
    """The layer that needs most, of those on the stage; with full recomputation a chunk of layers is there whole.

    The backward pass of a layer's attention comes when what its second part kept is freed again.
    """
    layers = {*shape.layers, *([shape.depth] if shape.depths else [])}
    block = c.recompute_method == "block"
    chunk = np.where(block, np.minimum(c.recompute_layers, 1), np.maximum(c.recompute_layers, 1))
    most = np.zeros(c.layers.shape)
    for layer in sorted(layers):
        needed, freed = np.zeros(c.number), np.zeros(c.number)
        for letter in reversed(layer):
            part = parts[letter]
            needed = np.maximum(needed, part.working + part.again - freed)
            freed = freed + part.whole - part.again
        whole = sum((parts[letter].whole for letter in layer), np.zeros(c.number))
        size = needed + np.where(full, chunk * whole, 0.0)
        size = size + np.where(c.overlap_expert, whole, 0.0)  # the other micro batch's layer
        on_stage = np.ones(c.layers.shape, dtype=bool)
        for letter in layer:
            on_stage &= (c.parts[letter] > 0) | (c.depths & (letter in shape.depth))
        most = np.maximum(most, np.where(on_stage, size[:, None], 0.0))
    return most
