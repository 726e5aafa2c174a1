"""Run directories with a shipped recipe, or a variant, and numbers of a test's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import moekit
from moekit.launch.flat import flat_yaml
from moekit.recipe.load import load

SOFTWARE = {"megatron": "0.19.2", "torch": "2.13.0", "transformer_engine": None, "device": "cpu"}
DENSE, MOE = "settings/quickstart_dense_continued", "settings/quickstart_one_expert"
SQUARED, SLICES = "settings/quickstart_squared_relu_continued", "settings/quickstart_slices"
DETERMINISTIC, REPEATED = "settings/quickstart_deterministic", "settings/quickstart_repeated"
STEPS = 15


def metrics(
    step: int, loss: float | None = None, zeros: float = 0, balance: float | None = None, rate: float | None = None
) -> dict[str, float]:
    """One step as Megatron logs it; the loss falls with the step."""
    found = {
        "lm loss": 7 - step / 100 if loss is None else loss,
        "grad-norm": 0.8,
        "num-zeros": zeros,
        "learning-rate": step * 1.5e-4 if rate is None else rate,
    }
    return found if balance is None else {**found, "load_balancing_loss": balance}


def dense_steps(steps: int = STEPS, start: int = 15) -> dict[int, dict[str, float]]:
    return {start + n: metrics(n) for n in range(1, steps + 1)}


def moe_steps(steps: int = STEPS) -> dict[int, dict[str, float]]:
    return {n: metrics(n, zeros=512, balance=1.0) for n in range(1, steps + 1)}


def make_run(
    root: Path,
    name: str,
    recipe: str,
    steps: Mapping[int, Mapping[str, float]],
    changes: str = "",
    software: Sequence[Mapping[str, object]] = (SOFTWARE,),
) -> Path:
    """`runs/<name>` below `root`; `changes` is YAML over the shipped recipe, `software` that of each attempt."""
    variant = root / f"{name}.yaml"
    variant.write_text(f"base: {recipe}\n{changes}\n")
    run = root / "runs" / name
    for number, versions in enumerate(software, 1):
        attempt = run / "attempts" / str(number)
        attempt.mkdir(parents=True)
        (attempt / "software.json").write_text(json.dumps(versions))
        lines = [json.dumps({"step": step, "time": 1.0, "metrics": dict(found)}) for step, found in steps.items()]
        (attempt / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (run / "recipe.yaml").write_text(flat_yaml(load(str(variant)).recipe))
    provenance = {"moekit": moekit.__version__, "megatron": "0.19.2", "cluster": None, "recipe": name}
    (run / "provenance.json").write_text(json.dumps(provenance))
    return run
