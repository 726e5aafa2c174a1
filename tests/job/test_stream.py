"""What real runs write into metrics.jsonl, against what Megatron gives TensorBoard and prints."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_runs import EXPERT_PARALLEL, PIPELINE_PARALLEL, TINY_MOE, read_lines, scalars

pytestmark = [pytest.mark.megatron, pytest.mark.train]

LOG_EVERYTHING = [
    *("--moe-z-loss-coeff", "1e-3", "--log-params-norm", "--log-num-zeros-in-grad", "--log-memory-to-tensorboard"),
    *("--log-validation-ppl-to-tensorboard", "--log-world-size-to-tensorboard", "--timing-log-level", "2"),
]
TWO_VALIDATION_SETS = [
    *("--train-data-path", "train", "--valid-data-path", "wiki", "code", "--multiple-validation-sets"),
    *("--full-validation", "--validation-set-names", "wiki", "code", "--eval-interval", "3"),
]
MAKE_DATA = """
import sys, numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
for seed, name in enumerate(sys.argv[1:]):
    made = IndexedDatasetBuilder(f"{name}.bin", dtype=numpy.uint16)
    for _ in range(40):
        tokens = numpy.random.default_rng(seed).integers(1, 500, 100)
        made.add_document(torch.from_numpy(tokens), [100])
    made.finalize(f"{name}.idx")
"""
# What Megatron gives wandb alone: the iteration's samples, under this name.
ONLY_WANDB = {"samples vs steps"}
AT_INTERVALS = {"skipped_iterations", "nan_iterations", "peak_rss_gib", "peak_rss_rank"}


def without(words: list[str], *options: str) -> list[str]:
    """`words` without some options and their values."""
    kept, drop = [], False
    for word in words:
        drop = word in options if word.startswith("--") else drop
        if not drop:
            kept.append(word)
    return kept


def metrics_of(run_dir: Path, attempt: int = 1) -> dict[int, dict[str, float]]:
    metrics: dict[int, dict[str, float]] = {}
    for line in read_lines(run_dir / "attempts" / str(attempt) / "metrics.jsonl"):
        if "step" in line:
            assert not set(line["metrics"]) & set(metrics.get(line["step"], {}))  # every value once
            metrics.setdefault(line["step"], {}).update(line["metrics"])
    return metrics


def printed(run_dir: Path, attempt: int = 1) -> dict[int, tuple[int, int]]:
    """Skipped and NaN iterations by step, from Megatron's own lines."""
    line = r"iteration +(\d+)/.*number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+)"
    found = re.findall(line, (run_dir / f"log.{attempt}").read_text())
    return {int(step): (int(skipped), int(nan)) for step, skipped, nan in found}


def same(run_dir: Path, attempt: int = 1) -> None:
    """All that TensorBoard has by steps is in metrics.jsonl, with its value, and nothing else but what is ours."""
    by_tag = scalars(run_dir / "attempts" / str(attempt) / "tensorboard")
    expected: dict[int, dict[str, Any]] = {}
    for tag, values in by_tag.items():
        for step, value in values.items():
            if not tag.endswith(" vs samples"):
                expected.setdefault(step, {})[tag] = pytest.approx(value, rel=1e-6)
    metrics = metrics_of(run_dir, attempt)
    ours = ONLY_WANDB | AT_INTERVALS
    assert {step: {k: v for k, v in values.items() if k not in ours} for step, values in metrics.items()} == expected


def test_everything_that_megatron_logs_arrives(tmp_path: Path, launch: Callable[..., None]) -> None:
    subprocess.run([sys.executable, "-c", MAKE_DATA, "train", "wiki", "code"], cwd=tmp_path, check=True)
    words = without(TINY_MOE, "--mock-data", "--split", "--eval-iters")
    launch(tmp_path, [*words, *TWO_VALIDATION_SETS, *LOG_EVERYTHING, "--train-iters", "6"], ranks=1)
    same(tmp_path)
    metrics = metrics_of(tmp_path)
    assert sorted(metrics) == [1, 2, 3, 4, 5, 6]
    for step, values in metrics.items():
        evaluated = {f"lm loss validation-{name}{what}" for name in ("wiki", "code") for what in ("", " ppl")}
        assert {name for name in values if "validation" in name} == (evaluated if step % 3 == 0 else set())
        assert (set(values) >= AT_INTERVALS) == (step % 2 == 0)
        assert values["samples vs steps"] == step * 8
    every_step = {"lm loss", "z_loss", "load_balancing_loss", "grad-norm", "params-norm", "num-zeros", "world-size"}
    every_step |= {"mem-allocated-bytes", "mem-max-allocated-bytes", "moe/z_loss_layer_1", "loss-scale"}
    at_intervals = {"iteration-time", "throughput", "forward-backward-time", "optimizer-time", "forward-compute-time"}
    assert every_step <= set(metrics[1])
    assert every_step | at_intervals <= set(metrics[4])
    config = [line["config"] for line in read_lines(tmp_path / "attempts/1/metrics.jsonl") if "config" in line]
    assert config[0]["validation_set_names"] == ["wiki", "code"]
    assert not re.search("at 0x|<function|<class", str(config))


def test_the_peak_is_that_of_the_busiest_rank(trained: Path) -> None:
    for step, values in metrics_of(trained).items():
        if step % 2 == 0:
            assert 0.1 < values["peak_rss_gib"] < 10
            assert values["peak_rss_rank"] in (0, 1)
            assert (values["skipped_iterations"], values["nan_iterations"]) == (0, 0)
    assert "metrics are no longer complete" not in (trained / "log.1").read_text()
    same(trained)


@pytest.mark.parametrize("parallel", [PIPELINE_PARALLEL, EXPERT_PARALLEL], ids=["pipeline", "experts"])
def test_skipped_and_nan_iterations_are_those_that_megatron_prints(
    tmp_path: Path, launch: Callable[..., None], parallel: list[str]
) -> None:
    """In half precision: the loss scale overflows at first, and the first step taken is so long that NaN follows."""
    words = without([*TINY_MOE, *parallel], "--bf16", "--lr", "--min-lr", "--lr-warmup-iters")
    words += ["--fp16", "--initial-loss-scale", str(2**21), "--hysteresis", "1", "--no-check-for-nan-in-loss-and-grad"]
    launch(tmp_path, [*words, "--lr", "1e6", "--eval-interval", "1000", "--train-iters", "14"])
    metrics, said = metrics_of(tmp_path), printed(tmp_path)
    steps = [2, 4, 6, 8, 10, 12, 14]
    counted = {step: (metrics[step]["skipped_iterations"], metrics[step]["nan_iterations"]) for step in steps}
    assert counted == {step: said[step] for step in steps}
    assert sorted(step for step, values in metrics.items() if AT_INTERVALS & set(values)) == steps
    assert all({"peak_rss_gib", "peak_rss_rank"} <= set(metrics[step]) for step in steps)
    assert 0 < sum(nan for _, nan in counted.values()) < sum(skipped for skipped, _ in counted.values())
