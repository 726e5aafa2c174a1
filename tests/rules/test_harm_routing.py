"""What goes wrong without a word in models that the rules on the router and its balance refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harm import numbers_of

pytestmark = pytest.mark.megatron

MOE = "tiny_moe.yaml"


@pytest.mark.parametrize(("chosen", "is_followed"), [(2, True), (3, False)])
def test_no_score_chooses_among_groups_of_none(chosen: int, is_followed: bool) -> None:
    """Four tokens, each of which wants the experts of another group; top-2 of 16 experts in 4 groups."""
    import torch
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    scores = torch.eye(4).repeat_interleave(4, dim=1) + torch.rand(4, 16) / 10
    _, experts = group_limited_topk(scores, 2, num_tokens=4, num_experts=16, num_groups=4, group_topk=chosen)
    wanted = torch.arange(4).unsqueeze(1).expand(4, 2)
    assert bool((experts // 4 == wanted).all()) == is_followed


def test_experts_outside_the_chosen_groups_spoil_the_weights() -> None:
    """Top-9 out of 2 groups of 4 experts: a sigmoid's weights are no numbers, a softmax's ninth is 0."""
    import torch
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    for function, kind in (("sigmoid", "nan"), ("softmax", "zero")):
        weights, routing = topk_routing_with_score_function(
            torch.randn(4, 16), 9, num_groups=4, group_topk=2, score_function=function
        )
        chosen = weights[routing].view(4, 9)
        spoilt = chosen.isnan().any(dim=1) if kind == "nan" else (chosen == 0).sum(dim=1) == 1
        assert bool(spoilt.all())


@pytest.mark.parametrize("method", ["quantile_balancing", "sinkhorn", "none"])
def test_a_method_in_a_list_is_left_off(method: str, here: Path) -> None:
    listed, without = numbers_of(
        here,
        (MOE, f"balance: {{type: [aux_loss, {method}], aux_loss_coeff: [1e-2, 0]}}\n"),
        (MOE, "balance: {type: aux_loss, aux_loss_coeff: 1e-2}\n"),
    )
    assert listed == without


def test_a_method_said_twice_counts_once(here: Path) -> None:
    twice, once = numbers_of(
        here,
        (MOE, "balance: {type: [aux_loss, aux_loss], aux_loss_coeff: [1e-2, 5]}\n"),
        (MOE, "balance: {type: aux_loss, aux_loss_coeff: 1e-2}\n"),
    )
    assert twice == once


def test_quantiles_of_memory_alone_balance_nothing(here: Path) -> None:
    memory, none, quantiles = numbers_of(
        here,
        (MOE, "balance: {type: quantile_balancing, aux_loss_coeff: null, quantile_balancing_ema: 1}\n"),
        (MOE, "balance: {type: none, aux_loss_coeff: null}\n"),
        (MOE, "balance: {type: quantile_balancing, aux_loss_coeff: null}\n"),
    )
    assert memory == none != quantiles


@pytest.mark.parametrize(("kind", "most"), [("bfloat16", 256), ("float16", 2048)])
def test_bf16_counts_no_257th_micro_batch(kind: str, most: int) -> None:
    """The buffer that counts micro batches (router.py:212), as Float16Module leaves it (module.py:464)."""
    import torch

    router = torch.nn.Module()
    router.register_buffer("ga_steps", torch.tensor(0, dtype=torch.float32), persistent=False)
    router.to(getattr(torch, kind))
    counts = []
    for _ in range(most + 44):
        router.ga_steps += 1
        counts.append(int(router.ga_steps))
    assert counts[:most] == list(range(1, most + 1))
    assert set(counts[most:]) == {most}


@pytest.mark.parametrize(("kind", "directions"), [("float32", 2), ("float16", 1)])
def test_fp16_counts_of_a_whole_step_balance_nothing(kind: str, directions: int) -> None:
    """Eight experts, one of which got most of 65,536 choices."""
    import torch
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
    from torch.testing._internal.distributed.fake_pg import FakeStore

    counts = torch.tensor([30_528.0] + [5001.0] * 7).round().to(getattr(torch, kind))
    counts[0] += 1
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        bias = get_updated_expert_bias(counts, torch.zeros(8), 1e-3, torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()
    assert len(set(bias.tolist())) == directions


@pytest.mark.parametrize("forced", ["force_load_balancing: true", "force_biased: 0.5"])
def test_forced_routing_does_not_look_at_the_router(forced: str, here: Path) -> None:
    """Noise on the router's input changes the first loss, unless routing is forced."""
    noise = "router: {input_jitter_eps: 0.5}\n"
    free, noisy, random, noisy_random = numbers_of(
        here,
        (MOE, ""),
        (MOE, noise),
        (MOE, f"balance: {{{forced}}}\n"),
        (MOE, f"balance: {{{forced}}}\n{noise}"),
    )
    assert free[0][0] != noisy[0][0]
    assert random[0][0] == noisy_random[0][0]


def test_a_table_of_no_data_set_is_not_looked_for() -> None:
    """The job gets no variable, and hash layers keep the placeholder without a word."""
    from moekit.launch.run_files import job_variables
    from moekit.recipe.load import load

    recipe = load("first_moe").recipe
    recipe = replace(recipe, moe=replace(recipe.moe, num_hash_layers=3, hash_table="greedy"))
    assert job_variables(recipe)["MOEKIT_HASH_TABLE"]
    recipe = replace(recipe, data=replace(recipe.data, name=None))
    assert job_variables(recipe)["MOEKIT_HASH_TABLE"] is None


def test_a_path_leads_a_table_out_of_its_data_set(tmp_path: Path) -> None:
    from moekit.launch.rundir import hash_table_file
    from moekit.recipe.load import load

    recipe = load("first_moe").recipe
    tables = hash_table_file(tmp_path, recipe)
    assert tables is None
    for name, inside in (("greedy", True), ("../greedy", False)):
        file = hash_table_file(tmp_path, replace(recipe, moe=replace(recipe.moe, hash_table=name)))
        assert file is not None
        assert (file.resolve().parent.name == "hash_tables") == inside


def test_a_table_reaches_no_layer_that_is_none_of_hash() -> None:
    """A router that is learned keeps its own choice: the table that was asked for says nothing."""
    from types import SimpleNamespace

    import numpy as np

    from moekit.job.hash_table import fill

    router = SimpleNamespace(tid2eid=None, is_hash_layer=False, layer_number=1)
    fill(router, np.zeros((1, 4, 2), np.int32))
    assert router.tid2eid is None
