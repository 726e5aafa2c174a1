"""What each log interval adds to the metrics: the busiest rank's peak memory, and how many steps were not taken.

Megatron prints the peak of data-parallel rank 0 and gives TensorBoard that of the last rank; the rank that runs out of
memory is the busiest one (handbook 3.7). Iterations that were skipped, or had no finite loss, it counts for its printed
line only. Both are taken around `training_log`, which every rank calls after every iteration: between steps, where no
CUDA graph is captured. An interval is Megatron's own: the first iteration of a start belongs to the next one.

skipped_iterations, nan_iterations    as in Megatron's line of the same step
peak_memory_gib, peak_memory_rank     allocated tensors at most, and the rank that had them (`max_memory_allocated`)
peak_reserved_gib, peak_reserved_rank what PyTorch's allocator held at most (`max_memory_reserved`)
peak_rss_gib, peak_rss_rank           without a GPU, in the place of those: the resident set at most (`VmHWM`)
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

SKIPPED, NAN = "skipped iterations", "nan iterations"  # Megatron's keys, among the sums of its losses
GIB = 2**30
Call = dict[str, Any]
Metrics = dict[str, Any]


def install() -> list[dict[str, str]]:
    """Put this into Megatron, where its `training_log` is one that is known here; the list of what was put in."""
    from megatron.training import get_args, training

    log = getattr(training, "training_log", None)
    if log is None or not is_known(log):
        return []
    signature = inspect.signature(log)

    @functools.wraps(log)
    def log_more(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        call = bound.arguments
        if not ends_interval(call, get_args()):
            return log(*arguments, **named)
        metrics = unless_it_fails(steps_not_taken, call)  # before Megatron starts its counts anew
        answer = log(*arguments, **named)
        metrics.update(unless_it_fails(peaks_of_interval))
        if sys.modules["wandb"].run is not None:
            sys.modules["wandb"].log(metrics, call["iteration"])
        return answer

    training.training_log = log_more
    return [
        {
            "name": "intervals",
            "why": "Megatron logs neither the busiest rank's peak memory nor how many iterations it skipped",
            "source": "megatron/training/training.py: training_log",
        }
    ]


def is_known(log: Callable[..., Any]) -> bool:
    """Whether this `training_log` takes what is read here, and counts under the keys that are read here."""
    needed = {"loss_dict", "total_loss_dict", "iteration", "skipped_iter", "is_first_iteration"}
    source = inspect.getsource(log)
    return needed <= set(inspect.signature(log).parameters) and all(f"'{key}'" in source for key in (SKIPPED, NAN))


def ends_interval(call: Call, args: Any) -> bool:
    """Whether a log interval ends with this call, in a run that has metrics; the same on every rank."""
    asked = bool(getattr(args, "wandb_project", None))
    return asked and not call["is_first_iteration"] and call["iteration"] % args.log_interval == 0


def unless_it_fails(measure: Callable[..., Metrics], *arguments: Any) -> Metrics:
    """What `measure` finds, or nothing and a warning: metrics stop no training."""
    try:
        return measure(*arguments)
    except Exception as failure:
        sys.modules["wandb"].warn(f"`{measure.__name__}` fails: {type(failure).__name__}: {failure}")
        return {}


def steps_not_taken(call: Call) -> Metrics:
    """Skipped and NaN iterations of the interval that ends with this call (training/training.py: training_log)."""
    sums, skipped = call["total_loss_dict"], int(call["skipped_iter"])
    is_nan = skipped and not all(math.isfinite(loss.float().sum().item()) for loss in call["loss_dict"].values())
    return {
        "skipped_iterations": int(sums.get(SKIPPED, 0)) + skipped,
        "nan_iterations": int(sums.get(NAN, 0)) + int(is_nan),
    }


def peaks_of_interval() -> Metrics:
    """The highest of all ranks since the last call, with the rank. Every rank has to call this at the same step.

    Right after a barrier of Megatron's, with its timer of the iterations stopped, as for an evaluation.
    """
    import torch
    from megatron.training import get_timers

    on_gpu = torch.cuda.is_available()
    timer = get_timers()("interval-time")
    timer.stop()
    try:
        own = unless_it_fails(cuda_peaks if on_gpu else resident_peak)
        # A rank that could not measure takes part all the same, with 0: the others wait for it.
        return highest({name: own.get(name, 0) for name in (("memory", "reserved") if on_gpu else ("rss",))})
    finally:
        timer.start()


def highest(own_bytes: Metrics) -> Metrics:
    """The largest of all ranks' values by name, in GiB, and the lowest rank that has it: one all-reduce.

    A value and its rank are one number of 64 bits, the value in front.
    """
    import torch

    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    packed = [size * world + world - 1 - rank for size in own_bytes.values()]
    if world > 1:
        tensor = torch.tensor(packed, dtype=torch.int64, device="cuda")
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        packed = tensor.tolist()
    found: Metrics = {}
    for name, number in zip(own_bytes, packed, strict=True):
        found[f"peak_{name}_gib"] = number // world / GIB
        found[f"peak_{name}_rank"] = world - 1 - number % world
    return found


def cuda_peaks() -> Metrics:
    """Bytes allocated and reserved at most since the last call. The peaks that Megatron shows start anew too."""
    import torch

    peaks = {"memory": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    torch.cuda.reset_peak_memory_stats()
    return peaks


def resident_peak() -> Metrics:
    """Bytes resident at most since the last call, or the start where /proc cannot be written (proc_pid_status(5))."""
    status = Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) * 1024
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return {"rss": peak}
