"""Real training runs that several tests read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job_runs import EXPERT_PARALLEL, FULL_RECOMPUTE, RECORDED, SAVE, TINY_MOE, TRACE_LAST, started


@pytest.fixture(scope="session")
def launch() -> Callable[..., None]:
    """Train to the end; a failure shows the log."""

    def run(
        run_dir: Path, argv: list[str], attempt: int = 1, env: dict[str, str] | None = None, ranks: int = 2
    ) -> None:
        with started(run_dir, argv, attempt, env, ranks) as torchrun:
            code = torchrun.wait(timeout=300)
        assert code == 0, (run_dir / f"log.{attempt}").read_text()[-6000:]

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None]) -> Path:
    """The run directory of 8 iterations with EP=2, evaluated after 3, 6 and 8, with counts and traces."""
    run_dir = tmp_path_factory.mktemp("trained")
    launch(run_dir, [*TINY_MOE, *EXPERT_PARALLEL, *SAVE, *RECORDED, "--train-iters", "8"], env=TRACE_LAST)
    return run_dir


@pytest.fixture(scope="session")
def resumed(
    tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None], request: pytest.FixtureRequest
) -> Path:
    """The run `trained` in two attempts of 4 iterations, with full recompute."""
    run_dir = tmp_path_factory.mktemp("resumed")
    argv = [*TINY_MOE, *EXPERT_PARALLEL, *SAVE, *RECORDED, *FULL_RECOMPUTE, *request.param, "--train-iters", "8"]
    launch(run_dir, [*argv, "--exit-interval", "4", "--save-interval", "4"], env=TRACE_LAST)
    launch(run_dir, [*argv, "--load", "checkpoints"], attempt=2, env=TRACE_LAST)
    return run_dir
