"""Training runs of `moekit/job/`: torchrun, two ranks, mock data, a tiny MoE; and reading what they wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moekit.job

JOB = Path(moekit.job.__file__).parent

LAYERS, EXPERTS, TOPK, SEQ_LENGTH, MICRO_BATCH, GLOBAL_BATCH = 2, 8, 2, 64, 2, 8
TINY_MOE = f"""
    --num-layers {LAYERS} --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --init-method-std 0.02
    --attention-dropout 0 --hidden-dropout 0 --num-experts {EXPERTS} --moe-ffn-hidden-size 64 --moe-router-topk {TOPK}
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-router-dtype fp32 --moe-per-layer-logging --bf16 --micro-batch-size {MICRO_BATCH}
    --global-batch-size {GLOBAL_BATCH} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-decay-iters 100
    --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 2 --eval-iters 2
    --mock-data --tokenizer-type NullTokenizer --vocab-size 512 --null-tokenizer-eod-id 0 --split 95,5,0 --num-workers 0
    --use-distributed-optimizer --transformer-impl local --no-rope-fusion --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-bias-swiglu-fusion --distributed-backend gloo
    --tensorboard-dir attempts/N/tensorboard --wandb-project tests --wandb-exp-name tiny
    --wandb-save-dir attempts/N/wandb --log-throughput --log-timers-to-tensorboard
""".split()
EXPERT_PARALLEL = [
    *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--untie-embeddings-and-output-weights"),
]
PIPELINE_PARALLEL = ["--pipeline-model-parallel-size", "2", "--eod-mask-loss"]
FULL_RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
SAVE = ["--save", "checkpoints", "--save-interval", "1000"]
RECORDED = [  # the run `trained`, besides its length
    *("--eval-interval", "3", "--save-tokens-per-expert-interval", "2"),
    *("--moe-routing-trace-path", "attempts/N/routing", "--moe-routing-trace-max-training-iters", "2"),
]
TRACE_LAST = {"MOEKIT_ROUTING_TRACE_LAST_ITERS": "3"}


def command(*arguments: str, ranks: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *arguments]


@contextmanager
def started(
    run_dir: Path, argv: list[str], attempt: int = 1, env: dict[str, str] | None = None, ranks: int = 2
) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with `argv` in the run directory; its output goes to `log.<attempt>`; nothing of it outlives this."""
    shutil.copytree(JOB, run_dir / "job", dirs_exist_ok=True)
    variables = {
        "MOEKIT_ATTEMPT": str(attempt),
        "MOEKIT_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **(env or {}),
    }
    with (run_dir / f"log.{attempt}").open("wb") as log:
        torchrun = subprocess.Popen(
            command("job/entry.py", *argv, ranks=ranks),
            cwd=run_dir,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield torchrun
    finally:
        for pid in processes_in(run_dir):
            os.kill(pid, signal.SIGKILL)
        torchrun.wait(timeout=60)


def processes_in(run_dir: Path) -> list[int]:
    """The living processes that work in `run_dir`; torchrun gives each rank a session of its own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = (process / "cwd").resolve(strict=True)
        except OSError:  # gone, or a zombie
            continue
        if where == run_dir:
            found.append(int(process.name))
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(*paths: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, without those that measure time or memory."""
    metrics: dict[int, dict[str, float]] = {}
    measured = ("iteration-time", "throughput", "peak_")
    for line in (line for path in paths for line in read_lines(path) if "step" in line):
        values = {k: v for k, v in line["metrics"].items() if not k.startswith(measured)}
        metrics.setdefault(line["step"], {}).update(values)
    return metrics


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard keeps in a folder: by tag and step, the first value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    kept.Reload()
    tags = kept.Tags()["scalars"]
    return {tag: {event.step: event.value for event in reversed(kept.Scalars(tag))} for tag in tags}
