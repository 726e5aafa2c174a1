"""Rules on upcycling, experts that begin as copies of a dense run's feed-forward layers (docs/upcycling.md)."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def _upcycles(recipe: Recipe) -> bool:
    return bool(recipe.moe.num_experts and recipe.moe.use_upcycling)


def upcycling_is_saved(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The converted model is saved at once.

    Megatron, validate: `When using upcycling, the --save option must be specified`
    (megatron/training/arguments.py:1783).
    """
    if _upcycles(recipe) and not recipe.checkpoint.save:
        yield Violation(
            ("moe.use_upcycling", "checkpoint.save"),
            "`moe.use_upcycling` needs `checkpoint.save`: the converted model is saved at once",
        )


def upcycling_begins_from_a_run(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Experts would begin at random and the dense training be lost.

    Megatron, first step: before it, nothing is found to convert (megatron/core/transformer/moe/upcycling_utils.py:312;
    handbook 3.6).
    """
    if _upcycles(recipe) and not recipe.checkpoint.from_run:
        yield Violation(
            ("moe.use_upcycling", "checkpoint.from_run"),
            "`moe.use_upcycling` needs `checkpoint.from_run`, the dense run whose layers become experts",
        )


def upcycling_counts_slices_of_an_expert(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`model.ffn_hidden_size` times the granularity is the dense run's width, so it must itself be an expert's.

    Megatron, first step: before it, the dense checkpoint does not load, as its shapes are others
    (megatron/training/training.py:2159; handbook 3.6).
    """
    moe, model = recipe.moe, recipe.model
    if not (_upcycles(recipe) and moe.ffn_hidden_size and model.ffn_hidden_size):
        return
    if moe.ffn_hidden_size != model.ffn_hidden_size:
        granularity = moe.upcycling_granularity or 1
        yield Violation(
            ("model.ffn_hidden_size", "moe.ffn_hidden_size", "moe.upcycling_granularity"),
            f"while upcycling, model.ffn_hidden_size = {model.ffn_hidden_size} must be an expert's width: Megatron "
            f"takes the dense layers to be {granularity} times as wide",
            f"use {moe.ffn_hidden_size}, for dense layers of {moe.ffn_hidden_size * granularity}",
        )


def upcycled_experts_are_whole_copies(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each slice of a dense layer is copied equally often.

    Megatron, first step: before it, `The number of experts must be divisible by granularity for upcycling`
    (megatron/core/transformer/moe/upcycling_utils.py:90).
    """
    moe = recipe.moe
    if _upcycles(recipe) and (moe.num_experts or 0) % (moe.upcycling_granularity or 1):
        yield Violation(
            ("moe.upcycling_granularity", "moe.num_experts"),
            f"{moe.num_experts} experts are no whole number of copies of moe.upcycling_granularity = "
            f"{moe.upcycling_granularity} slices",
        )


def upcycled_layers_all_have_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What is converted is read off the first layer, and then each dense layer is.

    Megatron, first step: before it, `The mlp layer ... is not supported by upcycling`
    (megatron/core/transformer/moe/upcycling_utils.py:39), or `Unexpected key(s) in state_dict` (pull request 3646).
    """
    pattern = recipe.moe.layer_freq
    if _upcycles(recipe) and pattern and not all(pattern.is_moe(recipe.model.num_layers or 1)):
        yield Violation(
            ("moe.layer_freq", "moe.use_upcycling"),
            "`moe.use_upcycling` needs experts in every layer, and `moe.layer_freq` leaves some dense",
        )


def upcycling_takes_transformer_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """In a hybrid stack attention is a layer of its own, and has no experts to be read off.

    Megatron, first step: before it, `unsupported operand type(s) for %: 'NoneType' and 'int'`, as the pattern puts
    experts into the dense model too (megatron/core/transformer/moe/moe_layer.py:185).
    """
    if _upcycles(recipe) and recipe.model.hybrid_layer_pattern:
        yield Violation(
            ("moe.use_upcycling", "model.hybrid_layer_pattern"),
            "`moe.use_upcycling` does not go with a hybrid stack",
            "use `stack: gpt`, of layers with attention and experts in one",
        )


def upcycled_stages_have_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each pipeline stage reads off a layer of its own what is converted.

    Megatron, first step: before it, `can not find mlp layer in moe model`
    (megatron/core/transformer/moe/upcycling_utils.py:38).
    """
    layout = recipe.parallel.pipeline_model_layout
    if _upcycles(recipe) and layout and not all("t" in stage for stage in layout.stages):
        yield Violation(
            ("parallel.pipeline_model_layout", "moe.use_upcycling"),
            "`moe.use_upcycling` needs a layer in every pipeline stage, and the layout has one without",
            "convert with another layout; checkpoints can be loaded with any",
        )


def upcycled_experts_are_cut_as_dense_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each tensor-parallel rank cuts experts out of its own part of the dense layers.

    Megatron, first step: before it, `size mismatch for decoder.layers.0.mlp.experts`
    (megatron/core/transformer/moe/upcycling_utils.py:346).
    """
    dense, expert = recipe.parallel.tensor_model or 1, recipe.parallel.expert_tensor
    if _upcycles(recipe) and expert and expert != dense:
        yield Violation(
            ("parallel.expert_tensor", "parallel.tensor_model"),
            f"while upcycling, parallel.expert_tensor = {expert} must be parallel.tensor_model = {dense}",
            f"use {dense} in the first start; checkpoints can be loaded with another",
        )


def upcycling_knows_the_activation(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The weights are scaled by the activation, of which three are known.

    Megatron, first step: before it, `The activation func is not supported by upcycling`
    (megatron/core/transformer/moe/upcycling_utils.py:58).
    """
    if _upcycles(recipe) and recipe.model.quick_geglu:
        yield Violation(
            ("model.quick_geglu", "moe.use_upcycling"),
            "`moe.use_upcycling` knows GELU, `swiglu` and `squared_relu`, and not `quick_geglu`",
        )


def upcycled_tokens_meet_every_slice(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Slices of a dense layer stand side by side and are chosen together, as the rows of their router are equal.

    A warning, since it trains, from farther away: with 3 of 8 experts and 2 slices a layer is a third off.

    Megatron, never: a token that meets more of one slice than of another gets another layer than the dense one
    (megatron/core/transformer/moe/upcycling_utils.py:145).
    """
    topk, slices = recipe.router.topk, recipe.moe.upcycling_granularity or 1
    if _upcycles(recipe) and topk and topk % slices:
        yield Violation(
            ("router.topk", "moe.upcycling_granularity"),
            f"a token's {topk} experts are no whole number of the {slices} slices of a dense layer",
            f"use a multiple of {slices}: the MoE then begins as the dense model",
            "warning",
        )


def upcycled_slices_have_copies(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The router chooses between the copies of a slice; where there is one, the rows of all experts are equal.

    A warning, since it trains: the dense model in slices.

    Megatron, never: with as many experts as slices all scores tie, for every token
    (megatron/core/transformer/moe/upcycling_utils.py:137).
    """
    moe, slices = recipe.moe, recipe.moe.upcycling_granularity or 1
    if _upcycles(recipe) and slices > 1 and moe.num_experts == slices:
        yield Violation(
            ("moe.num_experts", "moe.upcycling_granularity"),
            f"{slices} experts are one copy of each of {slices} slices, and the router has nothing to choose between",
            f"use {2 * slices} experts or more",
            "warning",
        )


def upcycled_outputs_keep_their_size(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights are scaled for a token's experts to count as one dense layer.

    A warning, since it trains, from farther away.

    Megatron, never: the factor comes on top of it (megatron/core/transformer/moe/upcycling_utils.py:154).
    """
    factor = recipe.router.topk_scaling_factor
    if _upcycles(recipe) and factor not in (None, 1.0):
        yield Violation(
            ("router.topk_scaling_factor", "moe.use_upcycling"),
            f"each upcycled layer's output is {factor:g} times the dense one's",
            "unset it with `null`",
            "warning",
        )


def a_shared_expert_is_not_upcycled(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The routed experts alone are the dense layer; a shared one adds its own output to it.

    A warning, since it trains.

    Megatron, never: a shared expert begins at random (megatron/core/transformer/moe/upcycling_utils.py:260).
    """
    if _upcycles(recipe) and recipe.moe.shared_expert_intermediate_size:
        yield Violation(
            ("moe.shared_expert_intermediate_size", "moe.use_upcycling"),
            "a shared expert begins at random beside upcycled ones, and adds to what they give",
            level="warning",
        )


def upcycled_layers_have_no_bias(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Linear layers have a bias unless told otherwise, and so has the router.

    A warning, since it trains, from farther away.

    Megatron, never: Transformer Engine's grouped experts get the weights alone, and of the router's rows only the
    weights are made equal (megatron/core/transformer/moe/upcycling_utils.py:275, 248).
    """
    if _upcycles(recipe) and not recipe.model.disable_bias_linear:
        yield Violation(
            ("moe.use_upcycling", "model.disable_bias_linear"),
            "biases are not upcycled as weights are, and linear layers have one by default",
            "add `disable_bias_linear: true` to `model`, for a dense run without biases",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    upcycling_is_saved,
    upcycling_begins_from_a_run,
    upcycling_counts_slices_of_an_expert,
    upcycled_experts_are_whole_copies,
    upcycled_layers_all_have_experts,
    upcycling_takes_transformer_layers,
    upcycled_stages_have_layers,
    upcycled_experts_are_cut_as_dense_layers,
    upcycling_knows_the_activation,
    upcycled_tokens_meet_every_slice,
    upcycled_slices_have_copies,
    upcycled_outputs_keep_their_size,
    a_shared_expert_is_not_upcycled,
    upcycled_layers_have_no_bias,
)
