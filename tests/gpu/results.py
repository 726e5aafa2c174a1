"""Speed and memory of runs on a GPU, as JSON: `python results.py RUN_DIR ...`. Fails if one had the CPU's answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from moekit.watch.metrics import MetricsReader, merge


def result(run: Path) -> dict[str, object]:
    """The median over the second half of a run's log intervals: compilation and warm-up lie in the first."""
    reader = MetricsReader(run)
    history = merge(reader.poll())
    timed = [metrics for metrics in history.values() if "iteration-time" in metrics]
    settled = timed[len(timed) // 2 :]
    iteration_s = median(metrics["iteration-time"] for metrics in settled)
    installed = json.loads((run / "attempts" / "1" / "installed.json").read_text())
    peak_bytes = max(metrics.get("mem-max-allocated-bytes", 0.0) for metrics in history.values())
    return {
        "run": run.name,
        "steps": max(history),
        "first_loss": history[min(history)]["lm loss"],
        "last_loss": history[max(history)]["lm loss"],
        "validation_loss": history[max(history)].get("lm loss validation"),
        "iteration_s": round(iteration_s, 4),
        "tokens_per_s": round(reader.config["global_batch_size"] * reader.config["seq_length"] / iteration_s),
        "tflop_per_s": round(median(metrics["throughput"] for metrics in settled), 1),
        "peak_memory_gib": round(peak_bytes / 2**30, 2),
        "installed": [part["name"] for part in installed],
    }


if __name__ == "__main__":
    results = [result(Path(run)) for run in sys.argv[1:]]
    print(json.dumps(results, indent=1))
    sys.exit(any("cuda_on_cpu" in str(found["installed"]) for found in results))
