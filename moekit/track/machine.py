"""What preflight says of an attempt's nodes, as metrics and alerts: its `verdict.json` and `refused.json`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from moekit.job.attempts import read_json
from moekit.job.endings import refusal


def machine_metrics(attempt: Path) -> dict[str, float]:
    """Bus bandwidths in GB/s that were measured before the training, and the share of the baseline; empty: none were.

    Inside nodes it is the slowest node's.
    """
    verdict: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        verdict = json.loads((attempt / "preflight" / "verdict.json").read_text(encoding="utf-8"))
    if not isinstance(verdict, dict):
        return {}
    said = {
        "machine/alltoall_gb_s": verdict.get("across"),
        "machine/alltoall_share_of_baseline": verdict.get("share"),
        "machine/alltoall_inside_gb_s": min((verdict.get("inside") or {}).values(), default=None),
        "machine/allreduce_gb_s": verdict.get("allreduce"),
    }
    return {name: float(value) for name, value in said.items() if value}


def machine_refusal(attempt: Path) -> tuple[str, int, float]:
    """Why an attempt's nodes were refused, the step it began from, and when; empty where they were not."""
    decision = read_json(attempt / "decision.json")
    sentence = str(refusal(attempt).get("sentence") or "")
    return sentence, int(decision.get("step") or 0), float(decision.get("time") or 0)
