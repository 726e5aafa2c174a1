"""One step in `interval` is a diagnostic one: what its first micro batch says of router and experts (handbook A.1).

Each rank appends to `attempts/N/diagnostics/rankR.jsonl`, a line for each of its MoE layers (`samples.py`: what is in
it). The last rank logs, over all ranks, for each decoder layer (`_layer_3` from 0 behind the name):

experts/norm_max_over_median, experts/norm_min_over_median    of the experts' mean output norms
experts/zero_wgrads           the part of the expert weight gradients that is exactly 0 (handbook 3.7)
router/fp32_flips             the part of the sampled tokens that fp32 would give to another set of experts
router/dropped                the part of the assignments that the capacity drops

Hooks only look: they draw no random number, change no tensor, and fail into the line they would have written. While
one works Megatron's timer of the interval stands still; a diagnostic step is slower all the same.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

Installed = dict[str, str]
Record = dict[str, Any]
SECONDS_FOR_THE_DISK = 2.0


def install(interval: int) -> list[Installed]:
    """Make Megatron's activation dumps work, and every `interval`th step a diagnostic one; 0 is none."""
    return [done for done in (activation_dumps(), diagnostic_steps(interval) if interval else None) if done]


def activation_dumps() -> Installed | None:
    """Let `--save-activations-interval` work without Transformer Engine, and keep the forward's own values.

    Megatron asks `isinstance` with the stand-ins it makes where there is no Transformer Engine, which raises.
    Recomputed forwards, inside the backward pass, would take the place of the original ones.
    """
    try:
        from megatron.training import activation_logging
    except ImportError:  # a Megatron without this option
        return None
    import hooks  # type: ignore[import-not-found]

    logger_class = activation_logging.ActivationLogger
    if not hasattr(activation_logging, "LINEAR_TYPES") or not hasattr(logger_class, "_make_activation_hook"):
        return None
    make_hook = logger_class._make_activation_hook

    def make_once(self: Any, *name: str) -> Any:
        hook = make_hook(self, *name)
        return lambda *call: None if hooks.recomputing() else hook(*call)

    types = activation_logging.LINEAR_TYPES
    activation_logging.LINEAR_TYPES = tuple(one for one in types if isinstance(one, type))
    logger_class._make_activation_hook = make_once
    return {
        "name": "activation_dumps",
        "why": "Megatron cannot dump activations without Transformer Engine, and dumps recomputed ones over the others",
        "source": "megatron/training/activation_logging.py: LINEAR_TYPES, _make_activation_hook",
    }


def diagnostic_steps(interval: int) -> Installed | None:
    """Look at every `interval`th step of the training, where its `train_step` is one that is known here."""
    from megatron.training import training

    train_step = getattr(training, "train_step", None)
    if train_step is None or not is_known(train_step):
        return None
    signature = inspect.signature(train_step)
    folder, rank = Path("attempts", os.environ["MOEKIT_ATTEMPT"], "diagnostics"), int(os.environ.get("RANK", "0"))
    diary = Diary((folder / f"rank{rank}.jsonl").absolute())

    @functools.wraps(train_step)
    def train_and_look(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named).arguments
        iteration = call.get("iteration")
        if iteration is None or (iteration + 1) % interval:
            return train_step(*arguments, **named)
        with ExitStack() as hooked:
            samples = guarded(begin, hooked, call) or []
            answer = train_step(*arguments, **named)
        guarded(diary.write, iteration + 1, samples)
        guarded(log, iteration + 1, samples)
        return answer

    training.train_step = train_and_look
    return {
        "name": "diagnose",
        "why": f"every {interval} steps, what one micro batch says of router and experts is written down",
        "source": "megatron/training/training.py: train_step; megatron/core/transformer/moe/moe_layer.py: MoELayer",
    }


def is_known(train_step: Any) -> bool:
    """Whether this `train_step` takes what is read here, and steps the optimizer as it is watched here."""
    needed = {"model", "optimizer", "iteration"}
    return needed <= set(inspect.signature(train_step).parameters) and "optimizer.step()" in inspect.getsource(
        train_step
    )


def guarded(act: Any, *arguments: Any) -> Any:
    """What `act` gives; None and a warning where it fails: no diagnosis stops a training."""
    try:
        return act(*arguments)
    except Exception as failure:
        print(f"moekit: `{act.__name__}` of a diagnostic step fails: {type(failure).__name__}: {failure}", flush=True)
        return None


def begin(hooked: ExitStack, call: dict[str, Any]) -> list[Any]:
    """Put hooks on the model and its optimizer, which `hooked` takes off again; a sample for each MoE layer."""
    import samples as sampling  # type: ignore[import-not-found]
    import zeros  # type: ignore[import-not-found]

    found = sampling.watch(hooked, call["model"])
    zeros.watch(hooked, call["optimizer"], found)
    return list(found)


class Diary:
    """A rank's file; it is begun with the first line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: Any = None

    def write(self, step: int, samples: list[Any]) -> None:
        """A line for each layer."""
        import lines  # type: ignore[import-not-found]

        if not samples:
            return
        self._lines = self._lines or lines.Lines(self._path, lambda: None, lambda what: print(what, flush=True))
        for sample in samples:
            self._lines.add(json.dumps({"step": step, "time": time.time(), **sample.record}))
        self._lines.wait(SECONDS_FOR_THE_DISK)


def log(step: int, samples: list[Any]) -> None:
    """Log what all ranks saw together. Every rank has to call this at the same step."""
    import torch
    from megatron.training import get_args

    args = get_args()
    layers, experts = int(args.num_layers), int(args.num_experts or 0)
    own = guarded(numbers, samples, layers, experts) or [0.0] * (layers * (4 * experts + 4))
    total = torch.tensor(own, dtype=torch.float64, device="cuda")
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(total)
    face = sys.modules.get("wandb")
    if face is not None and face.run is not None:
        face.log(metrics(total.tolist(), layers, experts), step)


def numbers(samples: list[Any], layers: int, experts: int) -> list[float]:
    """One rank's sums as one list: for each decoder layer rows, sum of norms, zeros and elements of each expert, then
    sampled tokens, flipped ones, assignments and those dropped."""
    rows = [[0.0] * (4 * experts + 4) for _ in range(layers)]
    for record in (sample.record for sample in samples if sample.record["block"] == "decoder"):
        row = rows[record["layer"]]
        by_expert = (("norms", "rows"), ("norms", "sum_l2"), ("zeros", "zeros"), ("zeros", "elements"))
        for i, (part, key) in enumerate(by_expert):
            for expert, value in zip(record["experts"], record.get(part, {}).get(key, ()), strict=False):
                row[i * experts + expert] = value
        of_all = (("flips", "tokens"), ("flips", "flipped"), ("dropped", "assignments"), ("dropped", "dropped"))
        row[4 * experts :] = [record.get(part, {}).get(key, 0) for part, key in of_all]
    return [float(value) for row in rows for value in row]


def metrics(total: list[float], layers: int, experts: int) -> dict[str, float]:
    """The metrics of all ranks' sums, by the names above; those that are not defined are left out."""
    found: dict[str, float] = {}
    for layer in range(layers):
        row = total[layer * (4 * experts + 4) : (layer + 1) * (4 * experts + 4)]
        counts, sums, zeros, elements = (row[i * experts : (i + 1) * experts] for i in range(4))
        means = [norm / count for norm, count in zip(sums, counts, strict=True) if count]
        middle = median(means) if means else 0.0
        if middle > 0 and math.isfinite(middle):
            found[f"experts/norm_max_over_median_layer_{layer}"] = max(means) / middle
            found[f"experts/norm_min_over_median_layer_{layer}"] = min(means) / middle
        shares = {"experts/zero_wgrads": (sum(zeros), sum(elements))}
        shares |= {"router/fp32_flips": (row[-3], row[-4]), "router/dropped": (row[-1], row[-2])}
        found |= {f"{name}_layer_{layer}": part / whole for name, (part, whole) in shares.items() if whole}
    return found
