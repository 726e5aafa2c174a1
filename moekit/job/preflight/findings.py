"""What a check found, in one shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

MOST_TOLD = 8
"""Nodes that a sentence names; the verdict has all."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check says of a node."""

    node: str
    """Empty: of the whole allocation."""
    check: str
    """`dcgm`, `gpus`, `ecc`, `xid`, `throttle`, `memlock`, `fabric`, `locks`, `speed`, `names`, `inside`, `across`,
    `network`, `allreduce`."""
    level: str
    """`fail` (do not train on it), `warn`, or `skip` (not checked, and why)."""
    what: str
    """One sentence, without the node's name."""
    own: bool = True
    """Whether it is this node's own fault also where all nodes have it: a broken GPU is, a limit that a site sets is
    not."""

    def as_json(self) -> dict[str, Any]:
        """For `verdict.json`."""
        return asdict(self)


def bad_nodes(findings: Iterable[Finding], nodes: Iterable[str]) -> dict[str, str]:
    """The nodes to stay away from, and why: those that fail by themselves, or fail where another does not."""
    names = list(nodes)
    failed = [finding for finding in findings if finding.level == "fail" and finding.node]
    bad: dict[str, list[str]] = {}
    for finding in failed:
        alike = {other.node for other in failed if other.check == finding.check and not other.own}
        if finding.own or not alike >= set(names):
            bad.setdefault(finding.node, []).append(finding.what)
    return {node: "; ".join(dict.fromkeys(bad[node])) for node in names if node in bad}


def refusal(findings: Iterable[Finding], bad: dict[str, str]) -> str:
    """Why there is no training on this allocation, in one sentence; empty where there may be."""
    if bad:
        told = [f"{node}: {why}" for node, why in bad.items()][:MOST_TOLD]
        return "; ".join([*told, *([f"and {len(bad) - MOST_TOLD} more nodes"] if len(bad) > MOST_TOLD else [])])
    failed = [finding for finding in findings if finding.level == "fail"]
    if not failed:
        return ""
    whats = dict.fromkeys(finding.what for finding in failed)
    everywhere = all(finding.node for finding in failed)
    return f"{'on every node: ' if everywhere else ''}{'; '.join(whats)}"
