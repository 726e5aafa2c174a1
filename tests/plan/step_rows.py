"""Published steps as what the planner reads: `measured_steps.csv`, each row through a recipe as everybody's.

`measured_steps.csv` has the published rows of Megatron pretraining that print layout, batch and precision. `row` is the
place in the collected table, `said` who says dispatcher, recomputation, overlap and graphs: the `row` itself, today's
Megatron-Bridge `recipe` of that layout (067f987, not the release that was measured), or nobody (`assumed`). `stated`:
the row, or a note of its source, gives recomputation and dispatcher. A step that only TFLOP/s are printed of is made of
them with Megatron's causal count.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import memory_rows
import plan_recipes
import yaml

from moekit.plan.candidates import Candidates, of_run
from moekit.plan.flops import per_token
from moekit.plan.given import Given
from moekit.plan.layout import layout_of
from moekit.plan.resolve import resolve_given
from moekit.plan.run import Facts, facts_of
from moekit.plan.shape import Shape
from moekit.plan.time.hardware import Hardware, hardware, with_constants
from moekit.plan.time.step import StepTime, step_time

_FOLDER = Path(__file__).parent
GPUS_PER_NODE = {"gb200": 4, "gb300": 4}
"""Eight in all others."""


@dataclass(frozen=True)
class Row:
    """One published step and what the planner makes of its recipe."""

    text: dict[str, str]
    shape: Shape
    facts: Facts
    candidates: Candidates
    measured_s: float

    @property
    def is_stated(self) -> bool:
        """Whether the source gives recomputation and dispatcher."""
        return self.text["stated"] == "yes"

    @property
    def layout(self) -> tuple[str, ...]:
        """What makes rows of several releases the same configuration."""
        return tuple(self.text[name] for name in list(self.text)[1:23])

    def on(self, **constants: float) -> Hardware:
        """Its cluster, with some constants changed."""
        return with_constants(hardware(self.text["gpu"], "ib", GPUS_PER_NODE.get(self.text["gpu"], 8)), **constants)

    def predicted(self, **constants: float) -> StepTime:
        """The planner's time, balanced."""
        return step_time(self.shape, self.facts, self.candidates, self.on(**constants))


def ci_errors(folder: Path) -> dict[str, float]:
    """How far off the tiny models of Megatron's own CI are (`ci_steps.csv`), which no fit has seen.

    Medians of its golden iteration times on one or two nodes: there the host is what a step waits for. Their options
    are those of `memory_rows.csv`.
    """
    with (_FOLDER / "ci_steps.csv").open() as file:
        measured = {line["name"]: float(line["median_iteration_s"]) for line in csv.DictReader(file)}
    found = {}
    for row in memory_rows.rows():
        if row.name in measured:
            given = Given.of(memory_rows.recipe_of(folder, row))
            shape = resolve_given(given, row.vocabulary)
            candidates = of_run(given, shape, layout_of(given, shape))
            on = hardware("h100", "ib", 8) if "h100" in row.name.split()[-1] else hardware("gb200", "ib", 4)
            predicted = step_time(shape, facts_of(given), candidates, on).seconds[0]
            found[row.name] = float(predicted) / measured[row.name] - 1
    return found


def families() -> dict[str, dict[str, list[str]]]:
    """`held_out_families.yaml`: families by `held_out` and `fitted`."""
    read: dict[str, dict[str, list[str]]] = yaml.safe_load((_FOLDER / "held_out_families.yaml").read_text())
    return read


def family_of(model: str) -> tuple[str, str]:
    """(`held_out` or `fitted`, family)."""
    return next((side, name) for side, found in families().items() for name, models in found.items() if model in models)


@cache
def texts() -> tuple[dict[str, str], ...]:
    """The rows as they are written."""
    with (_FOLDER / "measured_steps.csv").open() as file:
        return tuple(csv.DictReader(file))


def rows(folder: Path) -> list[Row]:
    """All of them, their recipes written into `folder`."""
    return [row_of(folder, text) for text in texts()]


def row_of(folder: Path, text: dict[str, str], **changes: dict[str, Any]) -> Row:
    """One row's; `changes` are further sections of its recipe."""
    fields = recipe(text)
    for section, values in changes.items():
        fields[section] = {**fields.get(section, {}), **values}
    given = Given.of(plan_recipes.written(folder, fields, f"row{text['row']}"))
    shape = resolve_given(given)
    facts = facts_of(given)
    candidates = of_run(given, shape, layout_of(given, shape))
    if text["step_s"]:
        measured = float(text["step_s"])
    else:
        tokens = int(text["gbs"]) * int(text["seq"]) / int(text["gpus"])
        measured = tokens * per_token(shape, facts.seq_length) / float(text["tflops"]) / 1e12
    return Row(text, shape, facts, candidates, measured)


_TRUNCATED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "Llama-3-70B truncated to 12 layers": ("Llama-3-70B", {"num_layers": 12}, None),
    "Llama-3.1-405B truncated to 4 layers": ("Llama-3.1-405B", {"num_layers": 4}, None),
    "DeepSeek-V3 truncated to 4 layers": ("DeepSeek-V3", {"num_layers": 4, "mtp_num_layers": None}, "([0]*1+[1]*3)"),
}
"""One dense layer of DeepSeek-V3's four is assumed: the row's memory allows no other number."""
_DEFAULTS = {
    "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "make_vocab_size_divisible_by": 1,
}  # fmt: skip
_OTHERS: dict[str, dict[str, Any]] = {
    "Moonlight-16B-A3B": {
        "vocabulary": 163840,
        "model": {
            **_DEFAULTS, "num_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 11264,
            "multi_latent_attention": True, "kv_lora_rank": 512, "qk_layernorm": True,
        },
        "moe": {
            "num_experts": 64, "ffn_hidden_size": 1408, "shared_expert_intermediate_size": 2816,
            "layer_freq": "([0]*1+[1]*26)",
        },
        "router": {"topk": 6},
    },
    "Qwen3-235B-A22B": {
        "vocabulary": 151936,
        "model": {
            **_DEFAULTS, "num_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
            "group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "qk_layernorm": True,
        },
        "moe": {"num_experts": 128, "ffn_hidden_size": 1536},
        "router": {"topk": 8},
    },
}  # fmt: skip
"""Models whose elements no checkpoint was counted for; sizes as in `recipes/models/shapes`."""


def _model(name: str) -> dict[str, Any]:
    if name in _OTHERS:
        return _OTHERS[name]
    shown, changes, frequency = _TRUNCATED.get(name, (name, {}, None))
    row = dict(plan_recipes.public_models()[shown])
    row["model"] = {**row["model"], **changes}
    if frequency:
        row["moe"] = {**row["moe"], "layer_freq": frequency}
    if name == "DeepSeek-V3":
        row["router"] = {**row["router"], "num_groups": 8, "group_topk": 4, "score_function": "sigmoid"}
    return row


def recipe(text: dict[str, str]) -> dict[str, Any]:
    """A row's recipe, by section."""
    model = _model(text["model"])
    number = {name: int(text[name] or 1) for name in ("tp", "pp", "vpp", "ep", "etp", "cp")}
    fields: dict[str, Any] = {name: dict(model.get(name, {})) for name in ("model", "moe", "router")}
    fields["megatron"] = {"extra": [str(word) for word in model.get("megatron", {}).get("extra", [])]}
    fields["model"] |= {"seq_length": int(text["seq"])}
    fields["data"] = {"tokenizer_type": "NullTokenizer", "vocab_size": model["vocabulary"]}
    fields["parallel"] = {
        "gpus": int(text["gpus"]),
        "tensor_model": number["tp"],
        "sequence": number["tp"] > 1,
        "pipeline_model": number["pp"],
        "context": number["cp"],
        "expert_model": number["ep"],
        "expert_tensor": number["etp"],
        "use_distributed_optimizer": True,
        **_stages(model, number["pp"], number["vpp"]),
    }
    fields["train"] = {"micro_batch_size": int(text["mbs"]), "global_batch_size": int(text["gbs"])}
    fields["precision"] = {"bf16": True, "grad_reduce_in_bf16": True}
    fields["overlap"] = {"grad_reduce": True, "param_gather": True}
    fields["memory"] = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    if text["model"].startswith("gpt-oss"):
        fields["model"] |= {"activation_func_clamp_value": 7.0, "window_size": "127,0", "window_attn_skip_freq": 2}
    _format(fields, text["precision"])
    _moe(fields, text)
    if text["recompute"]:
        fields["memory"] |= {"recompute_granularity": "selective", "recompute_modules": text["recompute"].split()}
    if text["lean_moments"]:
        fields["optimizer"] = {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        }
    if text["sharding"] == "fsdp":
        fields["megatron"]["extra"] += [
            "--use-megatron-fsdp",
            "--data-parallel-sharding-strategy",
            "optim_grads_params",
        ]
    if not text["ep"] and number["tp"] > 1:
        fields["overlap"] |= {"tp_comm_overlap": True}
    return {name: values for name, values in fields.items() if values and values != {"extra": []}}


def _format(fields: dict[str, Any], precision: str) -> None:
    if precision == "nvfp4":
        fields["megatron"]["extra"] += ["--fp4-format", "e2m1"]
    elif precision != "bf16":
        blackwell = precision == "mxfp8"
        fields["precision"] |= {"fp8_format": "e4m3" if blackwell else "hybrid", "fp8_recipe": precision}
        if blackwell:
            fields["precision"] |= {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}


def _moe(fields: dict[str, Any], text: dict[str, str]) -> None:
    if text["dispatcher"]:
        flex = text["dispatcher"] != "alltoall"
        fields["moe"] |= {"dispatcher": "flex" if flex else "alltoall", "grouped_gemm": True}
        fields["moe"] |= {"flex_dispatcher_backend": text["dispatcher"]} if flex else {}
        fields["moe"] |= {"permute_fusion": True} if text["permute_fusion"] == "yes" else {}
        fields["overlap"] |= {"moe_expert_parallel_comm": True} if text["overlap"] else {}
        fields["router"] |= {"dtype": "fp32"}
    if text["capacity"]:
        fields["moe"] |= {"expert_capacity_factor": float(text["capacity"]), "pad_expert_input_to_capacity": True}
    if text["graphs"] == "full_iteration":
        fields["model"] |= {"cuda_graph_impl": "full_iteration"}
    elif text["graphs"]:
        fields["model"] |= {"cuda_graph_impl": "transformer_engine"}
        fields["megatron"]["extra"] += ["--cuda-graph-modules", *text["graphs"].split()]
    if text["op_fuser"]:
        fields["megatron"]["extra"] += ["--use-transformer-engine-op-fuser"]


def _stages(model: dict[str, Any], pipeline: int, virtual: int) -> dict[str, Any]:
    """How its layers are cut: evenly, with embedding and loss as layers, or as Megatron-Bridge cuts DeepSeek-V3."""
    if pipeline == 1:
        return {}
    layers, depths, pieces = (
        model["model"].get("num_layers", 0),
        model["model"].get("mtp_num_layers"),
        pipeline * virtual,
    )
    if depths or layers == 61:
        middle = ceil((layers + 2) / pieces)
        last = max(0, layers - middle * (pieces - 1))
        first = layers - middle * (pieces - 2) - last
        text = f"Et*{first}|(" + "t" * middle + f"|)*{pieces - 2}" + "t" * last + "m" * (depths or 0) + "L"
        return {"pipeline_model_layout": text}
    cut = {"num_virtual_stages_per_pipeline_rank": virtual} if virtual > 1 else {}
    if layers % pieces:
        cut |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    return cut
