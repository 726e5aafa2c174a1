"""The all-to-all that experts use, measured inside each node and across all of them, and judged (handbook 2.1)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Optional

from .baselines import ACCEPTED, CLEAN_RUNS, Baseline, Key, add_runs, read_baseline
from .findings import Finding
from .measure import SIZE_BYTES, Asked, Measurer
from .nccl_tests import Measured
from .network import judge_network, read_network
from .pairs import Pair, find_slow

_RUNS_OF_A_BASELINE = CLEAN_RUNS
_RUNS_OF_A_TRIAL = 3


class Exchange:
    """One allocation's collectives. `run` measures and judges; `as_json` is what came of it."""

    def __init__(self, out: Path, nodes: Sequence[str], asked: Mapping[str, Any]) -> None:
        self._nodes = tuple(nodes)
        self._asked = asked
        self._root = Path(asked["shared_root"], "preflight")
        self._measurer = Measurer(out / "collectives", asked)
        self._inside: dict[str, list[float]] = {}
        self._across: list[float] = []
        self._allreduce: list[float] = []
        self._baseline: dict[str, float] = {}
        self._network: dict[str, list[str]] = {}
        self._pairs: list[dict[str, Any]] = []
        self._tried: dict[str, Any] = {}
        self._slow = False

    def run(self) -> list[Finding]:
        """Measure what the profile has a program for; what fails ends it."""
        if not self._asked["nccl_tests"]:
            what = "the exchange between GPUs: the profile names no `nccl_tests`"
            return [Finding("", "across", "skip", what)]
        if self._asked["baseline"] and _is_investigated(self._root, self._key(len(self._nodes)).name):
            why = "the newest preflight of its kind was slow: a clean one without `--baseline` comes first"
            return [Finding("", "baseline", "fail", f"no baseline of {len(self._nodes)} nodes: {why}")]
        found: list[Finding] = []
        rounds = _RUNS_OF_A_BASELINE if self._asked["baseline"] else 1
        for _ in range(rounds):
            for step in (self._inside_each, self._across_all):
                found += step()
                if any(finding.level == "fail" for finding in found):
                    return found
        if self._asked["baseline"]:
            found += self._add_to_baselines()
        if self._asked["try"]:
            found += self._try()
        return list(dict.fromkeys(found))

    def as_json(self) -> dict[str, Any]:
        """For `verdict.json`: bus bandwidths in GB/s, medians where there were several runs."""
        across = median(self._across) if self._across else None
        usual = self._baseline.get("across")
        return {
            "inside": {node: median(values) for node, values in self._inside.items()},
            "across": across,
            "allreduce": median(self._allreduce) if self._allreduce else None,
            "baseline": self._baseline,
            "share": across / usual if across and usual else None,
            "key": self._key(len(self._nodes)).name if self._asked["nccl_tests"] else None,
            "slow": self._slow,
            "network": self._network,
            "pairs": self._pairs,
            "tried": self._tried,
        }

    def _key(self, nodes: int) -> Key:
        """What a number on so many nodes of this allocation is compared with."""
        return Key(
            collective="alltoall",
            nodes=nodes,
            gpus_per_node=int(self._asked["gpus_per_node"]),
            size_bytes=SIZE_BYTES,
            gpu=str(self._asked["gpu"]),
            image=_identity(str(self._asked["image"] or self._asked["nccl_tests"])),
            settings=tuple(sorted(self._asked["settings"].items())),
        )

    def _inside_each(self) -> list[Finding]:
        found, baseline = [], read_baseline(self._root, self._key(1))
        results = self._measurer.measure([Asked("alltoall", (node,)) for node in self._nodes])
        for node, (measured, _) in dict(zip(self._nodes, results)).items():  # noqa: B905
            if measured.problem:
                found.append(_failed(node, measured))
                continue
            self._inside.setdefault(node, []).append(measured.busbw_gb_s)
            if why := _slow_by(baseline, measured.busbw_gb_s):
                self._slow = self._slow or len(self._nodes) == 1
                found.append(Finding(node, "inside", "fail", f"all-to-all inside it is {why}"))
        return found + self._judged_by("inside", baseline, 1)

    def _across_all(self) -> list[Finding]:
        if len(self._nodes) < 2:
            return []
        baseline = read_baseline(self._root, self._key(len(self._nodes)))
        ((measured, log),) = self._measurer.measure([Asked("alltoall", self._nodes)])
        taken = read_network(log.read_text(errors="replace").splitlines())
        self._network = {node: sorted(one.networks) for node, one in taken.items() if one.networks}
        found = list(judge_network(str(self._asked["fabric"]), taken, self._nodes))
        if any(finding.level == "fail" for finding in found):
            return found
        if measured.problem:
            why = f"all-to-all across {len(self._nodes)} nodes: {measured.problem}"
            return found + self._bisect(why, f" ({log})")
        self._across.append(measured.busbw_gb_s)
        found += self._judged_by("across", baseline, len(self._nodes))
        found += self._all_reduce(measured)
        if why := _slow_by(baseline, measured.busbw_gb_s):
            return found + self._bisect(f"all-to-all across {len(self._nodes)} nodes is {why}", "")
        return found

    def _judged_by(self, kind: str, baseline: Baseline, nodes: int) -> list[Finding]:
        """Note the baseline; or say that there is none to judge by."""
        if baseline.is_made:
            self._baseline[kind] = baseline.busbw_gb_s
            return []
        if self._asked["baseline"]:
            return []
        have = f"{len(baseline.runs)} of {CLEAN_RUNS} clean runs"
        make = f"`moekit preflight --nodes {nodes} --baseline` makes it"
        what = f"how fast all-to-all is on {nodes} node{'s' * (nodes > 1)}: no baseline ({have}); {make}"
        return [Finding("", kind, "skip", what)]

    def _all_reduce(self, alltoall: Measured) -> list[Finding]:
        """Beside it: an all-reduce that is well says nothing of an all-to-all, and is not judged."""
        ((measured, _),) = self._measurer.measure([Asked("allreduce", self._nodes)])
        if measured.problem:
            return [Finding("", "allreduce", "skip", f"all-reduce beside it: {measured.problem}")]
        self._allreduce.append(measured.busbw_gb_s)
        print(f"preflight: all-to-all {alltoall.busbw_gb_s:.2f} GB/s, all-reduce {measured.busbw_gb_s:.2f}", flush=True)
        return []

    def _bisect(self, why: str, kept: str) -> list[Finding]:
        """Which nodes of a slow allocation it is."""
        self._slow = True
        baseline = read_baseline(self._root, self._key(2))
        if not baseline.is_made:
            what = f"{why}{kept}; which nodes it is, only a baseline of two nodes can tell"
            return [Finding("", "across", "fail", what)]
        print(f"preflight: {why}: pairs of nodes are measured", flush=True)

        def measure(pairs: Sequence[Pair]) -> dict[Pair, Optional[float]]:
            results = self._measurer.measure([Asked("alltoall", pair) for pair in pairs])
            values = [None if measured.problem else measured.busbw_gb_s for measured, _ in results]
            return dict(zip(pairs, values))  # noqa: B905

        found = find_slow(self._nodes, measure, ACCEPTED * baseline.busbw_gb_s)
        self._pairs += found.tried
        if found.bad:
            return [Finding(node, "across", "fail", said) for node, said in found.bad.items()]
        return [Finding("", "across", "fail", f"{why}{kept}; {found.said}")]

    def _add_to_baselines(self) -> list[Finding]:
        """Keep clean runs."""
        found = []
        inside = [((node,), value) for node, values in self._inside.items() for value in values]
        runs: dict[int, list[tuple[tuple[str, ...], float]]] = {1: [*inside]}
        if self._across:
            runs[len(self._nodes)] = [(self._nodes, value) for value in self._across]
        for nodes, measured in runs.items():
            stamp = {
                "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "job": os.environ.get("SLURM_JOB_ID", ""),
            }
            new = [{"busbw_gb_s": value, "nodes": list(names), **stamp} for names, value in measured]
            baseline, why = add_runs(self._root, self._key(nodes), new)
            if why:
                found.append(Finding("", "baseline", "fail", f"no baseline of {nodes} nodes: {why}"))
                continue
            self._baseline["inside" if nodes == 1 else "across"] = baseline.busbw_gb_s
            low, high = baseline.values[0], baseline.values[-1]
            said = f"{baseline.busbw_gb_s:.2f} GB/s, {low:.2f} to {high:.2f} in {len(baseline.runs)} runs"
            print(f"preflight: baseline of {nodes} node{'s' * (nodes > 1)}: {said}", flush=True)
        return found

    def _try(self) -> list[Finding]:
        """Two settings in turn on the same nodes; nothing of it becomes a baseline."""
        settings, values = dict(self._asked["try"]), {"as it is": [], "tried": []}  # type: ignore[var-annotated]
        for _ in range(_RUNS_OF_A_TRIAL):
            for name, given in (("as it is", {}), ("tried", settings)):
                ((measured, _),) = self._measurer.measure([Asked("alltoall", self._nodes, given)])
                if measured.problem:
                    return [Finding("", "try", "warn", f"with {name} settings: {measured.problem}")]
                values[name].append(measured.busbw_gb_s)
        self._tried = {"settings": settings, **values}
        words = ", ".join(f"{name}={value}" for name, value in settings.items())
        one, other = (median(values[name]) for name in values)
        print(f"preflight: with {words} {other:.2f} GB/s, without {one:.2f} ({other / one - 1:+.1%})", flush=True)
        return []


def _slow_by(baseline: Baseline, busbw_gb_s: float) -> str:
    """Why a number is slow; empty where it is not, or nothing is known."""
    if not baseline.is_made or baseline.share(busbw_gb_s) >= ACCEPTED:
        return ""
    usual = baseline.busbw_gb_s
    return f"{busbw_gb_s:.2f} GB/s, {busbw_gb_s / usual:.0%} of the baseline's {usual:.2f}"


def _failed(node: str, measured: Measured) -> Finding:
    what = f"all-to-all inside it: {measured.problem}"
    return Finding(node, "inside", "fail", what, own="arrived wrong" in measured.problem)


def _is_investigated(root: Path, key: str) -> bool:
    """Whether the newest preflight of a key was slow."""
    for path in sorted((root / "results").glob("*.json"), reverse=True):
        with suppress(OSError, ValueError, KeyError):
            said = json.loads(path.read_text())
            if said["key"] == key and (said["slow"] or said["inside"]):
                return bool(said["slow"])
    return False


def _identity(image: str) -> str:
    """An image's path and what tells it from another one under that path: its sha256 by its record, else its size."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return f"{image} (sha256 {json.loads(Path(f'{image}.json').read_text())['sha256'][:16]})"
    with suppress(OSError):
        return f"{image} ({Path(image).stat().st_size} bytes)"
    return image
