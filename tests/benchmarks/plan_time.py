"""Fits the planner's constants of time to published measurements, and says how far it is off.

    python tests/benchmarks/plan_time.py [--write]

Reads `tests/plan/`: `measured_steps.csv` (published steps of Megatron), `dispatch_times.csv` and
`network_bandwidth.csv` (what networks do), and `held_out_families.yaml`, the families that fit nothing and measure all.
Of GPUs, seven constants are fitted to steps, an eighth (NVLink) is read off dispatch times; EFA's four are fitted to
what was measured of it alone, of IB's only its share. Rows held out fit no constant, but whoever wrote the formulas saw
how far off they were, and the most that a launch may take is what the tiny models of Megatron's CI allow. With
`--write` the result becomes `moekit/plan/time/constants.yaml`; without, the shipped constants are measured. Exits with
1 where a goal is missed: a median error of at most 10 % on families held out, and on rows that state recomputation and
dispatcher.

The fit is least absolute error of logarithms over distinct configurations (several releases of one are averaged), with
a light pull to a first guess of each constant, by descent along one constant at a time.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from step_rows import Row, ci_errors, family_of, rows

from moekit.plan.time import hardware as known

FOLDER = Path(__file__).parents[1] / "plan"
CONSTANTS = Path(known.__file__).parent / "constants.yaml"
GPUS = ("h100", "b200", "b300", "gb200", "gb300")
GUESS = {
    "gemm": 0.68, "gemm_fp8": 0.6, "memory": 0.6, "nvlink": 0.72, "overlap": 0.6, "launch_us": 32.0, "scan": 0.018,
    "step_ms": 40.0,
}  # fmt: skip
LIMITS = {
    "gemm": (0.4, 0.8), "gemm_fp8": (0.35, 0.8), "memory": (0.4, 0.8), "overlap": (0.3, 0.95), "launch_us": (5, 40),
    "scan": (0.005, 0.4), "step_ms": (5, 300),
}  # fmt: skip
"""What is physically believable; constants that are not here are not fitted to steps."""
NVLINK = {"h100": 0.72, "blackwell": 0.60}
"""Of an all-to-all over NVLink: arXiv 2603.07685 Table 7, H100 at 8 ranks; GB200 0.55 to 0.66."""
PULL, PULL_OF_ONE = 0.04, 0.1
GOAL = 0.10

Constants = dict[str, float]
Group = tuple[Row, float]


def main() -> int:
    """Fit and write where asked, then measure."""
    parser = argparse.ArgumentParser(description="fit and measure the planner's constants of time")
    parser.add_argument("--write", action="store_true", help="fit, and write constants.yaml")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return _of(rows(Path(folder)), Path(folder), asked.write)


def _of(found: list[Row], folder: Path, is_fitted: bool) -> int:
    if is_fitted:
        fitted = [row for row in found if family_of(row.text["model"])[0] == "fitted"]
        write(fit_gpus(fitted), {"efa": fit_efa(), "ib": fit_ib(), "none": SOCKETS})
        known._file.cache_clear()
    missed = report(found)
    ci = ci_errors(folder)
    for gpu in ("h100", "gb200"):
        some = np.abs([error for name, error in ci.items() if name.endswith(gpu)])
        middle, most = np.percentile(some, [50, 90])
        shown = f"median {middle:6.1%}   90th percentile {most:6.1%}"
        print(f"{'CI, tiny models, ' + gpu:28} {len(some):4} rows   {shown}   (never fitted, no goal)")
    return missed


def fit_gpus(fitted: list[Row]) -> dict[str, Constants]:
    """Constants of each GPU type; Blackwell's start from what fits them all."""
    blackwell = {**GUESS, "nvlink": NVLINK["blackwell"]}
    joint = fit(groups([row for row in fitted if row.text["gpu"] != "h100"]), blackwell, PULL, steps=(1.25, 1.12, 1.05))
    found = {}
    for gpu in GPUS:
        guess, pull = (GUESS, PULL) if gpu == "h100" else (joint, PULL_OF_ONE)
        found[gpu] = fit(groups([row for row in fitted if row.text["gpu"] == gpu]), guess, pull)
        print(f"{gpu:6} " + ", ".join(f"{name} {value:.3g}" for name, value in found[gpu].items()))
    return found


def groups(of: list[Row]) -> list[Group]:
    """Each distinct configuration once, with the geometric mean of what was measured of it."""
    same: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in of:
        same[row.layout].append(row)
    return [(each[0], float(np.exp(np.mean([np.log(row.measured_s) for row in each])))) for each in same.values()]


def fit(of: list[Group], guess: Constants, pull: float, steps: Sequence[float] = (1.25, 1.12, 1.05, 1.02)) -> Constants:
    """Descent along one constant at a time, in smaller and smaller steps."""

    def loss(constants: Constants) -> float:
        off = [abs(np.log(row.predicted(**constants).seconds[0] / measured)) for row, measured in of]
        away = [abs(np.log(constants[name] / guess[name])) for name in constants]
        return float(np.mean(off) + pull * np.mean(away))

    best, least = dict(guess), loss(guess)
    for step in steps:
        for _ in range(3):
            before = least
            for name, (low, high) in LIMITS.items():
                for factor in (step, 1 / step):
                    while True:
                        tried = {**best, name: min(high, max(low, best[name] * factor))}
                        if tried[name] == best[name] or (now := loss(tried)) >= least - 1e-5:
                            break
                        best, least = tried, now
            if before == least:
                break
    return best


SOCKETS = {"share": 0.034, "start_us": 500.0, "start_us_per_rank": 5.0, "ring": 0.034}
"""Without a fast network: a twenty-fifth of EFA (handbook 3.7). Starts are assumed."""


def fit_efa() -> Constants:
    """NCCL's all-to-all and reductions on P5 nodes, at all sizes and numbers of nodes."""
    with (FOLDER / "network_bandwidth.csv").open() as file:
        measured = list(csv.DictReader(file))
    points = [
        (float(row["size_MB"]) * 1e6 / ranks * (ranks - 8), ranks, _seconds(row, ranks))
        for row in measured
        if row["collective"] == "alltoall" and (ranks := int(row["gpus"]))
    ]
    big = [
        float(row["busbw_GBps"]) / 400
        for row in measured
        if row["collective"] == "all_reduce" and int(row["nodes"]) >= 4 and float(row["size_MB"]) >= 1024
    ]
    found = _fit_start(points, (0.0, 800.0), (0.0, 8.0))
    return {**found, "ring": round(median(big), 3)}


def _seconds(row: dict[str, str], ranks: int) -> float:
    """Of an all-to-all, by NCCL's bus bandwidth."""
    return float(row["size_MB"]) * 1e6 * (ranks - 1) / ranks / (float(row["busbw_GBps"]) * 1e9)


def fit_ib() -> Constants:
    """Published dispatch and combine over nodes, of all-to-all."""
    with (FOLDER / "dispatch_times.csv").open() as file:
        measured = [row for row in csv.DictReader(file) if row["dispatcher"] == "alltoall"]
    points = [
        (4096 * 8 * 7168 * 2 * (ranks - 8) / ranks, ranks, float(row["microseconds"]) * 1e-6)
        for row in measured
        if (ranks := int(row["expert_ranks"])) > 8
    ]
    return {**_fit_start(points, (50.0, 50.0), (1.0, 1.0)), "ring": 0.9}


def _fit_start(
    points: list[tuple[float, int, float]], start: tuple[float, float], each: tuple[float, float]
) -> Constants:
    """The share of 50 GB/s and the start that least miss (bytes across nodes, ranks, seconds), relative to each."""

    def off(share: float, start_us: float, per_rank: float) -> float:
        predicted = [size / (50e9 * share) + (start_us + per_rank * ranks) * 1e-6 for size, ranks, _ in points]
        return float(sum(abs(np.log(one / seconds)) for one, (_, _, seconds) in zip(predicted, points, strict=True)))

    tried = [
        (off(share, start_us, per_rank), share, start_us, per_rank)
        for share in np.arange(0.6, 1.0, 0.01)
        for start_us in np.unique(np.linspace(*start, 17))
        for per_rank in np.unique(np.linspace(*each, 17))
    ]
    least, share, start_us, per_rank = min(tried)
    print(f"network: {least / len(points):.1%} off on average over {len(points)} points")
    return {
        "share": round(float(share), 3), "start_us": round(float(start_us), 1),
        "start_us_per_rank": round(float(per_rank), 2),
    }  # fmt: skip


def write(gpus: dict[str, Constants], networks: dict[str, Constants]) -> None:
    """`constants.yaml`."""
    head = (
        "# Made by tests/benchmarks/plan_time.py --write of published measurements (tests/plan/*.csv); hardware.py\n"
        "# says what each is. Sockets, IB's starts and IB's reductions are assumed.\n"
    )
    rounded = {gpu: {name: float(f"{value:.3g}") for name, value in of.items()} for gpu, of in gpus.items()}
    text = yaml.safe_dump({"gpus": rounded, "networks": networks}, sort_keys=False, default_flow_style=None, width=118)
    CONSTANTS.write_text(head + text)


def report(found: list[Row]) -> int:
    """Errors by what is held out, stated, GPU and family; 1 where a goal is missed."""
    errors = [(float(row.predicted().seconds[0]) / row.measured_s - 1, row) for row in found]

    def line(name: str, of: Callable[[Row], bool]) -> float:
        some = [error for error, row in errors if of(row)]
        if not some:
            return 0.0
        middle, most = np.percentile(np.abs(some), [50, 90])
        shown = f"median {middle:6.1%}   90th percentile {most:6.1%}   bias {np.median(some):+6.1%}"
        print(f"{name:28} {len(some):4} rows   {shown}")
        return float(middle)

    def held(row: Row) -> bool:
        return family_of(row.text["model"])[0] == "held_out"

    line("families fitted", lambda row: not held(row))
    goals = [line("families held out", held), line("stated", lambda row: row.is_stated)]
    goals.append(line("stated, held out", lambda row: row.is_stated and held(row)))
    line("held out, MoE on H100", lambda row: held(row) and row.text["gpu"] == "h100")
    for gpu in GPUS:
        line(gpu, lambda row, gpu=gpu: row.text["gpu"] == gpu)  # type: ignore[misc]
    for family in sorted({family_of(row.text["model"]) for _, row in errors}, reverse=True):
        line(f"{family[1]} ({family[0].replace('_', ' ')})", lambda row, f=family: family_of(row.text["model"]) == f)  # type: ignore[misc]
    missed = sum(goal > GOAL for goal in goals)
    print("all goals met" if not missed else f"{missed} of {len(goals)} goals missed: a median over {GOAL:.0%}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
