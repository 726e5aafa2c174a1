"""Rules on the batch, the length of a run, its data and its validation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


def batch_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert on the micro batch at validate; an unset global batch silently means no accumulation.

    Source: megatron/training/arguments.py:675-690.
    """
    for name in ("micro_batch_size", "global_batch_size"):
        if getattr(recipe.train, name) is None:
            yield Violation(
                (f"train.{name}",), f"`train.{name}` is missing", "sequences, over one rank and over all ranks"
            )


def micro_batches_fill_the_global_batch(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate, worded as a fault of evaluation. Source: megatron/training/arguments.py:695."""
    size = sizes(recipe)
    if size is None or size.world % size.model_ranks:
        return
    together = size.micro_batch_seqs * size.data
    if size.global_batch_seqs % together:
        yield Violation(
            ("train.global_batch_size", "train.micro_batch_size", "parallel.gpus"),
            f"train.global_batch_size = {size.global_batch_seqs} is no multiple of {together}: "
            f"train.micro_batch_size = {size.micro_batch_seqs} on {size.data} data-parallel ranks",
            f"use {max(together, round(size.global_batch_seqs / together) * together)}",
        )


def one_length(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Both stop at validate (megatron/training/arguments.py:1240), neither when the schedule is made.

    Their fields exclude each other too: one run counts in iterations or in samples (arguments.py:1240-1258).
    """
    iters, samples = recipe.train.iters, recipe.train.samples
    if iters and samples:
        yield Violation(("train.samples", "train.iters"), "`train.iters` and `train.samples` exclude each other")
    if not iters and not samples:
        yield Violation(("train.iters",), "`train.iters` is missing", "optimizer steps of the full token budget")
    unit, other = ("samples", "iters") if samples and not iters else ("iters", "samples")
    for name in (f"{part}_{other}" for part in ("decay", "wsd_decay", "warmup")):
        if getattr(recipe.schedule, name):
            yield Violation(
                (f"schedule.{name}", f"train.{unit}"),
                f"`schedule.{name}` has no meaning beside `train.{unit}`",
                f"use `{name.replace(other, unit)}`, and unset this one with `null`",
            )


def evaluation_has_an_interval(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A TypeError when the data sets are built, after the model, even where nothing is validated. Seen on a CPU.

    Source: megatron/training/training.py:4481.
    """
    if recipe.train.eval_interval is None and "--full-validation" not in (recipe.megatron.extra or ()):
        yield Violation(
            ("train.eval_interval", "train.eval_iters"),
            "`train.eval_interval` is missing, and Megatron divides by it even where nothing is validated",
            "any number will do beside `eval_iters: 0`",
        )


def data_is_named_or_mocked(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Two sources stop at validate (megatron/training/arguments.py:1627); none is silently mock data."""
    data = recipe.data
    if data.name and data.mock_data:
        yield Violation(("data.mock_data", "data.name"), "`data.name` and `data.mock_data` exclude each other")
    said_by_extra = {"--train-data-path", "--per-split-data-args-path"} & {*(recipe.megatron.extra or ())}
    if not data.name and not data.mock_data and not said_by_extra:
        yield Violation(("data.name",), "`data.name` is missing", "name a data set, or say `mock_data: true`")
    if data.shards and not data.name:
        yield Violation(("data.shards",), "`data.shards` needs `data.name`, the data set they are of")


def tokenizer_is_complete(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Asserts when the tokenizer is built, after the ranks have met. Source: megatron/core/tokenizers."""
    data = recipe.data
    if data.tokenizer_type is None:
        yield Violation(
            ("data.tokenizer_type",),
            "`data.tokenizer_type` is missing",
            "`HuggingFaceTokenizer` reads a folder, `NullTokenizer` goes with `mock_data`",
        )
    elif data.tokenizer_type.startswith("Null"):
        if data.vocab_size is None:
            yield Violation(("data.vocab_size", "data.tokenizer_type"), "`NullTokenizer` needs `data.vocab_size`")
        if data.tokenizer:
            yield Violation(
                ("data.tokenizer", "data.tokenizer_type"), "`data.tokenizer` has no meaning with `NullTokenizer`"
            )
    elif not data.tokenizer and "--vocab-file" not in (recipe.megatron.extra or ()):
        yield Violation(("data.tokenizer", "data.tokenizer_type"), f"`{data.tokenizer_type}` needs `data.tokenizer`")


def validation_has_data(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The first validation stops the run, hours in. Source: megatron/training/training.py:4584, 4673."""
    shares = [part.strip() for part in (recipe.data.split or "").split(",")]
    if not recipe.data.name or len(shares) < 2 or not re.fullmatch(r"0*(\.0*)?", shares[1]):
        return
    if (
        recipe.train.eval_iters
        and recipe.train.eval_interval
        and recipe.train.eval_interval <= (recipe.train.iters or 0)
    ):
        yield Violation(
            ("data.split", "train.eval_iters"),
            f"`data.split: {recipe.data.split}` leaves validation nothing, and `train.eval_iters` asks for it",
            "give the second share some documents, or set `eval_iters: 0`",
        )


RULES: tuple[Rule, ...] = (
    batch_is_given,
    micro_batches_fill_the_global_batch,
    one_length,
    evaluation_has_an_interval,
    data_is_named_or_mocked,
    tokenizer_is_complete,
    validation_has_data,
)
