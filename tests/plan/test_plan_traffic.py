"""Bytes between nodes by formula, against the count that a routing trace gets."""

from __future__ import annotations

import numpy as np
import pytest

from moekit.plan.resolve import resolve
from moekit.plan.traffic import traffic
from moekit.recipe.load import load
from moekit.watch.router.traffic import count

TOKENS = 20_000


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("is_limited", [False, True])
def test_bytes_are_those_a_trace_counts(nodes: int, is_limited: bool) -> None:
    """Random choices of first_moe's shape, a group to a node; the trace's own count says what travels."""
    dice, experts, topk = np.random.default_rng(nodes), 64, 8
    (said,) = [one for one in traffic(resolve(load("first_moe")), 2) if one.nodes == nodes]
    scores = dice.random((TOKENS, experts))
    if is_limited:
        order = np.argsort(dice.random((TOKENS, nodes)), axis=1)
        kept = np.zeros((TOKENS, nodes), bool)
        np.put_along_axis(kept, order[:, : said.limit], True, axis=1)
        scores[~np.repeat(kept, experts // nodes, axis=1)] = -1
    chosen = np.argsort(-scores, axis=1)[:, :topk]
    owners = np.repeat(np.arange(nodes) * 8, experts // nodes)  # a node's experts on its first rank
    found = [count(chosen[home::nodes], owners, home * 8, 8) for home in range(nodes)]
    per_expert = sum(one.remote_choices for one in found) / TOKENS * said.copy
    per_node = sum(one.remote_nodes for one in found) / TOKENS * said.copy
    assert per_expert == pytest.approx(said.alltoall, rel=0.02)
    assert per_node == pytest.approx(said.flex_limited if is_limited else said.flex, rel=0.02)


def test_a_limit_saves_where_a_token_travels_once_a_node() -> None:
    found = {one.nodes: one for one in traffic(resolve(load("first_moe")), 2)}
    assert [*found] == [2, 4, 8]
    assert found[8].copy == 4096
    assert found[8].alltoall == 8 * 7 / 8 * 4096
    assert found[8].flex < found[8].alltoall
    assert found[8].saved == pytest.approx(0.315, abs=5e-3)
    assert all(one.flex_limited <= one.flex for one in found.values())


def test_a_latent_space_travels_and_a_limit_that_holds_too_few_is_left_out() -> None:
    shape = resolve(load("settings/experts_latent"))
    assert shape.experts is not None
    assert shape.experts.latent is not None
    assert {one.copy for one in traffic(shape, 2)} == {2 * shape.experts.latent}
    assert [*traffic(resolve(load("dense")), 2)] == []
    few = [one.nodes for one in traffic(resolve(load("first_moe")), 2, limit=1)]
    assert few == [2, 4, 8]
