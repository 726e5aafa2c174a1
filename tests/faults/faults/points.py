"""The points at which a fault is put in, and cases made of them."""

from __future__ import annotations

from faults import harm as h
from faults.bench import Plan
from faults.harm import Harm
from faults.trial import Case

POINTS = {
    "begin": "before anything is imported",
    "load": "before the checkpoint is read",
    "first": "before the first step",
    "step": "in a step",
    "shards": "in a save, shards half written",
    "metadata": "in a save, `.metadata` missing",
    "tracker": "in a save, tracker not written",
    "validation": "in a validation",
    "end": "after the last step",
}
BETWEEN, REST = "between attempts", "at rest"
_RANK = {"metadata": 0, "tracker": 0}
"""The rank that comes by a point; where both do, the last one."""
_BEFORE_STEPS = ("begin", "load", "first")


def held(point: str, **more: object) -> Plan:
    return {"point": point, "rank": _RANK.get(point, 1), "do": "hold", **more}


def at_points(slug: str, fault: str, points: str, harm: Harm, then: str = "resumes", **more: object) -> list[Case]:
    """The same fault at several points, at each of which a rank is held while it is put in."""
    return [one(f"{slug}-{point}", fault, point, harm, then, **more) for point in points.split()]


def one(name: str, fault: str, point: str, harm: Harm, then: str = "resumes", **more: object) -> Case:
    start = "early" if point in _BEFORE_STEPS else "late" if point == "end" else "going"
    return Case(name, fault, POINTS[point], then, harm, (held(point),), **{"start": start, **more})  # type: ignore[arg-type]


def inside(slug: str, fault: str, points: str, do: str, then: str = "resumes", **more: object) -> list[Case]:
    """What a rank does to itself at several points."""
    cases = []
    for point in points.split():
        start = "early" if point in _BEFORE_STEPS else "late" if point == "end" else "going"
        plan = {**held(point), "do": do}
        cases.append(Case(f"{slug}-{point}", fault, POINTS[point], then, plans=(plan,), **{"start": start, **more}))  # type: ignore[arg-type]
    return cases


def at_rest(name: str, fault: str, harm: Harm, then: str = "resumes", start: str = "early", **more: object) -> Case:
    """Something is wrong in a run's files when its job starts."""
    return Case(name, fault, REST, then, start=start, before=harm, **more)  # type: ignore[arg-type]


def between(name: str, fault: str, harm: Harm, then: str = "resumes", **more: object) -> Case:
    """Something happens while the job waits for its next attempt."""
    back = h.both(h.scontrol("requeue", "{job}"), harm)
    return Case(name, fault, BETWEEN, then, back, (held("step"),), **more)  # type: ignore[arg-type]
