"""Rules on communication behind computation."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.interleaving import virtual_stages
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def gathers_overlap_behind_reductions(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights are gathered behind the forward pass only where gradients are reduced behind the backward one.

    Megatron, validate: `Must use --overlap-param-gather with --overlap-grad-reduce`
    (megatron/training/arguments.py:994).
    """
    if recipe.overlap.param_gather and not recipe.overlap.grad_reduce:
        yield Violation(
            ("overlap.param_gather", "overlap.grad_reduce"),
            "`overlap.param_gather` needs `overlap.grad_reduce`",
            "`overlap: {grad_reduce: true}`",
        )


def gathers_overlap_what_is_divided(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a divided optimizer state there are no weights to gather.

    Megatron, validate: `--overlap-param-gather only supported with distributed optimizer, megatron fsdp, or dist_muon`
    (megatron/training/arguments.py:991).
    """
    parallel = recipe.parallel
    divided = parallel.use_distributed_optimizer or parallel.use_megatron_fsdp or recipe.optimizer.name == "dist_muon"
    if recipe.overlap.param_gather and not divided:
        yield Violation(
            ("overlap.param_gather", "parallel.use_distributed_optimizer"),
            "`overlap.param_gather` needs `parallel.use_distributed_optimizer`",
            "`parallel: {use_distributed_optimizer: true}`",
        )


def buckets_belong_to_overlapped_reductions(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Gradients that are reduced after the backward pass go in one piece: the size of a bucket says nothing.

    Megatron, never: it drops the size without a word (megatron/training/training.py:1565).
    """
    overlap = recipe.overlap
    if overlap.ddp_bucket_size and not overlap.grad_reduce and not recipe.parallel.use_megatron_fsdp:
        yield Violation(
            ("overlap.ddp_bucket_size", "overlap.grad_reduce"),
            "`overlap.ddp_bucket_size` does nothing without `overlap.grad_reduce`",
            "add that, or unset this with `null`",
        )


def tensor_overlap_needs_sequence_parallel(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What is exchanged behind matrix multiplications are sequence-parallel activations; Megatron has none at size 1.

    Megatron, validate: `Tensor parallel communication/GEMM overlap can happen only when sequence parallelism is
    enabled` (megatron/training/arguments.py:1402).
    """
    parallel, divided = recipe.parallel, (recipe.parallel.tensor_model or 1) > 1
    if recipe.overlap.tp_comm_overlap and not (parallel.sequence and divided):
        yield Violation(
            ("overlap.tp_comm_overlap", "parallel.sequence", "parallel.tensor_model"),
            "`overlap.tp_comm_overlap` needs `parallel.sequence` and `parallel.tensor_model` above 1",
            "`parallel: {sequence: true}`" if divided else "unset `overlap.tp_comm_overlap` with `null`",
        )


def unoverlapped_interleaving_needs_three_stages(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Between two ranks the sends and receives of an interleaved schedule would meet in one batch.

    Megatron, validate: `When interleaved schedule is used and p2p communication overlap is disabled,
    pipeline-model-parallel size should be greater than 2` (megatron/training/arguments.py:972).
    """
    if (
        recipe.overlap.no_overlap_p2p_communication
        and recipe.parallel.pipeline_model == 2
        and virtual_stages(recipe) > 1
    ):
        yield Violation(
            ("overlap.no_overlap_p2p_communication", "parallel.pipeline_model"),
            "`overlap.no_overlap_p2p_communication` with virtual stages needs `parallel.pipeline_model` above 2",
            "unset `overlap.no_overlap_p2p_communication` with `null`",
        )


RULES: tuple[Rule, ...] = (
    gathers_overlap_behind_reductions,
    gathers_overlap_what_is_divided,
    buckets_belong_to_overlapped_reductions,
    tensor_overlap_needs_sequence_parallel,
    unoverlapped_interleaving_needs_three_stages,
)
