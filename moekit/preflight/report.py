"""What a preflight found, as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moekit.runs.report import when

_LABEL = 14


def lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    """The verdict first, then what it rests on."""
    nodes = verdict["nodes"]
    many = f"{len(nodes)} node{'s' * (len(nodes) > 1)}"
    job = f", job {verdict['job']}" if verdict["job"] else ""
    came = "refused" if verdict["refused"] else "nothing against training there"
    yield f"preflight of {many}{job}, {when(verdict['when'])}: {came}"
    yield from _fact("nodes", ", ".join(nodes))
    for node, why in verdict["bad"].items():
        yield from _fact("bad", f"{node}: {why}")
    if verdict["refused"] and not verdict["bad"]:
        yield from _fact("refused", verdict["refused"])
    yield from _exchange(verdict)
    for level, label in (("warn", "warning"), ("skip", "not checked")):
        for what, named in _alike(verdict["findings"], level).items():
            yield from _fact(label, f"{_names(named)}{what}")
    if verdict["bad"]:
        yield from _fact("leave out", f"--exclude={','.join(verdict['bad'])}")


def _exchange(verdict: Mapping[str, Any]) -> Iterator[str]:
    """Bus bandwidths, each beside what it was judged by."""
    inside, usual = verdict["inside"], verdict["baseline"]
    if inside:
        lowest = min(inside, key=lambda node: float(inside[node]))
        said = f"{inside[lowest]:.2f} GB/s"
        if len(inside) > 1:
            said += f" ({lowest}) to {max(inside.values()):.2f}"
        yield from _fact("inside a node", said + _beside(inside[lowest], usual.get("inside")))
    if verdict["across"]:
        yield from _fact(
            "across nodes", f"{verdict['across']:.2f} GB/s{_beside(verdict['across'], usual.get('across'))}"
        )
    if verdict["allreduce"]:
        yield from _fact("all-reduce", f"{verdict['allreduce']:.2f} GB/s, which says nothing of the exchange")
    taken: dict[str, list[str]] = {}
    for node, networks in verdict["network"].items():
        taken.setdefault(", ".join(networks), []).append(node)
    for network, named in taken.items():
        yield from _fact("network", f"{network} on {len(named)} node{'s' * (len(named) > 1)}")
    slow = [one for one in verdict["pairs"] if one["slow"]]
    if verdict["pairs"]:
        yield from _fact("pairs", f"{len(verdict['pairs'])} measured, {len(slow)} slow")
    if tried := verdict["tried"]:
        names = " ".join(f"{name}={value}" for name, value in tried["settings"].items())
        for label in ("as it is", "tried"):
            values = " ".join(f"{value:.2f}" for value in tried[label])
            yield from _fact(label, f"{values} GB/s{f' with {names}' if label == 'tried' else ''}")


def _beside(value: float, usual: float | None) -> str:
    return f", {value / usual:.0%} of the baseline's {usual:.2f}" if usual else ", no baseline"


def _alike(findings: Iterable[Mapping[str, Any]], level: str) -> dict[str, list[str]]:
    """Sentences of a level, each with the nodes that have it."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        if finding["level"] == level:
            found.setdefault(finding["what"], []).append(finding["node"])
    return found


def _names(nodes: Iterable[str]) -> str:
    names = [node for node in nodes if node]
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{few}: " if few else ""


def _fact(label: str, text: str) -> Iterator[str]:
    yield f"  {label.ljust(_LABEL)}{text}"
