"""The comparison of steps, on numbers made up here."""

from __future__ import annotations

import math

import pytest
from made_runs import dense_steps, metrics, moe_steps

from moekit.prove import compare
from moekit.prove.compare import Pair, align


def pairs(**changed: float) -> list[Pair]:
    """15 steps of a dense run and its MoE of one expert; at step 7 the MoE's are `changed`."""
    moe = moe_steps()
    moe[7] = {**moe[7], **{name.replace("_", " ") if name == "lm_loss" else name: v for name, v in changed.items()}}
    return align(dense_steps(), moe, 15)


def test_steps_are_paired_by_their_distance_from_the_checkpoint() -> None:
    found = align({16: metrics(1), 17: metrics(2), 19: metrics(4)}, {1: metrics(1), 3: metrics(3), 4: metrics(4)}, 15)
    assert [(pair.step, pair.first_step, pair.second_step) for pair in found] == [(1, 16, 1), (4, 19, 4)]
    assert align({16: metrics(1)}, {16: metrics(1)}) == [Pair(16, 16, 16, metrics(1), metrics(1))]
    assert align({}, {1: metrics(1)}) == []


def test_one_expert_that_is_its_dense_model() -> None:
    checks = compare.one_expert(pairs(), router_weights=512)
    assert [(check.holds, check.largest, check.parts_at) for check in checks] == [(True, 0.0, None)] * 3


@pytest.mark.parametrize(
    ("changed", "which", "by"),
    [
        ({"lm_loss": 6.93 + 0.00088}, 0, 0.00088),
        ({"lm_loss": 6.93 - 0.00088}, 0, -0.00088),
        ({"load_balancing_loss": 1.0000001}, 1, 1e-7),
        ({"num-zeros": 512.0 + 18}, 2, 18),
        ({"num-zeros": 0.0}, 2, -512),
    ],
)
def test_one_expert_parts_where_one_number_does(changed: dict[str, float], which: int, by: float) -> None:
    checks = compare.one_expert(pairs(**changed), router_weights=512)
    assert [check.holds for check in checks] == [number != which for number in range(3)]
    assert checks[which].parts_at == 7
    assert checks[which].parts_by == pytest.approx(by, rel=1e-3)
    assert checks[which].largest == pytest.approx(abs(by), rel=1e-3)


@pytest.mark.parametrize("changed", [{"lm_loss": 6.93 + 0.00086}, {"num-zeros": 512.0 + 17}, {"num-zeros": 512.0 - 17}])
def test_what_chance_does_is_allowed(changed: dict[str, float]) -> None:
    assert all(check.holds for check in compare.one_expert(pairs(**changed), router_weights=512))


@pytest.mark.parametrize("name", ["lm loss", "load_balancing_loss", "num-zeros"])
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_no_number_does_not_hold(name: str, value: float | None) -> None:
    moe = moe_steps()
    moe[3] = {other: v for other, v in moe[3].items() if other != name}
    if value is not None:
        moe[3][name] = value
    parted = [c for c in compare.one_expert(align(dense_steps(), moe, 15), router_weights=512) if not c.holds]
    assert [check.parts_at for check in parted] == [3]
    assert not math.isfinite(parted[0].largest)


def test_slices_are_judged_by_their_first_step_alone() -> None:
    moe = {n: {**found, "lm loss": found["lm loss"] + (0.1 if n > 1 else 5e-6)} for n, found in moe_steps().items()}
    (check,) = compare.slices(align(dense_steps(), moe, 15), "fp32")
    assert check.holds
    assert check.largest == pytest.approx(5e-6, rel=1e-3)
    (check,) = compare.slices(align(dense_steps(), {1: metrics(1, loss=6.99 + 2e-5)}, 15), "fp32")
    assert (check.holds, check.parts_at) == (False, 1)
    (check,) = compare.slices(align(dense_steps(), {1: metrics(1, loss=6.99 + 2e-5)}, 15), "bf16")
    assert check.holds


def test_two_runs_are_the_same_to_the_last_bit() -> None:
    steps = {n: metrics(n, balance=1.1) for n in range(1, 13)}
    assert [(c.what, c.holds) for c in compare.same(align(steps, steps))] == [
        ("LM loss", True),
        ("load-balancing loss", True),
        ("gradient norm", True),
        ("zero gradients", True),
    ]
    for name, check in zip(("lm loss", "load_balancing_loss", "grad-norm", "num-zeros"), range(4), strict=True):
        other = {n: dict(found) for n, found in steps.items()}
        other[9][name] = math.nextafter(other[9][name], math.inf)
        parted = compare.same(align(steps, other))
        assert [c.parts_at for c in parted] == [9 if number == check else None for number in range(4)]


def test_a_dense_run_has_no_balance_to_compare() -> None:
    steps = {n: metrics(n) for n in range(1, 13)}
    assert [check.what for check in compare.same(align(steps, steps))] == ["LM loss", "gradient norm", "zero gradients"]
    half = {n: metrics(n, balance=1.0) for n in range(1, 13)}
    assert [c.holds for c in compare.same(align(steps, half))] == [True, False, True, True]
