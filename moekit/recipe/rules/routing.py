"""Rules on the router and on what keeps the experts' load even."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def topk_is_among_the_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`selected index k out of range`, at the first step. Seen on a CPU."""
    experts, topk = recipe.moe.num_experts, recipe.router.topk
    if experts and topk and topk > experts:
        yield Violation(
            ("router.topk", "moe.num_experts"), f"a token cannot go to router.topk = {topk} of {experts} experts"
        )


def top_1_needs_pre_softmax(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A softmax over one expert is always 1 and its router learns nothing; stops at config.

    Source: megatron/core/transformer/transformer_config.py:2336.
    """
    router = recipe.router
    softmax = router.score_function in (None, "softmax") and "sinkhorn" not in (recipe.balance.type or ())
    if router.topk == 1 and softmax and not router.pre_softmax:
        yield Violation(
            ("router.topk", "router.pre_softmax"),
            "`router.topk: 1` needs `router.pre_softmax`: a softmax over one expert is always 1",
            "add `pre_softmax: true`",
        )


def expert_bias_needs_independent_scores(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config. Source: megatron/core/transformer/transformer_config.py:2289."""
    if recipe.balance.enable_expert_bias and recipe.router.score_function in (None, "softmax"):
        yield Violation(
            ("balance.enable_expert_bias", "router.score_function"),
            "`balance.enable_expert_bias` needs `router.score_function` sigmoid or sqrtsoftplus, not softmax",
            "add `score_function: sigmoid` to `router`",
        )


def each_balancing_loss_has_a_coefficient(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Lists of unequal length stop at config (transformer_config.py:1656).

    An aux loss whose coefficient is unset has weight 0 and does nothing; never noticed
    (megatron/core/transformer/moe/router.py, `get_aux_loss_coeff`).
    """
    types, coefficients = recipe.balance.type or (), recipe.balance.aux_loss_coeff or ()
    if len(types) > 1 and len(types) != len(coefficients):
        yield Violation(
            ("balance.aux_loss_coeff", "balance.type"),
            f"`balance.type` has {len(types)} methods, and `balance.aux_loss_coeff` {len(coefficients) or 'no'} "
            f"value{'s' * (len(coefficients) > 1)}",
            "give one value for each method",
        )
    elif len(coefficients) > 1 and len(types) <= 1:
        yield Violation(
            ("balance.aux_loss_coeff", "balance.type"),
            f"`balance.aux_loss_coeff` has {len(coefficients)} values for one balancing method",
            "give one value, or a list of methods",
        )
    elif recipe.moe.num_experts and not types and not any(coefficients) and not recipe.balance.enable_expert_bias:
        yield Violation(
            ("balance.type", "moe.num_experts"),
            "nothing balances the experts: Megatron's own aux loss has weight 0",
            "the first MoE uses `type: aux_loss` with `aux_loss_coeff: 1e-3` (handbook 2.5); `type: none` means it",
            "warning",
        )
    elif len(types) == 1 and types[0] in AUX_LOSSES and not any(coefficients):
        yield Violation(
            ("balance.type", "balance.aux_loss_coeff"),
            f"`balance.type: {types[0]}` does nothing without `balance.aux_loss_coeff`",
            "the first MoE uses 1e-3 (handbook 2.5); `type: none` says that no balancing is meant",
            "warning",
        )


def balancing_without_a_loss_takes_no_coefficient(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The coefficient is ignored, and in a list `quantile_balancing` itself is; never noticed.

    Source: megatron/core/transformer/moe/router.py:223, `get_aux_loss_coeff`; losses on a CPU are the same to the bit.
    """
    types = recipe.balance.type or ()
    if len(types) > 1 and (alone := [t for t in types if t in ("quantile_balancing", "sinkhorn", "none")]):
        yield Violation(
            ("balance.type",),
            f"`{alone[0]}` in a list of balancing methods is switched off without a word",
            f"use `type: {alone[0]}` alone",
        )
    elif types in (("quantile_balancing",), ("sinkhorn",), ("none",)) and any(recipe.balance.aux_loss_coeff or ()):
        yield Violation(
            ("balance.aux_loss_coeff", "balance.type"),
            f"`balance.aux_loss_coeff` does nothing with `balance.type: {types[0]}`",
            "unset it with `null`",
        )


def quantiles_are_whole_tokens(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """An assert in the router, at the first step. Source: handbook 3.3; moe/router.py, `quantile_balancing`."""
    experts, topk, size = recipe.moe.num_experts, recipe.router.topk, sizes(recipe)
    if "quantile_balancing" not in (recipe.balance.type or ()) or not (experts and topk and size):
        return
    assigned = size.micro_batch_seqs * size.seq_length * topk
    if assigned % experts:
        yield Violation(
            ("balance.type", "train.micro_batch_size", "router.topk", "moe.num_experts"),
            f"quantile balancing needs micro-batch tokens x top-k = {assigned:,} to be a multiple of {experts} experts",
        )


def groups_of_experts_fit(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config (megatron/core/transformer/transformer_config.py:2346-2354).

    Too few experts in the chosen groups for the top-k fail at the first step.
    """
    experts, router = recipe.moe.num_experts, recipe.router
    groups, chosen = router.num_groups, router.group_topk
    if chosen and not groups:
        yield Violation(("router.group_topk",), "`router.group_topk` needs `router.num_groups`")
    elif groups and not chosen:
        yield Violation(
            ("router.num_groups", "router.group_topk"), "`router.num_groups` does nothing without `router.group_topk`"
        )
    elif chosen and router.topk and router.topk < chosen:
        yield Violation(
            ("router.group_topk", "router.topk"),
            f"router.topk = {router.topk} is below router.group_topk = {chosen}: no score would choose the groups",
        )
    elif groups and experts and experts % groups:
        yield Violation(
            ("router.num_groups", "moe.num_experts"), f"{experts} experts cannot be put into {groups} equal groups"
        )
    elif groups and chosen and chosen > groups:
        yield Violation(
            ("router.group_topk", "router.num_groups"), f"a token cannot choose {chosen} of {groups} groups"
        )
    elif groups and chosen and experts and router.topk and router.topk > experts // groups * chosen:
        yield Violation(
            ("router.topk", "router.group_topk", "router.num_groups", "moe.num_experts"),
            f"{chosen} of {groups} groups hold {experts // groups * chosen} experts, fewer than "
            f"router.topk = {router.topk}",
        )


def forced_routing_is_a_benchmark(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Tokens go to random experts and the router learns nothing; never noticed. Source: handbook 3.3."""
    for name in ("force_load_balancing", "force_biased"):
        if getattr(recipe.balance, name) and not recipe.benchmark:
            yield Violation(
                (f"balance.{name}",),
                f"`balance.{name}` routes at random and trains no router",
                "mark a control run with `benchmark: true`, or unset it",
            )


RULES: tuple[Rule, ...] = (
    topk_is_among_the_experts,
    top_1_needs_pre_softmax,
    expert_bias_needs_independent_scores,
    each_balancing_loss_has_a_coefficient,
    balancing_without_a_loss_takes_no_coefficient,
    quantiles_are_whole_tokens,
    groups_of_experts_fit,
    forced_routing_is_a_benchmark,
)
