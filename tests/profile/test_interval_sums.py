"""Arithmetic of intervals, beside one that marks every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moekit.profile.families import ALL_TO_ALL, COMPUTE, FAMILIES, IDLE
from moekit.profile.intervals import Intervals, joined, length, own_time, union
from moekit.profile.shares import shares_of
from moekit.profile.timeline import Timeline

TIMES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=25)


def made(times: list[tuple[int, int]]) -> Intervals:
    return np.array([(begin, begin + length) for begin, length in times], np.int64).reshape(-1, 2)


def marked(intervals: Intervals) -> set[int]:
    return {instant for begin, end in intervals.tolist() for instant in range(begin, end)}


@given(TIMES)
def test_union_has_the_same_instants_once(times: list[tuple[int, int]]) -> None:
    merged = union(made(times))
    assert marked(merged) == marked(made(times))
    assert length(merged) == len(marked(merged))
    assert (merged[1:, 0] > merged[:-1, 1]).all()


@given(TIMES, TIMES)
def test_joined_is_either(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert marked(joined([made(one), made(other)])) == marked(made(one)) | marked(made(other))


@given(
    st.lists(
        st.tuples(st.sampled_from(FAMILIES), st.integers(1, 3), st.integers(0, 60), st.integers(1, 12)), min_size=1
    )
)
def test_shares_beside_a_slow_reference(kernels: list[tuple[str, int, int, int]]) -> None:
    parts: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for family, stream, begin, duration in kernels:
        parts.setdefault((f"stream {stream}", family), []).append((begin, duration))
    recorded = {name: made(times) for name, times in parts.items()}
    first = min(begin for _, _, begin, _ in kernels)
    last = max(begin + duration for _, _, begin, duration in kernels)
    shares = shares_of(Timeline("rank 0", "made", False, 1, recorded, (first, last)))
    by_family = {
        family: set().union(*(marked(times) for (_, kind), times in recorded.items() if kind == family))
        for family in FAMILIES
    }
    expected = dict.fromkeys((*FAMILIES, IDLE), 0)
    for instant in range(first, last):
        expected[next((family for family in FAMILIES if instant in by_family[family]), IDLE)] += 1
    computing = set().union(*(by_family[family] for family in COMPUTE))
    assert shares.share_ns == expected
    assert sum(shares.share_ns.values()) == shares.whole_ns
    assert shares.exposed_ns == len(by_family[ALL_TO_ALL] - computing)
    assert shares.hidden_ns == len(by_family[ALL_TO_ALL] & computing)


Call = tuple[int, int]


@st.composite
def nested(draw: st.DrawFn) -> list[Call]:
    """Calls of one thread: each in a part of its parent that no sibling has."""
    calls: list[Call] = []

    def fill(begin: int, end: int, depth: int) -> None:
        at = begin
        while at < end and depth < 4 and draw(st.booleans()):
            start = draw(st.integers(at, end - 1))
            stop = draw(st.integers(start + 1, end))
            calls.append((start, stop))
            fill(start, stop, depth + 1)
            at = stop

    fill(0, 40, 0)
    return draw(st.permutations(calls))


@given(nested())
def test_own_time_is_the_innermost_calls(calls: list[Call]) -> None:
    times = np.array(calls, np.int64).reshape(-1, 2)
    own = own_time(times).tolist()
    assert sum(own) == len(marked(times))
    shortest: dict[Call, int] = dict.fromkeys(calls, 0)
    for instant in marked(times):
        shortest[min((c for c in calls if c[0] <= instant < c[1]), key=lambda c: c[1] - c[0])] += 1
    summed = dict.fromkeys(calls, 0)
    for call, value in zip(calls, own, strict=True):  # calls alike in both ends share their time
        summed[call] += value
    assert summed == shortest


def test_a_call_that_leaves_its_parent_is_cut() -> None:
    assert own_time(np.array([(0, 10), (5, 15), (20, 30)], np.int64)).tolist() == [5, 5, 10]
