"""Rules on the router: which experts a token is sent to, and with what weight."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import exchange_ranks


def topk_is_among_the_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A token cannot go to more experts than there are; Megatron's own top-k is 2.

    Megatron, first step: `selected index k out of range` (megatron/core/transformer/moe/moe_utils.py:823).
    """
    experts, topk = recipe.moe.num_experts, recipe.router.topk or 2
    if experts and topk > experts:
        counted = f"{experts} experts" if experts > 1 else "1 expert"
        said = f"router.topk = {topk}" if recipe.router.topk else "`router.topk`, by default 2,"
        yield Violation(("router.topk", "moe.num_experts"), f"a token cannot go to {said} of {counted}")


def top_1_needs_pre_softmax(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A softmax over one expert is always 1, and its router would learn nothing.

    Megatron, config: `Please use --moe-router-pre-softmax when topk is 1`
    (megatron/core/transformer/transformer_config.py:2336).
    """
    router = recipe.router
    softmax = router.score_function in (None, "softmax") and recipe.balance.type != ("sinkhorn",)
    if recipe.moe.num_experts and router.topk == 1 and softmax and not router.pre_softmax:
        yield Violation(
            ("router.topk", "router.pre_softmax"),
            "`router.topk: 1` needs `router.pre_softmax`: a softmax over one expert is always 1",
            "add `pre_softmax: true`",
        )


def weights_of_several_experts_sum_to_one(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """With `pre_softmax` the chosen weights are what is left of all experts', and the layer's output swells and
    shrinks with them.

    A warning, since some published models were trained so; renormalized weights gave the lower loss.

    Megatron, never: it takes the weights as they are (handbook 3.1).
    """
    router = recipe.router
    softmax = router.score_function in (None, "softmax") and recipe.balance.type != ("sinkhorn",)
    if recipe.moe.num_experts and softmax and router.pre_softmax and (router.topk or 2) > 1:
        yield Violation(
            ("router.pre_softmax", "router.topk"),
            f"`router.pre_softmax` leaves the weights of router.topk = {router.topk or 2} experts below a sum of 1, "
            "another for each token",
            "unset it with `null` unless a model that was trained so is continued (handbook 3.1)",
            "warning",
        )


def pre_softmax_is_of_a_softmax(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Other score functions do not look at it.

    A warning, since published settings of sigmoid routers often have it, and nothing else changes.

    Megatron, never: it is read beside softmax alone (megatron/core/transformer/moe/moe_utils.py:839).
    """
    router = recipe.router
    if recipe.moe.num_experts and router.pre_softmax and router.score_function in ("sigmoid", "sqrtsoftplus"):
        yield Violation(
            ("router.pre_softmax", "router.score_function"),
            f"`router.pre_softmax` does nothing with `router.score_function: {router.score_function}`",
            "unset it with `null`",
            "warning",
        )


def scores_are_exact(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Scores in the model's own 16 bits tie, and ties choose other experts; runs have diverged of it.

    A warning, since it trains; an fp32 model has fp32 scores by itself.

    Megatron, never: with 32 experts and more it warns (megatron/core/transformer/transformer_config.py:2784;
    handbook 3.1).
    """
    half = recipe.precision.bf16 or recipe.precision.fp16
    if recipe.moe.num_experts and half and recipe.router.dtype is None:
        yield Violation(
            ("router.dtype", "moe.num_experts"),
            f"the routing scores are rounded to {'bf16' if recipe.precision.bf16 else 'fp16'}: `router.dtype` is unset",
            "add `dtype: fp32` to `router` (handbook 3.1)",
            "warning",
        )


def chosen_groups_are_of_some_number(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Choosing groups needs groups.

    Megatron, config: `When using group limited routing, moe_router_num_groups must be specified`
    (megatron/core/transformer/transformer_config.py:2345).
    """
    if recipe.moe.num_experts and recipe.router.group_topk and not recipe.router.num_groups:
        yield Violation(("router.group_topk",), "`router.group_topk` needs `router.num_groups`")


def groups_of_experts_are_equal(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Experts are cut into groups in order.

    Megatron, config: `num_moe_experts should be divisible by moe_router_num_groups`
    (megatron/core/transformer/transformer_config.py:2349).
    """
    experts, groups = recipe.moe.num_experts, recipe.router.num_groups
    if experts and groups and recipe.router.group_topk and experts % groups:
        yield Violation(
            ("router.num_groups", "moe.num_experts"), f"{experts} experts cannot be put into {groups} equal groups"
        )


def chosen_groups_are_among_the_groups(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A token cannot choose more groups than there are.

    Megatron, config: `moe_router_group_topk should be smaller than moe_router_num_groups`
    (megatron/core/transformer/transformer_config.py:2353).
    """
    groups, chosen = recipe.router.num_groups, recipe.router.group_topk
    if recipe.moe.num_experts and groups and chosen and chosen > groups:
        yield Violation(
            ("router.group_topk", "router.num_groups"), f"a token cannot choose {chosen} of {groups} groups"
        )


def _groups(recipe: Recipe) -> tuple[int, int, int] | None:
    """Experts of a group, groups chosen and top-k, where groups can be made."""
    experts, groups, chosen = recipe.moe.num_experts, recipe.router.num_groups, recipe.router.group_topk
    if not (experts and groups and chosen) or experts % groups or chosen > groups:
        return None
    return experts // groups, chosen, recipe.router.topk or 2


def groups_are_chosen_by_their_scores(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A group's score is the sum of its best top-k / group_topk experts: below 1, all groups score 0.

    Megatron, never: it takes the same groups for every token (megatron/core/transformer/moe/moe_utils.py:656).
    """
    sizes = _groups(recipe)
    if sizes and sizes[2] < sizes[1]:
        yield Violation(
            ("router.group_topk", "router.topk"),
            f"router.topk = {sizes[2]} is below router.group_topk = {sizes[1]}: no score would choose the groups",
        )


def groups_have_the_experts_that_score_them(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A group's score is the sum of its best top-k / group_topk experts, and it must have so many.

    Megatron, first step: `selected index k out of range` (megatron/core/transformer/moe/moe_utils.py:656).
    """
    sizes = _groups(recipe)
    if sizes and sizes[2] // sizes[1] > sizes[0]:
        yield Violation(
            ("router.topk", "router.group_topk", "router.num_groups", "moe.num_experts"),
            f"a group of {sizes[0]} experts is scored by its best {sizes[2] // sizes[1]} "
            f"(router.topk = {sizes[2]} / router.group_topk = {sizes[1]})",
        )


def chosen_groups_have_the_chosen_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The rest of the top-k lies outside with a score of minus infinity: not a number among the weights, or, where a
    softmax follows, experts that work at a weight of 0.

    Megatron, never: it loses the loss, or the work (megatron/core/transformer/moe/moe_utils.py:669).
    """
    sizes = _groups(recipe)
    if sizes and sizes[1] * sizes[0] < sizes[2] and sizes[2] // sizes[1] <= sizes[0]:
        yield Violation(
            ("router.topk", "router.group_topk", "router.num_groups", "moe.num_experts"),
            f"{sizes[1]} of {recipe.router.num_groups} groups hold {sizes[1] * sizes[0]} experts, fewer than "
            f"router.topk = {sizes[2]}",
        )


def a_limit_of_groups_saves_traffic(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Fewer groups are fewer nodes only where experts lie on several and a token travels to each node once.

    Told where the groups are right. A warning, since the limit is part of some published models.

    Megatron, never: it chooses among fewer experts and sends as much (handbook 3.7).
    """
    sizes = _groups(recipe)
    used = recipe.balance.type not in (("quantile_balancing",), ("sinkhorn",))
    if sizes is None or not used or not sizes[1] <= sizes[2] <= sizes[0] * sizes[1]:
        return
    ranks = exchange_ranks(recipe)
    if ranks <= target.gpus_per_node:
        why = f"all experts lie within one node ({ranks} ranks)"
    elif recipe.moe.dispatcher != "flex":
        why = f"`moe.dispatcher: {recipe.moe.dispatcher or 'allgather'}` sends a token once for each expert"
    else:
        return
    yield Violation(
        ("router.num_groups", "router.group_topk", "moe.dispatcher", "parallel.expert_model"),
        f"`router.num_groups` saves no traffic here, and takes experts from a token: {why}",
        "unset it and `group_topk` with `null` unless the model was published so (handbook 3.7)",
        "warning",
    )


def jitter_is_above_rounding(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Noise between 1 - eps and 1 + eps, which the model's number format must tell from 1.

    Megatron, first step: `Expected parameter low ... to satisfy the constraint LessThan`
    (megatron/core/transformer/moe/router.py:719).
    """
    eps, precision = recipe.router.input_jitter_eps, recipe.precision
    least, format = (2**-9, "bf16") if precision.bf16 else (2**-12, "fp16") if precision.fp16 else (2**-25, "fp32")
    if recipe.moe.num_experts and eps is not None and eps <= least:
        yield Violation(
            ("router.input_jitter_eps",),
            f"router.input_jitter_eps = {eps:g} is no noise: in {format}, 1 - {eps:g} is 1",
            f"use more than {least:.1g}, or unset it with `null`",
        )


def a_z_loss_weighs_something(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A weight of 0 adds nothing, and what is logged is divided by it.

    A warning, since training is as without it.

    Megatron, never: it logs the z-loss as NaN (megatron/core/transformer/moe/router.py:700).
    """
    if recipe.moe.num_experts and recipe.router.z_loss_coeff == 0:
        yield Violation(
            ("router.z_loss_coeff",),
            "`router.z_loss_coeff: 0` adds no loss and logs NaN",
            "unset it with `null`, or use 1e-3 (handbook 3.1)",
            "warning",
        )


def a_fused_router_needs_its_kernel(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine fuses routers since 2.6, those of sqrtsoftplus since 2.13.

    Megatron, first step: `fused_topk_with_score_function is not available. Please install TE >= 2.6.0`
    (megatron/core/transformer/moe/moe_utils.py:774, 777).
    """
    wanted = "2.13" if recipe.router.score_function == "sqrtsoftplus" else "2.6"
    if recipe.moe.num_experts and recipe.router.fusion and below(target.transformer_engine, wanted):
        of = " of sqrtsoftplus scores" if wanted == "2.13" else ""
        yield Violation(
            ("router.fusion", "router.score_function"),
            f"`router.fusion`{of} needs Transformer Engine {wanted} or later, and {target.name} has "
            f"{target.transformer_engine}",
        )


def choices_are_replayed_by_a_framework(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A framework for reinforcement learning hands the recorded choices over; pretraining has none.

    A warning, since training is as without it.

    Megatron, never: it chooses as ever (megatron/core/transformer/moe/router_replay.py:170; handbook 4).
    """
    if recipe.moe.num_experts and recipe.moe.enable_routing_replay:
        fused = "; a fused router (`router.fusion`) would not read it either" if recipe.router.fusion else ""
        yield Violation(
            ("moe.enable_routing_replay",),
            f"`moe.enable_routing_replay` does nothing while nobody hands recorded choices over{fused}",
            "unset it with `null` in pretraining",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    topk_is_among_the_experts,
    top_1_needs_pre_softmax,
    weights_of_several_experts_sum_to_one,
    pre_softmax_is_of_a_softmax,
    scores_are_exact,
    chosen_groups_are_of_some_number,
    groups_of_experts_are_equal,
    chosen_groups_are_among_the_groups,
    groups_are_chosen_by_their_scores,
    groups_have_the_experts_that_score_them,
    chosen_groups_have_the_chosen_experts,
    a_limit_of_groups_saves_traffic,
    jitter_is_above_rounding,
    a_z_loss_weighs_something,
    a_fused_router_needs_its_kernel,
    choices_are_replayed_by_a_framework,
)
