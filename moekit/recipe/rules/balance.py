"""Rules on what keeps the experts' load even."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import Sizes, sizes

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_OWN_WAYS = ("quantile_balancing", "sinkhorn")


def _methods(recipe: Recipe) -> tuple[str, ...]:
    """What is said of an MoE's balancing; Megatron's own is `aux_loss` with a weight of 0."""
    return recipe.balance.type or () if recipe.moe.num_experts else ()


def _whole_sizes(recipe: Recipe) -> Sizes | None:
    """The sizes where ranks, and micro batches on them, come out whole."""
    size = sizes(recipe)
    if size is None or size.world % size.model_ranks or size.global_batch_seqs < size.micro_batch_seqs * size.data:
        return None
    return size


def each_balancing_loss_has_a_coefficient(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A list of methods has a list of weights.

    Megatron, config: `moe_aux_loss_coeff must be a list of the same length as moe_router_load_balancing_type`
    (megatron/core/transformer/transformer_config.py:1653).
    """
    methods, coefficients = _methods(recipe), recipe.balance.aux_loss_coeff or ()
    if len(methods) > 1 and len(methods) != len(coefficients):
        yield Violation(
            ("balance.aux_loss_coeff", "balance.type"),
            f"`balance.type` has {len(methods)} methods, and `balance.aux_loss_coeff` {len(coefficients) or 'no'} "
            f"value{'s' * (len(coefficients) > 1)}",
            "give one value for each method",
        )


def one_balancing_loss_has_one_coefficient(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A list of weights for one method is no number.

    Megatron, first step: `'>' not supported between instances of 'list' and 'int'`
    (megatron/core/transformer/moe/router.py:403).
    """
    coefficients, methods = recipe.balance.aux_loss_coeff or (), _methods(recipe)
    one_loss = not methods or (len(methods) == 1 and "aux" in methods[0])  # another method reads no coefficient
    if recipe.moe.num_experts and len(coefficients) > 1 and one_loss:
        yield Violation(
            ("balance.aux_loss_coeff", "balance.type"),
            f"`balance.aux_loss_coeff` has {len(coefficients)} values for one balancing method",
            "give one value, or a list of methods",
        )


def something_balances_the_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """With nothing said the aux loss has weight 0, and experts can die unnoticed.

    A warning, since it trains; `type: none` says that it is meant.

    Megatron, never: it adds no loss (megatron/core/transformer/moe/router.py:387; handbook 2.5).
    """
    balance = recipe.balance
    forced = balance.force_load_balancing or balance.force_biased is not None
    said = balance.type or any(balance.aux_loss_coeff or ()) or balance.enable_expert_bias or forced
    if recipe.moe.num_experts and recipe.moe.num_experts > 1 and not said:
        yield Violation(
            ("balance.type", "moe.num_experts"),
            "nothing balances the experts: Megatron's own aux loss has weight 0",
            "the first MoE uses `type: aux_loss` with `aux_loss_coeff: 1e-3` (handbook 2.5); `type: none` means it",
            "warning",
        )


def a_balancing_loss_weighs_something(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A loss whose weight is unset has weight 0.

    A warning, since it trains.

    Megatron, never: it adds no loss (megatron/core/transformer/moe/router.py:387).
    """
    methods, coefficients = _methods(recipe), recipe.balance.aux_loss_coeff or (0.0,)
    if len(methods) != len(coefficients):
        return
    for method, coefficient in zip(methods, coefficients, strict=True):
        if method in LOSSES and not coefficient:
            yield Violation(
                ("balance.type", "balance.aux_loss_coeff"),
                f"`balance.type: {method}` does nothing without `balance.aux_loss_coeff`"
                if len(methods) == 1
                else f"`{method}` in `balance.type` has weight 0 and does nothing",
                "the first MoE uses 1e-3 (handbook 2.5); `type: none` says that no balancing is meant",
                "warning",
            )


def a_list_of_methods_has_losses_alone(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only losses can be added up: what balances in another way is looked for as the one method.

    Megatron, never: it leaves it off (megatron/core/transformer/moe/router.py:225, 764).
    """
    methods = _methods(recipe)
    if len(methods) > 1 and (alone := [method for method in methods if method not in LOSSES]):
        yield Violation(
            ("balance.type",),
            f"`{alone[0]}` in a list of balancing methods is switched off without a word",
            f"use `type: {alone[0]}` alone",
        )


def a_list_of_methods_has_each_once(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A loss is looked up by its name, and the first weight found is taken.

    Megatron, never: it leaves the second out (megatron/core/transformer/moe/router.py:393).
    """
    methods = _methods(recipe)
    if twice := [method for method in LOSSES if methods.count(method) > 1]:
        yield Violation(
            ("balance.type", "balance.aux_loss_coeff"),
            f"`{twice[0]}` is in `balance.type` {methods.count(twice[0])} times, and counts once, at its first weight",
            "leave one",
        )


def balancing_without_a_loss_takes_no_coefficient(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What balances without a loss has none to weigh.

    Megatron, never: it does not look at the weight (megatron/core/transformer/moe/router.py:387).
    """
    methods, coefficients = _methods(recipe), recipe.balance.aux_loss_coeff or ()
    if methods in (("quantile_balancing",), ("none",)) and len(coefficients) == 1 and coefficients[0]:
        yield Violation(
            ("balance.aux_loss_coeff", "balance.type"),
            f"`balance.aux_loss_coeff` does nothing with `balance.type: {methods[0]}`",
            "unset it with `null`",
        )


def sinkhorn_takes_no_coefficient(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Sinkhorn's choices are even by themselves.

    Megatron, first step: `Sinkhorn routing does not support aux loss` (megatron/core/transformer/moe/router.py:295).
    """
    coefficients = recipe.balance.aux_loss_coeff or ()
    if _methods(recipe) == ("sinkhorn",) and len(coefficients) == 1 and coefficients[0]:
        yield Violation(
            ("balance.aux_loss_coeff", "balance.type"),
            "`balance.type: sinkhorn` takes no `balance.aux_loss_coeff`",
            "unset it with `null`",
        )


def sinkhorn_makes_its_own_weights(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights are a softmax over all experts, a sigmoid at top-1, and groups, scale and fusion have no part in it.

    Megatron, never: it does not look at these (megatron/core/transformer/moe/router.py:276).
    """
    if _methods(recipe) != ("sinkhorn",):
        return
    router = recipe.router
    own = "sigmoid" if router.topk == 1 else "softmax"
    for name in ("score_function", "pre_softmax", "topk_scaling_factor", "num_groups", "fusion"):
        value = getattr(router, name)
        if value in (None, False) or (name == "score_function" and value == own):
            continue
        yield Violation(
            (f"router.{name}", "balance.type"),
            f"`router.{name}` does nothing with `balance.type: sinkhorn`, which makes weights by a {own} of its own",
            "unset it with `null`",
        )


def quantiles_are_whole_tokens(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """An expert's share of a micro batch is where its threshold lies.

    Megatron, first step: `Quantile balancing requires the number of routed assignments to be divisible by ... experts`
    (megatron/core/transformer/moe/moe_utils.py:230).
    """
    experts, topk, size = recipe.moe.num_experts, recipe.router.topk or 2, sizes(recipe)
    if _methods(recipe) != ("quantile_balancing",) or not (experts and size):
        return
    assigned = size.micro_batch_seqs * size.seq_length * topk
    if assigned % experts:
        yield Violation(
            ("balance.type", "train.micro_batch_size", "router.topk", "moe.num_experts"),
            f"quantile balancing needs micro-batch tokens x top-k = {assigned:,} to be a multiple of {experts} experts",
        )


def quantiles_have_an_expert_left(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A token's first expert that is not chosen is what the chosen ones are measured by.

    Megatron, first step: `selected index k out of range` (megatron/core/transformer/moe/moe_utils.py:224).
    """
    if _methods(recipe) == ("quantile_balancing",) and (recipe.router.topk or 2) == recipe.moe.num_experts:
        yield Violation(
            ("balance.type", "router.topk", "moe.num_experts"),
            f"quantile balancing needs more experts than router.topk = {recipe.router.topk or 2}",
            "nothing is to be balanced where a token goes to all experts; use `type: none`",
        )


def quantiles_go_without_fusion(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The fused router makes its own choice.

    Megatron, first step: `Quantile balancing routing does not support moe_router_fusion`
    (megatron/core/transformer/moe/router.py:324).
    """
    if _methods(recipe) == ("quantile_balancing",) and recipe.router.fusion:
        yield Violation(
            ("router.fusion", "balance.type"),
            "`router.fusion` does not go with `balance.type: quantile_balancing`",
            "unset it with `null`",
        )


def quantiles_go_without_groups(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Thresholds are found over all experts.

    Megatron, first step: `Quantile balancing routing does not support group-limited routing`
    (megatron/core/transformer/moe/router.py:327).
    """
    router = recipe.router
    if _methods(recipe) == ("quantile_balancing",) and (router.num_groups or router.group_topk):
        name = "num_groups" if router.num_groups else "group_topk"
        yield Violation(
            (f"router.{name}", "balance.type"),
            f"`router.{name}` does not go with `balance.type: quantile_balancing`",
            "unset it with `null`",
        )


def quantiles_are_not_all_memory(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The share of the old thresholds in the new: at 1 they stay 0 for ever, above it they run away.

    Megatron, never: nothing is balanced (megatron/core/distributed/finalize_model_grads.py:408).
    """
    ema = recipe.balance.quantile_balancing_ema
    if _methods(recipe) == ("quantile_balancing",) and ema is not None and ema >= 1:
        yield Violation(
            ("balance.quantile_balancing_ema",),
            f"balance.quantile_balancing_ema = {ema:g} lets no new threshold in: old ones keep that share",
            "use less than 1, such as 0.9, or unset it with `null`",
        )


def global_counts_are_few_enough(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The loss averages over the micro batches so far, and counts them in the model's own number format: bf16 has no
    257, fp16 no 2,049.

    Megatron, never: later micro batches change the average ever less (megatron/core/transformer/moe/router.py:203, 525;
    handbook 3.3, whose commit counts so too).
    """
    size, precision = _whole_sizes(recipe), recipe.precision
    most, form = (256, "bf16") if precision.bf16 else (2048, "fp16")
    weighs = "global_aux_loss" in _methods(recipe) and any(recipe.balance.aux_loss_coeff or ())
    if weighs and size and (precision.bf16 or precision.fp16) and size.accumulation_steps > most:
        yield Violation(
            ("balance.type", "train.global_batch_size", "train.micro_batch_size"),
            f"`global_aux_loss` counts at most {most:,} micro batches in {form}, and a global batch has "
            f"{size.accumulation_steps:,} on each rank",
            "raise `train.micro_batch_size` or the number of GPUs, or use `aux_loss`",
        )


RULES: tuple[Rule, ...] = (
    each_balancing_loss_has_a_coefficient,
    one_balancing_loss_has_one_coefficient,
    something_balances_the_experts,
    a_balancing_loss_weighs_something,
    a_list_of_methods_has_losses_alone,
    a_list_of_methods_has_each_once,
    balancing_without_a_loss_takes_no_coefficient,
    sinkhorn_takes_no_coefficient,
    sinkhorn_makes_its_own_weights,
    quantiles_are_whole_tokens,
    quantiles_have_an_expert_left,
    quantiles_go_without_fusion,
    quantiles_go_without_groups,
    quantiles_are_not_all_memory,
    global_counts_are_few_enough,
)
