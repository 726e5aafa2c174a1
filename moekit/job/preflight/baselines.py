"""This cluster's own measurements on nodes known to be good: what a new allocation is judged by (handbook 2.1).

One file for each collective, node count, message size, image and settings, below `<shared_root>/preflight/baselines/`.
It keeps every run: when, on which nodes, how fast.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Optional

ACCEPTED = 0.9
"""The share of a baseline's bandwidth that is accepted (handbook 2.1)."""
CLEAN_RUNS = 3
"""So many clean runs make a baseline."""


@dataclass(frozen=True)
class Key:
    """What must be the same for two numbers to be compared."""

    collective: str
    nodes: int
    gpus_per_node: int
    size_bytes: int
    gpu: str = ""
    image: str = ""
    """The image's path and its sha256 or size; the program's where there is none."""
    settings: tuple[tuple[str, str], ...] = ()
    """Variables that NCCL and what is below it read."""

    def as_json(self) -> dict[str, Any]:
        """As it stands in a baseline's file."""
        return {
            "collective": self.collective,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "size_bytes": self.size_bytes,
            "gpu": self.gpu,
            "image": self.image,
            "settings": dict(self.settings),
        }

    @property
    def name(self) -> str:
        """The name of its file: to be found by people, and of this key alone."""
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.collective}.{self.nodes}x{self.gpus_per_node}.{digest}.json"


@dataclass(frozen=True)
class Baseline:
    """The clean runs of one key."""

    key: Key
    runs: tuple[Mapping[str, Any], ...] = ()
    """Each with `busbw_gb_s`, `nodes`, `when`, `job`."""

    @property
    def values(self) -> list[float]:
        """Bus bandwidths in GB/s, ascending."""
        return sorted(float(run["busbw_gb_s"]) for run in self.runs)

    @property
    def is_made(self) -> bool:
        """Whether there are enough runs to judge by."""
        return len(self.runs) >= CLEAN_RUNS

    @property
    def busbw_gb_s(self) -> float:
        """The median."""
        return median(self.values)

    @property
    def spread(self) -> float:
        """How far the slowest lies below the fastest, as a share of it."""
        return 1 - self.values[0] / self.values[-1]

    def share(self, busbw_gb_s: float) -> float:
        """A measurement as a share of the baseline; below `ACCEPTED` it is slow."""
        return busbw_gb_s / self.busbw_gb_s


def settings_of(environment: Mapping[str, Optional[str]]) -> tuple[tuple[str, str], ...]:
    """The variables of a profile that belong to a key: those that change how fast a collective is."""
    prefixes = ("NCCL_", "FI_", "OFI_", "EFA_", "RDMAV_", "UCX_", "CUDA_", "LD_LIBRARY_PATH")
    quiet = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
    kept = {n: v for n, v in environment.items() if v is not None and n.startswith(prefixes) and n not in quiet}
    return tuple(sorted(kept.items()))


def read_baseline(root: Path, key: Key) -> Baseline:
    """The baseline of a key, without runs where there is none; a file that cannot be read counts as none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads((root / "baselines" / key.name).read_text())
        runs = tuple(run for run in said["runs"] if float(run["busbw_gb_s"]) > 0)
        if said["key"] == key.as_json():
            return Baseline(key, runs)
    return Baseline(key)


def add_runs(root: Path, key: Key, runs: Sequence[Mapping[str, Any]]) -> tuple[Baseline, str]:
    """Add clean runs to a baseline; as it is then, and why nothing was added: empty where it was.

    Runs that are slow by what is there, or lie far apart, make none: a slow allocation would become the measure.
    """
    before = read_baseline(root, key)
    if before.is_made and (slow := [run for run in runs if before.share(run["busbw_gb_s"]) < ACCEPTED]):
        value, share = slow[0]["busbw_gb_s"], before.share(slow[0]["busbw_gb_s"])
        return before, f"{value:.2f} GB/s is {share:.0%} of the baseline, which stays as it is"
    after = Baseline(key, (*before.runs, *runs))
    if not before.is_made and len(after.runs) > 1 and after.spread > 1 - ACCEPTED:
        low, high = after.values[0], after.values[-1]
        return before, f"its runs are between {low:.2f} and {high:.2f} GB/s, too far apart to judge by"
    said = {
        "key": key.as_json(),
        "median_gb_s": after.busbw_gb_s,
        "lowest_gb_s": after.values[0],
        "highest_gb_s": after.values[-1],
        "spread": after.spread,
        "runs": list(after.runs),
    }
    write_json(root / "baselines" / key.name, said)
    return after, ""


def write_json(path: Path, value: Any) -> None:
    """Write a file whole: to a temporary name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)
