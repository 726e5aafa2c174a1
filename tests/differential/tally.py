"""What a run of the differential test came to: counts, coverage, and the smallest example of each disagreement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from generate import Case, Values, fields
from judged import DISAGREEMENTS, Finding, Kind, Refusal

from moekit.megatron.verdict import Verdict
from moekit.recipe.rules import RULES

LEAST_CHANGES_OF_A_FIELD = 20
LEAST_REFUSED = 0.35
"""Changes that Megatron accepts show little; a part of the fields is moekit's own, and it never sees them."""


@dataclass
class Tally:
    """Grows by one case at a time and keeps no case but the smallest of each group."""

    cases: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Cases that Megatron refuses, by stage."""
    verdicts: Counter[Kind] = field(default_factory=Counter)
    """Cases by the worst finding."""
    groups: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    """Findings by kind and group."""
    changes: Counter[str] = field(default_factory=Counter)
    """Changes by field."""
    broken: Counter[str] = field(default_factory=Counter)
    """Cases by the rule of ours that refuses them."""
    smallest: dict[tuple[Kind, str], tuple[Case, str]] = field(default_factory=dict)
    """Of each group the case with the fewest changes, and what was said."""
    accepted: list[Case] = field(default_factory=list)
    """Cases that neither refuses, for the training step."""
    steps: Counter[str] = field(default_factory=Counter)
    """Answers to training steps."""

    def add(self, case: Case, ours: Sequence[Refusal], theirs: Sequence[Verdict], found: Sequence[Finding]) -> None:
        """One more case."""
        self.cases += 1
        self.changes.update({field_of(name) for name in case.changes})
        self.broken.update({refusal.source for refusal in ours})
        self.refused.update(verdict.stage for verdict in theirs if verdict.answer == "refused")
        if not ours and theirs[-1].answer != "refused":
            self.accepted.append(case)
        self.verdicts[min((finding.kind for finding in found), key=WORST_FIRST.index)] += 1
        self._group(case, found)

    def add_step(self, case: Case, verdict: Verdict) -> None:
        """What a training step said to a case that both accept otherwise."""
        self.steps[verdict.answer] += 1
        if verdict.answer == "refused":
            self.verdicts["false accept"] += 1
            self._group(case, [Finding("false accept", f"step {verdict.place}", verdict.message)])
        elif verdict.answer == "not_judged":
            self._group(case, [Finding("not judged", f"step: {verdict.feature}")])

    def _group(self, case: Case, found: Sequence[Finding]) -> None:
        for finding in set(found):
            key = (finding.kind, finding.group)
            self.groups[key] += 1
            known = self.smallest.get(key)
            if known is None or _size(case) < _size(known[0]):
                self.smallest[key] = (case, finding.said)

    @property
    def share_refused(self) -> float:
        """The share of judged cases that Megatron refuses."""
        return self.refused.total() / max(1, self.cases)

    def of(self, kind: Kind) -> list[tuple[str, int]]:
        """The groups of a kind with their counts, most first."""
        found = [(group, count) for (each, group), count in self.groups.items() if each == kind]
        return sorted(found, key=lambda item: (-item[1], item[0]))

    def changes_of_fields(self) -> list[int]:
        """How often each field was changed, fewest first."""
        return sorted(self.changes[name] for name in fields())

    def failures(self, whole: bool) -> Iterator[str]:
        """Why the run does not hold; the least number of changes of a field counts only where it is `whole`."""
        for kind in ("false accept", "false refusal"):
            if count := self.verdicts[kind]:
                yield f"{count} recipes with a {kind}"
        if self.share_refused < LEAST_REFUSED:
            yield f"Megatron refuses {self.share_refused:.0%} of the recipes, below {LEAST_REFUSED:.0%}"
        if whole and self.changes_of_fields()[0] < LEAST_CHANGES_OF_A_FIELD:
            few = [name for name in fields() if self.changes[name] < LEAST_CHANGES_OF_A_FIELD]
            yield f"changed below {LEAST_CHANGES_OF_A_FIELD} times: {', '.join(few)}"


WORST_FIRST: tuple[Kind, ...] = (
    *DISAGREEMENTS,
    "ours alone",
    "not judged",
    "both refuse",
    "both accept",
)


def field_of(name: str) -> str:
    """The field of a dotted name: all variables are one."""
    return ".".join(name.split(".")[:2])


def _size(case: Case) -> tuple[int, int]:
    return len(case.changes), len(str(case.changes))


def summary(tally: Tally) -> str:
    """The run in a page of Markdown."""
    counts = tally.changes_of_fields()
    never = [rule.__name__ for rule in RULES if not tally.broken[rule.__name__]]
    lines = [
        f"{tally.cases:,} recipes, {tally.changes.total():,} changes of {len(counts)} fields: each field at least "
        f"{counts[0]} times, half of them {median(counts):g} times or more.",
        f"Megatron refuses {tally.refused.total():,} ({tally.share_refused:.0%}).",
        "",
        *_table(("Both answers", "recipes"), [(kind, tally.verdicts[kind]) for kind in WORST_FIRST[::-1]]),
        *_table(("Megatron refuses at", "recipes"), tally.refused.most_common()),
        *_table(("Training steps of those that both accept", "recipes"), tally.steps.most_common()),
        *_table(("Not judged", "times"), tally.of("not judged")),
        *_table(("Refused by us alone, by rule", "recipes"), tally.of("ours alone")),
    ]
    for kind in DISAGREEMENTS:
        lines += _table((kind.capitalize(), "recipes", "said", "smallest example"), _examples(tally, kind))
    if never:
        lines += [f"Rules that no recipe broke: {', '.join(never)}.", ""]
    return "\n".join(lines)


def _examples(tally: Tally, kind: Kind) -> list[tuple[Any, ...]]:
    rows = []
    for group, count in tally.of(kind):
        case, said = tally.smallest[kind, group]
        rows.append((group, count, said[:160], f"{case.seed} on {case.profile}: {case.changes}"))
    return rows


def _table(heads: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> list[str]:
    if not rows:
        return []
    lines = [heads, ("---",) * len(heads), *rows]
    return [*(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines), ""]


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def as_json(tally: Tally, smallest: dict[tuple[Kind, str], Values]) -> dict[str, Any]:
    """Everything, for a script; `smallest` has minimal recipes as differences from the plain seed."""
    return {
        "recipes": tally.cases,
        "refused": dict(tally.refused),
        "kinds": dict(tally.verdicts),
        "steps": dict(tally.steps),
        "changes": {name: tally.changes[name] for name in fields()},
        "rules": dict(tally.broken),
        "groups": [
            {"kind": kind, "group": group, "count": count, "said": said}
            | {"seed": case.seed, "profile": case.profile, "changes": case.changes}
            | {"minimal": smallest.get((kind, group))}
            for (kind, group), count in tally.groups.items()
            for case, said in [tally.smallest[kind, group]]
        ],
    }
