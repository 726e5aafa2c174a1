"""What alerts need besides a run's numbers: its recipe's limits, whether it has several nodes, and its control."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from moekit.job.attempts import read_facts
from moekit.problems import MoekitError
from moekit.recipe.load import load_partly
from moekit.recipe.schema.watch import Monitor
from moekit.watch.facts import Facts, facts_of
from moekit.watch.health import Thresholds
from moekit.watch.metrics import MetricsReader

CONTROL_STEPS = 20
"""The control's speed is the median of so many last ones that it logged."""
_AT_ONCE = 20_000


class Setting:
    """A run's limits and facts; `missing` says in a sentence why its control is not compared with, else empty."""

    def __init__(self, run_dir: Path, control: str | None = None) -> None:
        """`control`: the name of a run in the same folder, or the path of one, over the recipe's."""
        monitor = _monitor(run_dir)
        said = read_facts(run_dir)
        self.thresholds = thresholds(monitor)
        self.missing = ""
        self._multi_node = said.world > said.ranks_per_node
        self._control_tflops: float | None = None
        if name := control or (monitor and monitor.control_run):
            self._control_tflops, self.missing = control_tflops(run_dir, name)

    def facts(self, config: Mapping[str, Any]) -> Facts:
        """The facts under Megatron's arguments as far as they are known."""
        return facts_of(config, multi_node=self._multi_node, control_tflops=self._control_tflops)


def thresholds(monitor: Monitor | None) -> Thresholds:
    """The defaults, and over them what the recipe says."""
    names = [field.name for field in fields(Thresholds)]
    said = {name: getattr(monitor, f"alert_{name}", None) for name in names}
    return Thresholds(**{name: value for name, value in said.items() if value is not None})


def control_tflops(run_dir: Path, name: str) -> tuple[float | None, str]:
    """TFLOP/s of each GPU in a control, the median of its last; or why there are none, in a sentence."""
    folder = Path(name) if "/" in name else run_dir.resolve().parent / name
    try:
        there = (folder / "attempts").is_dir()
        reader, speeds = MetricsReader(folder), deque[float](maxlen=CONTROL_STEPS)
        while steps := reader.poll(_AT_ONCE):
            speeds.extend(step.metrics["throughput"] for step in steps if "throughput" in step.metrics)
    except (OSError, ValueError) as failure:
        return None, f"The control `{name}` cannot be read: {failure}."
    if not there:
        return None, f"The control `{name}` is no run in `{folder.parent}`."
    if not facts_of(reader.config).forced:
        return None, f"`{name}` is no control: its routing is not forced to be even."
    if not speeds:
        return (
            None,
            f"The control `{name}` has logged no TFLOP/s yet: `log.throughput` and `log.timers_to_tensorboard`.",
        )
    return median(speeds), ""


def _monitor(run_dir: Path) -> Monitor | None:
    """The recipe's section; None where there is no recipe that this moekit can read."""
    try:
        return load_partly(str(run_dir / "recipe.yaml")).recipe.monitor
    except MoekitError:
        return None
