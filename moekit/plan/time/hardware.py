"""What the GPUs and the network can do: makers' figures, and the few constants that were fitted to measured steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from moekit.problems import error

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A maker's figures, and how fast attention is known to run (`hardware.yaml`). Rates are a second's."""

    name: str
    bf16: float
    """Operations, dense."""
    fp8: float
    fp4: float
    memory: float
    """Bytes."""
    processors: int
    """Streaming multiprocessors."""
    nvlink: float
    """Bytes, one way."""
    domain: int
    """GPUs that NVLink joins."""
    network: float
    """Bytes, one way, of the GPU's own share of the network cards."""
    host_link: float
    """Bytes, one way, to main memory."""
    attention: Mapping[str, float]
    """`forward`, `backward`: operations at no end of tokens; `forward_half`, `backward_half`: tokens of half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What was fitted for one GPU type: all of it (`constants.yaml`, made by `tests/benchmarks/plan_time.py`)."""

    gemm: float
    """Share of the peak that a very large matrix multiplication reaches, in bf16."""
    gemm_fp8: float
    """The same in FP8, of FP8's peak."""
    memory: float
    """Share of the memory's bandwidth that kernels reach."""
    nvlink: float
    """Share of NVLink that an exchange reaches."""
    overlap: float
    """Share of an exchange that runs behind computation where it may."""
    launch_us: float
    """Time of the host for one launch, with all that Python does around it."""
    scan: float
    """Share of the peak that the scan of a state space or delta net layer reaches."""
    step_ms: float
    """A step's fixed time: loop, logging, waiting for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What was fitted for one network."""

    share: float
    """Share of its cards that an all-to-all of large messages reaches."""
    start_us: float
    """Of one all-to-all."""
    start_us_per_rank: float
    ring: float
    """Share of its cards that reductions and gathers reach."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of cluster."""

    gpu: Gpu
    network: Network
    network_name: str
    constants: Constants
    node: int
    """GPUs of a node."""
    alltoall: Mapping[int, float]
    """Bytes a second that preflight measured, as NCCL's bus bandwidth, by nodes; empty: nothing was measured."""
    allreduce: Mapping[int, float]
    notes: tuple[tuple[str, str], ...]
    """What its numbers are: (name, `modelled`, `calibrated`, `measured here` or `assumed: why`)."""

    @property
    def domain(self) -> int:
        """GPUs joined by NVLink: a node's, or a whole rack's."""
        return max(self.gpu.domain if self.gpu.domain > self.node else self.node, 1)


def hardware(gpu: str, fabric: str, gpus_per_node: int, measured: Path | None = None) -> Hardware:
    """A cluster's hardware.

    Args:
        gpu: Its GPU model, as profiles name them.
        fabric: `efa`, `ib` or `none`.
        gpus_per_node: GPUs of a node.
        measured: A JSON file of what its preflight measured: `alltoall_busbw_gbps` and `allreduce_busbw_gbps`, GB/s by
            number of nodes. A file that does not exist is none.

    Raises:
        MoekitError: moekit knows no such GPU or fabric, or the file is not readable as that.
    """
    known, fitted = _file("hardware.yaml"), _file("constants.yaml")
    if gpu not in known["gpus"]:
        raise error(f"no figures are known of GPU `{gpu}`", f"known are {', '.join(sorted(known['gpus']))}")
    if fabric not in fitted["networks"]:
        raise error(f"no figures are known of fabric `{fabric}`", f"known are {', '.join(sorted(fitted['networks']))}")
    alltoall, allreduce = _measured(measured)
    constants, like = _constants(fitted["gpus"], gpu)
    return Hardware(
        gpu=_gpu(gpu, known),
        network=Network(**fitted["networks"][fabric]),
        network_name=fabric,
        constants=constants,
        node=gpus_per_node,
        alltoall=alltoall,
        allreduce=allreduce,
        notes=(
            ("peaks and links", "modelled: the makers' figures, hardware.yaml"),
            ("attention", "modelled: arXiv 2603.07685 Table 9" if "a100" not in gpu else "assumed: a third of Hopper"),
            ("efficiencies", "calibrated" if like == gpu else f"assumed: those of {like}, none measured on {gpu}"),
            ("network", f"measured here: {measured}" if alltoall or allreduce else _NETWORKS[fabric]),
        ),
    )


_NETWORKS = {
    "efa": "calibrated: NCCL on P5 nodes",
    "ib": "calibrated: published dispatch times",
    "none": "assumed: a twenty-fifth of EFA, as sockets were (handbook 3.7)",
}
_LIKE = {"a100": "h100", "h200": "h100"}
"""GPUs without constants of their own, and whose they take."""


def _constants(fitted: Mapping[str, Mapping[str, float]], gpu: str) -> tuple[Constants, str]:
    like = gpu if gpu in fitted else _LIKE.get(gpu, "b200" if "b" in gpu and "b200" in fitted else "h100")
    return Constants(**fitted[like]), like


def with_constants(of: Hardware, **values: float) -> Hardware:
    """The same cluster with other constants: of its GPU or its network, by name."""
    own = {field.name for field in fields(Constants)}
    constants = {name: value for name, value in values.items() if name in own}
    network = {name: value for name, value in values.items() if name not in own}
    return replace(of, constants=replace(of.constants, **constants), network=replace(of.network, **network))


def _gpu(name: str, known: Mapping[str, Any]) -> Gpu:
    row = known["gpus"][name]
    attention = known["attention"][row["attention"]]
    return Gpu(
        name=name,
        **{peak: row[peak] * 1e12 for peak in ("bf16", "fp8", "fp4")},
        memory=row["memory_gb_s"] * 1e9,
        processors=row["processors"],
        nvlink=row["nvlink_gb_s"] * 1e9,
        domain=row["domain"],
        network=row["network_gb_s"] * 1e9,
        host_link=row["host_link_gb_s"] * 1e9,
        attention={key: value * (1 if key.endswith("half") else 1e12) for key, value in attention.items()},
    )


def _measured(path: Path | None) -> tuple[dict[int, float], dict[int, float]]:
    if path is None or not path.is_file():
        return {}, {}
    try:
        said = json.loads(path.read_text())
        tables = [said.get(f"{name}_busbw_gbps") or {} for name in ("alltoall", "allreduce")]
        both = [{int(nodes): float(rate) * 1e9 for nodes, rate in table.items()} for table in tables]
    except (ValueError, TypeError, AttributeError):
        hint = "preflight writes it: GB/s by number of nodes"
        raise error("no bandwidths of `alltoall_busbw_gbps` and `allreduce_busbw_gbps`", hint, str(path)) from None
    if any(rate <= 0 for table in both for rate in table.values()):
        raise error("a bandwidth is not positive", "measure again: `moekit preflight`", str(path))
    return both[0], both[1]


@cache
def _file(name: str) -> dict[str, Any]:
    text: dict[str, Any] = yaml.safe_load((_FOLDER / name).read_text())
    return text
