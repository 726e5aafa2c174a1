"""A slow allocation is taken apart by pairs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import pytest

from moekit.job.preflight.pairs import MOST_ROUNDS, Pair, find_slow, rounds

FAST, SLOW, ACCEPTED = 77.14, 39.84, 69.43


def measures(is_slow: Callable[[Pair], bool]) -> Callable[[Sequence[Pair]], Mapping[Pair, float | None]]:
    return lambda pairs: {pair: SLOW if is_slow(pair) else FAST for pair in pairs}


def bad(nodes: str, slow: str) -> str:
    """The nodes that are found, of those that are slow with every other."""
    found = find_slow(list(nodes), measures(lambda pair: bool(set(pair) & set(slow))), ACCEPTED)
    return "".join(sorted(found.bad))


@pytest.mark.parametrize("nodes", ["abc", "abcd", "abcde", "abcdefgh", "abcdefghi"])
def test_one_slow_node_is_found_wherever_it_is(nodes: str) -> None:
    assert [bad(nodes, node) for node in nodes] == list(nodes)


@pytest.mark.parametrize("nodes", ["abcde", "abcdefgh"])
def test_two_slow_nodes_are_found(nodes: str) -> None:
    for one, other in combinations(nodes, 2):
        assert bad(nodes, one + other) == one + other


def test_of_two_nodes_both_are_left_out() -> None:
    found = find_slow(["a", "b"], measures(lambda _: True), ACCEPTED)
    why = "all-to-all between a and b is 39.84 GB/s, below 69.43; which of the two it is, two nodes cannot tell"
    assert found.bad == {"a": why, "b": why}


def test_the_way_between_two_good_nodes() -> None:
    found = find_slow(list("abcd"), measures(lambda pair: set(pair) == {"a", "b"}), ACCEPTED)
    why = "all-to-all between a and b is 39.84 GB/s, below 69.43, though each is fast with others"
    assert found.bad == {"b": why}


def test_where_every_pair_is_slow_no_node_is_blamed() -> None:
    found = find_slow(list("abcd"), measures(lambda _: True), ACCEPTED)
    assert (found.bad, "no single node" in found.said) == ({}, True)


def test_where_no_pair_is_slow_no_node_is_blamed() -> None:
    found = find_slow(list("abcdef"), measures(lambda _: False), ACCEPTED)
    assert (found.bad, found.said) == ({}, "no pair of its nodes is slow: it is slow only together")
    assert len(found.tried) == MOST_ROUNDS * 3


def test_a_pair_that_is_slow_only_beside_others_is_not_slow() -> None:
    def measure(pairs: Sequence[Pair]) -> Mapping[Pair, float]:
        return {pair: FAST if len(pairs) == 1 else SLOW for pair in pairs}

    assert find_slow(list("abcd"), measure, ACCEPTED).bad == {}


def test_a_measurement_that_fails_is_slow() -> None:
    def measure(pairs: Sequence[Pair]) -> Mapping[Pair, float | None]:
        return {pair: None if "c" in pair else FAST for pair in pairs}

    found = find_slow(list("abcd"), measure, ACCEPTED)
    assert list(found.bad) == ["c"]
    assert found.bad["c"].endswith("does not end well")


@pytest.mark.parametrize("number", range(2, 12))
def test_rounds_have_each_pair_once_and_no_node_twice(number: int) -> None:
    nodes = [f"n{node}" for node in range(number)]
    found = rounds(nodes)
    pairs = [frozenset(pair) for pairs in found for pair in pairs]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, combinations(nodes, 2)))
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in found)
