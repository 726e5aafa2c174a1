"""What goes wrong, hours in or without a word, in runs that the rules on output, dumps and checkpoints refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harm_runs import trained

from moekit.launch.rundir import run_dir
from moekit.problems import MoekitError
from moekit.recipe.load import load
from moekit.recipe.rules.output import profiled_steps

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("name", "problem"), [("wgrads", "assert save_dir is not None"), ("tokens_per_expert", "TypeError: expected str")]
)
def test_a_dump_without_a_place_ends_the_run(name: str, problem: str, tmp_path: Path) -> None:
    code, output = trained(tmp_path, f"monitor: {{{name}_interval: 2}}\n")
    assert code != 0
    assert "iteration        1/" in output
    assert "iteration        2/" not in output
    assert problem in output


PROFILED = """
import sys
from torch import profiler

start, end, iterations, written = 1, int(sys.argv[1]), 3, []
schedule = profiler.schedule(wait=start - 1, warmup=1, active=end - start, repeat=1)
activities = [profiler.ProfilerActivity.CPU]
profile = profiler.profile(activities=activities, schedule=schedule, on_trace_ready=written.append)
profile.start()
for iteration in range(iterations):
    profile.step()
    if iteration + 1 == end:
        profile.stop()
print(len(written), flush=True)
"""


@pytest.mark.parametrize(("end", "files"), [(3, 1), (4, 0)])
def test_a_profile_beyond_the_end_leaves_no_file(end: int, files: int) -> None:
    """PyTorch's profiler as Megatron drives it (training.py:3680, 3733, 3205), in a run of three iterations."""
    command = [sys.executable, "-c", PROFILED, str(end)]  # of its own: one that never stops crashes as Python ends
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == f"{files}\n"


SHOWN = """
import sys
from torch import profiler

start, end = map(int, sys.argv[1:])
schedule = profiler.schedule(wait=max(start - 1, 0), warmup=1 if start > 0 else 0, active=end - start, repeat=1)
profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU], schedule=schedule)
profile.start()
for iteration in range(end):
    profile.step()
    with profiler.record_function(f"step {iteration + 1}"):
        pass
profile.stop()
print(sorted(int(event.name[5:]) for event in profile.events() if event.name.startswith("step ")))
"""


@pytest.mark.parametrize(("start", "end"), [(0, 2), (2, 4)])
def test_which_steps_a_profile_shows(start: int, end: int, tmp_path: Path) -> None:
    """PyTorch's profiler as Megatron drives it, and what `monitor.diagnose_interval` is held against."""
    change = f"profile: {{enabled: true, use_pytorch_profiler: true, step_start: {start}, step_end: {end}}}\n"
    (tmp_path / "recipe.yaml").write_text(f"base: quickstart\n{change}")
    command = [sys.executable, "-c", SHOWN, str(start), str(end)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == list(profiled_steps(load(str(tmp_path / "recipe.yaml")).recipe))


def test_a_hook_records_nothing_in_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's tracer on a router that is captured; a replay does not even call it."""
    import torch
    from megatron.core.transformer.moe.router_trace import RouterTracer

    router: Any = torch.nn.Identity()
    router.topk, routing = 1, (torch.ones(4, 2), torch.eye(2, dtype=torch.bool).repeat(2, 1))
    for capturing, records in ((False, 1), (True, 0)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        tracer = RouterTracer(str(tmp_path), max_steps=1, rank=0, training_mode=True)
        tracer.make_hook("decoder.layers.0.mlp.router")(router, (torch.ones(4, 8),), routing)
        assert len(tracer.records) == records


SAVE = "checkpoint: {{save: true, save_interval: 2, {}}}\n"


def test_a_save_in_the_background_without_a_worker_is_none(tmp_path: Path) -> None:
    code, output = trained(tmp_path, SAVE.format("async_save: true"))
    assert code == 0, output[-3000:]
    assert "Disabling --async-save" in output
    assert "successfully saved checkpoint from iteration       2" in output


def test_a_save_in_the_background_has_no_legacy_format(tmp_path: Path) -> None:
    code, output = trained(tmp_path, SAVE.format("async_save: true, format: torch"))
    assert code != 0
    assert "iteration        2/" in output
    assert "Async checkpoint save not implemented for legacy checkpoints" in output


def test_a_load_that_returns_mismatches_ends_the_run(tmp_path: Path) -> None:
    change = SAVE.format("dist_strictness: return_all")
    code, output = trained(tmp_path, change)
    assert code == 0, output[-3000:]
    code, output = trained(tmp_path, change, resume=True)
    assert code != 0
    assert "TypeError: tuple indices must be integers" in output or "'tuple' object" in output


@pytest.mark.parametrize("parent", ["a/b", ".."])
def test_a_launch_takes_no_path_for_a_parent(parent: str, tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="a run cannot be named"):
        run_dir(tmp_path, parent)
