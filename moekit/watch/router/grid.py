"""A run's ranks, layers and batches: what the local numbers in its counts and traces stand for.

Megatron's files number layers and experts within their rank (megatron/training/activation_logging.py:68,
core/transformer/moe/router_trace.py:47), so only the run's own sizes say which layer and which expert is meant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from moekit.launch.rundir import RunDir
from moekit.megatron.flags import arguments
from moekit.problems import error
from moekit.recipe.load import load
from moekit.recipe.patterns import LayerPattern
from moekit.watch.counts import LayerKey
from moekit.watch.layout import RankLayout
from moekit.watch.metrics import attempts
from moekit.watch.rankfile import Tail, parse

_UNEVEN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",
)


class Layer(NamedTuple):
    """Which router of the whole model; `stage` is -1 where `key.layer` counts from the model's first layer."""

    key: LayerKey
    stage: int = -1

    @property
    def name(self) -> str:
        """`layer_3`, `mtp_0_layer_0`; `stage_1_layer_0` where a pipeline stage's first layer is not known."""
        return self.key.name if self.stage < 0 else f"stage_{self.stage}_{self.key.name}"


@dataclass(frozen=True)
class Grid:
    """Sizes of one attempt, from Megatron's arguments (their names)."""

    experts: RankLayout
    """Of the ranks of one pipeline stage."""
    args: Mapping[str, Any]
    pipeline: int = 1
    stage_layers: tuple[int, ...] | None = None
    """Decoder layers of each pipeline stage; None where they are not known."""
    microbatches: int | None = None
    """Of one rank in one step; None where the batch grows or is not known."""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Grid:
        """From Megatron's arguments.

        Raises:
            MoekitError: the run is dense, sizes are missing or do not fit, or the files cannot tell layers apart.
        """
        if not args.get("num_experts"):
            raise error("the run is dense, so it has no router", "give a run whose recipe has `moe.num_experts`")
        if _interleaved(args):
            raise error(
                "the chunks of an interleaved pipeline are merged in these files: they reuse each other's layer"
                " numbers, so no count says which layer it is of",
                "collect them in a short run without virtual stages (handbook A.1)",
            )
        if args.get("use_tp_pp_dp_mapping") and _size(args, "pipeline_model_parallel_size") > 1:
            raise error("ranks numbered by `--use-tp-pp-dp-mapping` are not told apart by pipeline stage")
        pipeline, world = _size(args, "pipeline_model_parallel_size"), _size(args, "world_size")
        if world % pipeline:
            raise error(f"{world} ranks cannot be split into {pipeline} pipeline stages")
        tensor = _size(args, "tensor_model_parallel_size")
        experts = RankLayout(
            world_size=world // pipeline,
            expert_model_parallel=_size(args, "expert_model_parallel_size"),
            expert_tensor_parallel=int(args.get("expert_tensor_parallel_size") or tensor),
            num_experts=int(args["num_experts"]),
        )
        return cls(experts, args, pipeline, _stage_layers(args, pipeline), _microbatches(args))

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage; stages vary slowest (megatron/core/parallel_state.py, "tp-cp-ep-dp-pp")."""
        return self.experts.world_size

    def counting_ranks(self) -> Iterator[tuple[int, int]]:
        """(stage, rank in it) of those whose counts add up to all tokens: one of each expert tensor group."""
        return ((stage, rank) for stage in range(self.pipeline) for rank in self.experts.counting_ranks)

    def tracing_ranks(self) -> Iterator[tuple[int, int]]:
        """(stage, rank in it) of those whose traces have different tokens.

        Without sequence parallelism all ranks of a tensor group route the same tokens: one of them counts.
        """
        copies = 1 if self.args.get("sequence_parallel") else _size(self.args, "tensor_model_parallel_size")
        return ((stage, rank) for stage in range(self.pipeline) for rank in range(0, self.stage_ranks, copies))

    def layer(self, key: LayerKey, stage: int) -> Layer:
        """The layer that a rank of `stage` calls `key`."""
        if self.pipeline == 1 or key.mtp_idx is not None:
            return Layer(key)
        if self.stage_layers is None:
            return Layer(key, stage)
        return Layer(key._replace(layer=sum(self.stage_layers[:stage]) + key.layer))

    @cached_property
    def processed(self) -> tuple[str, ...]:
        """What counts behind the dispatch have gone through, so that they are not what the router asked for."""
        found = []
        if (factor := self.args.get("moe_expert_capacity_factor")) is not None:
            found.append(f"after capacity (factor {factor})")
        if self.args.get("moe_pad_expert_input_to_capacity"):
            found.append("padded to capacity")
        if self.args.get("moe_router_padding_for_quantization") or self.args.get("moe_router_padding_for_fp8"):
            found.append("padded for quantization")
        return tuple(found)

    @property
    def padded_choices(self) -> bool:
        """Whether traces too are of what is left behind capacity: Megatron's router pads its own map, and with exactly
        top-k assignments a token, as at factor 1, its tracer takes that for choices (router_trace.py:353)."""
        return bool(self.args.get("moe_pad_expert_input_to_capacity"))

    @cached_property
    def no_sequences(self) -> str:
        """Why rows of a trace cannot be put to sequences (handbook A.1), empty where row s * B + b is of sequence b."""
        if self.padded_choices:
            return "rows of a routing map that is padded to capacity are not the choices of tokens"
        packs = [name for name in ("sft", "reset_position_ids", "reset_attention_mask") if self.args.get(name)]
        if self.args.get("perform_rl_step") and self.args.get("rl_use_sequence_packing"):
            packs.append("rl_use_sequence_packing")
        if packs:
            return f"sequences are packed (`--{packs[0].replace('_', '-')}`), and the trace has no boundaries"
        if _size(self.args, "context_parallel_size") > 1:
            return "context parallel ranks hold parts of sequences, and the trace has no positions"
        if self.args.get("sequence_parallel") and _size(self.args, "tensor_model_parallel_size") > 1:
            return "sequence parallel ranks hold parts of sequences, and the trace has no positions"
        if not self.args.get("micro_batch_size") or not self.args.get("seq_length"):
            return "`train.micro_batch_size` or `model.seq_length` is not known"
        return ""

    @property
    def sequences(self) -> int:
        """Sequences in a micro batch of one rank."""
        return int(self.args["micro_batch_size"])

    @cached_property
    def moe_layers(self) -> tuple[Layer, ...]:
        """The decoder's layers that have a router, in order; empty where the arguments do not say it.

        Every N-th, or by a pattern (megatron/core/models/gpt/gpt_layer_specs.py, `moe_layer_freq`).
        """
        layers = int(self.args.get("num_layers") or 0)
        if not layers or self.args.get("hybrid_layer_pattern") or (self.pipeline > 1 and not self.stage_layers):
            return ()
        pattern = self.args.get("moe_layer_freq") or 1
        is_moe = list(pattern) if isinstance(pattern, list) else LayerPattern.parse(str(pattern)).is_moe(layers)
        return tuple(Layer(LayerKey("decoder", None, layer)) for layer, moe in enumerate(is_moe) if moe)

    @property
    def hash_layers(self) -> int:
        """So many of the decoder's first MoE layers read a table (handbook 3.2)."""
        return int(self.args.get("moe_num_hash_layers") or 0)


def _size(args: Mapping[str, Any], name: str) -> int:
    return int(args.get(name) or 1)


def _interleaved(args: Mapping[str, Any]) -> bool:
    sizes = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    layers = args.get("num_layers_per_virtual_pipeline_stage")
    return bool(layers) or any(args.get(name) not in (None, 1) for name in sizes)


def _stage_layers(args: Mapping[str, Any], pipeline: int) -> tuple[int, ...] | None:
    layers = int(args.get("num_layers") or 0)
    if not layers or any(args.get(name) for name in _UNEVEN):
        return None
    ends = [args.get("decoder_first_pipeline_num_layers"), args.get("decoder_last_pipeline_num_layers")]
    inner = pipeline - sum(end is not None for end in ends)
    left = layers - sum(int(end) for end in ends if end is not None)
    if left < 0 or (left % inner if inner else left):
        return None
    first, last = ([] if end is None else [int(end)] for end in ends)
    return (*first, *[left // inner if inner else 0] * inner, *last)


def _microbatches(args: Mapping[str, Any]) -> int | None:
    """Of one data parallel rank in one step (megatron/core/num_microbatches_calculator.py)."""
    whole, micro = args.get("global_batch_size"), args.get("micro_batch_size")
    if not whole or not micro or args.get("rampup_batch_size"):
        return None
    model = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = _size(args, "world_size")
    for name in model:
        ranks //= _size(args, name)
    return int(whole) // (int(micro) * ranks) or None if ranks else None


def attempt_args(run: RunDir) -> dict[int, dict[str, Any]]:
    """Megatron's arguments of each attempt: the recipe's, and over them what Megatron said that it had parsed.

    A run that no attempt has told anything of yet is attempt 0.

    Raises:
        MoekitError: the recipe cannot be read.
    """
    recipe = load(str(run.recipe)).recipe
    said: dict[str, Any] = {"world_size": recipe.parallel.gpus}
    words = [word for argument in arguments(recipe) for word in argument.words]
    option = ""
    for word in words:
        if word.startswith("--"):
            option = word[2:].replace("-", "_")
            said[option] = True
        elif said.get(option) is True:
            said[option] = _number(word)
    found = {number: said | config for number in attempts(run.path) if (config := _config(run, number))}
    return found or {0: said}


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _config(run: RunDir, attempt: int) -> dict[str, Any]:
    """What an attempt's `config` lines say, which stand ahead of its first step."""
    config: dict[str, Any] = {}
    for line in Tail(run.attempt(attempt).metrics).lines():
        record = parse(line, "step")
        if record is not None and "event" not in record:
            break
        config |= _event_config(line)
    return config


def _event_config(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    config = record.get("config") if isinstance(record, dict) and record.get("event") == "config" else None
    return config if isinstance(config, dict) else {}
