"""Which layers each pipeline stage holds, and how many ranks share a weight.

Line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from moekit.plan.given import Given
from moekit.plan.shape import Grouped, Shape
from moekit.recipe.patterns import HybridPattern, PipelineLayout
from moekit.recipe.sizes import expert_tensor_ranks


@dataclass(frozen=True, slots=True)
class Stage:
    """One virtual stage: what one rank holds in one piece."""

    layers: tuple[str, ...]
    """The parts of each of its layers."""
    first_layer: int
    """The place of the first of them among all layers, from 0."""
    embedding: bool
    output: bool
    """The output layer and the loss."""
    depths: bool
    """The prediction depths, all of them."""
    final_norm: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is laid over ranks."""

    tensor: int
    pipeline: int
    virtual: int
    """Virtual stages of one rank, 1 without interleaving."""
    context: int
    expert: int
    expert_tensor: int
    stages: tuple[tuple[Stage, ...], ...]
    """`# (pipeline rank, virtual stage)`"""
    world: int | None
    """GPUs; None where the recipe does not say."""


def layout_of(given: Given, shape: Shape) -> Layout:
    """The recipe's layout of `shape`.

    Raises:
        MoekitError: the layers cannot be cut so, or the ranks do not share the weights evenly.
    """
    pipeline = given("pipeline_model_parallel_size")
    pieces = _pieces(given, shape, pipeline)
    virtual = len(pieces) // pipeline
    stages = _stages(shape, pieces, _with_depths(given, shape, pieces))
    by_rank = tuple(tuple(stages[v * pipeline + p] for v in range(virtual)) for p in range(pipeline))
    layout = Layout(
        tensor=given("tensor_model_parallel_size"),
        pipeline=pipeline,
        virtual=virtual,
        context=given("context_parallel_size"),
        expert=given("expert_model_parallel_size"),
        expert_tensor=given("expert_tensor_parallel_size") or expert_tensor_ranks(given.loaded.recipe),
        stages=by_rank,
        world=given.loaded.recipe.parallel.gpus,
    )
    _shared_evenly(given, shape, layout)
    return layout


def _pieces(given: Given, shape: Shape, pipeline: int) -> list[int]:
    """Layers of each virtual stage, in the order that a token meets them: `# (virtual stage x pipeline rank)`."""
    if text := given("pipeline_model_parallel_layout"):
        return _by_layout(given, shape, given.parsed(PipelineLayout, text, _LAYOUT), pipeline)
    if shape.stack == "hybrid":
        pieces = [
            len(stage)
            for stage in given.parsed(HybridPattern, given("hybrid_layer_pattern"), "model.hybrid_layer_pattern").stages
        ]
        if len(pieces) > 1:  # arguments.py:817
            given.divided(len(pieces), pipeline, "model.hybrid_layer_pattern", "parallel.pipeline_model")
            return pieces
    return _by_numbers(given, len(shape.layers), pipeline)


def _by_layout(given: Given, shape: Shape, text: PipelineLayout, pipeline: int) -> list[int]:
    name = _LAYOUT
    if len(text.stages) % pipeline:
        what = f"`{name}` has {len(text.stages)} stages, no multiple of `parallel.pipeline_model` = {pipeline}"
        raise given.refused(name, what)
    wanted = (("t", len(shape.layers), "model.num_layers"), ("m", shape.depths, "model.mtp_num_layers"))
    for letter, number, of in wanted:
        if text.count(letter) != number:
            raise given.refused(name, f"`{name}` has {text.count(letter)} `{letter}`, and `{of}` is {number}")
    return [stage.count("t") for stage in text.stages]


def _by_numbers(given: Given, layers: int, pipeline: int) -> list[int]:
    """Even stages but for what is said of the first and last (core/transformer/transformer_block.py:70)."""
    first, last = given("decoder_first_pipeline_num_layers"), given("decoder_last_pipeline_num_layers")
    with_embedding = bool(given("account_for_embedding_in_pipeline_split"))
    with_loss = bool(given("account_for_loss_in_pipeline_split"))
    left = layers + with_embedding + with_loss - (first or 0) - (last or 0)
    uncut = pipeline - (first is not None) - (last is not None)
    middle = given.divided(left, uncut, "model.num_layers", "parallel.pipeline_model") if uncut > 0 else 0
    ranks = [middle] * pipeline
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    virtual = _virtual(given, ranks[0])
    chunks = [given.divided(rank, virtual, "model.num_layers", _VIRTUAL) for rank in ranks]
    pieces = chunks * virtual
    pieces[0] -= with_embedding
    pieces[-1] -= with_loss
    if sum(pieces) != layers or min(pieces) < 0:
        raise given.refused("model.num_layers", f"the pipeline's stages have {sum(pieces)} of {layers} layers")
    return pieces


_LAYOUT = "parallel.pipeline_model_layout"
_VIRTUAL = "parallel.num_virtual_stages_per_pipeline_rank"


def _virtual(given: Given, layers_of_a_rank: int) -> int:
    if given("num_virtual_stages_per_pipeline_rank") is not None:
        return int(given("num_virtual_stages_per_pipeline_rank"))
    each = given("num_layers_per_virtual_pipeline_stage")
    name = "parallel.num_layers_per_virtual_pipeline_stage"
    return 1 if each is None else given.divided(layers_of_a_rank, each, "model.num_layers", name)


def _with_depths(given: Given, shape: Shape, pieces: list[int]) -> int | None:
    """The virtual stage that has the prediction depths: the layout's `m`, else the last."""
    if not shape.depths:
        return None
    if text := given("pipeline_model_parallel_layout"):
        return next(
            index for index, stage in enumerate(given.parsed(PipelineLayout, text, _LAYOUT).stages) if "m" in stage
        )
    return len(pieces) - 1


def _stages(shape: Shape, pieces: list[int], with_depths: int | None) -> list[Stage]:
    ends = list(accumulate(pieces))
    last = len(pieces) - 1
    # core/transformer/transformer_block.py:387: with depths, the final norm follows the last layer of a transformer
    norm_at = last if with_depths is None or shape.stack == "hybrid" else ends.index(len(shape.layers))
    return [
        Stage(
            layers=shape.layers[end - size : end],
            first_layer=end - size,
            embedding=index == 0,
            output=index == last,
            depths=index == with_depths,
            final_norm=index == norm_at,
        )
        for index, (size, end) in enumerate(zip(pieces, ends, strict=True))
    ]


def _shared_evenly(given: Given, shape: Shape, layout: Layout) -> None:
    given.divided(shape.attention.heads, layout.tensor, "model.num_attention_heads", "parallel.tensor_model")
    given.divided(shape.rows, layout.tensor, "data.vocab_size", "parallel.tensor_model")
    if shape.dense:
        given.divided(shape.dense.width, layout.tensor, "model.ffn_hidden_size", "parallel.tensor_model")
    if shape.experts:
        given.divided(shape.experts.number, layout.expert, "moe.num_experts", "parallel.expert_model")
        given.divided(shape.experts.width, layout.expert_tensor, "moe.ffn_hidden_size", "parallel.expert_tensor")
        shared = "moe.shared_expert_intermediate_size"
        given.divided(shape.experts.shared_width, layout.tensor, shared, "parallel.tensor_model")
    if isinstance(shape.attention, Grouped) and layout.tensor % shape.attention.groups:  # transformer_config.py:1339
        given.divided(shape.attention.groups, layout.tensor, "model.num_query_groups", "parallel.tensor_model")
    if shape.delta:
        given.divided(shape.delta.key_heads, layout.tensor, "megatron.extra", "parallel.tensor_model")
    if shape.mamba:
        given.divided(shape.mamba.groups, layout.tensor, "model.hybrid_layer_pattern", "parallel.tensor_model")
    if layout.world is not None:
        dense, experts = layout.tensor * layout.context, layout.expert * layout.expert_tensor
        given.divided(layout.world, dense * layout.pipeline, "parallel.gpus", "tensor x context x pipeline")
        given.divided(layout.world, experts * layout.pipeline, "parallel.gpus", "expert x expert_tensor x pipeline")
