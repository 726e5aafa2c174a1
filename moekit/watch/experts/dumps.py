"""Megatron's activation dumps (`monitor.activations_interval`) to expert norms and the RMS around latent projections.

A dump is `checkpoints/activations/iter_0000100/mp_rank_TT[_PPP][_EEE].pth`: tensor, pipeline and expert parallel rank
of the writer, one of each expert data parallel group; in it `{chunk: {"<module>/output0": tensor, ...}}` of the last
micro batch (megatron/training/activation_logging.py, checkpointing.py:516). A grouped layer has the tokens of each
expert as `linear_fc2/input1`; local experts have a module each. Files are read as weights alone: a pickle in one runs
nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moekit.problems import MoekitError, error, shortened
from moekit.watch.experts.norms import LayerNorms, Rms, merge, part
from moekit.watch.layout import RankLayout

_FC2 = re.compile(r"(.+)\.mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc2/output0")
_LATENT = re.compile(r"(.+)\.mlp\.(fc[12]_latent_proj)/(input0|output0)")
_LAYER = re.compile(r"(?:decoder\.layers\.(\d+)|mtp\.layers\.(\d+)\.mtp_model_layer(?:\.layers\.(\d+))?)")
_PADDED = ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """How a run's experts lie over its dump files."""

    num_experts: int
    expert_parallel: int
    expert_tensor_parallel: int
    pipeline: int

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Shape:
        """From Megatron's arguments, the `config` line of `metrics.jsonl`.

        Raises:
            MoekitError: there are none, or no experts, or the dump has rows that are no tokens.
        """
        if not args:
            raise error("Megatron's arguments are not known, and with them neither layout nor padding of the dump")
        if not args.get("num_experts"):
            raise error("the run is dense: it has no experts")
        padded = [name for name in _PADDED if args.get(name)]
        padded += [name for name in ("fp8", "fp4") if args.get(name)]
        if padded:
            raise error(
                f"`{padded[0]}` pads what the experts compute, and the dump does not tell those rows from tokens",
                "`monitor.diagnose_interval` measures before it is padded, except where the router itself pads",
            )
        layout = RankLayout.from_args({**args, "pipeline_model_parallel_size": 1})
        assert layout is not None
        return cls(
            layout.num_experts,
            layout.expert_model_parallel,
            layout.expert_tensor_parallel,
            int(args.get("pipeline_model_parallel_size") or 1),
        )


def weights_in(args: Mapping[str, Any]) -> str:
    """Where the routing weights are applied, which a norm that is small may come from (experts.py: `forward`)."""
    if args.get("moe_apply_probs_on_input"):
        return "the experts' inputs are multiplied by the routing weights, so they are in the norms"
    return "the routing weights are in the norms: they are applied before the experts' second linear layer"


@dataclass
class Dump:
    """What one iteration's files say; layers by name, `layer_3` from 0, with `stage_1_` before it under pipelining."""

    iteration: int
    norms: dict[str, LayerNorms] = field(default_factory=dict)
    latent: dict[str, dict[str, Rms]] = field(default_factory=dict)
    """By layer and `fc1_latent_proj input0` and the like."""
    refused: dict[str, str] = field(default_factory=dict)
    """Layers of which there are no norms, with the reason."""
    skipped: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""


def iterations(run_dir: Path) -> list[int]:
    """Those that have a dump, in order."""
    folders = (run_dir / "checkpoints" / "activations").glob("iter_*")
    return sorted(int(folder.name[5:]) for folder in folders if folder.name[5:].isdecimal())


def read(run_dir: Path, iteration: int, shape: Shape) -> Dump:
    """Read all files of an iteration, and merge them.

    Raises:
        MoekitError: PyTorch is not installed.
    """
    dump = Dump(iteration)
    shards: dict[tuple[str, int], dict[int, Tensors]] = defaultdict(dict)
    for path in sorted((run_dir / "checkpoints" / "activations" / f"iter_{iteration:07}").glob("*.pth")):
        try:
            tensor_rank, stage, expert_rank = _place(path.name, shape)
            for chunk, tensors in load(path).items():
                prefix = f"stage_{stage}_" * (shape.pipeline > 1) + f"{chunk}_" * (chunk != "model_chunk0")
                shards[prefix, expert_rank][tensor_rank] = tensors
        except MoekitError as refused:
            dump.skipped.append(f"{path.name}: {refused.problems[0].what}")
    parts: dict[str, dict[int, LayerNorms]] = defaultdict(dict)
    for (prefix, expert_rank), by_tensor_rank in sorted(shards.items()):
        _latent(dump, prefix, by_tensor_rank)
        for layer in sorted({layer for tensors in by_tensor_rank.values() for layer, _ in _fc2_keys(tensors)}):
            name = prefix + _layer_name(layer)
            try:
                parts[name][expert_rank] = _layer(layer, list(by_tensor_rank.values()), expert_rank, shape)
            except MoekitError as refused:
                dump.refused[name] = refused.problems[0].what
    for name, by_rank in parts.items():
        if missing := shape.expert_parallel - len(by_rank):
            dump.refused.setdefault(name, f"{missing} of {shape.expert_parallel} expert parallel shards are missing")
        elif name not in dump.refused:
            dump.norms[name] = merge(by_rank.values())
    return dump


def load(path: Path) -> dict[str, Tensors]:
    """The tensors of a file by chunk, mapped and not yet read; nothing that is pickled in it is run.

    Raises:
        MoekitError: it is no such file, or PyTorch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise error(
            "PyTorch, which reads activation dumps, is not installed", "`pip install 'moekit[local]'`"
        ) from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as failure:  # whatever a damaged or hostile file makes of the reader
        what = shortened(str(failure).partition("\n")[0] or type(failure).__name__)
        raise error(f"it cannot be read as weights: {what}") from None
    chunks = found if isinstance(found, dict) else {}
    if not chunks or not all(isinstance(name, str) and isinstance(one, dict) for name, one in chunks.items()):
        raise error("it is no activation dump")
    return chunks


def _place(name: str, shape: Shape) -> tuple[int, int, int]:
    """Tensor, pipeline and expert parallel rank of a file's name; the last two are in it where there are several."""
    numbers = re.fullmatch(r"mp_rank_(\d+)((?:_\d+)*)\.pth", name)
    rest = [int(number) for number in numbers[2].split("_")[1:]] if numbers else []
    if not numbers or len(rest) != (shape.pipeline > 1) + (shape.expert_parallel > 1):
        raise error("its name is not one of this run's layout")
    stage = rest.pop(0) if shape.pipeline > 1 else 0
    expert_rank = rest.pop() if rest else 0
    if stage >= shape.pipeline or expert_rank >= shape.expert_parallel:
        raise error("its name is not one of this run's layout")
    return int(numbers[1]), stage, expert_rank


def _layer_name(module: str) -> str:
    """`layer_3`, or `mtp_0_layer_0`; the module's own name where it is another."""
    match = _LAYER.fullmatch(module)
    if match is None:
        return module
    return f"layer_{match[1]}" if match[1] else f"mtp_{match[2]}_layer_{match[3] or 0}"


def _fc2_keys(tensors: Tensors) -> Iterator[tuple[str, str]]:
    """(layer's module, key) of each output of routed experts' second linear layers."""
    for key in tensors:
        if isinstance(key, str) and (match := _FC2.fullmatch(key)):
            yield match[1], key


def _layer(layer: str, shards: list[Tensors], expert_rank: int, shape: Shape) -> LayerNorms:
    """One layer's experts of one expert parallel rank, from the files of its expert tensor parallel ranks."""
    if len(shards) != shape.expert_tensor_parallel:
        raise error(
            f"{len(shards)} of {shape.expert_tensor_parallel} expert tensor parallel shards are there, and parts of a"
            " vector have no norm"
        )
    count = shape.num_experts // shape.expert_parallel
    each = [_outputs(layer, tensors, count) for tensors in shards]
    if len({tuple(tuple(output.shape) for output in outputs) for outputs in each}) != 1:
        raise error("its expert tensor parallel shards are not of the same tokens")
    rows, sums = [], []
    for same in zip(*each, strict=True):
        whole = sum(output.double() for output in same)  # row parallel: each shard's output is a summand of all of it
        rows.append(int(whole.shape[0]))
        sums.append(float(whole.norm(dim=1).sum()) if rows[-1] else 0.0)
    first = expert_rank * count
    return part(range(first, first + count), rows, sums, int(each[0][0].shape[1]), shape.num_experts)


def _outputs(layer: str, tensors: Tensors, count: int) -> list[Any]:
    """The output `# (row, width)` of each local expert's second linear layer.

    Raises:
        MoekitError: they are not there, or not as Megatron writes them; or there are rows that are no tokens.
    """
    import torch

    grouped = tensors.get(f"{layer}.mlp.experts.linear_fc2/output0")
    if grouped is None:
        names = [f"{layer}.mlp.experts.local_experts.{expert}.linear_fc2/output0" for expert in range(count)]
        outputs = [tensors.get(name) for name in names]
        if not all(_is_matrix(output) for output in outputs):
            raise error(f"it has no outputs of all {count} experts")
        return outputs
    counts = tensors.get(f"{layer}.mlp.experts.linear_fc2/input1")
    if isinstance(counts, torch.Tensor):
        counts = counts.tolist()
    whole = isinstance(counts, list) and all(type(one) is int and one >= 0 for one in counts)
    if not _is_matrix(grouped) or not isinstance(counts, list) or not whole or len(counts) != count:
        raise error(f"it has no output with the tokens of {count} experts")
    if sum(counts) != grouped.shape[0]:
        raise error(f"it has {grouped.shape[0]} rows for {sum(counts)} tokens: padded rows are no tokens")
    return list(torch.split(grouped, counts))


def _is_matrix(output: Any) -> bool:
    import torch

    return isinstance(output, torch.Tensor) and output.dim() == 2 and output.is_floating_point() and output.shape[1] > 0


def _latent(dump: Dump, prefix: str, shards: Mapping[int, Tensors]) -> None:
    """Add the RMS of what goes into and comes out of the latent projections; all shards hold other tokens."""
    import torch

    for tensors in shards.values():
        for key, value in tensors.items():
            match = _LATENT.fullmatch(key) if isinstance(key, str) else None
            if match and isinstance(value, torch.Tensor) and value.is_floating_point():
                of = dump.latent.setdefault(prefix + _layer_name(match[1]), {})
                name = f"{match[2]} {match[3]}"
                rms = Rms(float(value.double().square().sum()), value.numel())
                of[name] = of[name] + rms if name in of else rms
