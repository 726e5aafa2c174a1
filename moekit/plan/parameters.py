"""Exact parameters: of every part of a layer, of the model, and of one GPU. Line numbers are megatron-core 0.19.2's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from moekit.plan.layout import Layout, Stage
from moekit.plan.shape import Delta, Dense, Experts, Grouped, Latent, Mamba, Shape

Split = Literal["whole", "tensor", "expert", "expert_whole"]
"""What shares a weight: nothing; tensor-parallel ranks; expert-parallel ranks, and within them expert-tensor-parallel
ones or not."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Some weights of a module, of all ranks that share them together."""

    module: str
    count: int
    split: Split


def part_weights(shape: Shape, letter: str) -> tuple[Weight, ...]:
    """The weights of one part of a layer, with the norm before it."""
    norm = Weight("norms", shape.hidden * shape.norm_weights, "whole")
    return (norm, *(weight for weight in _inside(shape, letter) if weight.count))


def _inside(shape: Shape, letter: str) -> Iterator[Weight]:
    match letter:
        case "*" | "+":
            of = shape.attention
            return _grouped(shape.hidden, of) if isinstance(of, Grouped) else _latent(shape.hidden, of)
        case "G":
            assert shape.delta
            return _delta(shape, shape.delta)
        case "M":
            assert shape.mamba
            return _mamba(shape.hidden, shape.mamba)
        case "-":
            assert shape.dense
            return _dense(shape.hidden, shape.dense)
        case _:
            assert letter == "E"
            assert shape.experts
            return _experts(shape, shape.experts)


def _grouped(hidden: int, of: Grouped) -> Iterator[Weight]:
    """core/transformer/attention.py `SelfAttention`; the bias behind the output is every rank's (row parallel)."""
    queries = of.heads * of.width
    inner = queries * (2 if of.gate else 1) + 2 * of.groups * of.width
    yield Weight("attention", hidden * inner + queries * hidden + (inner if of.input_bias else 0), "tensor")
    yield Weight("attention", of.heads if of.sinks else 0, "tensor")  # core/transformer/dot_product_attention.py:126
    yield Weight("attention", (hidden if of.output_bias else 0) + 2 * of.width * of.norm_weights, "whole")


def _latent(hidden: int, of: Latent) -> Iterator[Weight]:
    """core/transformer/multi_latent_attention.py `MLASelfAttention`: every rank has the projections down."""
    query = of.heads * (of.width + of.position_width)
    down = hidden * (of.rank + of.position_width) + of.rank * of.norm_weights
    if of.query_rank:
        down += hidden * of.query_rank + of.query_rank * of.norm_weights
    yield Weight("attention", down + (hidden if of.output_bias else 0), "whole")
    up = (of.query_rank or hidden) * query + of.rank * of.heads * (of.width + of.value_width)
    yield Weight("attention", up + of.heads * of.value_width * hidden, "tensor")


def _delta(shape: Shape, of: Delta) -> Iterator[Weight]:
    """core/ssm/gated_delta_net/common.py: projections, convolution, decay and its bias, norm of a value head."""
    keys, values = of.key_heads * of.key_width, of.value_heads * of.value_width
    projections = shape.hidden * (2 * keys + 2 * values + 2 * of.value_heads) + values * shape.hidden
    yield Weight("delta_net", projections + of.kernel * (2 * keys + values) + 2 * of.value_heads, "tensor")
    yield Weight("delta_net", of.value_width * shape.norm_weights, "whole")


def _mamba(hidden: int, of: Mamba) -> Iterator[Weight]:
    """core/ssm/mamba_mixer.py:279-430; all of it, the inner norm too, is divided over tensor-parallel ranks."""
    inner, states = of.heads * of.width, 2 * of.groups * of.state
    projections = hidden * (2 * inner + states + of.heads) + inner * hidden
    yield Weight("mamba", projections + (inner + states) * (of.kernel + 1) + 3 * of.heads + inner, "tensor")


def _dense(hidden: int, of: Dense) -> Iterator[Weight]:
    yield Weight("dense", of.matrices * hidden * of.width + ((of.matrices - 1) * of.width if of.bias else 0), "tensor")
    yield Weight("dense", hidden if of.bias else 0, "whole")


def _experts(shape: Shape, of: Experts) -> Iterator[Weight]:
    """core/transformer/moe/: experts.py, router.py:61, shared_experts.py:134, moe_layer.py:264."""
    hidden, outer = shape.hidden, of.latent or shape.hidden
    inner_bias = (of.matrices - 1) * of.width if of.bias else 0
    yield Weight("experts", of.number * (of.matrices * outer * of.width + inner_bias), "expert")
    yield Weight("experts", of.number * outer if of.bias else 0, "expert_whole")
    yield Weight("router", of.number * (hidden + (1 if of.bias else 0)), "whole")
    yield Weight("shared_expert", of.matrices * hidden * of.shared_width, "tensor")
    yield Weight("shared_expert", hidden if of.shared_gate else 0, "whole")
    yield Weight("norms", hidden * shape.norm_weights if of.norm_behind else 0, "whole")
    if of.latent:
        bias = of.latent + hidden if of.bias else 0
        norm = of.latent * shape.norm_weights if of.latent_norm else 0
        yield Weight("latent", 2 * hidden * of.latent + bias + norm, "whole")


def layer_weights(shape: Shape, layer: str) -> list[Weight]:
    """The weights of one layer, given by its parts."""
    return [weight for letter in layer for weight in part_weights(shape, letter)]


def depth_weights(shape: Shape) -> list[Weight]:
    """The weights of one prediction depth: a layer, the projection of state and token, three norms more
    (core/transformer/multi_token_prediction.py:983)."""
    hidden = shape.hidden
    return [
        Weight("prediction", 2 * hidden * hidden, "tensor"),
        Weight("norms", 3 * hidden * shape.norm_weights, "whole"),
        *layer_weights(shape, shape.depth),
    ]


def embedding_weights(shape: Shape) -> list[Weight]:
    """The embedding of tokens and, where they are learned, of positions."""
    positions = [Weight("embedding", shape.positions * shape.hidden, "whole")] if shape.positions else []
    return [Weight("embedding", shape.rows * shape.hidden, "tensor"), *positions]


def output_weight(shape: Shape) -> Weight:
    """The output layer, where it has weights of its own."""
    return Weight("output", shape.rows * shape.hidden, "tensor")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of the whole model, prediction depths apart."""

    total: int
    experts: int
    """Of routed experts."""
    active: int
    """Those a token meets: all but the experts that it is not sent to."""
    active_without_input: int
    """The same less the input embedding; a tied one is the output layer as well and counts."""
    active_without_embeddings: int
    """The same less embedding and output layer."""
    prediction: int
    """What the prediction depths add."""
    router_biases: int
    """The router's biases: buffers here and no parameters, elements of released checkpoints."""
    prediction_router_biases: int
    by_module: dict[str, int]


def parameters(shape: Shape) -> Parameters:
    """Count a model."""
    weights = [weight for layer, times in Counter(shape.layers).items() for weight in _times(shape, layer, times)]
    weights += embedding_weights(shape)
    weights.append(Weight("norms", shape.hidden * shape.norm_weights, "whole"))
    if not shape.tied:
        weights.append(output_weight(shape))
    by_module = Counter[str]()
    for weight in weights:
        by_module[weight.module] += weight.count
    total, experts, of = sum(by_module.values()), by_module["experts"], shape.experts
    active = total - experts + (experts * of.topk // of.number if of else 0)
    words, positions = shape.rows * shape.hidden, shape.positions * shape.hidden
    biases = of.number if of and of.router_bias else 0
    return Parameters(
        total=total,
        experts=experts,
        active=active,
        active_without_input=active - positions - (0 if shape.tied else words),
        active_without_embeddings=active - positions - words * (1 if shape.tied else 2),
        prediction=shape.depth_copies * sum(weight.count for weight in depth_weights(shape)) if shape.depths else 0,
        router_biases=biases * shape.part_count("E"),
        prediction_router_biases=biases * shape.depth_copies * shape.depth.count("E") if shape.depths else 0,
        by_module={module: count for module, count in by_module.items() if count},
    )


def _times(shape: Shape, layer: str, times: int) -> list[Weight]:
    return [Weight(weight.module, weight.count * times, weight.split) for weight in layer_weights(shape, layer)]


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters that one GPU holds."""

    pipeline_rank: int
    dense: int
    """Of all but routed experts: what data-parallel (and context-parallel) ranks have alike."""
    experts: int
    """Of routed experts: what expert-data-parallel ranks have alike."""
    by_module: dict[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def held(shape: Shape, layout: Layout, pipeline_rank: int) -> Held:
    """What a GPU of that pipeline rank holds; all ranks of a stage hold as much."""
    by_module, experts = Counter[str](), 0
    for stage in layout.stages[pipeline_rank]:
        for weight in stage_weights(shape, stage):
            share = Fraction(weight.count, divisor(layout, weight.split))
            assert share.denominator == 1, (weight, layout)
            by_module[weight.module] += int(share)
            experts += int(share) if weight.split in ("expert", "expert_whole") else 0
    total = sum(by_module.values())
    return Held(pipeline_rank, total - experts, experts, dict(by_module))


def divisor(layout: Layout, split: Split) -> int:
    """How many ranks share a weight."""
    return {
        "whole": 1,
        "tensor": layout.tensor,
        "expert": layout.expert * layout.expert_tensor,
        "expert_whole": layout.expert,
    }[split]


def stage_weights(shape: Shape, stage: Stage) -> list[Weight]:
    """The weights of one virtual stage (core/models/gpt/gpt_model.py:167, :269).

    Prediction depths need the embedding, so their stage has a copy; an output layer that shares the embedding's weights
    has a copy of its own where the first stage is another.
    """
    weights = [weight for layer, times in Counter(stage.layers).items() for weight in _times(shape, layer, times)]
    if stage.embedding or stage.depths:
        weights += embedding_weights(shape)
    if stage.final_norm:
        weights.append(Weight("norms", shape.hidden * shape.norm_weights, "whole"))
    if stage.output and not (shape.tied and stage.embedding):
        weights.append(output_weight(shape))
    if stage.depths:
        weights += depth_weights(shape) * shape.depth_copies
    return weights
