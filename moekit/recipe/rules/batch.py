"""Rules on the batch, the data and what trains."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moekit.problems import shortened
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


def one_number_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Bare asserts at validate. Source: megatron/training/arguments.py:1066, 1173, 1182."""
    precision = recipe.precision
    if precision.bf16 and precision.fp16:
        yield Violation(
            ("precision.fp16", "precision.bf16"), "`precision.bf16` and `precision.fp16` exclude each other"
        )
    if precision.fp8_format and precision.fp4_format:
        yield Violation(
            ("precision.fp4_format", "precision.fp8_format"),
            "`precision.fp8_format` and `precision.fp4_format` exclude each other",
        )


def fp8_fits_the_gpu(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine refuses the first FP8 layer, with the GPUs held. Source: handbook 3.7; TE's `fp8.py`."""
    blackwell = target.gpu.startswith(("b", "gb"))
    if recipe.precision.fp8_format and recipe.precision.fp8_recipe == "mxfp8" and not blackwell:
        yield Violation(
            ("precision.fp8_recipe",),
            f"`mxfp8` needs Blackwell; {target.name} has {target.gpu}",
            "Hopper's is `blockwise`",
        )
    if recipe.precision.fp4_format and not blackwell:
        yield Violation(("precision.fp4_format",), f"FP4 needs Blackwell; {target.name} has {target.gpu}")


def padding_is_for_quantization(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config. Source: megatron/core/transformer/transformer_config.py:2318-2323."""
    if not recipe.router.padding_for_quantization:
        return
    if not (recipe.precision.fp8_format or recipe.precision.fp4_format):
        yield Violation(
            ("router.padding_for_quantization", "precision.fp8_format"),
            "`router.padding_for_quantization` needs `precision.fp8_format` or `precision.fp4_format`",
            "unset it with `null` where nothing is quantized",
        )
    if recipe.moe.dispatcher in (None, "allgather"):
        yield Violation(
            ("router.padding_for_quantization", "moe.dispatcher"),
            "`router.padding_for_quantization` needs `moe.dispatcher` alltoall or flex",
        )


def recompute_is_said_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config. Source: megatron/core/transformer/transformer_config.py:1739-1754."""
    memory = recipe.memory
    for name in ("recompute_method", "recompute_num_layers"):
        if memory.recompute_granularity == "full" and not getattr(memory, name):
            yield Violation(
                ("memory.recompute_granularity", f"memory.{name}"),
                f"`recompute_granularity: full` needs `memory.{name}`",
                "the dense baseline uses `uniform` with `recompute_num_layers: 1` (handbook 2.4)",
            )
    if memory.recompute_granularity == "selective" and (memory.recompute_num_layers or memory.recompute_method):
        name = "recompute_num_layers" if memory.recompute_num_layers else "recompute_method"
        yield Violation(
            (f"memory.{name}", "memory.recompute_granularity"),
            f"`memory.{name}` belongs to `recompute_granularity: full`, not to `selective`",
            "unset it with `null`",
        )


def fused_cross_entropy_runs(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate (megatron/training/arguments.py:1645; megatron/training/determinism.py:24)."""
    memory = recipe.memory
    if memory.cross_entropy_loss_fusion and memory.cross_entropy_fusion_impl == "te":
        yield Violation(
            ("memory.cross_entropy_fusion_impl",),
            "Megatron switched Transformer Engine's fused cross-entropy off",
            "use `native`",
        )
    if memory.cross_entropy_loss_fusion and recipe.precision.deterministic_mode:
        yield Violation(
            ("precision.deterministic_mode", "memory.cross_entropy_loss_fusion"),
            "`precision.deterministic_mode` excludes `memory.cross_entropy_loss_fusion`",
            "unset the fusion with `null`",
        )


def determinism_has_its_environment(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/determinism.py:24, 40-50, 85-99; handbook 2.5."""
    if not recipe.precision.deterministic_mode:
        return
    for variable, accepted in DETERMINISTIC.items():
        value = (recipe.runtime.environment or {}).get(variable)
        words = value.split(",") if value and variable == "NCCL_ALGO" else [value]
        if value is not None and not {*words} <= {*accepted}:
            yield Violation(
                (f"runtime.environment.{variable}", "precision.deterministic_mode"),
                f"`precision.deterministic_mode` refuses {variable}={shortened(value)}",
                f"unset it with `null`: Megatron sets it to {accepted[0]} itself",
            )
    if recipe.overlap.tp_comm_overlap:
        yield Violation(
            ("overlap.tp_comm_overlap", "precision.deterministic_mode"),
            "`precision.deterministic_mode` excludes `overlap.tp_comm_overlap`",
        )


DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}
"""What deterministic mode takes of a variable that is set, Megatron's own choice first."""


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
    one_number_format,
    fp8_fits_the_gpu,
    padding_is_for_quantization,
    recompute_is_said_whole,
    fused_cross_entropy_runs,
    determinism_has_its_environment,
    validation_has_data,
)
