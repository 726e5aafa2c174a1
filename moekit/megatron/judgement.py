"""What the real Megatron says, in a recipe's terms: each refusal at the field and line that it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from moekit.megatron.flags import arguments
from moekit.megatron.installed import Judge
from moekit.megatron.table import check, load, shipped
from moekit.megatron.verdict import Verdict
from moekit.problems import Problem
from moekit.recipe.load import Loaded, fields_by_option
from moekit.recipe.nodes import Scalar
from moekit.recipe.nodes import Sequence as Items

CALLED = {
    # TransformerConfig, where it differs from the argument it comes from (training/argument_utils.py:277).
    "num_moe_experts": ("num_experts",),
    "num_layers_in_first_pipeline_stage": ("decoder_first_pipeline_num_layers",),
    "num_layers_in_last_pipeline_stage": ("decoder_last_pipeline_num_layers",),
    "virtual_pipeline_model_parallel_size": (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    ),
    "persist_layer_norm": ("no_persist_layer_norm",),
    "batch_p2p_comm": ("overlap_p2p_comm",),
    "params_dtype": ("bf16", "fp16"),
    "pipeline_dtype": ("bf16", "fp16"),
    "fp8_param": ("fp8_param_gather",),
    "fp4_param": ("fp4_param_gather",),
    "gated_linear_unit": ("swiglu", "quick_geglu"),
    "activation_func": ("swiglu", "squared_relu", "quick_geglu"),
    "bias_activation_fusion": ("bias_swiglu_fusion", "bias_gelu_fusion"),
    "is_hybrid_model": ("hybrid_layer_pattern",),
    "cpu_offloading": ("cpu_offloading_num_layers",),
    "rope_scaling": ("use_rope_scaling",),
    "share_embeddings_and_output_weights": ("untie_embeddings_and_output_weights",),
    "cuda_graph_scope": ("cuda_graph_modules",),
    "inference_sampling_seed": ("seed",),
    "seq_len_interpolation_factor": ("rotary_seq_len_interpolation_factor",),
    "quant_recipe": ("te_precision_config_file",),
    "transformer_layer_spec": ("spec",),
    "hybrid_stack_spec": ("spec",),
    # Of the other configurations (training/training.py:1914, training/argument_utils.py:131).
    "lr_decay_steps": ("lr_decay_iters", "lr_decay_samples"),
    "wsd_decay_steps": ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    "lr_warmup_steps": ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    "max_lr": ("lr",),
    "grad_reduce_in_fp32": ("accumulate_allreduce_grads_in_fp32",),
    "check_for_nan_in_grad": ("check_for_nan_in_loss_and_grad",),
    "save_optim": ("no_save_optim",),
    "save_rng": ("no_save_rng",),
    "load_optim": ("no_load_optim",),
    "load_rng": ("no_load_rng",),
    "fully_parallel_save": ("ckpt_fully_parallel_save",),
    "fully_parallel_load": ("ckpt_fully_parallel_load",),
    "use_nsys_profiler": ("profile",),
    "check_for_nan_in_loss": ("check_for_nan_in_loss_and_grad",),
    # Of functions and layers.
    "moe_layer_pattern": ("moe_layer_freq",),
    "topk": ("moe_router_topk",),
    "num_groups": ("moe_router_num_groups",),
    "group_topk": ("moe_router_group_topk",),
    "expert_tensor_model_pipeline_parallel": (
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
    ),
    "tensor_model_parallel": ("tensor_model_parallel_size",),
    "tensor_model_parallelism": ("tensor_model_parallel_size",),
    "tensor_parallel": ("tensor_model_parallel_size",),
    "pipeline_parallel": ("pipeline_model_parallel_size",),
    "expert_parallel": ("expert_model_parallel_size",),
    "context_parallel": ("context_parallel_size",),
    "context_parallelism": ("context_parallel_size",),
}
"""What Megatron calls an argument elsewhere than in its parser; the tests hold it against the real configurations."""

_NO_OPTION = {"world_size": "parallel.gpus", "data_parallel_size": "parallel.gpus"}
"""What no option says."""


def problem_of(verdict: Verdict, loaded: Loaded, judge: Judge) -> Problem:
    """A refusal at the line of the field it is about, else at the recipe's file; other fields are named in the hint."""
    names = fields_of(verdict, loaded)
    hints = [_said_by(verdict, judge)]
    hints += [loaded.source.origin(name) or f"`{name}` is unset" for name in names[1:4]]
    if names and _distance(names[0], loaded) == _UNSET:
        hints.insert(1, f"`{names[0]}` is unset")
    if not judge.is_version(loaded.recipe.megatron.version):
        hints.append(f"the recipe is for Megatron {loaded.recipe.megatron.version}")
    words, bare = in_one_line(verdict.message), verdict.message.startswith("assert ")
    refuses = "stops in the rehearsal" if verdict.stage == "train" else f"refuses at {shown_stage(verdict.stage)}"
    what = f"Megatron {refuses}" + (f", without a message: `{words}`" if bare else f": {words}")
    return Problem(_where(names, verdict, loaded), what, "; ".join(hints))


def fields_of(verdict: Verdict, loaded: Loaded) -> list[str]:
    """The fields that a refusal is about, those first that a reader would look at first.

    They are named in Megatron's message, or in the statement that refuses and the conditions around it. First come
    what the recipe's own file sets, then what it inherits, then what is not set; of these only those in the message.
    """
    known = _fields_by_name(loaded)
    said = _mentioned(verdict.message, known)
    condition = [name for name in verdict.names for name in CALLED.get(name, (name,)) if name in known]
    variables = [
        name for name, value in (loaded.recipe.runtime.environment or {}).items() if _is_about(verdict, name, value)
    ]
    fields = [f"runtime.environment.{name}" for name in variables]
    fields += dict.fromkeys(known[name] for name in (*said, *condition))
    fields = fields or list(_with_value_in(verdict.message, loaded))
    in_message = {known[name] for name in said}
    kept = [name for name in fields if name in in_message or _distance(name, loaded) < _UNSET] or fields
    return sorted(kept, key=lambda name: _distance(name, loaded))


def _is_about(verdict: Verdict, variable: str, value: str | None) -> bool:
    """Whether a message names an environment variable, or has its value, where that is a word of some length."""
    return variable in verdict.message or (len(value or "") > 3 and f" {value}" in f" {verdict.message}")


def _with_value_in(message: str, loaded: Loaded) -> Iterator[str]:
    """The fields of which a message quotes a value: `KeyError: 'wash'` is the parser's word for an unknown choice."""
    for argument in arguments(loaded.recipe):
        if any(f"'{word}'" in message for word in argument.words[1:]):
            yield argument.field


_UNSET = 2


def _distance(name: str, loaded: Loaded) -> int:
    """0: the recipe's own file sets or unsets it; 1: it is inherited; 2: it is not set."""
    node = loaded.source.find(name)
    if node is not None and node.place.file == loaded.source.shown:
        return 0
    return 1 if _is_set(name, loaded) else _UNSET


def _is_set(name: str, loaded: Loaded) -> bool:
    node = loaded.source.find(name)
    return node is not None and not (isinstance(node, Scalar) and node.is_null)


def _fields_by_name(loaded: Loaded) -> dict[str, str]:
    """For each argument of Megatron's, by its attribute in `args`, the field that says it in this recipe."""
    version = loaded.recipe.megatron.version
    known = dict(_fields_by_dest(version if version in shipped() else ""))
    for word in loaded.recipe.megatron.extra or ():
        if word.startswith("--"):
            known.setdefault(_dest(word.partition("=")[0], version), "megatron.extra")
    return known


@cache
def _fields_by_dest(version: str) -> dict[str, str]:
    return {_dest(option, version): field for option, field in fields_by_option().items()} | _NO_OPTION


def _dest(option: str, version: str) -> str:
    found = load(version).option(option) if version in shipped() else None
    return found.dest if found else option.removeprefix("--").replace("-", "_")


def _mentioned(message: str, known: dict[str, str]) -> list[str]:
    """The arguments that a message names, in its order.

    A name of several words counts as an option, as an attribute and in prose (`expert model parallel size`); one of a
    single word only where it is written as a name (`--lr`, `args.lr`, `'lr'`), for `save` and `split` are English too.
    """
    options = {option.removeprefix("--").replace("-", "_"): dest for option, dest in _dests(known)}
    dests = {name: (name,) for name in known} | {name: (dest,) for name, dest in options.items()} | CALLED
    prose = re.sub(r"[^a-z0-9]", "_", message.lower())  # as long as the message: positions are the same
    long = [name for name in dests if "_" in name or any(letter.isdigit() for letter in name)]
    short = [name for name in dests if name not in long]
    found = [
        *re.finditer(rf"(?<![a-z0-9])({_either(long)})(?![a-z0-9])", prose),
        *re.finditer(rf"(?:--|[a-z]\.|['\"`])({_either(short)})(?![\w-])", message),
    ]
    names = [name for match in sorted(found, key=lambda m: m.start(1)) for name in dests[match[1]]]
    return [name for name in dict.fromkeys(names) if name in known]


def _dests(known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Each option whose attribute has another name, such as `--fp8-format`, with that attribute."""
    by_field = {field: dest for dest, field in known.items()}
    for option, field in fields_by_option().items():
        yield option, by_field[field]


def _either(names: Sequence[str]) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))


def _where(names: Sequence[str], verdict: Verdict, loaded: Loaded) -> str:
    node = loaded.source.find(names[0]) if names else None
    if names and names[0] == "megatron.extra" and isinstance(node, Items):
        for item in node.items:
            if isinstance(item, Scalar) and _is_in(item.text, verdict.message):
                return str(item.place)
    return loaded.source.where(*names)


def _is_in(word: str, message: str) -> bool:
    if not word.startswith("--"):
        return f"'{word}'" in message
    name = word.partition("=")[0].removeprefix("--")
    return bool(re.search(rf"(?<![\w-])(--)?{re.escape(name)}(?![\w-])", message.replace("_", "-")))


def _said_by(verdict: Verdict, judge: Judge) -> str:
    return f"{judge} says it " + (f"at megatron/{verdict.place}" if verdict.place else "in its parser")


def in_one_line(message: str) -> str:
    """Megatron's words without line ends and the final period."""
    return " ".join(message.split()).removesuffix(".")


def shown_stage(stage: str) -> str:
    """A stage as people know it: the other dataclasses are configuration too."""
    return "config" if stage == "container" else stage


def fair(verdicts: Sequence[Verdict], argv: Sequence[str], loaded: Loaded, judge: Judge) -> list[Verdict]:
    """The verdicts, less a refusal of options that this Megatron lacks and the recipe's has: no fault of the recipe."""
    version, last = loaded.recipe.megatron.version, verdicts[-1]
    if last.stage != "parse" or last.answer != "refused" or judge.is_version(version) or version not in shipped():
        return list(verdicts)
    if check(argv, load(version)):
        return list(verdicts)
    return [*verdicts[:-1], replace(last, answer="not_judged", feature=f"options of Megatron {version}")]


def summary(verdicts: Sequence[Verdict], stages: Sequence[str], loaded: Loaded, judge: Judge) -> str:
    """What each stage said, on one line: what is not judged is never called passed."""
    version = loaded.recipe.megatron.version
    engine = f" with Transformer Engine {judge.transformer_engine}" if judge.transformer_engine else ""
    head = f"{judge}{engine}" + ("" if judge.is_version(version) else f" (the recipe is for {version})")
    by_stage: dict[str, Verdict] = {}
    for verdict in verdicts:
        shown = shown_stage(verdict.stage)
        if shown not in by_stage or by_stage[shown].answer == "passed":
            by_stage[shown] = verdict
    passed = [stage for stage, verdict in by_stage.items() if verdict.answer == "passed"]
    parts = [f"{', '.join(passed)} passed"] if passed else []
    parts += [f"{stage} refused" for stage, verdict in by_stage.items() if verdict.answer == "refused"]
    parts += [
        f"{stage} not judged ({verdict.feature}: {in_one_line(verdict.message)})"
        for stage, verdict in by_stage.items()
        if verdict.answer == "not_judged"
    ]
    missing = [stage for stage in dict.fromkeys(map(shown_stage, stages)) if stage not in by_stage]
    parts += [f"{', '.join(missing)} not reached"] if missing else []
    return f"{head}: {'; '.join(parts)}"
