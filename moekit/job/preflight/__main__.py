"""`python3 -m preflight OUT NODE...`: on the first node of an allocation, in the folder that has `preflight.json`.

It looks at every node, measures, judges, and leaves `OUT/verdict.json`; where there should be no training here, also
`OUT/../refused.json`. Exit code 3: refused. Any other but 0 is a defect of this program, and says nothing of the nodes.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .baselines import write_json
from .exchange import Exchange
from .findings import Finding, bad_nodes, refusal
from .judging import judge_nodes
from .measured import write_measured
from .node import DIAG_TIMEOUT_S, LOCKS

REFUSED = 3
_SLACK_S = 300


def preflight(out: Path, nodes: Sequence[str], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, in order; what fails on the way ends it there. The verdict."""
    began = time.time()
    reports = _ask_nodes(out, nodes, asked)
    findings = _accepted(judge_nodes(reports, nodes, asked))
    _say_findings(findings)
    exchange = Exchange(out, nodes, asked)
    if not any(finding.level == "fail" for finding in findings):
        of_exchange = _accepted(exchange.run())
        _say_findings(of_exchange)
        findings += of_exchange
    bad = bad_nodes(findings, nodes)
    return {
        "when": began,
        "seconds": time.time() - began,
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "profile": asked["profile"],
        "nodes": list(nodes),
        "refused": refusal(findings, bad),
        "bad": bad,
        "findings": [finding.as_json() for finding in findings],
        "gpus": {node: reports[node]["gpus"]["text"] for node in reports},
        **exchange.as_json(),
    }


def _accepted(findings: Sequence[Finding]) -> list[Finding]:
    """Failures of the checks that MOEKIT_PREFLIGHT_ACCEPT names, `memlock,names`, are warnings."""
    accepted = os.environ.get("MOEKIT_PREFLIGHT_ACCEPT", "").split(",")
    return [replace(one, level="warn") if one.level == "fail" and one.check in accepted else one for one in findings]


def _ask_nodes(out: Path, nodes: Sequence[str], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Run `node.py` on every node; their reports, by node."""
    (out / "nodes").mkdir(parents=True, exist_ok=True)
    here = os.environ.get("SLURMD_NODENAME") or nodes[0]
    with _listening(here) as endpoint, _locked(out):
        step = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", *asked["node_srun"]]
        program = [sys.executable, "-m", "preflight.node", str(out), endpoint, *nodes]
        timeout_s = DIAG_TIMEOUT_S[int(asked["level"])] + _SLACK_S
        with (out / "nodes.log").open("wb") as log, suppress(subprocess.TimeoutExpired):
            subprocess.run(["srun", *step, *program], stdout=log, stderr=log, timeout=timeout_s)
    reports = {}
    for node in nodes:
        with suppress(OSError, ValueError):
            reports[node] = json.loads((out / "nodes" / f"{node}.json").read_text())
            _keep_output(out, node, reports[node])
    return reports


def _keep_output(out: Path, node: str, report: Mapping[str, Any]) -> None:
    """DCGM's own output as a file, for who looks after the node."""
    (out / "nodes" / f"{node}.dcgm.txt").write_text(report["dcgm"]["text"])


@contextmanager
def _listening(host: str) -> Iterator[str]:
    """A port on this node that takes connections: what the other nodes will have to do for training."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both) as server:

        def take() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=take, daemon=True).start()
        yield f"{host}:{server.getsockname()[1]}"


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold a lock of each kind, so that other nodes can say whether it keeps them out."""
    with (out / "held.flock").open("wb") as one, (out / "held.lockf").open("wb") as other:
        for file, kind in ((one, LOCKS[0]), (other, LOCKS[1])):
            with suppress(OSError):
                (fcntl.flock if kind == "flock" else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _say_findings(findings: Sequence[Finding]) -> None:
    """One line for each thing found, nodes that have it together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        alike.setdefault((finding.level, finding.what), []).append(finding.node)
    for (level, what), nodes in alike.items():
        names = [node for node in nodes if node]
        few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        word = {"fail": "FAIL", "warn": "warning", "skip": "not checked"}[level]
        print(f"preflight: {word}: {few + ': ' if few else ''}{what}", flush=True)


def main(words: Sequence[str]) -> int:
    """Run it in the working directory."""
    out, nodes = Path(words[0]), list(words[1:])
    asked = json.loads(Path("preflight.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    verdict = preflight(out, nodes, asked)
    write_json(out / "verdict.json", verdict)
    _keep(Path(asked["shared_root"], "preflight"), verdict)
    if verdict["refused"]:
        said = {"by": "preflight", "sentence": f"preflight: {verdict['refused']}", "bad": verdict["bad"]}
        write_json(out.parent / "refused.json", said)
        print(f"preflight: refused in {verdict['seconds']:.0f} s: {verdict['refused']}", flush=True)
        return REFUSED
    unmade = len({one["what"] for one in verdict["findings"] if one["level"] == "skip"})
    rest = f"; {unmade} checks were not made" if unmade else ""
    many = f"{len(nodes)} node{'s' * (len(nodes) > 1)}"
    print(f"preflight: nothing against training on {many}, in {verdict['seconds']:.0f} s{rest}", flush=True)
    return 0


def _keep(root: Path, verdict: Mapping[str, Any]) -> None:
    """For later preflights and the planner; a folder that cannot be written is no reason not to train."""
    try:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(verdict["when"]))
        write_json(root / "results" / f"{stamp}.{verdict['job'] or os.getpid()}.json", verdict)
        if not verdict["refused"] and not verdict["tried"]:
            write_measured(root, verdict)
    except OSError as reason:
        print(f"preflight: warning: {root} cannot be written: {reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
