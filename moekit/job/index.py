"""Build Megatron's index of a run's data on a CPU, before any GPU is held.

    python job/index.py <Megatron's arguments>

In a training, rank 0 builds it while all others wait (core/datasets/blended_megatron_dataset_builder.py), and finds it
in `--data-cache-path` where somebody did before. What it depends on are the data, the split, the seed, the sequence
length and how many samples are asked for: Megatron's own code works these out here, from the run's own arguments.
Neither Transformer Engine nor process groups are needed. From the environment: MOEKIT_MEGATRON, as in `entry.py`.

Written for 0.19.2; that a training then builds nothing is tested (tests/job/test_index.py).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

CHANGES_ON_THE_WAY = ("phase_transition_iterations", "step_batch_size_schedule", "mock_data")
"""With these, samples are counted otherwise, or there is no index."""


def main() -> None:
    """Build what is not there yet; SystemExit where the arguments have no index that is known beforehand."""
    prepare_process()
    import gpt  # type: ignore[import-not-found]
    from megatron.core.datasets.utils import compile_helpers
    from megatron.training import global_vars
    from megatron.training.arguments import parse_args
    from megatron.training.training import get_train_valid_test_num_samples

    args, unknown_here = parse_args(), (*CHANGES_ON_THE_WAY, *gpt.OF_A_CHECKOUT)
    if refused := [f"`--{name.replace('_', '-')}`" for name in unknown_here if getattr(args, name, None)]:
        raise SystemExit(f"moekit: {', '.join(refused)}: no index can be built beforehand")
    complete(args)
    global_vars.set_args(args)
    global_vars._build_tokenizer(args)
    compile_helpers()
    counts = get_train_valid_test_num_samples()
    before, began = files_in(args.data_cache_path), time.monotonic()
    gpt.datasets(counts)
    new = files_in(args.data_cache_path) - before
    built = f"{len(new)} files built" if new else "it was there already"
    samples = " + ".join("all" if count is None else f"{count:,}" for count in counts)
    seconds = time.monotonic() - began
    print(f"moekit: index of {samples} samples in {args.data_cache_path}: {built}, {seconds:.1f} s", flush=True)


def prepare_process() -> None:
    """Make Megatron's training package one that can be imported without a GPU."""
    import torch

    if not torch.cuda.is_available():
        import cuda_on_cpu  # type: ignore[import-not-found]

        cuda_on_cpu.install()
        # An image for GPUs has one that finds no driver here and fails in another way than by being missing.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    if checkout := os.environ.get("MOEKIT_MEGATRON"):
        sys.path.insert(0, checkout)
    import fixes  # type: ignore[import-not-found]

    fixes.dataset_helpers()


def complete(args: Any) -> None:
    """Set what validation would set of that which the index depends on (megatron/training/arguments.py:640-691)."""
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.rank, args.data_parallel_size = 0, max(1, int(os.environ.get("WORLD_SIZE", "1")) // model_ranks)
    if args.split is None and args.data_path:
        args.split = "969, 30, 1"
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    if getattr(args, "eval_global_batch_size", None) is None:
        args.eval_global_batch_size = args.global_batch_size
    if args.seq_length is None:
        args.seq_length = args.encoder_seq_length
    args.dataloader_fast_cache_load = args.dataloader_defer_npy_index_mmap = False  # both take it for built already
    if not args.train_iters:
        args.train_iters = args.train_samples // args.global_batch_size


def files_in(folder: str) -> set[Path]:
    """The index's files that are there."""
    return set(Path(folder).glob("*"))


if __name__ == "__main__":
    main()
