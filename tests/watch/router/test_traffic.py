"""Nodes and bytes: against sets of nodes counted one token at a time."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.problems import MoekitError
from moekit.watch.layout import RankLayout
from moekit.watch.router.grid import Grid
from moekit.watch.router.traffic import copies_of, count, rank_of_experts, traffic_of


@given(
    st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.integers(1, 8), st.integers(0, 31)
)
@settings(max_examples=150, deadline=None)
def test_as_sets_of_nodes(seed: int, ep: int, etp: int, topk: int, source: int) -> None:
    layout, per_node = RankLayout(32, ep, etp, num_experts=16), 4
    experts = np.argsort(np.random.default_rng(seed).random((30, 16)), axis=1)[:, :topk]
    found = count(experts.astype(np.uint16), rank_of_experts(layout, source), source, per_node)
    group = ep * etp
    nodes, remote, choices, others = [], [], 0, 0
    for token in experts.tolist():
        ranks = [source // group * group + expert // (16 // ep) * etp for expert in token]
        reached = {rank // per_node for rank in ranks}
        nodes.append(len(reached))
        remote.append(len(reached - {source // per_node}))
        choices += sum(rank // per_node != source // per_node for rank in ranks)
        others += sum(rank // per_node == source // per_node and rank != source for rank in ranks)
    assert (found.tokens, found.nodes, found.most_nodes) == (30, sum(nodes), max(nodes))
    assert (found.remote_nodes, found.most_remote_nodes) == (sum(remote), max(remote))
    assert (found.choices, found.remote_choices, found.other_ranks) == (30 * topk, choices, others)


@pytest.mark.megatron
@pytest.mark.parametrize(("ep", "etp", "pp"), [(4, 1, 1), (2, 2, 1), (4, 2, 2), (2, 1, 4)])
def test_experts_are_where_megatron_puts_them(ep: int, etp: int, pp: int) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    world = 16
    stage_ranks = world // pp
    layout = RankLayout(stage_ranks, ep, etp, num_experts=2 * ep)
    generator = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=world // (ep * etp * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp", rank_offset=0
    )
    for group in generator.get_ranks("ep"):
        for rank in group:
            first = rank // stage_ranks * stage_ranks
            owners = rank_of_experts(layout, rank - first, first)
            assert [owner // etp for owner in owners[::2]] == [member // etp for member in group]


def test_bytes_by_the_dispatchers_policy() -> None:
    base = {"hidden_size": 2048, "bf16": True}
    alltoall = copies_of({**base, "moe_token_dispatcher_type": "alltoall"})
    assert (alltoall.size, alltoall.policy, alltoall.dispatcher) == (4096, "expert", "alltoall")
    flex = copies_of({**base, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"})
    assert (flex.policy, flex.dispatcher) == ("node", "flex (deepep)")
    assert copies_of({**base, "moe_token_dispatcher_type": "allgather"}).policy == ""
    assert copies_of({**base, "moe_latent_size": 512}).size == 1024
    assert copies_of({**base, "moe_dispatch_fwd_dtype": "mxfp8"}).size == 2048
    with pytest.raises(MoekitError, match="hidden_size"):
        copies_of({})


ARGS = {
    "num_experts": 8,
    "world_size": 4,
    "expert_model_parallel_size": 4,
    "num_layers": 2,
    "hidden_size": 64,
    "bf16": True,
    "moe_token_dispatcher_type": "alltoall",
}


def write(folder: Path, rank: int, *rows: list[list[int]]) -> None:
    with (folder / f"router_trace_rank{rank}.jsonl").open("w") as file:
        for step, row in enumerate(rows):
            head = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": 1, "rank": rank}
            file.write(json.dumps({**head, "num_tokens": len(row), "topk": 3, "top_indices": row}) + "\n")


def test_a_trace_of_four_ranks_on_two_nodes(tmp_path: Path) -> None:
    write(tmp_path, 0, [[0, 1, 2], [0, 4, 6]], [[4, 5, 7]])
    write(tmp_path, 3, [[0, 2, 4]])
    (tmp_path / "router_trace_rank1.jsonl").write_text("junk\n")
    found = traffic_of(tmp_path, Grid.from_args(ARGS), gpus_per_node=2)
    (layer,) = found.layers.values()
    assert next(iter(found.layers)).name == "layer_1"
    assert (layer.tokens, layer.nodes, layer.most_nodes) == (4, 1 + 2 + 1 + 2, 2)
    assert (layer.remote_nodes, layer.remote_choices) == (0 + 1 + 1 + 1, 0 + 2 + 3 + 2)
    assert found.remote_bytes(layer, "expert") == 7 * 128 / 4
    assert found.remote_bytes(layer, "node") == 3 * 128 / 4
    assert dict(found.skipped) == {"not JSON": 1}
    said = json.loads(json.dumps(found.as_json()))
    assert said["policy"] == "expert"
    assert said["layers"]["layer_1"]["remote_nodes"] == 0.75
    whole = traffic_of(tmp_path, Grid.from_args(ARGS), gpus_per_node=8)
    assert [one.remote_nodes for one in whole.layers.values()] == [0]


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="no routing trace"):
        traffic_of(tmp_path, Grid.from_args(ARGS), gpus_per_node=2)
    split = {**ARGS, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}
    with pytest.raises(MoekitError, match="nodes of 3 GPUs cut the 2 ranks"):
        traffic_of(tmp_path, Grid.from_args(split), gpus_per_node=3)
