"""The newest accepted bus bandwidths of a cluster, for the planner: `<shared_root>/preflight/PROFILE.json`.

    {"alltoall_busbw_gbps": {"1": 330.1, "2": 77.14}, "allreduce_busbw_gbps": {"2": 398.52}, "runs": {...}}

By node count, in 1e9 bytes a second. Of a node count with a baseline it is the baseline's median.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from .baselines import write_json


def write_measured(root: Path, verdict: Mapping[str, Any]) -> None:
    """Put an accepted preflight's numbers in."""
    path = root / f"{str(verdict['profile']).replace('/', '_')}.json"
    said: Any = {}
    with suppress(OSError, ValueError):
        said = json.loads(path.read_text())
    said = said if isinstance(said, dict) else {}
    values = {("alltoall", 1): verdict["baseline"].get("inside") or _middle(verdict["inside"].values())}
    if (nodes := len(verdict["nodes"])) > 1:
        values["alltoall", nodes] = verdict["baseline"].get("across") or verdict["across"]
        values["allreduce", nodes] = verdict["allreduce"]
    for (collective, nodes), value in values.items():
        if value:
            said.setdefault(f"{collective}_busbw_gbps", {})[str(nodes)] = value
            said.setdefault("runs", {})[f"{collective}.{nodes}"] = {
                "when": verdict["when"],
                "job": verdict["job"],
                "nodes": verdict["nodes"],
            }
    if said:
        write_json(path, said)


def _middle(values: Any) -> float:
    numbers = [value for value in values if value]
    return median(numbers) if numbers else 0.0
