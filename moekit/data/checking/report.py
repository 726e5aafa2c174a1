"""What a check came to, as a table and sentences for people, or as values for a script."""

from __future__ import annotations

from typing import Any

from moekit.data.checking.folder import Finding, Report, ShardCheck
from moekit.problems import shortened

SHOWN_SHARDS = 40
"""Whole shards that a table lists; those that are not are all listed."""


def as_text(report: Report) -> str:
    """A line for each shard, the totals, and each thing that is wrong with its remedy."""
    whole = [shard for shard in report.shards if not shard.findings]
    listed = {shard.prefix for shard in whole[:SHOWN_SHARDS]}
    shown = [shard for shard in report.shards if shard.findings or shard.prefix in listed]
    rows = [("SHARD", "STATE", "DOCUMENTS", "TOKENS", "LARGEST ID"), *map(_row, shown)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(map(_aligned, row, widths, range(len(row)))) for row in rows] if shown else []
    if (more := len(report.shards) - len(shown)) > 0:
        lines.append(f"and {more:,} more that are whole")
    documents, tokens = (sum(getattr(shard.pair, what) for shard in whole if shard.pair) for what in _TOTALS)
    sample = ", a sample" if report.plan and report.plan.is_sample else ""
    what = f"{tokens:,} tokens in {documents:,} documents"
    lines.append(f"{len(whole):,} of {len(report.shards):,} shards are whole{sample}: {what}")
    for finding in report.findings:
        lines += [f"{finding.kind}: {finding.what}", f"    hint: {finding.remedy}"]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(line.rstrip() for line in lines)


_TOTALS = ("documents", "tokens")


def _aligned(cell: str, width: int, at: int) -> str:
    return cell.ljust(width) if at < 2 else cell.rjust(width)


def _row(shard: ShardCheck) -> tuple[str, str, str, str, str]:
    state = shard.findings[0].kind if shard.findings else "whole"
    pair = shard.pair
    if pair is None or pair.problem:
        return shortened(shard.prefix.name), state, "", "", ""
    return shortened(shard.prefix.name), state, f"{pair.documents:,}", f"{pair.tokens:,}", f"{pair.largest_id:,}"


def as_json(report: Report) -> dict[str, Any]:
    """The same for a script; `ok` is whether nothing is wrong."""
    return {
        "ok": not report.findings,
        "folder": str(report.folder) if report.folder else None,
        "sample": report.plan.is_sample if report.plan else None,
        "shards": [_shard_as_json(shard) for shard in report.shards],
        "findings": [_finding_as_json(finding) for finding in report.findings],
        "notes": list(report.notes),
    }


def _shard_as_json(shard: ShardCheck) -> dict[str, Any]:
    pair = shard.pair
    said: dict[str, Any] = {"prefix": str(shard.prefix), "whole": not shard.findings}
    if pair and not pair.problem:
        names = ("documents", "tokens", "token_type", "largest_id", "bin_sha256", "idx_sha256")
        said |= {name: getattr(pair, name) for name in names}
    return said


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "what": finding.what,
        "remedy": finding.remedy,
        "files": [str(file) for file in finding.files if file.exists()],
    }
