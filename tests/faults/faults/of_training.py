"""Faults of the training itself: what a rank fails with, again and again, and what it computes."""

from __future__ import annotations

from faults import harm as h
from faults.bench import Plan
from faults.points import POINTS, at_rest, held, inside
from faults.trial import Case

BOOM = "raise boom 17 at 0x7f"
EACH_TIME = {"keep": True, "attempt": None}


def failures() -> list[Case]:
    """What a rank fails with."""
    return [
        *inside("error", "an unknown exception", "load step shards metadata tracker validation", BOOM, says="boom"),
        *inside("exit", "a rank ends with code 3", "step", "exit 3", says="SystemExit: 3"),
        *inside("vanish", "a rank ends without a word", "step", "vanish 0"),
        *inside("segv", "SIGSEGV of a rank", "step validation", "signal 11", says="signal 11"),
        *inside("abort", "SIGABRT of a rank", "shards", "signal 6", says="signal 6"),
        *inside(
            "memory",
            "out of memory (torch.OutOfMemoryError)",
            "load step validation",
            "memory",
            "stops",
            says="rank 1 ran out of memory",
        ),
        *inside("ill", "SIGILL of a rank (132)", "begin step", "signal 4", "stops", says="instruction"),
        *inside("argparse", "exit 2 of a rank", "load", "exit 2", "stops", says="refuses its arguments"),
        at_rest(
            "argument",
            "argparse refuses an argument",
            h.option("--no-such-option", "1"),
            "stops",
            attempts=2,
            says="no-such-option",
        ),
        Case(
            "first-kill",
            "SIGKILL of a rank, nothing saved yet",
            POINTS["step"],
            "begins",
            h.kill_rank(1),
            (held("step"),),
            "first",
        ),
        Case(
            "first-told",
            "scancel --batch --signal=TERM, nothing saved yet",
            POINTS["step"],
            "resumes",
            h.scancel("--batch", "--signal=TERM", settle_s=2),
            (held("step"),),
            "first",
        ),
    ]


def again_and_again() -> list[Case]:
    """What would never end."""
    often = "3 attempts in a row ended so"

    def forever(name: str, fault: str, point: str, start: str) -> Case:
        plan = {**held(point), "do": BOOM, **EACH_TIME}
        return Case(name, fault, POINTS[point], "stops", plans=(plan,), start=start, attempts=3, says=often)

    return [
        forever("ever-load", "fails at once, forever", "load", "early"),
        forever("ever-first", "fails at once, forever", "first", "first"),
        forever("ever-step", "the same failure at the same step, thrice", "step", "early"),
        at_rest(
            "ever-shell",
            "fails at once, forever",
            h.write("environment.sh", "echo no such module >&2\nexit 1\n"),
            "stops",
            attempts=4,
            says=often,
        ),
        at_rest(
            "cap",
            "the cap over all attempts",
            h.write("retry.json", '{"requeue": true, "max_attempts": 1, "world": 2, "ranks_per_node": 1}'),
            "stops",
            says="resilience.max_attempts",
        ),
        Case(
            "cap-2",
            "the cap over all attempts",
            POINTS["begin"],
            "stops",
            h.kill_rank(1),
            (held("begin"),),
            "early",
            h.write("retry.json", '{"requeue": true, "max_attempts": 2, "world": 2, "ranks_per_node": 1}'),
            says="resilience.max_attempts",
        ),
    ]


def wrong_results() -> list[Case]:
    """NaN on one rank, in a step that is done again in each attempt."""
    at_15: Plan = {"point": "step", "rank": 1, "do": "nan", "iteration": 15}
    always = {**at_15, **EACH_TIME}

    def renamed(*attempts: int) -> tuple[Plan, ...]:
        """Rank 1 says that it is on n2, where the first attempt had it."""
        return tuple({"point": "begin", "rank": 1, "do": "name n2", "attempt": attempt} for attempt in attempts)

    return [
        Case(
            "nan-16-17",
            "NaN on one rank: 16, then 17",
            POINTS["step"],
            "stops",
            plans=(always,),
            start="early",
            attempts=2,
            says="exit 17",
        ),
        Case(
            "nan-gpu-16-17",
            "NaN on one node: 16, then 17",
            POINTS["step"],
            "stops",
            plans=({**always, "node": "n2"},),
            start="early",
            attempts=2,
            says="exit 17",
        ),
        Case(
            "nan-16-16-17",
            "NaN on one rank: 16, 16 (the same node), then 17",
            POINTS["step"],
            "stops",
            plans=(always, *renamed(3)),
            start="early",
            attempts=3,
            says="exit 17",
        ),
        Case(
            "nan-16-16-16",
            "NaN on one rank: 16 three times",
            POINTS["step"],
            "stops",
            plans=(always, *renamed(3, 4)),
            start="early",
            attempts=3,
            says="3rd time in a row",
        ),
        Case(
            "nan-once",
            "NaN once, not reproduced: 17",
            POINTS["step"],
            "stops",
            plans=(at_15,),
            start="early",
            says="exit 17",
        ),
    ]
