"""What a diagnostic step measures, one function at a time: against float64, and what each of them refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.job import samples

pytestmark = pytest.mark.megatron
torch = pytest.importorskip("torch")

SEEDS = st.integers(0, 2**32)


def layer(topk: int = 2, **options: Any) -> Any:
    """A module as the functions see it: its settings, and its router's top-k."""
    plain = {
        **{"moe_token_dispatcher_type": "alltoall", "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1},
        **{"moe_shared_expert_overlap": False, "fp8": None, "fp4": None},
    }
    return SimpleNamespace(config=SimpleNamespace(**plain | options), router=SimpleNamespace(topk=topk))


def drawn(seed: int, *shape: int, dtype: Any = None) -> Any:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed % 2**31), dtype=torch.float64)
    return values.to(dtype or torch.float32)


@given(SEEDS, st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40, deadline=None)
def test_norms_against_float64(seed: int, counts: list[int], dtype: Any) -> None:
    output = drawn(seed, sum(counts), 7, dtype=dtype)
    found = samples.norms(layer(), output, torch.tensor(counts))
    each = np.split(np.linalg.norm(output.double().numpy(), axis=1), np.cumsum(counts)[:-1])
    assert (found["rows"], found["width"]) == (counts, 7)
    assert found["sum_l2"] == pytest.approx([float(rows.sum()) for rows in each], rel=1e-5)


@given(SEEDS, st.integers(1, 6), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_shared_over_routed_against_float64(seed: int, tokens: int, zeros: int) -> None:
    shared, routed = drawn(seed, tokens, 2, 5), drawn(seed + 1, tokens, 2, 5)
    routed.view(-1, 5)[: min(zeros, 2 * tokens)] = 0
    found = samples.shared_over_routed(layer(), shared, routed)
    one, other = (np.linalg.norm(branch.double().numpy(), axis=-1).ravel() for branch in (shared, routed))
    ratios = one[other > 0] / other[other > 0]
    assert (found["tokens"], found["zero_routed"]) == (2 * tokens, int((other == 0).sum()))
    assert found["sum"] == pytest.approx(ratios.sum(), rel=1e-5)
    assert found["largest"] == (pytest.approx(ratios.max(), rel=1e-5) if len(ratios) else None)


@given(SEEDS, st.integers(1, 20), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_dropped_is_of_tokens_that_are_no_padding(seed: int, tokens: int, topk: int) -> None:
    """1 - K / (N topk), with K the assignments that are left of N tokens (handbook A.1)."""
    chooser = np.random.default_rng(seed)
    chosen = np.zeros((tokens, 8), bool)
    np.put_along_axis(chosen, chooser.random((tokens, 8)).argsort(axis=1)[:, :topk], True, axis=1)
    chosen &= chooser.random((tokens, 8)) < 0.7
    mask = chooser.random(tokens) < 0.3
    found = samples.dropped(layer(topk), torch.from_numpy(mask).reshape(tokens, 1), torch.from_numpy(chosen))
    kept, there = int(chosen[~mask].sum()), int((~mask).sum())
    assert found == {"assignments": there * topk, "dropped": there * topk - kept}
    assert samples.dropped(layer(topk), None, torch.from_numpy(chosen))["assignments"] == tokens * topk


@given(SEEDS, st.integers(2, 9))
@settings(max_examples=40, deadline=None)
def test_bias_against_float64(seed: int, experts: int) -> None:
    values = drawn(seed, experts)
    found = samples.bias(SimpleNamespace(router=SimpleNamespace(expert_bias=values)))
    wide = values.double().numpy()
    assert found == pytest.approx({"smallest": wide.min(), "largest": wide.max(), "std": wide.std()})


APART = {
    "moe_token_dispatcher_type": "allgather",
    "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "moe_shared_expert_overlap": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
}
ANYWHERE = {
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "cuda_graph_impl": "local",
    "overlap_moe_expert_parallel_comm": True,
}
PADDED = dict.fromkeys(samples.PADDED, True)


@pytest.mark.parametrize(("name", "value"), (APART | ANYWHERE | PADDED).items())
def test_branches_that_cannot_be_told_apart_are_refused(name: str, value: Any) -> None:
    samples.branches_apart(layer().config)
    with pytest.raises(samples.Refused):
        samples.branches_apart(layer(**{name: value}).config)


@pytest.mark.parametrize(
    ("name", "value"), (ANYWHERE | PADDED | {"expert_tensor_parallel_size": 2, "none": None}).items()
)
def test_norms_that_cannot_be_taken_are_refused(name: str, value: Any) -> None:
    rows = 4 if name == "none" else 3  # one that is no token
    with pytest.raises(samples.Refused):
        samples.norms(layer(**{name: value}), torch.ones(rows, 2), torch.tensor([1, 2]))


@pytest.mark.parametrize(("name", "value"), (ANYWHERE | PADDED).items())
def test_drops_that_cannot_be_counted_are_refused(name: str, value: Any) -> None:
    with pytest.raises(samples.Refused):
        samples.dropped(layer(**{name: value}), None, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(samples.Refused, match="no routing map"):
        samples.dropped(layer(), None, torch.ones(2, 4))
