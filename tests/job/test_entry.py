from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_runs import EXPERT_PARALLEL, JOB, SAVE, TINY_MOE, processes_in, read_lines, started

from moekit.job import entry

AT_INTERVALS = {"skipped_iterations", "nan_iterations", "peak_rss_gib", "peak_rss_rank"}


@pytest.mark.parametrize(
    ("argument", "replaced"),
    [
        ("attempts/N/tensorboard", "attempts/12/tensorboard"),
        ("attempts/N/", "attempts/12/"),
        ("attempts/N", "attempts/N"),
        ("attempts/Nothing/x", "attempts/Nothing/x"),
        ("data/attempts/N/x", "data/attempts/N/x"),
        ("--save=attempts/N/x", "--save=attempts/N/x"),
        ("", ""),
    ],
)
def test_the_attempt_takes_the_place_of_n(argument: str, replaced: str) -> None:
    assert entry.with_attempt(argument, 12) == replaced


def test_importing_the_files_of_the_job_does_nothing() -> None:
    script = """
import sys
import cuda_on_cpu, diagnose, entry, exits, fixes, gpt, hooks, intervals, lines, samples, wandb_face, zeros
assert not {"torch", "megatron", "wandb", "moekit"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(JOB)}, check=True)


def test_the_files_of_the_job_are_python_3_10_and_import_nothing_of_moekit() -> None:
    import ast

    for path in JOB.glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 10))
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        assert not [name for name in names if name.split(".")[0] == "moekit"], path


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("stack", "script"), [({}, "pretrain_gpt.py"), ({"MOEKIT_STACK": "hybrid"}, "pretrain_hybrid.py")]
)
def test_a_checkout_runs_its_own_script(tmp_path: Path, stack: dict[str, str], script: str) -> None:
    checkout = tmp_path / "megatron lm"
    checkout.mkdir()
    (checkout / "hooks.py").write_text("raise AssertionError('this is not the hooks of the job')")
    (checkout / "beside.py").write_text("NAME = 'the module beside the script'")
    (checkout / script).write_text(
        "import sys, wandb, megatron.core.timers as timers, beside, torch\n"
        "print(__name__, sys.argv, timers.wandb is wandb, beside.NAME, torch.cuda.device_count())\n"
        "sys.exit(16)\n"
    )
    env = {"MOEKIT_ATTEMPT": "3", "MOEKIT_DEVICE": "cpu", "MOEKIT_MEGATRON": str(checkout), "RANK": "0"} | stack
    done = subprocess.run(
        [sys.executable, JOB / "entry.py", "--save", "attempts/N/x"],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 16, done.stderr
    argv = [str(checkout / script), "--save", "attempts/3/x"]
    *said, last = [line for line in done.stdout.splitlines() if line.startswith(("moekit:", "__main__"))]
    assert last == f"__main__ {argv} True the module beside the script 1"
    assert [line.split(" (")[0] for line in said] == [
        "moekit: in this process: cuda_on_cpu",
        "moekit: in this process: dataset_helpers",
        "moekit: in this process: optimizer_resume",
        "moekit: in this process: fp32_resume",
        "moekit: in this process: orphans",
        "moekit: in this process: tokens_per_expert",
        "moekit: in this process: routing_trace",
        "moekit: in this process: metrics_before_checkpoint",
        "moekit: in this process: intervals",
        "moekit: in this process: activation_dumps",
        "moekit: in this process: wandb_face",
    ]
    assert json.loads((tmp_path / "attempts/3/exit/rank0.json").read_text())["code"] == 16


@pytest.mark.megatron
def test_what_the_wheel_would_ignore_is_refused(tmp_path: Path) -> None:
    ignored = ["--sft", "--per-dataset-sequences-path", "--dataloader-inter-document-masking", "--logits-load-dir"]
    argv = [*TINY_MOE, "--train-iters", "1", *ignored[:2], "sequences.json", *ignored[2:], "logits"]
    env = {"MOEKIT_ATTEMPT": "1", "MOEKIT_DEVICE": "cpu", "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, JOB / "entry.py", *argv],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"{', '.join(f'`{name}`' for name in ignored)}: the installed megatron-core would ignore this"
    assert done.stderr.splitlines()[-1] == f"{said}; a Megatron-LM checkout (MOEKIT_MEGATRON) runs it"
    assert done.returncode == 1
    assert json.loads((tmp_path / "attempts/1/exit/rank0.json").read_text())["reason"].startswith("SystemExit: `--sft`")


@pytest.mark.megatron
@pytest.mark.train
def test_a_run_leaves_its_records(trained: Path) -> None:
    attempt = trained / "attempts" / "1"
    for rank in (0, 1):
        record = json.loads((attempt / "exit" / f"rank{rank}.json").read_text())
        assert (record["code"], record["reason"]) == (0, "ok")
    log = (trained / "log.1").read_text()
    installed = json.loads((attempt / "installed.json").read_text())
    assert {tuple(part) for part in installed} == {("name", "why", "source")}
    said = [line for line in log.splitlines() if line.startswith("moekit: ")]
    assert said == [f"moekit: in this process: {part['name']} ({part['why']})" for part in installed]
    assert "CPU RNG state changed" not in log
    assert (trained / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "8"


@pytest.mark.megatron
@pytest.mark.train
def test_metrics_of_a_run(trained: Path) -> None:
    lines = read_lines(trained / "attempts" / "1" / "metrics.jsonl")
    kinds = [line.get("event", line.get("step")) for line in lines]
    once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind == "config" or kind != before]
    assert once == ["config", "config", *range(1, 9), "finish"]  # on a busy machine a step may take two lines
    assert lines[0]["config"]["num_experts"] == 8
    assert lines[1]["config"] == {"slurm_job_name": "N/A"}
    metrics: dict[int, dict[str, float]] = {}
    for line in (line for line in lines if "step" in line):
        metrics.setdefault(line["step"], {}).update(line["metrics"])
    always = {"lm loss", "learning-rate", "batch-size", "grad-norm", "loss-scale", "load_balancing_loss"}
    always |= {"samples vs steps", "moe/load_balancing_loss_layer_0", "moe/load_balancing_loss_layer_1"}
    for step, values in metrics.items():
        interval = {"iteration-time", "throughput", *AT_INTERVALS} if step % 2 == 0 else set()
        timed = {"throughput"} if step == 1 else interval
        evaluated = {"lm loss validation"} if step in (3, 6, 8) else set()
        assert {name for name in values if not name.endswith("-time") or name in timed} == always | timed | evaluated
    assert metrics[8]["lm loss"] < metrics[1]["lm loss"]
    log = (trained / "log.1").read_text()
    for step, said in ((3, "3"), (6, "6"), (8, "8 on validation set")):  # and not that of the test set
        loss = f"{metrics[step]['lm loss validation']:.6E}"
        assert f"validation loss at iteration {said} | lm loss value: {loss}" in log


@pytest.mark.megatron
@pytest.mark.train
def test_sigterm_to_torchrun_leaves_records_metrics_and_no_process(tmp_path: Path) -> None:
    metrics = tmp_path / "attempts" / "1" / "metrics.jsonl"
    argv = [*TINY_MOE, *EXPERT_PARALLEL, *SAVE, "--eval-interval", "1000000", "--train-iters", "100000"]
    with started(tmp_path, argv) as torchrun:
        deadline = time.monotonic() + 240
        while not (metrics.exists() and '"step"' in metrics.read_text()):
            ended = torchrun.poll() is not None or time.monotonic() > deadline
            assert not ended, (tmp_path / "log.1").read_text()[-3000:]
            time.sleep(0.2)
        assert len(processes_in(tmp_path)) >= 3
        torchrun.terminate()
        torchrun.wait(timeout=60)
        assert processes_in(tmp_path) == []
    for rank in (0, 1):
        record = json.loads((tmp_path / "attempts/1/exit" / f"rank{rank}.json").read_text())
        assert (record["code"], record["reason"]) == (128 + signal.SIGTERM, "SIGTERM")
    assert "step" in read_lines(metrics)[-1]
