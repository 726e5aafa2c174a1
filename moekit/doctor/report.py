"""What the doctor says: as text, or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from moekit.doctor.causes import OF_NETWORK, causes
from moekit.doctor.evidence import Evidence, Log, causes_of
from moekit.doctor.judge import Shown, shown
from moekit.doctor.proofs import Proof
from moekit.doctor.symptoms import Remedy, Symptom, symptoms
from moekit.doctor.triage import Hit

_SURE = {"sure": "sure", "likely": "likely", "possible": "possible, not sure"}
_COVERED = ("aux_blind", "socket", "dead_expert", "z_loss_rise", "loss_not_finite", "experts/norm_")
"""Alerts that a symptom may tell more of."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found, the first being what the others are read by."""

    key: str
    what: str
    sure: str
    shown_by: list[str]
    """Where the evidence is: sentences."""
    more: str
    remedy: str
    section: str = ""
    changes: list[Remedy] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)
    """What else was found and follows from it, or came after."""


@dataclass(frozen=True)
class Report:
    """Everything that is said."""

    title: str
    findings: list[Finding]
    looked_at: list[str]
    """Sentences: what was looked at, and what could not be."""
    proofs: list[Proof] = field(default_factory=list)
    asked: list[Symptom] = field(default_factory=list)
    """Symptoms that the person's words name."""


def findings(evidence: Evidence) -> list[Finding]:
    """Of a run: what its newest bad attempt's log names, then what its numbers show."""
    found = []
    world = evidence.recipe.parallel.gpus or 0
    for attempt in dict.fromkeys(log.attempt for log in evidence.logs):
        found += of_logs([log for log in evidence.logs if log.attempt == attempt], world, _ending(evidence, attempt))
    told = shown(evidence)
    found += [_symptom(one) for one in told]
    covered = _COVERED if told else ()
    found += [
        Finding(alert.key, alert.title, "sure", [f"step {alert.step:,} of attempt {alert.attempt}"], alert.text, "")
        for alert in evidence.alerts
        if alert.key in evidence.picture.active and not alert.key.startswith(tuple(covered))
    ]
    return found


def _ending(evidence: Evidence, attempt: int) -> str:
    """What the exit records say of an attempt; empty where it ended as it should, or runs."""
    for start in evidence.history.starts:
        if start.attempt.number == attempt and not start.running and start.attempt.ending.kind != "ended":
            return start.cause
    return ""


def of_logs(logs: Sequence[Log], world: int = 0, ending: str = "") -> list[Finding]:
    """What the logs of one attempt name: its first cause with all that came of it, and what made it slow."""
    found = causes_of(logs)
    drags = [one for one in found if causes()[one[1].key].tier == "drag"]
    fatal = [one for one in found if one not in drags]
    said = []
    if fatal:
        (log, hit), *rest = fatal
        said.append(_cause(log, hit, rest, world, ending))
    elif ending:
        what = f"attempt {logs[0].attempt}: {ending}" if logs else ending
        more = "its log names no cause that moekit knows; `moekit logs RUN` has its end"
        said.append(Finding("ending", what, "likely", ["exit records and the log's last lines"], more, ""))
    explained = {other for _, hit in drags for other in causes()[hit.key].explains}
    for log, hit in (one for one in drags if one[1].key not in explained):
        behind = [other for other in drags if other[1].key in causes()[hit.key].explains]
        said.append(_cause(log, hit, behind, world, ""))
    return said


def _cause(log: Log, hit: Hit, rest: Sequence[tuple[Log, Hit]], world: int, ending: str) -> Finding:
    cause = causes()[hit.key]
    by = [_place(log, hit)]
    if hit.count > 1 or hit.ranks or hit.hosts:
        by.append(_who(hit))
    if waits := log.triage.collectives.sentence(world):
        by.append(waits)
    if cause.key in OF_NETWORK and (taken := log.triage.networks.sentence()):
        by.append(taken)
    if ending:
        by.append(f"exit records: {ending}")
    sure = cause.sure
    if cause.key == "gpu_outlier" and (tests := log.triage.sniff.sentence()):
        by.append(tests)
        sure = "likely" if log.triage.sniff.again else sure
    if log.triage.went_on(hit):
        by.append("training went on after it")
        sure = "possible"
    elif hit.mild and cause.tier != "drag" and not cause.lasts:
        by.append("its line is marked a warning")
        sure = "possible"
    follows = [f"{causes()[one.key].cause} ({_lines(one)})" for _, one in rest]
    return Finding(hit.key, cause.cause, sure, by, cause.more, cause.remedy, cause.section, follows=follows)


def _place(log: Log, hit: Hit) -> str:
    where = "/".join(log.path.parts[-3:]) if log.path.name else "line"
    return f"{where}{':' if log.path.name else ' '}{hit.line_number}: {hit.line}"


def _lines(hit: Hit) -> str:
    return f"{hit.count:,} lines, first {hit.line_number:,}" if hit.count > 1 else f"line {hit.line_number:,}"


def _who(hit: Hit) -> str:
    parts = [f"{hit.count:,} such lines" if hit.count > 1 else "one such line"]
    if hit.ranks:
        ranks = sorted(hit.ranks)
        shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8:,} more" if len(ranks) > 8 else "")
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {shown}")
    if hit.hosts:
        names = list(hit.hosts)
        parts.append(f"on {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else ""))
    return ", ".join(parts)


def _symptom(one: Shown) -> Finding:
    symptom = one.symptom
    more = f"{symptom.needs}: {symptom.get}"
    return Finding(
        symptom.key,
        symptom.signal,
        one.sure,
        [one.sentence],
        more,
        symptom.advice,
        symptom.section,
        list(symptom.remedies),
    )


def lines(report: Report, width: int = 100) -> Iterator[str]:
    """What a person reads."""
    yield report.title
    if report.proofs:
        yield ""
        yield "is the stack proven?"
        for proof in report.proofs:
            yield f"  {proof.name:14}{proof.sentence}"
    for symptom in report.asked:
        yield ""
        yield from _asked(symptom, width)
    if not report.looked_at:
        return
    yield ""
    if not report.findings:
        yield "nothing found"
    for number, one in enumerate(report.findings, 1):
        yield from _wrapped(f"{number}. ", f"{one.what} ({_SURE[one.sure]})", width)
        yield from _rows(one, width)
    yield ""
    for row in report.looked_at:
        yield from _wrapped("looked at  " if row is report.looked_at[0] else " " * 11, row, width)


def _rows(one: Finding, width: int) -> Iterator[str]:
    for at, row in enumerate(one.shown_by):
        yield from _wrapped(f"   {'shown by' if not at else '':11}", row, width)
    for row in one.follows[:6]:
        yield from _wrapped(f"   {'with it' if row is one.follows[0] else '':11}", row, width)
    if len(one.follows) > 6:
        yield f"   {'':11}and {len(one.follows) - 6} other causes that its lines name"
    yield from _wrapped(f"   {'tells more':11}", one.more, width)
    if one.remedy:
        yield from _wrapped(f"   {'to do':11}", one.remedy, width)
    yield from _changes(one.changes, width)
    if one.section:
        yield f"   {'handbook':11}{one.section}"


def _asked(symptom: Symptom, width: int) -> Iterator[str]:
    yield from _wrapped(f"{'/'.join(symptom.labels)}: ", symptom.signal, width)
    yield from _wrapped(f"   {'needs':11}", symptom.needs, width)
    yield from _wrapped(f"   {'get it':11}", symptom.get, width)
    if symptom.advice:
        yield from _wrapped(f"   {'to do':11}", symptom.advice, width)
    yield from _changes(symptom.remedies, width)
    yield f"   {'handbook':11}{symptom.section}"


def _changes(remedies: Sequence[Remedy], width: int) -> Iterator[str]:
    for remedy in remedies:
        yield from _wrapped(f"   {'recipe':11}", f"{remedy.why}:", width)
        for row in _yaml(remedy).splitlines():
            yield f"   {'':13}{row}"


def _yaml(remedy: Remedy) -> str:
    return yaml.safe_dump(dict(remedy.change), sort_keys=False)


def _wrapped(begin: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, 60), initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False
    ) or [begin.rstrip()]


def as_json(report: Report) -> dict[str, Any]:
    """The same for a script."""
    return {
        "title": report.title,
        "proofs": [vars(proof) for proof in report.proofs],
        "asked": [_symptom_json(one) for one in report.asked],
        "findings": [{**vars(one), "changes": [vars(r) for r in one.changes]} for one in report.findings],
        "looked_at": report.looked_at,
    }


def _symptom_json(one: Symptom) -> dict[str, Any]:
    changes = [vars(r) for r in one.remedies]
    return {**vars(one), "labels": list(one.labels), "remedies": changes}


def looked_at(evidence: Evidence) -> list[str]:
    """What was looked at of a run, and what could not be."""
    picture = evidence.picture
    logs = [f"{'/'.join(log.path.parts[-3:])} ({log.triage.lines:,} lines)" for log in evidence.logs]
    starts = len(evidence.history.starts)
    said = [f"{starts} attempt{'s' * (starts != 1)} and their exit records, the recipe"]
    said += [f"logs: {', '.join(logs)}"] if logs else ["no log"]
    if picture.step:
        counts = f", tokens by expert up to step {picture.counted_step:,}" if picture.counted_step else ""
        said.append(f"metrics up to step {picture.step:,}{counts}, and the alerts of `moekit watch` over all of them")
    tested = sum(bool(one.test) for one in symptoms().values())
    said.append(
        f"{tested} of the handbook's {len(symptoms())} symptoms show in a run's files; `--symptom` explains all"
    )
    return said + evidence.missing
