"""What nvidia-smi and the kernel's log say of a node's GPUs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .findings import Finding

FIELDS = (
    "index",
    "name",
    "uuid",
    "serial",
    "pci.bus_id",
    "driver_version",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "clocks_event_reasons.active",
)
"""Of `nvidia-smi --query-gpu`; drivers before 535 know the last as `clocks_throttle_reasons.active`."""
ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
"""Of `nvidia-smi --query-remapped-rows`."""

_SLOWED = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake", 0x20: "thermal slowdown"}
"""Reasons for lower clocks that no idle GPU has (nvml.h, nvmlClocksEventReasons)."""
_BROKEN = {48, 62, 64, 74, 79, 95, 119, 120, 136, 140, *range(143, 151)}
"""Xids after which a GPU, its memory or its links are not to be trusted (NVIDIA's list of Xid errors)."""
_DAMAGED = {63, 92, 94}
"""Xids of errors that were put right, and may come again."""
_RECENT_S = 24 * 3600.0
_XID = re.compile(r"^(?:\[ *(?P<at>\d+\.\d+)\] ?)?.*NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d+)", re.M)


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi tells it."""

    index: int
    name: str
    uuid: str
    serial: str
    bus: str
    driver: str
    has_ecc: bool
    uncorrected: int
    """Memory errors that ECC could not put right, since the driver was loaded."""
    temperature_c: int
    """-1: not said."""
    reasons: int
    """Why its clocks are lower than they could be: a bit field."""


def read_gpus(text: str) -> list[Gpu]:
    """The rows of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; a row that is cut is left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdigit():
            continue
        index, name, uuid, serial, bus, driver, ecc, errors, temperature, reasons = cells
        found.append(
            Gpu(
                index=int(index),
                name=name,
                uuid=uuid,
                serial=serial,
                bus=bus,
                driver=driver,
                has_ecc=ecc.lower() == "enabled",
                uncorrected=_integer(errors, 0),
                temperature_c=_integer(temperature, -1),
                reasons=_integer(reasons, 0),
            )
        )
    return found


def are_held_back(text: str) -> bool:
    """Whether any GPU's clocks are lower than an idle one's should be: right after another job it may still be hot."""
    return any(gpu.reasons & bit for gpu in read_gpus(text) for bit in _SLOWED)


def judge_gpus(node: str, gpus: Sequence[Gpu], count: int, kind: str, rows: str = "") -> Iterator[Finding]:
    """What is wrong with a node's GPUs, of which a job has `count`, each of a `kind` such as `h100`."""
    if len(gpus) < count:  # more are shown where Slurm keeps a job's devices apart by their numbers alone
        yield Finding(node, "gpus", "fail", f"nvidia-smi shows {len(gpus)} GPUs where the job has {count}")
    other = sorted({gpu.name for gpu in gpus if kind.lower() not in gpu.name.lower().replace(" ", "")})
    if other:
        what = f"its GPUs are {', '.join(other)} where the profile says {kind}"
        yield Finding(node, "gpus", "fail", what, own=False)
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        yield Finding(node, "gpus", "fail", "nvidia-smi shows one GPU twice")
    for gpu in gpus:
        if gpu.uncorrected:
            what = f"GPU {gpu.index} has {gpu.uncorrected} memory errors that ECC could not correct"
            yield Finding(node, "ecc", "fail", what)
        if slowed := [what for bit, what in _SLOWED.items() if gpu.reasons & bit]:
            hot = f" at {gpu.temperature_c} degrees" if gpu.temperature_c >= 0 else ""
            yield Finding(node, "throttle", "fail", f"GPU {gpu.index} is idle{hot} and held back: {', '.join(slowed)}")
    without = [gpu.index for gpu in gpus if not gpu.has_ecc]
    if without and len(without) < len(gpus):
        yield Finding(node, "ecc", "warn", f"ECC is off on GPU {_names(without)}")
    yield from _judge_rows(node, gpus, rows)


def _judge_rows(node: str, gpus: Sequence[Gpu], text: str) -> Iterator[Finding]:
    """What `--query-remapped-rows` says."""
    index = {gpu.uuid: gpu.index for gpu in gpus}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(ROW_FIELDS) or cells[0] not in index:
            continue
        if cells[2].lower() in ("yes", "1"):
            yield Finding(node, "ecc", "fail", f"GPU {index[cells[0]]} has memory rows that cannot be remapped")
        elif cells[1].lower() in ("yes", "1"):
            what = f"GPU {index[cells[0]]} waits for a reset to remap memory rows"
            yield Finding(node, "ecc", "fail", what)


def judge_xids(node: str, log: str, uptime_s: float) -> Iterator[Finding]:
    """The Xids in the kernel's log, whose lines begin with seconds since the node's start."""
    seen: dict[tuple[int, str], float] = {}
    for match in _XID.finditer(log):
        at = float(match["at"]) if match["at"] else uptime_s
        seen[int(match["number"]), match["bus"]] = at
    for (number, bus), at in seen.items():
        if number not in _BROKEN | _DAMAGED:
            continue
        ago_h = max(0.0, uptime_s - at) / 3600
        recent = uptime_s - at < _RECENT_S
        level = "fail" if number in _BROKEN and recent else "warn"
        yield Finding(node, "xid", level, f"Xid {number} of the GPU at {bus}, {ago_h:.1f} h ago")


def judge_alike(gpus: Mapping[str, Sequence[Gpu]]) -> Iterator[Finding]:
    """Nodes whose driver is another than most nodes'."""
    drivers = {node: found[0].driver for node, found in gpus.items() if found}
    if len(set(drivers.values())) < 2:
        return
    usual = max(sorted(set(drivers.values())), key=list(drivers.values()).count)
    for node, driver in drivers.items():
        if driver != usual:
            yield Finding(node, "gpus", "warn", f"its driver is {driver}, of other nodes {usual}")


def _integer(text: str, default: int) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return default


def _names(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
