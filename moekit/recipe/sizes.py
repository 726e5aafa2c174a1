"""What follows from a recipe's sizes: world, data parallel, expert data parallel, tokens. The only place that knows.

The relations are Megatron's (megatron/core/parallel_state.py, `initialize_model_parallel`, at 0.19.2): the dense layout
is tensor x context x data x pipeline, the expert layout is expert-tensor x expert x expert-data x pipeline, over the
same world. A size that a recipe leaves out is 1, and an expert-tensor size is the tensor size.
"""

from __future__ import annotations

from dataclasses import dataclass

from moekit.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes of one run, in ranks, sequences and tokens."""

    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    micro_batch_seqs: int
    global_batch_seqs: int
    seq_length: int

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense layers."""
        return self.tensor * self.context * self.pipeline

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.expert * self.expert_tensor * self.pipeline

    @property
    def data(self) -> int:
        """Data-parallel size: copies of the dense layers."""
        return self.world // self.model_ranks

    @property
    def expert_data(self) -> int:
        """Expert-data-parallel size: copies of the experts."""
        return self.world // self.expert_ranks

    @property
    def accumulation_steps(self) -> int:
        """Micro batches each data-parallel rank takes in one optimizer step."""
        return self.global_batch_seqs // (self.micro_batch_seqs * self.data)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.global_batch_seqs * self.seq_length


def sizes(recipe: Recipe) -> Sizes | None:
    """The recipe's sizes, or None where one that has no meaning of its own (world, batch, length) is missing."""
    parallel, train = recipe.parallel, recipe.train
    if not (parallel.gpus and train.micro_batch_size and train.global_batch_size and recipe.model.seq_length):
        return None
    tensor = parallel.tensor_model or 1
    return Sizes(
        world=parallel.gpus,
        tensor=tensor,
        pipeline=parallel.pipeline_model or 1,
        context=parallel.context or 1,
        expert=parallel.expert_model or 1,
        expert_tensor=expert_tensor_ranks(recipe),
        micro_batch_seqs=train.micro_batch_size,
        global_batch_seqs=train.global_batch_size,
        seq_length=recipe.model.seq_length,
    )


def expert_tensor_ranks(recipe: Recipe) -> int:
    """Ranks that share one expert's matrices; unset, the tensor-parallel size (training/arguments.py:569)."""
    return recipe.parallel.expert_tensor or recipe.parallel.tensor_model or 1


def exchange_ranks(recipe: Recipe) -> int:
    """The ranks between which a token's exchange goes: expert-parallel times expert-tensor-parallel."""
    return (recipe.parallel.expert_model or 1) * expert_tensor_ranks(recipe)


def total_steps(recipe: Recipe) -> int | None:
    """The steps of the whole training; None where the recipe does not say it, or its batch grows on the way."""
    train = recipe.train
    if train.iters is not None or train.samples is None or train.rampup_batch_size:
        return train.iters
    return train.samples // train.global_batch_size if train.global_batch_size else None
