"""Runs that begin from a dense one: their arguments, and a start that ends as a lost machine ends it."""

from __future__ import annotations

import time
from pathlib import Path

from job_runs import TINY_MOE, read_metrics, started

_OF_EXPERTS = {
    **dict.fromkeys(("--num-experts", "--moe-ffn-hidden-size", "--moe-router-topk", "--moe-router-dtype"), 2),
    **dict.fromkeys(("--moe-token-dispatcher-type", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"), 2),
    "--moe-per-layer-logging": 1,
}
UNTIED = ["--untie-embeddings-and-output-weights", "--log-interval", "1", "--eval-interval", "1000"]
SAVE_LAST = ["--save", "checkpoints", "--save-interval", "1000"]
DENSE_STEPS = 4


def dense_words() -> list[str]:
    """`TINY_MOE` without experts: its dense layers are 128 wide, two experts."""
    words, kept = list(TINY_MOE), []
    while words:
        count = _OF_EXPERTS.get(words[0], 0)
        if not count:
            kept.append(words[0])
        words = words[count or 1 :]
    return [*kept, *UNTIED]


def upcycled_words(dense: Path, *more: str) -> list[str]:
    """`TINY_MOE` with 4 copies of each of 2 slices of the dense layers."""
    sliced = ["--ffn-hidden-size", "64", "--moe-use-upcycling", "--moe-upcycling-granularity", "2"]
    return [*TINY_MOE, *UNTIED, *sliced, *SAVE_LAST, "--load", str(dense / "checkpoints"), *more]


def resumed_words(words: list[str]) -> list[str]:
    """The same from the run's own checkpoint, as `moekit launch` writes them."""
    kept = [word for word in words if word != "--moe-use-upcycling"]
    return [*kept, "--load", "checkpoints"]


def killed_after_the_conversion(run_dir: Path, words: list[str]) -> None:
    """Start a run, and kill all of it as soon as the converted model is saved."""
    with started(run_dir, words) as torchrun:
        while not (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").exists():
            assert torchrun.poll() is None, (run_dir / "log.1").read_text()[-6000:]
            time.sleep(0.05)


def losses(run_dir: Path, attempt: int = 1) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, to the last bit."""
    steps = read_metrics(run_dir / "attempts" / str(attempt) / "metrics.jsonl")
    return {step: (values["lm loss"], values["grad-norm"]) for step, values in steps.items() if "lm loss" in values}
