"""Rules on pipeline stages: how layers are divided over them, evenly, by numbers or by a layout."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def stages_of(recipe: Recipe) -> int:
    """Pipeline stages."""
    return recipe.parallel.pipeline_model or 1


def counted_layers(recipe: Recipe) -> int:
    """Layers that are divided over stages: the embedding and the loss are two where they are said to count."""
    parallel = recipe.parallel
    more = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    return (recipe.model.num_layers or 0) + sum(map(bool, more))


def end_stages(recipe: Recipe) -> dict[str, int]:
    """Layers of the first and the last stage, by field, where they are given."""
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    given = {f"parallel.{name}": getattr(recipe.parallel, name) for name in names}
    return {name: layers for name, layers in given.items() if layers is not None}


def accounted(recipe: Recipe) -> list[str]:
    """The fields that count the embedding or the loss as a layer."""
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return [f"parallel.{name}" for name in names if getattr(recipe.parallel, name)]


def what_is_divided(recipe: Recipe) -> str:
    """The layers that are divided over stages, for a message."""
    layers, counted = recipe.model.num_layers, counted_layers(recipe)
    return f"model.num_layers = {layers}" + (f", {counted} with what is accounted for," if counted != layers else "")


def stages_share_layers_evenly(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each stage has as many layers, where nothing says how many.

    Megatron, validate: `Number of layers should be divisible by the pipeline-model-parallel size`
    (megatron/training/arguments.py:933, 963).
    """
    parallel, stages = recipe.parallel, stages_of(recipe)
    said = parallel.pipeline_model_layout or parallel.num_virtual_stages_per_pipeline_rank or end_stages(recipe)
    hybrid = recipe.model.hybrid_layer_pattern is not None
    if recipe.model.num_layers and not said and not hybrid and counted_layers(recipe) % stages:
        yield Violation(
            ("parallel.pipeline_model", "model.num_layers", *accounted(recipe)),
            f"{what_is_divided(recipe)} cannot be divided evenly over {stages} pipeline stages",
            "say which stage holds what with `parallel.pipeline_model_layout`, or how many layers the ends have with "
            "`decoder_first_pipeline_num_layers` and `decoder_last_pipeline_num_layers`",
        )


def uneven_stages_account_for_nothing(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Two ways to leave room for the embedding and the loss.

    Megatron, config: `cannot be set at the same time with account_for_embedding_in_pipeline_split`
    (megatron/core/transformer/transformer_config.py:1929).
    """
    ends, accounts = end_stages(recipe), accounted(recipe)
    if ends and accounts:
        yield Violation(
            (*accounts, *ends),
            f"`{accounts[0]}` excludes `{next(iter(ends))}`",
            "the stages' numbers of layers already leave room; unset this with `null`",
        )


def a_layout_says_all(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A layout already says which layers each stage holds.

    Megatron, config: `pipeline_model_parallel_layout cannot be set with other pipeline layout arguments`
    (megatron/core/transformer/transformer_config.py:1946).
    """
    ends, accounts = end_stages(recipe), accounted(recipe)
    others = [*ends, *accounts]
    if recipe.parallel.pipeline_model_layout is not None and others and not (ends and accounts):
        yield Violation(
            (*others, "parallel.pipeline_model_layout"),
            f"`{others[0]}` does not go with `parallel.pipeline_model_layout`, which says all",
            "unset this with `null`",
        )


def middle_stages_share_layers_evenly(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What the first and the last stage leave is divided evenly over the others.

    Megatron, config: `number of layers at middle stage: 51 must be divisible by the middle pipeline model parallel size
    6`, or `Mismatch` (megatron/core/transformer/transformer_config.py:2036, 2044).
    """
    ends, layers = end_stages(recipe), recipe.model.num_layers
    if not ends or not layers or accounted(recipe) or recipe.parallel.pipeline_model_layout:
        return
    rest, stages = layers - sum(ends.values()), stages_of(recipe) - len(ends)
    if bool(rest) != bool(stages) or (stages and rest % stages):
        said = " and ".join(f"`{name.partition('.')[2]}: {number}`" for name, number in ends.items())
        yield Violation(
            (*ends, "model.num_layers", "parallel.pipeline_model"),
            f"{said} of model.num_layers = {layers} leave {rest} over {max(stages, 0)} stages",
            "the stages between hold equally many; `parallel.pipeline_model_layout` says each",
        )


def one_stage_has_no_ends(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a pipeline the one stage is the first, has that many layers, and the rest are left out.

    Megatron, never: a shallower model is trained (megatron/core/transformer/transformer_block.py:110-143).
    """
    ends, layers = end_stages(recipe), recipe.model.num_layers
    if len(ends) == 2 and layers and stages_of(recipe) == 1 and sum(ends.values()) != layers:
        yield Violation(
            (*ends, "parallel.pipeline_model"),
            f"there is one pipeline stage, of which {' and '.join(f'`{name}`' for name in ends)} are two ends",
            "unset them with `null`",
        )


def layouts_fill_the_pipeline(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each rank has as many virtual stages.

    Megatron, validate: `The length of pipeline_model_parallel_layout must be divisible`
    (megatron/training/arguments.py:908).
    """
    layout, stages = recipe.parallel.pipeline_model_layout, stages_of(recipe)
    if layout is not None and len(layout.stages) % stages:
        yield Violation(
            ("parallel.pipeline_model_layout", "parallel.pipeline_model"),
            f"the layout has {len(layout.stages)} stages, no multiple of parallel.pipeline_model = {stages}",
            "each `|` begins another",
        )


def layouts_have_every_layer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each layer and each prediction depth stands in a layout once.

    Megatron, config: `Number of decoder layers 15 must match num_layers 16`
    (megatron/core/transformer/pipeline_parallel_layer_layout.py:106, 111).
    """
    layout = recipe.parallel.pipeline_model_layout
    if layout is None:
        return
    for letter, field in (("t", "num_layers"), ("m", "mtp_num_layers")):
        meant = getattr(recipe.model, field) or 0
        if layout.count(letter) != meant:
            yield Violation(
                ("parallel.pipeline_model_layout", f"model.{field}"),
                f"the layout has {layout.count(letter)} `{letter}`, but model.{field} = {meant}",
                "each layer stands in it once",
            )


def layouts_predict_last(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Prediction depths are of a rank's last virtual stage.

    Megatron, config: `Currently we restrict that the MTP should be always in the last virtual pipeline stage`
    (megatron/core/transformer/pipeline_parallel_layer_layout.py:122).
    """
    layout, stages = recipe.parallel.pipeline_model_layout, stages_of(recipe)
    if layout and not len(layout.stages) % stages and any("m" in stage for stage in layout.stages[:-stages]):
        yield Violation(
            ("parallel.pipeline_model_layout", "parallel.pipeline_model"),
            "the layout has `m` before the last virtual stage of its rank",
            f"put it into one of the last {stages} stages",
        )


RULES: tuple[Rule, ...] = (
    stages_share_layers_evenly,
    uneven_stages_account_for_nothing,
    a_layout_says_all,
    middle_stages_share_layers_evenly,
    one_stage_has_no_ends,
    layouts_fill_the_pipeline,
    layouts_have_every_layer,
    layouts_predict_last,
)
