"""Two runs compared: generated run folders, each verdict both ways; the trained ones are in `tests/quickstart`."""

import fcntl
import json
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moekit import cli
from moekit.launch.flat import flat_yaml
from moekit.launch.processes import LOCK
from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError
from moekit.recipe.load import load
from moekit.watch import compare_text
from moekit.watch.compare import Comparison, compare
from moekit.watch.compare_figures import FEWEST, MAX_VIO, RELATIVE_LOSS, TFLOPS, Figure, figure_of
from moekit.watch.compare_read import Trajectory, aligned
from moekit.watch.metrics import LOSS

DATA = Path(__file__).parent / "data"
PAGE = Path(__file__).parents[2] / "docs" / "comparing.md"
SOFTWARE = {"megatron": "0.19.2", "torch": "2.13.0", "transformer_engine": None, "device": "cpu"}
CONFIG = {"world_size": 2, "global_batch_size": 16, "seq_length": 256}
MOE = {**CONFIG, "num_experts": 8, "expert_model_parallel_size": 2, "save_tokens_per_expert_interval": 10}
FOUND = {
    "data": {"sha256": {"manifest.json": "7dafb2ab"}},
    "tokenizer": {"sha256": {"tokenizer.json": "f97bfb9c"}},
    "image": None,
}

Metrics = dict[str, float]


@dataclass
class Made:
    """A run to be written: `metrics` of each step, over some attempts `(number, steps)`."""

    root: Path
    name: str
    recipe: str = "quickstart"
    changes: str = ""
    metrics: Callable[[int], Metrics] = lambda step: {LOSS: loss(step)}
    attempts: tuple[tuple[int, Iterable[int]], ...] = ((1, range(1, 121)),)
    config: Mapping[str, Any] = field(default_factory=lambda: dict(CONFIG))
    found: Mapping[str, Any] | None = field(default_factory=lambda: dict(FOUND))
    software: Mapping[str, Any] = field(default_factory=lambda: dict(SOFTWARE))

    def write(self) -> RunDir:
        run = self.root / "runs" / self.name
        run.mkdir(parents=True)
        base = self.root / f"{self.name}.yaml"
        base.write_text(f"base: {self.recipe}\n{self.changes}\n")
        (run / "recipe.yaml").write_text(flat_yaml(load(str(base)).recipe))
        found = {} if self.found is None else {"found": self.found}
        (run / "provenance.json").write_text(json.dumps({"moekit": "0.1.0", "megatron": "0.19.2", **found}))
        for number, steps in self.attempts:
            folder = run / "attempts" / str(number)
            folder.mkdir(parents=True)
            (folder / "software.json").write_text(json.dumps(self.software))
            (folder / "exit").mkdir()
            (folder / "exit" / "rank0.json").write_text('{"code": 0, "reason": "", "time": 1.0}')
            lines: list[dict[str, Any]] = [{"event": "config", "config": self.config, "time": 1.0}]
            lines += [{"step": step, "time": 1.0, "metrics": self.metrics(step)} for step in steps]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RunDir(run)


def loss(step: int) -> float:
    """As a training's: falling, and with the noise of each step's data, the same in every run."""
    return 3 + 5 / (1 + step / 20) + random.Random(step).gauss(0, 0.05)


def times(factor: Callable[[int], float]) -> Callable[[int], Metrics]:
    """The losses of another run on the same data, with a little noise of its own."""
    return lambda step: {LOSS: loss(step) * factor(step) * (1 + random.Random(-step).gauss(0, 2e-4))}


def counts(run: RunDir, iterations: Iterable[int], busy: int) -> None:
    """Two layers, two ranks: each rank's first expert has `busy` tokens, the three others 100."""
    run.tokens_per_expert.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        with (run.tokens_per_expert / f"rank{rank}.jsonl").open("a") as file:
            for iteration in iterations:
                for layer in range(2):
                    line = {"iter": iteration, "block": "decoder", "layer": layer, "tpe": [[busy, 100, 100, 100]]}
                    file.write(json.dumps(line) + "\n")


def pair(root: Path, one: str, other: str, factor: Callable[[int], float], **more: Any) -> Comparison:
    """The second recipe's run has the first one's losses times a factor."""
    a = Made(root, "a", one, **more).write()
    b = Made(root, "b", other, metrics=times(factor), **more).write()
    return compare(a, b)


def text(comparison: Comparison, width: int = 80) -> str:
    return "\n".join(compare_text.lines(comparison, width)) + "\n"


def figure(comparison: Comparison, name: str) -> Figure:
    return next(one for one in comparison.figures if one.name == name)


def outcomes(comparison: Comparison) -> list[bool | None]:
    assert comparison.verdict
    assert not comparison.verdict.refused
    return [check.holds for check in comparison.verdict.checks]


# What is read


def test_steps_count_as_the_attempt_that_took_over_logged_them(tmp_path: Path) -> None:
    """Also where it has not come as far yet as the one before: that one's weights are gone."""
    made = Made(tmp_path, "a", attempts=((1, range(1, 91)), (2, range(61, 81))), config=MOE)
    run = made.write()
    path = run.path / "attempts" / "2" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"lm loss": ', '"lm loss": 1'))
    counts(run, range(10, 91, 10), 100)
    counts(run, range(70, 81, 10), 500)
    rows = list(Trajectory(run.path).rows())
    assert [step for step, _ in rows] == list(range(1, 81))
    assert [step for step, metrics in rows if metrics[LOSS] > 10] == list(range(61, 81))
    vio = {step: metrics[MAX_VIO] for step, metrics in rows if MAX_VIO in metrics}
    assert vio == {**dict.fromkeys(range(10, 61, 10), 0.0), 70: 1.5, 80: 1.5}


def test_of_a_step_in_two_lines_both_count(tmp_path: Path) -> None:
    run = Made(tmp_path, "a", attempts=((1, [1, 2]),)).write()
    with (run.path / "attempts" / "1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "time": 9.0, "metrics": {"lm loss validation": 4.0}}\n{"step": 3, "ti')
    rows = dict(Trajectory(run.path).rows())
    assert list(rows) == [1, 2]
    assert set(rows[2]) == {LOSS, "lm loss validation"}


def test_only_common_steps_are_aligned(tmp_path: Path) -> None:
    a = Made(tmp_path, "a", attempts=((1, range(1, 300)),)).write()
    b = Made(tmp_path, "b", attempts=((1, range(10, 121, 10)),)).write()
    paths = Trajectory(a.path), Trajectory(b.path)
    assert [step for step, _, _ in aligned(*paths)] == list(range(10, 121, 10))
    assert [path.last for path in paths] == [299, 120]
    comparison = compare(a, b, last=5)
    assert (comparison.interval.first, comparison.interval.last, comparison.interval.common) == (80, 120, 12)
    assert figure(comparison, LOSS).difference == 0


def test_memory_does_not_grow_with_the_runs(tmp_path: Path) -> None:
    def peak(name: str, steps: int) -> float:
        (tmp_path / name).mkdir()
        runs = [
            Made(tmp_path / name, each, metrics=lambda step: {LOSS: 3.0, TFLOPS: 1.0}, attempts=((1, range(1, steps)),))
            for each in "ab"
        ]
        one, other = (run.write() for run in runs)
        tracemalloc.start()
        compare(one, other)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    compared_once = peak("warm", 10)
    assert compared_once
    assert peak("long", 40_000) < 1.5 * peak("short", 8_000)


# What is said


def test_golden(tmp_path: Path, golden_file: Callable[[Path, str], None]) -> None:
    """And the page on comparing shows it."""

    def metrics(step: int, lower: float, speed: float) -> Metrics:
        own = random.Random(step * speed).gauss
        said = {LOSS: loss(step) - lower + own(0, 0.004), TFLOPS: speed * (1 - 0.5 / (1 + step / 10)) + own(0, 0.8)}
        said |= {"grad-norm": 0.9 + own(0, 0.03), "iteration-time": 60 / said[TFLOPS]}
        if step % 60 == 0:
            said["lm loss validation"] = said[LOSS] + 0.1
        if step % 10 == 0:
            said["peak_rss_gib"] = 2.5 + own(0, 0.01)
        return said

    a = Made(tmp_path, "aux_loss", config=MOE, metrics=lambda step: metrics(step, 0, 125)).write()
    changes = "balance: {type: [quantile_balancing], aux_loss_coeff: null}\nschedule: {lr: 2.0e-3}"
    b = Made(tmp_path, "quantile", changes=changes, config=MOE, metrics=lambda step: metrics(step, 0.02, 139)).write()
    counts(a, range(10, 121, 10), 160)
    counts(b, range(10, 121, 10), 110)
    shown = text(compare(a, b)).replace(f"{tmp_path}/", "")
    golden_file(DATA / "compare.txt", shown)
    assert max(map(len, shown.splitlines())) <= 100
    assert shown in PAGE.read_text()


def test_a_difference_within_its_noise_is_said_to_be(tmp_path: Path) -> None:
    def other(apart: float) -> Callable[[int], Metrics]:
        return lambda step: {LOSS: loss(step) + apart + random.Random(-step).gauss(0, 0.02)}

    a = Made(tmp_path, "a").write()
    near = compare(a, Made(tmp_path, "near", metrics=other(0.001)).write())
    far = compare(a, Made(tmp_path, "far", metrics=other(0.1)).write())
    assert figure(near, LOSS).is_clear is False
    assert "in noise" in text(near)
    found = figure(far, LOSS)
    assert found.is_clear is True
    assert found.difference == pytest.approx(0.1, abs=0.02)
    assert found.noise == pytest.approx(0.02, rel=0.7)
    assert "in noise" not in text(far)


def test_too_few_steps_have_no_noise() -> None:
    pairs = [(step, 1.0, 1.0 + step) for step in range(1, FEWEST + 1)]
    assert figure_of(LOSS, pairs[1:]).noise is None
    assert figure_of(LOSS, pairs[1:]).is_clear is None
    assert figure_of(LOSS, pairs).noise == pytest.approx(1.4826)
    assert figure_of("peak_memory_gib", pairs).difference == FEWEST
    assert figure_of("peak_memory_gib", pairs).noise is None


def test_the_warm_up_is_left_out(tmp_path: Path) -> None:
    """The learning rate's, the longer of both, unless told otherwise."""
    a = Made(tmp_path, "a", attempts=((1, range(1, 31)),)).write()
    b = Made(tmp_path, "b", changes="schedule: {warmup_iters: 25}", attempts=((1, range(1, 31)),)).write()
    assert compare(a, b).interval.first == 26
    assert compare(a, b, warmup=15).interval.first == 16
    assert compare(a, b, warmup=0, last=30).interval.first == 1
    short = Made(tmp_path, "short", attempts=((1, range(1, 11)),)).write()
    assert "No step that both have is behind the learning rate's warm-up of 20" in text(compare(a, short))


@pytest.mark.parametrize(
    ("changed", "bearing", "said"),
    [
        ({"config": {**CONFIG, "global_batch_size": 32}}, "loss", "DIFFERS: 4,096 in A, 8,192 in B"),
        ({"found": {**FOUND, "data": {"sha256": {"manifest.json": "other"}}}}, "loss", "manifest other in B"),
        ({"found": {**FOUND, "tokenizer": {"sha256": {"tokenizer.json": "x"}}}}, "loss", "DIFFERS: python-docs, files"),
        ({"found": {**FOUND, "tokenizer": None}}, None, "not known in B"),
        ({"found": {**FOUND, "image": {"name": "nvcr.io/x:1"}}}, "both", "DIFFERS: none in A, nvcr.io/x:1 in B"),
        (
            {"found": {**FOUND, "checkout": {"commit": "d98e8a64ffff"}}},
            "both",
            "0.19.2 in A, 0.19.2 at d98e8a64ff in B",
        ),
        ({"software": {**SOFTWARE, "megatron": "0.20.0"}}, "both", "DIFFERS: 0.19.2 in A, 0.20.0 in B"),
        ({"software": {**SOFTWARE, "device": "NVIDIA H100"}}, "speed", "DIFFERS: cpu in A, NVIDIA H100 in B"),
        ({"software": {}}, None, "cpu in A, not known in B"),
        ({"changes": "parallel: {gpus: 4}"}, "speed", "DIFFERS: 1 x 2 processes on the CPU in A, 1 x 4"),
    ],
)
def test_what_keeps_runs_from_being_compared(
    tmp_path: Path, changed: dict[str, Any], bearing: str | None, said: str
) -> None:
    comparison = compare(Made(tmp_path, "a").write(), Made(tmp_path, "b", **changed).write())
    assert [fact.bearing for fact in comparison.facts if fact.same is False] == ([bearing] if bearing else [])
    assert bool(comparison.spoilt) is (bearing == "loss")
    assert said in text(comparison)
    assert ("Not comparable: other" in text(comparison)) is (bearing == "loss")


def test_data_without_a_record_are_compared_as_they_are_now(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "ab"]
    for root in roots:
        (root / "data" / "python-docs").mkdir(parents=True)
        (root / "data" / "python-docs" / "manifest.json").write_text("{}")
    runs = [Made(root, "run", found=None).write() for root in roots]
    (data,) = [fact for fact in compare(runs[0], runs[1]).facts if fact.name == "data"]
    assert data.same is True
    assert data.one.endswith(" now")
    (roots[1] / "data" / "python-docs" / "manifest.json").write_text("{1}")
    assert compare(runs[0], runs[1]).spoilt == ["data"]
    shutil.rmtree(roots[1] / "data")
    assert [fact.same for fact in compare(runs[0], runs[1]).facts if fact.name == "data"] == [None]


def test_recipes_that_differ_in_more_than_one_group_are_warned_of(tmp_path: Path) -> None:
    """An MoE and its dense twin differ in one thing, however many fields that takes."""
    moe = Made(tmp_path, "moe").write()
    twin = Made(tmp_path, "twin", "settings/quickstart_dense").write()
    planted = Made(tmp_path, "planted", "settings/quickstart_dense", "schedule: {lr: 1.0e-3}").write()
    assert compare(moe, twin).groups == ["experts"]
    assert "differ in one group" in text(compare(moe, twin))
    assert compare(moe, planted).groups == ["experts", "schedule"]
    assert "DIFFER in 2 groups" in text(compare(moe, planted))
    assert "lr 0.003 → 0.001" in text(compare(moe, planted))
    logged = Made(tmp_path, "logged", changes="log: {interval: 5}\ncheckpoint: {save_interval: 7}").write()
    assert compare(moe, logged).groups == []
    assert "No verdict: the recipes are the same" in text(compare(moe, logged))


# Verdicts

LARGE: dict[str, Any] = {"attempts": ((1, range(1, 401)),), "config": CONFIG}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (lambda step: 1.001, [True, True]),
        (lambda step: 0.999, [True, True]),
        (lambda step: 1.004, [False, True]),
        (lambda step: 1 + 0.002 * step / 400, [True, False]),
        (lambda step: 1 - 0.006 * step / 400, [False, False]),
        (lambda step: 1 + 0.002 * (1 - step / 400), [True, True]),
        (lambda step: 1 + random.Random(-step).gauss(0, 0.05), [None, True]),
    ],
)
def test_fp8(tmp_path: Path, factor: Callable[[int], float], expected: list[bool | None], turned: bool) -> None:
    """HB 2661: near to BF16, and no further from it in time; whichever is named first."""
    a = Made(tmp_path, "a", "first_moe", **LARGE).write()
    b = Made(tmp_path, "b", "fp8", metrics=times(factor), **LARGE).write()
    comparison = compare(b, a) if turned else compare(a, b)
    assert outcomes(comparison) == expected
    assert "HB 2661" in text(comparison)
    assert comparison.verdict
    assert comparison.verdict.checks[0].value == pytest.approx(100 * (factor(395) - 1), abs=0.03) or None in expected


def test_growth_takes_steps(tmp_path: Path) -> None:
    assert outcomes(pair(tmp_path, "first_moe", "fp8", lambda _: 1.001, attempts=((1, range(1, 21)),)))[1] is None


@pytest.mark.parametrize(("factor", "expected"), [(1.003, True), (1.006, False), (0.994, False)])
def test_nvfp4(tmp_path: Path, factor: float, expected: bool) -> None:
    comparison = pair(tmp_path, "first_moe", "settings/nvfp4", lambda _: factor, **LARGE)
    assert outcomes(comparison) == [expected]
    assert "NVFP4 against BF16 (handbook 3.7, HB 2657): " + ("holds" if expected else "DOES NOT HOLD") in text(
        comparison
    )


@pytest.mark.parametrize(("speed", "expected"), [(140.0, True), (120.0, False), (155.0, True)])
def test_forced_balance(tmp_path: Path, speed: float, expected: bool) -> None:
    def at(tflops: float) -> Callable[[int], Metrics]:
        return lambda step: {LOSS: loss(step), TFLOPS: tflops + random.Random(step * tflops).gauss(0, 0.5)}

    control = {**MOE, "moe_router_force_load_balancing": True}
    a = Made(tmp_path, "control", "settings/forced_balance", metrics=at(149.4), config=control).write()
    b = Made(tmp_path, "learned", "first_moe", metrics=at(speed), config=MOE).write()
    comparison = compare(a, b)
    assert outcomes(comparison) == outcomes(compare(b, a)) == [expected]
    assert "`control` routes at random" in text(comparison)


def moe_of_one(step: int) -> Metrics:
    return {LOSS: 7 - step / 100, "num-zeros": 512, "load_balancing_loss": 1.0, "learning-rate": step * 1e-4}


def dense_behind(step: int) -> Metrics:
    return {LOSS: 7 - (step - 15) / 100, "num-zeros": 0, "learning-rate": (step - 15) * 1e-4}


@pytest.mark.parametrize(("apart", "expected"), [(0.0, [True] * 3), (0.001, [False, True, True])])
def test_one_expert(tmp_path: Path, apart: float, expected: list[bool]) -> None:
    """By the check that `moekit prove one-expert` has, at steps counted from the checkpoint of both."""
    dense = Made(
        tmp_path, "dense", "settings/quickstart_dense_continued", metrics=dense_behind, attempts=((1, range(16, 31)),)
    ).write()
    moe = Made(
        tmp_path,
        "moe",
        "settings/quickstart_one_expert",
        metrics=lambda step: moe_of_one(step) | {LOSS: moe_of_one(step)[LOSS] + apart},
        attempts=((1, range(1, 16)),),
    ).write()
    comparison = compare(dense, moe)
    assert outcomes(comparison) == outcomes(compare(moe, dense)) == expected
    assert comparison.interval.common == 15
    assert "Step n is iteration 15 + n of `dense`" in text(comparison)


def test_one_expert_from_its_own_initialisation_is_not_judged(tmp_path: Path) -> None:
    changes = "moe: {num_experts: 1}\nrouter: {topk: 1, pre_softmax: true}\nparallel: {expert_model: 1}"
    dense = Made(tmp_path, "dense", "settings/quickstart_dense").write()
    comparison = compare(dense, Made(tmp_path, "moe", changes=changes).write())
    assert comparison.verdict
    assert "begins from its own initialisation" in comparison.verdict.refused
    assert comparison.verdict.holds is None


@pytest.mark.parametrize(("apart", "expected"), [(-0.05, True), (0.05, False), (0.0, None)])
def test_upcycled(tmp_path: Path, apart: float, expected: bool | None) -> None:
    def metrics(step: int) -> Metrics:
        return {LOSS: loss(step) + apart + random.Random(-step).gauss(0, 0.002), "learning-rate": 1e-4}

    behind = Made(
        tmp_path,
        "dense",
        "settings/dense_continued",
        metrics=lambda step: {LOSS: loss(step - 120), "learning-rate": 1e-4},
        attempts=((1, range(121, 241)),),
    ).write()
    upcycled = Made(tmp_path, "upcycled", "upcycle", metrics=metrics, attempts=((1, range(1, 121)),)).write()
    comparison = compare(behind, upcycled)
    assert outcomes(comparison) == outcomes(compare(upcycled, behind)) == [expected]
    assert comparison.interval.last == 120


@pytest.mark.parametrize(
    ("changes", "more", "reason"),
    [
        ("schedule: {lr: 1.0e-4}", {}, "the recipes differ in `schedule.lr` as well"),
        ("", {"config": {**CONFIG, "global_batch_size": 8}}, "tokens a step differs"),
        ("train: {seed: 2}", {"software": {**SOFTWARE, "torch": "2.0"}}, "`train.seed` as well, and 1 more"),
    ],
)
def test_no_verdict_where_something_else_may_be_why(
    tmp_path: Path, changes: str, more: dict[str, Any], reason: str
) -> None:
    a = Made(tmp_path, "a", "first_moe").write()
    comparison = compare(a, Made(tmp_path, "b", "fp8", changes, metrics=times(lambda _: 1.01), **more).write())
    assert comparison.verdict
    assert reason in comparison.verdict.refused
    assert "not judged" in text(comparison)


# Where there is less than two runs


def refused(*arguments: Any, **named: Any) -> str:
    with pytest.raises(MoekitError) as problems:
        compare(*arguments, **named)
    assert len(problems.value.problems) == 1
    return str(problems.value)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    a = Made(tmp_path, "a").write()
    assert refused(a, a) == "error: `a` and `a` are one run\n    hint: give two runs to compare"
    (tmp_path / "link").symlink_to(a.path)
    assert "are one run" in refused(a, RunDir(tmp_path / "link"))
    empty = Made(tmp_path, "empty", attempts=()).write()
    assert refused(a, empty).startswith("error: run `empty` has logged no step yet")
    begun = Made(tmp_path, "begun", attempts=((1, ()),)).write()
    assert "`begun` has logged no step yet" in refused(begun, a)
    later = Made(tmp_path, "later", attempts=((1, range(200, 220)),)).write()
    assert "`a` and `later` have no step in common: they have logged 1 to 120 and 200 to 219" in refused(a, later)
    other = Made(tmp_path, "other", metrics=lambda _: {"batch-size": 4}).write()
    assert refused(a, other) == "error: `a` and `other` have logged no metric in common"
    assert "no step that both have comes after `--warmup 120`: the last is 120" in refused(
        a, Made(tmp_path, "b").write(), warmup=120
    )


def test_a_stream_that_cannot_be_read(tmp_path: Path) -> None:
    a, b = Made(tmp_path, "a").write(), Made(tmp_path, "b").write()
    path = b.path / "attempts" / "1" / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    assert refused(a, b) == f"error: cannot read `{path}`: is a directory"


def test_losses_that_are_no_number_are_left_out(tmp_path: Path) -> None:
    a = Made(tmp_path, "a").write()
    b = Made(tmp_path, "b", metrics=lambda step: {LOSS: float("nan") if step % 2 else loss(step)}).write()
    path = b.path / "attempts" / "1" / "metrics.jsonl"
    path.write_text(path.read_text().replace("NaN", '"NaN"'))
    comparison = compare(a, b)
    assert figure(comparison, LOSS).difference == 0
    assert "The LM loss of `b` was no number at 60 steps" in text(comparison)
    json.dumps(comparison.as_json(), allow_nan=False)


def test_a_metric_of_one_run_stands_alone(tmp_path: Path) -> None:
    dense = Made(tmp_path, "dense", "settings/quickstart_dense").write()
    moe = Made(tmp_path, "moe", config=MOE).write()
    counts(moe, range(10, 121, 10), 160)
    comparison = compare(dense, moe)
    found = figure(comparison, MAX_VIO)
    assert (found.one, found.difference) == (None, None)
    assert found.other == pytest.approx(160 * 8 / 920 - 1)
    assert "only one has it" in text(comparison)
    assert "not logged" in text(comparison)  # TFLOP/s


def test_a_pipeline_has_no_max_vio(tmp_path: Path) -> None:
    a = Made(tmp_path, "a", config=MOE).write()
    b = Made(tmp_path, "b", config={**MOE, "pipeline_model_parallel_size": 2}).write()
    assert "MaxVio of `b` is not shown: the layers of a run with `parallel.pipeline_model` = 2" in text(compare(a, b))


def test_a_run_that_still_trains(tmp_path: Path) -> None:
    a, b = Made(tmp_path, "a").write(), Made(tmp_path, "b", attempts=((1, range(1, 61)),)).write()
    with (b.path / "attempts" / "1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "ti')
    assert "may not have ended" not in text(compare(a, b))
    with (b.path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        comparison = compare(a, b)
    assert (comparison.one.active, comparison.other.active) == (False, True)
    assert comparison.interval.last == 60
    assert "`b` may not have ended" in text(comparison)


def test_a_recipe_of_another_moekit(tmp_path: Path) -> None:
    a, b = Made(tmp_path, "a").write(), Made(tmp_path, "b").write()
    b.recipe.write_text("- this is\n- none")
    comparison = compare(a, b)
    assert comparison.difference is None
    assert comparison.verdict is None
    assert "The recipe of `b` cannot be read" in text(comparison)


# The command


def moekit(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["moekit", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moekit-local").mkdir()
    Made(tmp_path / "moekit-local", "a").write()
    (tmp_path / "far away").mkdir()
    hostile = Made(tmp_path / "far away", "a", metrics=times(lambda _: 1.1)).write()
    renamed = hostile.path.rename(hostile.path.with_name("a\x1b[31m <&\"'\n"))
    assert moekit(monkeypatch, "compare", "a", str(renamed)) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "a?[31m <&\"'?" in shown
    assert moekit(monkeypatch, "compare", "a", str(renamed), "--json", "--last", "7", "--plot", "both.svg") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["interval"]["steps"] == 7
    assert found["not_comparable"] == []
    assert found["figures"][0]["is_clear"] is True
    assert found["verdict"] is None
    assert len(found["curves"][1][RELATIVE_LOSS]) == 120
    ElementTree.parse(tmp_path / "both.svg")
    assert moekit(monkeypatch, "compare", "a", "nobody") == 1
    assert capsys.readouterr().err.startswith("error: there is no run `nobody`")
    assert moekit(monkeypatch, "compare", "a", str(renamed), "--plot", "no/such/folder.svg") == 1
    assert capsys.readouterr().err.startswith("error: cannot write `no/such/folder.svg`")
