"""Traces of PyTorch's profiler (Chrome's format, as Kineto writes it) to timelines.

A GPU's kernels and copies are read, and where a trace has none, the operators on the CPU. Megatron writes one file a
rank, `torch_profile/rank-R.json.gz` (megatron/training/training.py `trace_handler`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moekit.problems import error
from moekit.profile.families import GEMM, GROUPED_GEMM, OTHER, PERMUTE, is_unnamed_send, of_kernel, of_operator
from moekit.profile.json_events import events
from moekit.profile.timeline import Recorder, Timeline, nanoseconds

SOURCE = "PyTorch's profiler"
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
_STEP = "ProfilerStep#"


class _Reading:
    """What the events have said so far."""

    def __init__(self) -> None:
        self.devices: dict[str, Recorder] = {}
        self.threads = Recorder()
        self.steps: dict[str, tuple[int, int]] = {}
        self.grouped: set[object] = set()
        """Identifiers of operators on many experts. Transformer Engine gives each expert's product to cuBLAS by itself
        (`_GroupedLinear`), and those kernels are told from others by the operator that launched them alone."""
        self.skipped = 0

    def take(self, event: Mapping[str, Any]) -> None:
        category = event.get("cat")
        on_gpu = category in _ON_GPU
        if not on_gpu and category != "cpu_op" and category != "user_annotation":
            return
        if category == "cpu_op" and "grouped" in str(event.get("name")).lower():
            self.grouped.add(_launcher(event))
        if category == "cpu_op" and self.devices:  # kernels tell more, and operators would only take memory
            return
        begin, duration = nanoseconds(event.get("ts")), nanoseconds(event.get("dur"))
        name = event.get("name")
        if begin is None or duration is None or duration < 0 or not isinstance(name, str):
            self.skipped += 1
        elif on_gpu:
            self._kernel(event, str(category), name, begin, begin + duration)
        elif category == "cpu_op":
            self.threads.add(f"thread {event.get('tid')}", of_operator(name), begin, begin + duration)
        elif name.startswith(_STEP):
            self.steps[name] = begin, begin + duration

    def _kernel(self, event: Mapping[str, Any], category: str, name: str, begin: int, end: int) -> None:
        said = event.get("args")
        said = said if isinstance(said, dict) else {}
        if not self.devices:
            self.threads = Recorder()
        device = self.devices.setdefault(str(said.get("device", event.get("pid"))), Recorder())
        if category.lower() == "kernel":
            collective = str(said.get("Collective name", ""))
            family = of_kernel(name, collective)
            family = GROUPED_GEMM if family == GEMM and _launcher(event) in self.grouped else family
            device.unnamed_sends += is_unnamed_send(name, collective)
        else:
            family = PERMUTE if "memcpy" in category.lower() else OTHER
        device.add(f"stream {said.get('stream', event.get('tid'))}", family, begin, end)


def read(path: Path) -> list[Timeline]:
    """The timelines of a trace, one a device; of a trace without kernels the training thread's, with `on_cpu`.

    Raises:
        MoekitError: it is no such trace, is damaged, or has nothing in it.
    """
    head: dict[str, Any] = {}
    reading = _Reading()
    for batch in events(path, head):
        for event in batch:
            if isinstance(event, dict):
                reading.take(event)
    rank = _rank(head, path)
    steps = len(reading.steps) or None
    if reading.devices:
        many = len(reading.devices) > 1
        return [
            Timeline(
                f"{rank} device {name}" if many else rank,
                SOURCE,
                False,
                steps,
                device.parts(),
                device.window(),
                device.unnamed_sends,
                reading.skipped,
            )
            for name, device in reading.devices.items()
        ]
    if not reading.threads:
        what = f"`{path}` has neither kernels nor operators in its events"
        raise error(what, "the profiled steps were not reached, or it is no trace of PyTorch's profiler")
    window = reading.threads.window()
    if reading.steps:
        window = min(begin for begin, _ in reading.steps.values()), max(end for _, end in reading.steps.values())
    return [Timeline(rank, SOURCE, True, steps, reading.threads.parts(), window, 0, reading.skipped)]


def _launcher(event: Mapping[str, Any]) -> object:
    """What links an operator with the kernels that it launched; never None, which would link all without it."""
    said = event.get("args")
    found = said.get("External id") if isinstance(said, dict) else None
    return found if isinstance(found, int | str) else id(event)


def _rank(head: Mapping[str, Any], path: Path) -> str:
    """`rank 3`, from what the trace says of itself, else from its name."""
    said = head.get("distributedInfo")
    if isinstance(said, dict) and isinstance(said.get("rank"), int):
        return f"rank {said['rank']}"
    name = path.name.removesuffix(".gz").removesuffix(".json")
    return f"rank {name[5:]}" if name.startswith("rank-") and name[5:].isdecimal() else name
