"""A recipe made small: sizes shrink to the smallest that are legal, the structure stays.

For two places: rank 0 of the recipe's own world on the fake process group (`moekit.megatron.step`), and two real
processes on a CPU. What a CPU cannot do is taken out and told (`moekit.rehearse.without`). The learning rate of every
step is the recipe's: `schedule.decay_iters` says how long it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moekit.megatron.cpu_limits import Limit
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.moe import Balance, Moe, Router
from moekit.recipe.sizes import expert_tensor_ranks, sizes
from moekit.rehearse.edit import Change, changed, differences, value
from moekit.rehearse.instead import UPCYCLING
from moekit.rehearse.layers import cut
from moekit.rehearse.stages import in_place
from moekit.rehearse.without import Rest, options_left, unset_dependents, without_limits

ITERATIONS = 3
"""Steps of one start; the run's end comes after twice as many, so that a start from its checkpoint reaches it."""
HEADS, HEAD, GROUPS = 4, 16, 2
SEQUENCE, MICRO_BATCH, VOCABULARY = 64, 2, 512
WIDTH = 8
"""All widths are multiples of this."""


@dataclass(frozen=True)
class Small:
    """A recipe made small."""

    recipe: Recipe
    changes: tuple[Change, ...]
    """Against the user's recipe."""
    not_judged: tuple[Limit, ...]
    """What a CPU cannot do: taken out, or where `build` is `replaced`, done in another way."""


def for_the_world(recipe: Recipe) -> Small:
    """For rank 0 of the recipe's full world on the fake process group: the parallel layout stays."""
    rest = without_limits(recipe, on_cpu=False)
    if recipe.moe.use_upcycling:
        rest.limits.append(UPCYCLING)
        _change(rest, {"moe.use_upcycling": None}, f"{UPCYCLING.feature}: {UPCYCLING.reason}")
    _resize(rest, recipe, in_place(rest.recipe))
    return _small(recipe, rest)


def for_two(recipe: Recipe) -> Small:
    """For two real processes on a CPU.

    What stays of the layout is its most telling part: expert parallel, else pipeline parallel, else tensor parallel,
    else data parallel, of two ranks.
    """
    rest = without_limits(recipe, on_cpu=True)
    layout = _layout_for_two(rest.recipe)
    rest.why |= dict.fromkeys(layout, "two processes on a CPU")
    rest.recipe = changed(rest.recipe, layout)
    parallel = rest.recipe.parallel
    chunks = 2 if parallel.num_virtual_stages_per_pipeline_rank or parallel.num_layers_per_virtual_pipeline_stage else 1
    _resize(rest, recipe, cut(rest.recipe, parallel.pipeline_model or 1, chunks))
    _change(rest, _on_this_machine(rest.recipe), "two processes on a CPU")
    return _small(recipe, rest)


def parent(recipe: Recipe) -> Small | None:
    """The run for two processes whose checkpoint `for_two(recipe)` begins from; None where it begins from none.

    Where it upcycles: a dense one, as wide as all slices of its layers together.
    """
    if not recipe.checkpoint.from_run:
        return None
    small = for_two(recipe)
    changes = dict.fromkeys(("from_run", "finetune", "no_load_optim", "no_load_rng", "exit_on_missing"))
    child = changed(small.recipe, {f"checkpoint.{name}": None for name in changes})
    rest = Rest(changed(child, {"checkpoint.save": True, "checkpoint.save_interval": ITERATIONS}))
    if recipe.moe.use_upcycling and child.model.ffn_hidden_size:
        width = child.model.ffn_hidden_size * (child.moe.upcycling_granularity or 1)
        dense = Recipe(**{**vars(rest.recipe), "moe": Moe(), "router": Router(), "balance": Balance()})
        rest.recipe = changed(
            dense, {"model.ffn_hidden_size": width, "parallel.expert_model": None, "parallel.expert_tensor": None}
        )
    unset_dependents(rest, child)
    why = {change.field: change.why for change in small.changes} | rest.why
    return Small(rest.recipe, differences(recipe, rest.recipe, why), small.not_judged)


def _small(recipe: Recipe, rest: Rest) -> Small:
    unset_dependents(rest, recipe)
    return Small(rest.recipe, differences(recipe, rest.recipe, rest.why), tuple(rest.limits))


def _change(rest: Rest, changes: Mapping[str, Any], why: str = "") -> None:
    rest.why |= {name: why for name, to in changes.items() if value(rest.recipe, name) != to}
    rest.recipe = changed(rest.recipe, changes)


def _resize(rest: Rest, whole: Recipe, of_layers: Mapping[str, Any]) -> None:
    """All that is a size, or keeps the run short; `rest` has its layout, `whole` is the user's recipe."""
    _change(rest, of_layers)
    _change(rest, _widths(rest.recipe))
    _change(rest, _batch(whole, rest.recipe))
    _change(rest, _lengths(whole, rest.recipe))
    _change(rest, _intervals(rest.recipe))
    _change(rest, _mock(), "neither data nor tokenizer need be here")
    _change(rest, {"megatron.extra": options_left(rest.recipe, _SIZES_IN_EXTRA)}, "sizes and files of the run")


def _widths(recipe: Recipe) -> dict[str, Any]:
    """Widths divided by one number, so that their ratios stay; heads as few as the tensor-parallel ranks allow."""
    model, tensor = recipe.model, recipe.parallel.tensor_model or 1
    heads, groups = _heads(recipe)
    hidden = heads * HEAD
    changes: dict[str, Any] = {"model.num_attention_heads": heads, "model.hidden_size": hidden}
    if model.num_query_groups:
        changes["model.num_query_groups"] = groups
    step = WIDTH * tensor * expert_tensor_ranks(recipe)

    def scaled(width: int, step: int) -> int:
        return max(1, round(width * hidden / ((model.hidden_size or hidden) * step))) * step

    for field in ("model.ffn_hidden_size", "moe.ffn_hidden_size", "moe.shared_expert_intermediate_size"):
        if width := value(recipe, field):
            changes[field] = scaled(width, step)
    if model.kv_channels:
        changes["model.kv_channels"] = max(
            WIDTH, scaled(model.kv_channels * (model.num_attention_heads or 1), WIDTH) // heads
        )
    changes |= {field: SEQUENCE for field in _LENGTHS if value(recipe, field)}
    if model.window_size:
        changes["model.window_size"] = re.sub(
            r"\d+", lambda found: str(min(int(found[0]), SEQUENCE // 4 - 1)), model.window_size
        )
    return changes


_LENGTHS = ("model.seq_length", "model.max_position_embeddings")


def _heads(recipe: Recipe) -> tuple[int, int]:
    """Query heads and the groups of them that share keys: as many, or fewer, or one, as in the recipe."""
    model, tensor = recipe.model, recipe.parallel.tensor_model or 1
    least = -(-HEADS // tensor) * tensor
    if not model.num_query_groups or model.num_query_groups == model.num_attention_heads:
        return least, least
    if model.num_query_groups == 1:
        return least, 1
    groups = -(-GROUPS // tensor) * tensor
    return max(least, 2 * groups), groups


def _batch(whole: Recipe, recipe: Recipe) -> dict[str, Any]:
    """A micro batch for every pipeline stage, or two of them where the recipe accumulates."""
    then, now = sizes(whole), sizes(recipe)
    if then is None or now is None or not then.data or not now.data:
        return {}
    count = max(1, min(then.accumulation_steps, max(2, now.pipeline)))
    micro = min(now.micro_batch_seqs, MICRO_BATCH)
    return {"train.micro_batch_size": micro, "train.global_batch_size": micro * count * now.data}


def _lengths(whole: Recipe, recipe: Recipe) -> dict[str, Any]:
    """A few steps of the recipe's own schedule: its length is said by itself, since the run's is cut."""
    changes: dict[str, Any] = {"train.exit_interval": ITERATIONS}
    train, batch = recipe.train, recipe.train.global_batch_size
    if train.iters:
        changes["train.iters"] = 2 * ITERATIONS
        changes["schedule.decay_iters"] = recipe.schedule.decay_iters or train.iters
    elif train.samples and batch and whole.train.global_batch_size:
        changes["train.samples"] = 2 * ITERATIONS * batch
        decay = recipe.schedule.decay_samples or train.samples
        said = {"decay_samples": decay, **{name: getattr(recipe.schedule, name) for name in _SAMPLES}}
        for name, samples in said.items():
            if samples:
                changes[f"schedule.{name}"] = max(1, samples * batch // whole.train.global_batch_size)
    if train.eval_iters != 0:
        changes["train.eval_iters"] = 1
    if recipe.memory.recompute_num_layers:
        changes["memory.recompute_num_layers"] = 1
    return changes


_SAMPLES = ("warmup_samples", "wsd_decay_samples")


def _intervals(recipe: Recipe) -> dict[str, Any]:
    """What happens every so many steps, often enough to happen."""
    found = {field: most for field, most in _AT_MOST.items() if (value(recipe, field) or 0) > most}
    return {**found, **{field: to for field, to in _PROFILED.items() if value(recipe, field) is not None}}


_AT_MOST = {
    "train.eval_interval": 2,
    "train.manual_gc_interval": 2,
    "checkpoint.save_interval": 2,
    "checkpoint.save_retain_interval": 2,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 2,
    "log.interval": 1,
    "log.tensorboard_interval": 1,
    "log.memory_interval": 1,
    "monitor.tokens_per_expert_interval": 1,
    "monitor.activations_interval": 2,
    "monitor.params_interval": 2,
    "monitor.wgrads_interval": 2,
    "monitor.dgrads_interval": 2,
    "monitor.diagnose_interval": 2,
    "monitor.routing_trace_max_training_iters": 2,
    "monitor.routing_trace_last_iters": 2,
}
_PROFILED = {"profile.step_start": 1, "profile.step_end": 2}


def _mock() -> dict[str, Any]:
    """Made-up tokens."""
    return {
        **dict.fromkeys(("data.name", "data.shards", "data.per_split", "data.tokenizer", "moe.hash_table")),
        "data.mock_data": True,
        "data.tokenizer_type": "NullTokenizer",
        "data.vocab_size": VOCABULARY,
        "data.null_tokenizer_eod_id": VOCABULARY - 1,
        "data.num_workers": 0,
    }


_SIZES_IN_EXTRA = (
    *("--padded-vocab-size", "--step-batch-size-schedule", "--full-validation", "--multiple-validation-sets"),
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--per-split-data-args-path", "--vocab-file"),
    *("--merge-file", "--tokenizer-", "--tiktoken-", "--vocab-extra-ids"),
)
"""How options begin that tell of sizes and files."""


def _layout_for_two(recipe: Recipe) -> dict[str, Any]:
    parallel, experts = recipe.parallel, recipe.moe.num_experts
    ranks = {"expert_model": 1, "pipeline_model": 1, "tensor_model": 1, "expert_tensor": 1}
    if experts and experts % 2 == 0 and (parallel.expert_model or 1) > 1:
        ranks["expert_model"] = 2
    elif (parallel.pipeline_model or 1) > 1:
        ranks["pipeline_model"] = 2
    elif (parallel.tensor_model or 1) > 1:
        ranks["tensor_model"] = 2
    changes: dict[str, Any] = {"parallel.gpus": 2}
    changes |= {f"parallel.{name}": to for name, to in ranks.items() if getattr(parallel, name) is not None}
    changes |= {f"parallel.{name}": None for name in _UNEVEN}
    if ranks["pipeline_model"] == 1:
        changes |= {f"parallel.{name}": None for name in _STAGES}
    elif parallel.num_layers_per_virtual_pipeline_stage:
        changes["parallel.num_layers_per_virtual_pipeline_stage"] = 1
    elif parallel.num_virtual_stages_per_pipeline_rank:
        changes["parallel.num_virtual_stages_per_pipeline_rank"] = 2
    if recipe.profile.ranks:
        changes["profile.ranks"] = tuple(sorted({min(rank, 1) for rank in recipe.profile.ranks}))
    return {name: to for name, to in changes.items() if value(recipe, name) != to}


_STAGES = (*("pipeline_model_layout", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),)
_UNEVEN = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_distributed_optimizer_instances", "use_tp_pp_dp_mapping"),
)
"""How the recipe's many ranks are shared out unevenly."""


def _on_this_machine(recipe: Recipe) -> dict[str, Any]:
    environment = recipe.runtime.environment
    kept = {name: to for name, to in (environment or {}).items() if not name.startswith(_OF_GPUS)}
    if (recipe.parallel.tensor_model or 1) > 1:
        kept["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it on a CPU too (training/arguments.py:1415)
    return {
        "parallel.distributed_backend": "gloo",
        "runtime.environment": kept or None,
        "runtime.secrets": None,
    }


_OF_GPUS = (
    "CUBLAS_",
    "NCCL_",
    "NVTE_",
    "NUM_OF_HYBRID_EP",
    "NVSHMEM_",
    "FI_",
    "UCX_",
    "PYTORCH_CUDA",
    "TORCH_NCCL",
)
"""How variables begin that say something to GPUs and their network."""
