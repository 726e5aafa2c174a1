"""Weights made again from logits: against Megatron's own routing, and against sums in plain Python."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.problems import MoekitError
from moekit.watch.counts import LayerKey
from moekit.watch.router.grid import Grid, Layer
from moekit.watch.router.logits import NO_LOGITS
from moekit.watch.router.weights import (
    FLAT,
    NAMES,
    SHARP,
    LayerWeights,
    Score,
    score_of,
    token_values,
    weights,
    weights_of,
)

SCORES = [
    Score("softmax"),
    Score("softmax", all_experts=True, scale=2.5),
    Score("softmax", scale=2.827),
    Score("sigmoid", scale=2.5),
    Score("sqrtsoftplus", scale=1.5),
]


def plain(logits: list[float], experts: list[int], score: Score) -> list[float]:
    """One token's weights, one operation at a time."""
    chosen = [logits[expert] for expert in experts]
    if score.function == "softmax":
        over = logits if score.all_experts else chosen
        top = max(over)
        total = math.fsum(math.exp(value - top) for value in over)
        found = [math.exp(value - top) / total for value in chosen]
    else:
        softplus = [max(value, 0.0) + math.log1p(math.exp(-abs(value))) for value in chosen]
        found = [math.exp(v - s) for v, s in zip(chosen, softplus, strict=True)]
        if score.function == "sqrtsoftplus":
            found = [math.sqrt(value) for value in softplus]
        if len(found) > 1:
            found = [value / (math.fsum(found) + 1e-20) for value in found]
    return [value * score.scale for value in found]


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(SCORES), st.sampled_from([0.1, 1.0, 20.0]))
@settings(max_examples=150, deadline=None)
def test_every_value_as_in_plain_python(seed: int, topk: int, score: Score, size: float) -> None:
    chooser = np.random.default_rng(seed)
    logits = chooser.normal(0, size, (20, 8))
    experts = np.argsort(chooser.random((20, 8)), axis=1)[:, :topk].astype(np.uint16)
    found = weights(logits, experts, score)
    values = token_values(found, score)
    for token in range(20):
        w = plain(logits[token].tolist(), experts[token].tolist(), score)
        q = [value / math.fsum(w) for value in w]
        np.testing.assert_allclose(found[token], w, rtol=1e-9)
        ordered = sorted(w, reverse=True)
        wanted = {
            "largest": ordered[0],
            "share": max(q),
            "entropy": -math.fsum(value * math.log(value) for value in q),
            "ratio": ordered[0] / ordered[1] if topk > 1 else math.nan,
            "rms": math.sqrt(math.fsum(value**2 for value in q)),
            "output_rms": math.sqrt(math.fsum(value**2 for value in w)),
            "mass": math.fsum(w) / score.scale if score.all_experts else math.nan,
        }
        for name in NAMES:
            np.testing.assert_allclose(values[name][token], wanted[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_handbooks_example() -> None:
    values = token_values(np.array([[0.75, 0.25]]), Score("softmax"))
    assert values["largest"][0] == 0.75
    assert values["ratio"][0] == 3
    assert round(float(values["entropy"][0]), 3) == 0.562
    assert np.isnan(values["mass"][0])


def test_top_1_has_no_ratio_and_no_entropy() -> None:
    values = token_values(weights(np.array([[3.0, 1.0]]), np.array([[0]]), Score("softmax")), Score("softmax"))
    assert (values["largest"][0], values["entropy"][0]) == (1.0, 0.0)
    assert np.isnan(values["ratio"][0])
    layer = LayerWeights()
    layer.add(values, 1)
    assert layer.verdict == ""
    assert layer.as_json()["ratio"] is None


def test_a_weight_of_nothing_is_undefined_or_infinite_and_no_mean_has_it() -> None:
    logits = np.array([[1000.0, -1000.0], [0.0, 0.0]])
    layer = LayerWeights()
    layer.add(token_values(weights(logits, np.array([[0, 1], [0, 1]]), Score("softmax")), Score("softmax")), 2)
    assert layer.spread("ratio").tokens == 1
    assert layer.spread("ratio").mean == 1
    assert layer.spread("entropy").tokens == 2
    dead = weights(np.array([[-2000.0, -3000.0]]), np.array([[0, 1]]), Score("sigmoid"))
    assert np.isnan(token_values(dead, Score("sigmoid"))["entropy"]).all()


@pytest.mark.parametrize(
    ("gap", "verdict"), [(0.0, FLAT), (0.04, FLAT), (0.5, ""), (2.0, ""), (6.0, SHARP)], ids=lambda gap: str(gap)[:4]
)
def test_verdicts(gap: float, verdict: str) -> None:
    logits = np.tile([gap, 0.0, 0.0, 0.0], (10, 1))
    layer = LayerWeights()
    layer.add(token_values(weights(logits, np.tile(np.arange(4), (10, 1)), Score("softmax")), Score("softmax")), 4)
    assert layer.verdict == verdict


def test_two_leaders_are_not_a_flat_gate() -> None:
    values = token_values(np.array([[0.48, 0.48, 0.02, 0.02]]), Score("softmax"))
    layer = LayerWeights()
    layer.add(values, 4)
    assert layer.spread("ratio").mean == 1
    assert layer.verdict == ""


def test_scores_from_a_runs_arguments() -> None:
    assert score_of({}) == Score("softmax")
    assert score_of({"moe_router_pre_softmax": True}) == Score("softmax", all_experts=True)
    own = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": "2.5"}
    assert score_of(own) == Score("sigmoid", scale=2.5)
    sinkhorn = {"moe_router_load_balancing_type": ["sinkhorn"], "moe_router_topk_scaling_factor": 2.0}
    assert score_of({**sinkhorn, "moe_router_topk": 2}) == Score("softmax", all_experts=True)
    assert score_of({**sinkhorn, "moe_router_topk": 1}) == Score("sigmoid")
    for refused in ({"moe_router_force_load_balancing": True}, {"moe_router_score_function": "tanh"}):
        with pytest.raises(MoekitError, match="weights cannot be made again"):
            score_of(refused)


@pytest.mark.megatron
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("topk", "groups"), [(1, None), (2, None), (6, None), (2, 4), (6, 4)])
@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_megatrons_own_weights(function: str, topk: int, pre: bool, scale: float | None, groups: int | None) -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    torch.manual_seed(topk)
    logits = (torch.randn(50, 16) * 3).bfloat16().float()
    bias = torch.randn(16) if function != "softmax" else None
    probs, chosen = utils.topk_routing_with_score_function(
        logits, topk, pre, groups, groups and topk // 2, scale, function, bias
    )
    args = {"moe_router_score_function": function, "moe_router_pre_softmax": pre}
    score = score_of({**args, "moe_router_topk_scaling_factor": scale})
    experts = chosen.nonzero()[:, 1].view(50, topk)
    mine = weights(logits.numpy(), experts.numpy(), score)
    np.testing.assert_allclose(mine, probs.gather(1, experts).numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.megatron
@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorns_weights(topk: int) -> None:
    """As its router makes them of logits that are float32."""
    torch = pytest.importorskip("torch")
    router = pytest.importorskip("megatron.core.transformer.moe.router")
    from types import SimpleNamespace

    logits = torch.randn(20, 8)
    own = SimpleNamespace(topk=topk, training=True, config=SimpleNamespace(moe_aux_loss_coeff=0))
    probs, chosen = router.TopKRouter.sinkhorn_load_balancing(own, logits)
    experts = chosen.nonzero()[:, 1].view(20, topk)
    score = score_of({"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": topk})
    mine = weights(logits.numpy(), experts.numpy(), score)
    np.testing.assert_allclose(mine, probs.gather(1, experts).numpy(), rtol=1e-5, atol=1e-7)


ARGS = {"num_experts": 8, "world_size": 2, "expert_model_parallel_size": 2, "moe_router_topk": 2, "num_layers": 2}


def write_trace(folder: Path, calls: int = 3, **changes: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two ranks' files as the tracer writes them; the logits and choices of layer 0."""
    chooser, made = np.random.default_rng(0), []
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        lines, data = [], b""
        for call in range(calls):
            words = (chooser.normal(0, 2, (16, 8)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            logits = (words.astype(np.uint32) << 16).view(np.float32)
            experts = np.sort(np.argsort(-logits, axis=1)[:, :2], axis=1)
            made.append((logits, experts))
            record = {"step": call, "stage": "pre_dispatch", "block": "decoder", "layer": 0, "rank": rank}
            record |= {"num_tokens": 16, "topk": 2, "logit_offset": len(data), "logit_bytes": 256}
            record |= {"logit_shape": [16, 8], **changes, "top_indices": experts.tolist()}
            data += words.astype("<u2").tobytes()
            lines.append(json.dumps(record) + "\n")
        (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(lines))
        (folder / f"logits_rank{rank}.bin").write_bytes(data)
    return made


@pytest.mark.parametrize("at_once", [1, 40, 1 << 21])
def test_a_whole_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("moekit.watch.router.logits._VALUES", at_once)
    made = write_trace(tmp_path)
    with (tmp_path / "router_trace_rank1.jsonl").open("a") as file:
        file.write('{"step": 3, "half')
    found = weights_of(tmp_path, Grid.from_args(ARGS))
    assert list(found.layers) == [Layer(LayerKey("decoder", None, 0))]
    (layer,) = found.layers.values()
    each = [token_values(weights(*one, Score("softmax")), Score("softmax")) for one in made]
    assert layer.tokens == 6 * 16
    for name in ("largest", "share", "entropy", "rms", "output_rms"):
        values = np.concatenate([one[name] for one in each])
        spread = layer.spread(name)
        np.testing.assert_allclose(spread, (values.mean(), values.min(), values.max(), len(values)), rtol=1e-12)
    ratios = np.concatenate([one["ratio"] for one in each])
    np.testing.assert_allclose(layer.spread("ratio").mean, np.exp(np.log(ratios).mean()), rtol=1e-12)
    assert dict(found.skipped) == {"half-written": 1}
    assert "bf16" in found.approximate
    assert json.loads(json.dumps(layer.as_json()))["mass"] is None


def test_logits_that_are_not_there_or_no_numbers(tmp_path: Path) -> None:
    write_trace(tmp_path)
    (tmp_path / "logits_rank0.bin").write_bytes(b"")
    data = bytearray((tmp_path / "logits_rank1.bin").read_bytes())
    data[0:2] = b"\xc0\x7f"  # NaN
    (tmp_path / "logits_rank1.bin").write_bytes(data)
    found = weights_of(tmp_path, Grid.from_args(ARGS))
    (layer,) = found.layers.values()
    assert found.skipped == {NO_LOGITS: 3}
    assert (layer.tokens, layer.not_finite) == (47, 1)
    write_trace(tmp_path, logit_shape=[16, 9])
    with pytest.raises(MoekitError, match="no logits") as refused:
        weights_of(tmp_path, Grid.from_args(ARGS))
    assert "routing_trace_capture_logits" in str(refused.value)
