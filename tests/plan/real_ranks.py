"""What the real Megatron says of questions, each in a fork: the parameters that a rank builds, and a step's operations.

Run as a script with questions as JSON on the standard input: `{"argv": [...], "world": 8, "ranks": [0, 1]}`. Of each
come Megatron's count of a step's operations and, by rank, the parameters of its stages, all and routed experts'; or
what it was refused for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from moekit.megatron import stages
from moekit.megatron.forks import in_a_fork


def operations(question: dict[str, Any]) -> Iterator[float]:
    from megatron.training.training import num_floating_point_operations
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    run = _validated(question, 0)
    args = run.args
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
    )
    yield float(num_floating_point_operations(args, args.global_batch_size))


def built(question: dict[str, Any], rank: int) -> Iterator[list[int]]:
    """All parameters of a rank, and those of routed experts."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.global_vars import set_args
    from megatron.training.initialize import _initialize_distributed
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder
    from torch.testing._internal.distributed.fake_pg import FakeStore

    run = _validated(question, rank)
    args = run.args
    stages.config(run)
    set_args(args)
    args.use_gloo_process_groups = False
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=question["world"])
    _initialize_distributed(None, None, None)
    model_parallel_cuda_manual_seed(1)
    run.config.transformer_impl, run.config.perform_initialization = "local", False
    run.config.persist_layer_norm = False
    run.config.sequence_parallel = False  # changes no count, and the local norms have none
    for fusion in stages.FUSIONS:
        setattr(run.config, fusion, False)
    total = experts = 0
    virtual = args.virtual_pipeline_model_parallel_size
    with torch.device("meta"):
        group = ProcessGroupCollection.use_mpu_process_groups()
        builder = GPTModelBuilder if args.hybrid_layer_pattern is None else HybridModelBuilder
        for stage in [None] if virtual is None else range(virtual):
            model = builder(stages._model_config(run)).build_model(group, vp_stage=stage)
            for name, parameter in model.named_parameters():
                total += parameter.numel()
                experts += parameter.numel() if ".experts." in name else 0
    yield [total, experts]


def _validated(question: dict[str, Any], rank: int) -> stages.Run:
    asked = stages.Question(question["argv"], question["world"], environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    run = stages.Run(asked)
    stages.pretend(asked)
    os.environ["RANK"] = str(rank)
    stages.parse(run)
    stages.validate(run)
    return run


def answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        (flops,), _ = in_a_fork(lambda: operations(question), 60)
        ranks = {rank: in_a_fork(lambda rank=rank: built(question, rank), 60)[0][0] for rank in question["ranks"]}
    except RuntimeError as refused:
        return {"refused": str(refused)}
    return {"flops": flops, "ranks": ranks}


def main() -> None:
    stages.load()
    json.dump([answer(question) for question in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
