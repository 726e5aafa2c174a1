"""Which pairs of runs can show something, and what is said of those that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import (
    DENSE,
    DETERMINISTIC,
    MOE,
    REPEATED,
    SLICES,
    SOFTWARE,
    SQUARED,
    dense_steps,
    make_run,
    metrics,
    moe_steps,
)

from moekit.problems import MoekitError
from moekit.prove import judge
from moekit.prove.runs import read_run

REFUSED = {
    "own initialisation": (
        "",
        "moe: {use_upcycling: null}\ncheckpoint: {from_run: null}",
        "run `moe` begins from its own initialisation, so its losses show nothing here",
        "2.72 apart at iteration 4 in handbook 2.5",
    ),
    "another parent": (
        "checkpoint: {from_run: other}",
        "",
        "run `dense` goes on from run `other`, `moe` from `quickstart_dense_save`",
        "one checkpoint",
    ),
    "no parent": ("checkpoint: {from_run: null}", "", "run `dense` goes on from no run, `moe` from", "one checkpoint"),
    "optimizer": (
        "checkpoint: {no_load_optim: null}",
        "",
        "run `dense` takes its optimizer and schedule over",
        "`checkpoint.no_load_optim: true`",
    ),
    "finetune": ("checkpoint: {finetune: true}", "", "run `dense` begins the data anew", "unset"),
    "seed": ("train: {seed: 1}", "", "`train.seed` is 1 in `dense` and 1234 in `moe`", "the same"),
    "iterations": ("", "train: {iters: 15}", "`train.iters` is 300 in `dense` and 15 in `moe`: the order", "the same"),
    "rate": ("", "schedule: {lr: 0.001}", "`schedule.lr` is 0.003 in `dense` and 0.001 in `moe`", "the same"),
    "width": ("", "model: {hidden_size: 256}", "`model.hidden_size` is 128 in `dense` and 256 in `moe`", "the same"),
    "precision": ("precision: {bf16: true}", "", "`precision.bf16` is True in `dense` and unset in `moe`", "the same"),
    "experts": (
        "",
        "moe: {num_experts: 8}\nrouter: {topk: 2}",
        "run `moe` sends tokens to 2 of 8 experts",
        "only one expert",
    ),
    "zeros": ("log: {num_zeros_in_grad: null}", "", "run `dense` does not count the zeros", "`log.num_zeros_in_grad"),
    "interval": ("", "log: {tensorboard_interval: 5}", "run `moe` logs every 5 steps", "`log.tensorboard_interval: 1`"),
}


@pytest.mark.parametrize(("dense", "moe", "what", "hint"), REFUSED.values(), ids=REFUSED)
def test_runs_that_cannot_show_anything_are_refused(dense: str, moe: str, what: str, hint: str, tmp_path: Path) -> None:
    make_run(tmp_path, "dense", DENSE, dense_steps(), dense)
    make_run(tmp_path, "moe", MOE, moe_steps(), moe)
    with pytest.raises(MoekitError) as refused:
        judge.one_expert(read_run("dense", tmp_path), read_run("moe", tmp_path))
    (problem,) = [problem for problem in refused.value.problems if what in problem.what]
    assert hint in problem.hint
    assert "recipe.yaml" in problem.where


def test_a_pair_that_shows_something(tmp_path: Path) -> None:
    make_run(tmp_path, "dense", DENSE, dense_steps(20))
    make_run(tmp_path, "moe", MOE, moe_steps(17))
    result = judge.one_expert(read_run("dense", tmp_path), read_run(str(tmp_path / "runs/moe"), tmp_path))
    assert result.holds
    assert [(pair.first_step, pair.second_step) for pair in result.pairs] == [(15 + n, n) for n in range(1, 16)]
    assert "step n is iteration 15 + n of `dense`" in result.alignment


def test_the_router_s_weights_are_those_of_moe_layers(tmp_path: Path) -> None:
    run = make_run(tmp_path, "moe", MOE, moe_steps(), "moe: {layer_freq: '[1,0,1,1]'}")
    assert judge.router_weights(read_run(str(run), tmp_path).loaded.recipe) == 3 * 128


def test_the_wrong_way_round(tmp_path: Path) -> None:
    make_run(tmp_path, "dense", DENSE, dense_steps())
    make_run(tmp_path, "moe", MOE, moe_steps())
    with pytest.raises(MoekitError) as refused:
        judge.one_expert(read_run("moe", tmp_path), read_run("dense", tmp_path))
    said = str(refused.value)
    assert "run `moe` is an MoE; the first run is the dense one" in said
    assert "run `dense` has no experts; the first run is the dense one" in said


def test_schedules_that_are_not_aligned(tmp_path: Path) -> None:
    make_run(tmp_path, "dense", DENSE, {15 + n: metrics(n, rate=(15 + n) * 1.5e-4) for n in range(1, 16)})
    make_run(tmp_path, "moe", MOE, moe_steps())
    with pytest.raises(
        MoekitError, match=r"learning rates differ: 0.0024 at `dense`'s step 16, 0.00015 at `moe`'s step 1"
    ):
        judge.one_expert(read_run("dense", tmp_path), read_run("moe", tmp_path))


def test_too_few_steps(tmp_path: Path) -> None:
    make_run(tmp_path, "dense", DENSE, dense_steps())
    make_run(tmp_path, "moe", MOE, moe_steps(14))
    with pytest.raises(MoekitError, match="`dense` and `moe` have 14 steps in common, and this takes 15"):
        judge.one_expert(read_run("dense", tmp_path), read_run("moe", tmp_path))


def test_other_software(tmp_path: Path) -> None:
    make_run(tmp_path, "dense", DENSE, dense_steps(), software=[{**SOFTWARE, "torch": "2.12.0"}])
    make_run(tmp_path, "moe", MOE, moe_steps())
    with pytest.raises(MoekitError, match=r"run `dense` was trained with torch 2.12.0, `moe` with 2.13.0"):
        judge.one_expert(read_run("dense", tmp_path), read_run("moe", tmp_path))


def test_software_that_changed_on_the_way(tmp_path: Path) -> None:
    make_run(tmp_path, "moe", MOE, moe_steps(), software=[{**SOFTWARE, "device": "NVIDIA H100"}, SOFTWARE])
    with pytest.raises(MoekitError, match="attempt 1 was trained with device NVIDIA H100, attempt 2 with cpu"):
        read_run("moe", tmp_path)


def test_no_run_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="there is no run `moe`"):
        read_run("moe", tmp_path)
    with pytest.raises(MoekitError, match="there is no run `some/where`"):
        read_run("some/where", tmp_path)
    make_run(tmp_path, "moe", MOE, {})
    with pytest.raises(MoekitError, match="run `moe` has logged nothing yet"):
        read_run("moe", tmp_path)


def test_a_run_without_a_record_of_its_software(tmp_path: Path) -> None:
    run = make_run(tmp_path, "moe", MOE, moe_steps())
    (run / "attempts/1/software.json").unlink()
    found = read_run("moe", tmp_path).software
    assert (found["megatron"], found["torch"], found["device"]) == ("0.19.2", None, None)


SLICES_REFUSED = {
    "swiglu": ("model: {squared_relu: null, swiglu: true}", "an activation for which Megatron's scaling"),
    "one copy": ("moe: {num_experts: 2}", "has 2 experts of granularity 2"),
    "whole": ("moe: {upcycling_granularity: 1}", "has 8 experts of granularity 1"),
    "topk": ("router: {topk: 4}", "sends tokens to 4 experts, and 2 make up the dense layer"),
    "pre-softmax": ("router: {pre_softmax: true}", "weighs experts before their choice"),
    "own": ("moe: {use_upcycling: null}", "begins from its own initialisation"),
}


@pytest.mark.parametrize(("changes", "what"), SLICES_REFUSED.values(), ids=SLICES_REFUSED)
def test_slices_that_do_not_make_up_the_layer_are_refused(changes: str, what: str, tmp_path: Path) -> None:
    make_run(tmp_path, "dense", SQUARED, dense_steps(1, 30))
    make_run(tmp_path, "moe", SLICES, moe_steps(1), changes)
    with pytest.raises(MoekitError, match=what):
        judge.slices(read_run("dense", tmp_path), read_run("moe", tmp_path))


@pytest.mark.parametrize(("changes", "bound"), [("", 1e-5), ("precision: {bf16: true}", 1e-3)])
def test_slices_are_held_to_what_their_weights_allow(changes: str, bound: float, tmp_path: Path) -> None:
    make_run(tmp_path, "dense", SQUARED, dense_steps(1, 30), changes)
    make_run(tmp_path, "moe", SLICES, {1: metrics(1, balance=1.2)}, changes)
    result = judge.slices(read_run("dense", tmp_path), read_run("moe", tmp_path))
    assert result.holds
    assert [check.bound for check in result.checks] == [bound]


def test_two_runs_that_are_not_the_same_recipe(tmp_path: Path) -> None:
    steps = {n: metrics(n, balance=1.1) for n in range(1, 13)}
    make_run(tmp_path, "one", DETERMINISTIC, steps)
    make_run(tmp_path, "other", DETERMINISTIC, steps, "train: {seed: 1}\nlog: {num_zeros_in_grad: null}")
    with pytest.raises(MoekitError) as refused:
        judge.deterministic(read_run("one", tmp_path), read_run("other", tmp_path))
    said = [problem.what for problem in refused.value.problems]
    assert said == [
        "`train.seed` is 1234 in `one` and 1 in `other`",
        "`log.num_zeros_in_grad` is True in `one` and unset in `other`",
        "run `other` does not count the zeros of its gradient",
    ]


def test_runs_without_the_mode_prove_nothing(tmp_path: Path) -> None:
    steps = {n: metrics(n, balance=1.1) for n in range(1, 13)}
    make_run(tmp_path, "one", REPEATED, steps)
    make_run(tmp_path, "other", REPEATED, steps)
    runs = read_run("one", tmp_path), read_run("other", tmp_path)
    with pytest.raises(MoekitError, match="run `one` is not in deterministic mode"):
        judge.deterministic(*runs)
    assert judge.twice("deterministic", *runs).holds


def test_eleven_iterations_are_too_few(tmp_path: Path) -> None:
    steps = {n: metrics(n, balance=1.1) for n in range(1, 12)}
    make_run(tmp_path, "one", DETERMINISTIC, steps)
    make_run(tmp_path, "other", DETERMINISTIC, steps)
    with pytest.raises(MoekitError, match="have 11 steps in common, and this takes 12"):
        judge.deterministic(read_run("one", tmp_path), read_run("other", tmp_path))
