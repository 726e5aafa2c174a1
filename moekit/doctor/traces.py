"""What a run's traces say, as far as they are small enough to be read on the way: the profiler's, the router's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError

_MOST_BYTES = 1 << 26
"""Of a run's traces of one kind: read in seconds."""
_UNPACKED = 8
"""Times that a gzipped trace is longer unpacked, about."""
_GPU_GIB = {"H200": 141 * 1e9 / 2**30, "B200": 180 * 1e9 / 2**30, "B300": 279 * 1e9 / 2**30}
"""Of GPUs whose name in torch does not say it; GB are 1e9 bytes."""


@dataclass(frozen=True)
class Exchange:
    """Shares of the profiled steps, over all profiled ranks: what `moekit profile` says."""

    exposed: float
    """All-to-all while nothing computes."""
    runs: float
    """All-to-all, whatever else runs."""
    permute: float
    other: float
    """Other communication."""
    idle: float
    gemm: float
    """Products of matrices."""


@dataclass(frozen=True)
class Reach:
    """Where the copies of a traced token go."""

    mean: float
    """Nodes, over all layers."""
    nodes: int
    """Of an expert parallel group."""


@dataclass(frozen=True)
class Gate:
    """One traced layer's weights."""

    layer: str
    flat: bool
    mass: float
    """Probability of the chosen experts; NaN where softmax is not over all."""


@dataclass(frozen=True)
class Traces:
    """What there is; nothing where there is no such trace."""

    exchange: Exchange | None = None
    reach: Reach | None = None
    gates: tuple[Gate, ...] = ()
    peak_gib: float = 0.0
    """The largest that Megatron printed as allocated; 0 where it did not."""
    gpu_gib: float = 0.0
    """Of the GPU that trained; 0 where it is not known."""
    missing: tuple[str, ...] = ()
    """What could not be looked at, and why: sentences."""


def of_run(run: RunDir, peak_gib: float) -> Traces:
    """Read what a run has of traces; what is too large is said."""
    found = Traces(peak_gib=peak_gib, gpu_gib=_gpu_gib(run))
    for folders, reads, command in (
        (("torch_profile", "nsys"), _exchange, f"moekit profile {run.path.name}"),
        (("routing",), _routing, f"moekit router {run.path.name} --weights --traffic"),
    ):
        attempts = [run.attempt(number).path for number in run.numbers()]
        size = max((_bytes(attempt / folder) for attempt in attempts for folder in folders), default=0)
        if not size:
            continue
        if size > _MOST_BYTES:
            said = f"Traces in `{folders[0]}` are of {size / 2**30:.1f} GiB, and are not read on the way: `{command}`."
            found = replace(found, missing=(*found.missing, said))
        else:
            found = _with(found, run, reads)
    return found


def _with(found: Traces, run: RunDir, reads: Callable[[Traces, RunDir], Traces]) -> Traces:
    try:
        return reads(found, run)
    except MoekitError as failure:
        said = f"A trace cannot be read: {failure.problems[0].what}."
    return replace(found, missing=(*found.missing, said))


def _exchange(found: Traces, run: RunDir) -> Traces:
    from moekit.profile.families import ALL_TO_ALL, COMMUNICATION, GEMM, GROUPED_GEMM, IDLE, PERMUTE
    from moekit.profile.shares import part
    from moekit.profile.traces import read

    ranks = read(str(run.path), [], None).ranks
    if not ranks or any(rank.on_cpu for rank in ranks):
        return replace(found, missing=(*found.missing, "Its profile is of a CPU, on which speed is not judged."))
    runs = sum(rank.busy_ns[ALL_TO_ALL] for rank in ranks) / (sum(rank.whole_ns for rank in ranks) or 1)
    gemm = part(ranks, GEMM) + part(ranks, GROUPED_GEMM)
    shares = (part(ranks, PERMUTE), part(ranks, COMMUNICATION), part(ranks, IDLE), gemm)
    return replace(found, exchange=Exchange(part(ranks, ALL_TO_ALL), runs, *shares))


def _routing(found: Traces, run: RunDir) -> Traces:
    from moekit.watch.router.grid import Grid, attempt_args
    from moekit.watch.router.trace_report import trace_report
    from moekit.watch.router.weights import FLAT

    with suppress(MoekitError):  # a trace may be without logits
        weights = trace_report(run, weights=True).weights
        layers = weights.layers.items() if weights else ()
        gates = tuple(Gate(key.name, one.verdict == FLAT, one.spread("mass").mean) for key, one in layers)
        found = replace(found, gates=gates)
    report = trace_report(run, traffic=True)
    traffic = report.traffic
    if traffic and (tokens := sum(one.tokens for one in traffic.layers.values())):
        grid = Grid.from_args(attempt_args(run)[report.attempt])
        layout = grid.experts
        nodes = -(-layout.expert_model_parallel * layout.expert_tensor_parallel // traffic.gpus_per_node)
        found = replace(found, reach=Reach(sum(one.nodes for one in traffic.layers.values()) / tokens, nodes))
    return found


def _bytes(folder: Path) -> int:
    """Of the files in a folder, gzipped ones as they are unpacked; 0 where there is none."""
    total = 0
    with suppress(OSError):
        for file in folder.iterdir():
            total += file.stat().st_size * (_UNPACKED if file.suffix == ".gz" else 1)
    return total


def _gpu_gib(run: RunDir) -> float:
    """The memory of the GPU that the newest attempt names (`software.json`); 0 where that is not known."""
    for number in reversed(run.numbers()):
        with suppress(OSError, ValueError, AttributeError):
            name = str(json.loads(run.attempt(number).software.read_text()).get("device"))
            if said := re.search(r"(\d+) ?GB", name):
                return float(said[1])
            return next((gib for model, gib in _GPU_GIB.items() if model in name), 0.0)
    return 0.0
