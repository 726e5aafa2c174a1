"""Statistics of loads: the handbook's worked examples, and float64 references on random counts."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moekit.watch.router import loads

COUNTS = arrays.arrays(
    np.int64, st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 4, 8])), elements=st.integers(0, 9)
)  # (group, micro batch, expert)
CHOICES = st.integers(1, 4).flatmap(  # (token, choice) of 3 sequences and 8 experts
    lambda length: st.lists(
        st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=3 * length, max_size=3 * length
    )
)


def test_the_worked_example() -> None:
    assert loads.max_vio(np.array([2, 2, 4, 0])) == 1  # the expert without tokens is part of the mean
    assert loads.max_vio(np.array([5, 5, 5, 5])) == 0
    assert np.isnan(loads.max_vio(np.array([0, 0, 0, 0])))


def test_the_mean_of_micro_batches_is_not_the_global_batch() -> None:
    """Each of two micro batches goes to one expert alone, and together they are even."""
    counts = np.array([[[4, 0], [0, 4]]])
    assert loads.max_vio(counts).tolist() == [[1, 1]]
    assert loads.max_vio(counts.sum(axis=(0, 1))) == 0


def test_ranks_may_be_uneven_where_experts_are_not_very() -> None:
    counts = np.array([3, 3, 1, 1])
    assert loads.rank_loads(counts, 2).tolist() == [6, 2]
    assert loads.busiest_over_mean(loads.rank_loads(counts, 2)) == 1.5
    assert loads.max_vio(counts) == 0.5
    assert loads.dead_experts(np.array([1, 0, 2, 0])) == [1, 3]
    assert loads.dead_experts(np.zeros(4, np.int64)) == []


@given(COUNTS)
def test_max_vio_and_ranks_against_exact_fractions(counts: np.ndarray) -> None:
    found, ranks = loads.max_vio(counts), loads.busiest_over_mean(loads.rank_loads(counts, 2))
    for place in np.ndindex(*counts.shape[:-1]):
        vector = [int(count) for count in counts[place]]
        half = len(vector) // 2
        two = [sum(vector[:half]), sum(vector[half:])]
        if not sum(vector):
            assert math.isnan(found[place])
            assert math.isnan(ranks[place])
            continue
        assert found[place] == pytest.approx(float(Fraction(max(vector) * len(vector), sum(vector)) - 1), abs=1e-12)
        assert ranks[place] == pytest.approx(float(Fraction(2 * max(two), sum(two))), abs=1e-12)


@given(CHOICES)
def test_sequences_against_a_loop(chosen: list[list[int]]) -> None:
    """Row s * B + b is of sequence b."""
    expected = [[0] * 8 for _ in range(3)]
    for row, experts in enumerate(chosen):
        for expert in experts:
            expected[row % 3][expert] += 1
    assert loads.sequence_counts(np.array(chosen), 3, 8).tolist() == expected
    assert loads.chosen_counts(np.array(chosen), 8).tolist() == np.sum(expected, axis=0).tolist()


def test_masked_rows_count_nowhere() -> None:
    chosen = np.array([[0, 1], [-1, -1], [2, 1], [3, 0]])
    assert loads.chosen_counts(chosen, 4).tolist() == [2, 2, 1, 1]
    assert loads.sequence_counts(chosen, 2, 4).tolist() == [[1, 2, 1, 0], [1, 0, 0, 1]]


A, B, C = [1, 2], [3, 0], [2, 1]


@pytest.mark.parametrize(
    ("calls", "expected", "evaluations", "kept", "recomputed"),
    [
        ([A, B], 2, False, [A, B], False),
        ([A, A, B, B], 2, False, [A, B], True),  # each forward is made anew in its own backward
        ([A, B, A, C, B, C], 3, False, [A, B, C], True),  # a pipeline stage that warms up
        ([C, C, A, B], 2, True, [A, B], False),  # evaluations are ahead of the step
        ([C, A, A, B, B], 2, True, [A, B], True),
        ([A, B, C], 2, False, [A, B, C], False),  # neither: the caller sees that it is not 2
        ([A, B, C, A], 2, False, [A, B, C, A], False),
        ([A, B, B], None, True, [A, B, B], False),
        ([A], 2, True, [A], False),
    ],
)
def test_recomputed_forwards_and_evaluations(
    calls: list[list[int]], expected: int | None, evaluations: bool, kept: list[list[int]], recomputed: bool
) -> None:
    found, again = loads.once(np.array(calls), expected, evaluations)
    assert ([calls[call] for call in found], again) == (kept, recomputed)


@given(st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=6), st.randoms())
def test_recomputed_in_any_schedule(forwards: list[list[int]], rng: object) -> None:
    """Each micro batch's second forward comes somewhere behind its first, in the same order."""
    calls, first, second = [], 0, 0
    while second < len(forwards):
        if first < len(forwards) and (first == second or rng.random() < 0.5):  # type: ignore[attr-defined]
            calls.append(forwards[first])
            first += 1
        else:
            calls.append(forwards[second])
            second += 1
    found, again = loads.once(np.array(calls), len(forwards), False)
    assert sorted(calls[call] for call in found) == sorted(forwards)
    assert again


def test_disagreement_is_two_numbers() -> None:
    """One choice of ten layers differs in each of ten tokens: 10 % of choices, every token."""
    one = np.tile(np.array([0, 1]), (10, 10, 1))  # (token, layer, choice)
    other = one.copy()
    other[np.arange(10), np.arange(10)] = [2, 1]
    assert loads.disagreement(one, other) == (0.1, 1.0)
    assert loads.disagreement(one, one[..., ::-1]) == (0, 0)  # the order is none of the choice


@given(
    arrays.arrays(
        np.int64, st.tuples(st.integers(1, 6), st.integers(1, 5), st.just(2), st.just(3)), elements=st.integers(0, 4)
    )
)
def test_disagreement_against_sets(both: np.ndarray) -> None:
    one, other = both[..., 0, :], both[..., 1, :]
    differ = [
        [sorted(a) != sorted(b) for a, b in zip(x, y, strict=True)]
        for x, y in zip(one.tolist(), other.tolist(), strict=True)
    ]
    choices, tokens = loads.disagreement(one, other)
    assert choices == pytest.approx(sum(map(sum, differ)) / sum(map(len, differ)))
    assert tokens == pytest.approx(sum(map(any, differ)) / len(differ))
    assert choices <= tokens <= min(1, choices * one.shape[1]) + 1e-12


def test_the_reported_pair() -> None:
    """10 % of choices differ and 94 % of tokens are touched (handbook 4); neither number tells the other."""
    one = np.zeros((100, 48, 2), np.int64)
    one[..., 1] = 1
    spread, heaped = one.copy(), one.copy()
    for number in range(480):  # of 4,800 choices
        spread[number % 94, number // 94] = [0, 2]
        heaped[number // 48, number % 48] = [0, 2]
    assert loads.disagreement(one, spread) == (0.1, 0.94)
    assert loads.disagreement(one, heaped) == (0.1, 0.1)
