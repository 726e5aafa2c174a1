"""Rules on Muon and the other optimizers of the package emerging_optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def sharded_training_has_a_common_optimizer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron FSDP divides matrices, which Muon and its kin need whole.

    Megatron, validate: `Megatron-FSDP does not support the muon optimizer yet` (megatron/training/arguments.py:1127);
    handbook 3.6.
    """
    if recipe.parallel.use_megatron_fsdp and _is_emerging(recipe):
        yield Violation(
            ("optimizer.name", "parallel.use_megatron_fsdp"),
            f"`optimizer.name: {recipe.optimizer.name}` excludes `parallel.use_megatron_fsdp`",
            "`parallel: {use_megatron_fsdp: null, use_distributed_optimizer: true}`",
        )


def emerging_optimizers_are_not_of_fp16(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A loss scale would change what they orthogonalize.

    Megatron, first step: `emerging optimizer with fp16 is not supported` (megatron/core/optimizer/__init__.py:770).
    """
    if _is_emerging(recipe) and recipe.precision.fp16:
        yield Violation(
            ("optimizer.name", "precision.fp16"),
            f"`optimizer.name: {recipe.optimizer.name}` excludes `precision.fp16`",
            "`precision: {fp16: null, bf16: true}`",
        )


def layer_wise_state_has_one_instance(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Whole matrices are dealt out over all data-parallel ranks: there are no instances among them.

    Megatron, first step: `LayerWiseDistributedOptimizer does not support num_distributed_optimizer_instances > 1`
    (megatron/core/optimizer/layer_wise_optimizer.py:464).
    """
    instances = recipe.parallel.num_distributed_optimizer_instances or 1
    if _is_layer_wise(recipe) and instances > 1:
        yield Violation(
            ("parallel.num_distributed_optimizer_instances", "optimizer.name"),
            f"`optimizer.name: {recipe.optimizer.name}` has one instance, not {instances}",
            "unset it with `null`",
        )


def layer_wise_state_is_of_bf16(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Whole matrices are dealt out to an optimizer that keeps fp32 copies of bfloat16 weights; of fp32 it makes none.

    Megatron, first step: `'TensorParallelMuon' object has no attribute 'get_loss_scale'`
    (megatron/core/optimizer/optimizer.py:1490; seen on a CPU).
    """
    if _is_layer_wise(recipe) and not (recipe.precision.bf16 or recipe.precision.fp16):
        yield Violation(
            ("optimizer.name", "precision.bf16", "parallel.use_distributed_optimizer"),
            f"`optimizer.name: {recipe.optimizer.name}` over divided state needs `precision.bf16`",
            "`precision: {bf16: true}`",
        )


def muon_starts_from_a_small_scale(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's own scale of 1 is five times what held. A warning: it is what Megatron documents.

    Megatron, never: the loss diverges (a dense 7B in Mellum2's trials; handbook 3.6).
    """
    scale = recipe.optimizer.muon_extra_scale_factor
    if recipe.optimizer.name in ("muon", "dist_muon") and (scale is None or scale >= 1):
        yield Violation(
            ("optimizer.muon_extra_scale_factor", "optimizer.name"),
            f"Muon with a scale of {1 if scale is None else scale:g} has diverged",
            "`optimizer: {muon_extra_scale_factor: 0.2}` (handbook 3.6)",
            level="warning",
        )


def a_router_skips_muon_where_it_is(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Other optimizers have one way for all weights. A warning: nothing else is trained than was meant.

    Megatron, never: it marks the router's weights for Muon alone (megatron/core/transformer/moe/router.py of the
    handbook's commit; handbook 3.6).
    """
    if recipe.router.skip_muon and not is_muon(recipe):
        yield Violation(
            ("router.skip_muon", "optimizer.name"),
            "`router.skip_muon` does nothing without Muon",
            "`optimizer: {name: muon}`, or unset it with `null`",
            level="warning",
        )


def stacked_experts_are_adams(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Muon takes matrices: the one tensor of all local experts is none.

    Megatron, never: it hands the experts to Adam without a word, at Muon's learning rate
    (megatron/core/optimizer/emerging_optimizers.py:124; handbook 3.6).
    """
    if is_muon(recipe) and recipe.moe.single_grouped_weight and not _refuses_stacks(recipe):
        yield Violation(
            ("moe.single_grouped_weight", "optimizer.name"),
            "`moe.single_grouped_weight` takes the experts from Muon and gives them to Adam",
            "unset it with `null`, or `optimizer: {name: adam}`",
        )


def stacked_experts_are_not_dealt_out(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Muon takes matrices: the handbook's commit does not let the one tensor of all local experts near it.

    Megatron, validate: `The LayerWise distributed optimizer does not support --moe-single-grouped-weight`
    (handbook 3.6; megatron-core 0.19.2 says nothing).
    """
    if is_muon(recipe) and recipe.moe.single_grouped_weight and _refuses_stacks(recipe):
        yield Violation(
            ("moe.single_grouped_weight", "optimizer.name", "parallel.use_distributed_optimizer"),
            "`moe.single_grouped_weight` excludes Muon over divided state",
            "unset it with `null`, or `optimizer: {name: adam}`",
        )


def _is_emerging(recipe: Recipe) -> bool:
    """Whether the optimizer is of the package emerging_optimizers (megatron/training/arguments.py:1671)."""
    return recipe.optimizer.name not in (None, "adam", "sgd")


def _is_layer_wise(recipe: Recipe) -> bool:
    """Whether Megatron deals out whole matrices instead of dividing state (megatron/training/arguments.py:1672)."""
    divided = recipe.parallel.use_distributed_optimizer or recipe.optimizer.name == "dist_muon"
    return _is_emerging(recipe) and bool(divided)


def is_muon(recipe: Recipe) -> bool:
    """Whether the optimizer orthogonalizes."""
    return recipe.optimizer.name in ("muon", "dist_muon", "adaptive_muon")


def _refuses_stacks(recipe: Recipe) -> bool:
    return recipe.megatron.version != "0.19.2" and _is_layer_wise(recipe)


RULES: tuple[Rule, ...] = (
    sharded_training_has_a_common_optimizer,
    emerging_optimizers_are_not_of_fp16,
    layer_wise_state_has_one_instance,
    layer_wise_state_is_of_bf16,
    muon_starts_from_a_small_scale,
    a_router_skips_muon_where_it_is,
    stacked_experts_are_adams,
    stacked_experts_are_not_dealt_out,
)
