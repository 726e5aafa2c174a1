"""Rules on the expert bias, which moves with the load, and on forced routing, which takes the router's choice away."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


def _biased(recipe: Recipe) -> bool:
    return bool(recipe.moe.num_experts and recipe.balance.enable_expert_bias)


def expert_bias_needs_independent_scores(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A softmax makes each expert's score depend on all others', and is the default.

    Megatron, config: `Expert bias for aux-loss-free routing only supports 'sigmoid' and 'sqrtsoftplus'`
    (megatron/core/transformer/transformer_config.py:2288).
    """
    if _biased(recipe) and recipe.router.score_function in (None, "softmax"):
        yield Violation(
            ("balance.enable_expert_bias", "router.score_function"),
            "`balance.enable_expert_bias` needs `router.score_function` sigmoid or sqrtsoftplus, not softmax",
            "add `score_function: sigmoid` to `router`",
        )


def expert_bias_has_a_choice_to_move(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Quantile balancing and sinkhorn choose by thresholds of their own.

    Megatron, never: it moves the bias and adds it nowhere (megatron/core/transformer/moe/router.py:764).
    """
    methods = recipe.balance.type
    if _biased(recipe) and methods in (("quantile_balancing",), ("sinkhorn",)):
        yield Violation(
            ("balance.enable_expert_bias", "balance.type"),
            f"`balance.enable_expert_bias` does nothing with `balance.type: {methods[0]}`",
            "use one of them",
        )


def expert_bias_moves(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bias that never leaves 0 changes no choice.

    Megatron, never: it routes as without a bias (megatron/core/transformer/moe/moe_utils.py:1165).
    """
    if _biased(recipe) and recipe.balance.bias_update_rate == 0:
        yield Violation(
            ("balance.enable_expert_bias", "balance.bias_update_rate"),
            "`balance.enable_expert_bias` does nothing with `balance.bias_update_rate: 0`",
            "unset the rate with `null` for Megatron's 1e-3",
        )


def expert_bias_moves_finely(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The step is fixed, and 1e-3, the default, was found too coarse for more than 128 experts.

    A warning, since it trains, and some published models have it.

    Megatron, never: loads stay uneven, and the loss is higher (handbook 3.3).
    """
    rate, experts = recipe.balance.bias_update_rate, recipe.moe.num_experts or 0
    if _biased(recipe) and experts > 128 and (rate is None or rate >= 1e-3):
        said = f"balance.bias_update_rate = {rate:g}" if rate else "`balance.bias_update_rate`, by default 1e-3,"
        yield Violation(
            ("balance.bias_update_rate", "moe.num_experts"),
            f"{said} may be too coarse a step for {experts} experts: beyond 128, loads stayed uneven at 1e-3",
            "try a smaller one, and watch MaxVio (handbook 3.3)",
            "warning",
        )


def expert_bias_counts_exactly(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The tokens of a step are counted in the model's own number format: bf16 is exact up to 256, fp16 up to 2,048.

    A warning, since loads still even out, less exactly; from d6316eb45 on counts are integers.

    Megatron, never: a rounded count can turn a bias the wrong way (megatron/core/transformer/moe/router.py:171;
    handbook 3.3).
    """
    size, precision = sizes(recipe), recipe.precision
    most, form = (256, "bf16") if precision.bf16 else (2048, "fp16")
    rounds = (precision.bf16 or precision.fp16) and size and size.tokens_per_step > most
    if _biased(recipe) and recipe.megatron.version == "0.19.2" and rounds and not _overflows(recipe):
        yield Violation(
            ("balance.enable_expert_bias", "megatron.version"),
            f"Megatron 0.19.2 counts the expert bias's tokens in {form}, rounded beyond {most:,}, and a step has "
            f"{size.tokens_per_step:,}"  # type: ignore[union-attr]
            "; a bias may move the wrong way",
            "`megatron.version: d6316eb45` counts exactly (handbook 3.3)",
            "warning",
        )


def expert_bias_counts_below_infinity(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """In fp16 the sum of all experts' tokens ends at 65,504: the mean load is then infinite, and every expert's bias
    rises alike.

    Megatron, never: nothing is balanced (megatron/core/transformer/moe/moe_utils.py:1163).
    """
    size = sizes(recipe)
    if _biased(recipe) and _overflows(recipe) and size:
        yield Violation(
            ("balance.enable_expert_bias", "precision.fp16"),
            f"Megatron 0.19.2 sums the expert bias's tokens in fp16, which ends at 65,504, and a step has "
            f"{size.tokens_per_step:,} x top-{recipe.router.topk or 2}",
            "train in bf16, or with `megatron.version: d6316eb45`",
        )


def _overflows(recipe: Recipe) -> bool:
    size, old = sizes(recipe), recipe.megatron.version == "0.19.2"
    return bool(old and recipe.precision.fp16 and size and size.tokens_per_step * (recipe.router.topk or 2) >= 65_520)


def forced_routing_is_a_benchmark(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Tokens go to random experts, whatever the router says.

    Megatron, never: it trains experts on noise (megatron/core/transformer/moe/router.py:864; handbook 3.3).
    """
    for name in ("force_load_balancing", "force_biased"):
        if recipe.moe.num_experts and getattr(recipe.balance, name) not in (None, False) and not recipe.benchmark:
            yield Violation(
                (f"balance.{name}",),
                f"`balance.{name}` routes at random, whatever the router says",
                "mark a control run with `benchmark: true`, or unset it",
            )


RULES: tuple[Rule, ...] = (
    expert_bias_needs_independent_scores,
    expert_bias_has_a_choice_to_move,
    expert_bias_moves,
    expert_bias_moves_finely,
    expert_bias_counts_exactly,
    expert_bias_counts_below_infinity,
    forced_routing_is_a_benchmark,
)
