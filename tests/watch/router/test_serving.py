"""Weights at a smaller k: against plain Python, against what Megatron serves with, and on what a real run left."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError
from moekit.watch.router.serving import NAMES, LayerServing, Sizes, _of_tokens, served_values, trained_by
from moekit.watch.router.trace_report import lines, trace_report
from moekit.watch.router.weights import Score, score_of, weights

DATA = Path(__file__).parent / "data"
SCORES = [
    Score("softmax"),
    Score("softmax", all_experts=True, scale=2.5),
    Score("sigmoid", scale=2.5),
    Score("sqrtsoftplus"),
]


def plain(logits: list[float], score: Score) -> list[float]:
    """One token's scores, one operation at a time."""
    if score.function == "softmax":
        top = max(logits)
        total = math.fsum(math.exp(value - top) for value in logits)
        return [math.exp(value - top) / total for value in logits]
    softplus = [max(value, 0.0) + math.log1p(math.exp(-abs(value))) for value in logits]
    if score.function == "sigmoid":
        return [math.exp(value - one) for value, one in zip(logits, softplus, strict=True)]
    return [math.sqrt(value) for value in softplus]


@given(
    st.integers(0, 2**32),
    st.sampled_from([(1, 2), (2, 3), (1, 4), (3, 4)]),
    st.sampled_from(SCORES),
    st.sampled_from([0.1, 1.0, 8.0]),
)
@settings(max_examples=120, deadline=None)
def test_every_value_as_in_plain_python(seed: int, counts: tuple[int, int], score: Score, size: float) -> None:
    """Chosen experts are any: a bias, groups or a table may have chosen others than the best."""
    chooser, sizes = np.random.default_rng(seed), Sizes(*counts, 12)
    logits = chooser.normal(0, size, (15, 12))
    experts = np.argsort(chooser.random((15, 12)), axis=1)[:, : sizes.trained].astype(np.uint16)
    found, mass, kept = served_values(logits, experts, sizes, score)
    assert sizes.denominators == (sizes.served, sizes.trained, 2 * sizes.trained, 0)
    for token in range(15):
        every = plain(logits[token].tolist(), score)
        chosen = sorted((every[expert] for expert in experts[token]), reverse=True)
        served, best = chosen[: sizes.served], sorted(every, reverse=True)
        by = [math.fsum(served), math.fsum(chosen), math.fsum(best[: 2 * sizes.trained]), 1.0]
        own = 1.0 if score.all_experts else math.fsum(chosen)
        trained = [one / own for one in chosen]
        for row, divisor in enumerate(by):
            w = [one / divisor for one in served]
            wanted = {
                "weight": w[0] / trained[0],
                "sum": math.fsum(w) / math.fsum(trained),
                "rms": math.hypot(*w) / math.hypot(*trained),
                "largest": w[0] * score.scale,
            }
            for place, name in enumerate(NAMES):
                np.testing.assert_allclose(found[row, place, token], wanted[name], rtol=1e-9, err_msg=name)
        probabilities = plain(logits[token].tolist(), Score("softmax"))
        np.testing.assert_allclose(
            mass[token], math.fsum(probabilities[expert] for expert in experts[token]), rtol=1e-9
        )
        np.testing.assert_allclose(kept[token], math.fsum(served) / math.fsum(chosen), rtol=1e-9)


def test_the_handbooks_ordering() -> None:
    """Of a flat router of 256 experts, trained with 8 and served with 4: renormalized over the four each weighs more
    than it was trained with, over the trained eight as much, over sixteen less; without, next to nothing."""
    logits = np.random.default_rng(0).normal(0, 0.7, (400, 256))
    experts = np.argsort(-logits, axis=1)[:, :8]
    found = _of_tokens(logits, experts, Sizes(4, 8, 256), Score("softmax"))
    weight, total = found.means[:, NAMES.index("weight")], found.means[:, NAMES.index("sum")]
    assert 0.1 < found.mass / found.tokens < 0.25  # 0.182 is reported of Qwen3.6-35B-A3B
    assert weight[0] > 1.5 > weight[1] == 1 > weight[2] > 0.5 > 0.3 > weight[3]
    assert total[0] == pytest.approx(1)
    assert total[1] == pytest.approx(found.kept / found.tokens)
    np.testing.assert_allclose(total, weight * found.kept / found.tokens, rtol=0.02)


def test_what_megatron_divides_by() -> None:
    assert trained_by(Score("softmax"), 1) == 1
    assert trained_by(Score("softmax", all_experts=True), 4) == 0
    assert (trained_by(Score("sigmoid"), 4), trained_by(Score("sigmoid"), 1)) == (4, 0)
    assert Sizes(2, 4, 8).denominators == (2, 4, 0)  # of 8 experts there are no more than 8


@pytest.mark.megatron
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("served", [1, 2, 5])
@pytest.mark.parametrize("pre", [False, True])
def test_megatron_at_that_k(function: str, served: int, pre: bool) -> None:
    """Its own router, trained with 6 experts and served with fewer."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = (torch.randn(50, 16) * 2).float()
    args = {"moe_router_score_function": function, "moe_router_pre_softmax": pre, "moe_router_topk_scaling_factor": 2.5}
    score, sizes = score_of(args), Sizes(served, 6, 16)
    probs, _ = utils.topk_routing_with_score_function(logits, served, pre, None, None, 2.5, function, None)
    experts = np.argsort(-logits.numpy(), axis=1)[:, :6]
    found, _, _ = served_values(logits.numpy(), experts, sizes, score)
    mine = found[sizes.denominators.index(trained_by(score, served))]
    np.testing.assert_allclose(mine[NAMES.index("largest")], probs.max(dim=1).values.numpy(), rtol=1e-5)
    trained = weights(logits.numpy(), experts, score).sum(axis=1)
    np.testing.assert_allclose(mine[NAMES.index("sum")] * trained, probs.sum(dim=1).numpy(), rtol=1e-5)


def test_a_real_run() -> None:
    found = trace_report(RunDir(DATA / "logits"), served=1)
    assert found.serving is not None
    assert (found.weights, found.traffic) == (None, None)
    assert found.serving.sizes == Sizes(1, 2, 8)
    for one in found.serving.layers.values():
        assert one.tokens == 2 * 2 * 2 * 128
        assert 0.25 < one.mass / one.tokens < 0.35  # two of eight, not yet learnt
        assert one.means[0, NAMES.index("sum")] == pytest.approx(1)
    text = list(lines(found))
    assert max(map(len, text)) <= 80
    assert "  approximate: served are the best by score; the expert bias decides too" in text
    assert any(line.startswith("  layer_1  0.30  0.51    1.96   1.00   0.5") for line in text)
    said = json.loads(json.dumps(found.as_json()))["serving"]
    assert said["megatron_divides_by"] == 0
    assert [row["divided_by"] for row in said["layers"]["layer_0"]["denominators"]] == [1, 2, 4, 0]


@pytest.mark.parametrize("served", [2, 3])
def test_a_k_that_is_no_smaller_is_refused(served: int) -> None:
    with pytest.raises(MoekitError, match=f"{served} is no smaller k: the run was trained with 2 experts a token"):
        trace_report(RunDir(DATA / "logits"), served=served)


def test_tokens_without_weights_are_left_out() -> None:
    logits = np.array([[-2000.0, -3000.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = _of_tokens(logits, np.array([[0, 1], [0, 1]]), Sizes(1, 2, 4), Score("sigmoid"))
    assert (found.tokens, found.not_finite) == (1, 1)
    assert found.means[1].tolist()[:2] == [1, 0.5]
    another = _of_tokens(logits, np.array([[0], [0]]), Sizes(1, 2, 4), Score("sigmoid"))  # another top-k than the run's
    assert (another.tokens, another.not_finite) == (0, 2)
    another.merge(found)
    assert (another.tokens, another.means.tolist()) == (1, found.means.tolist())
    assert np.isnan(LayerServing(np.zeros((1, 4))).means).all()
