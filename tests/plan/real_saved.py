"""What autograd keeps in the real Megatron's own classes, on the CPU: bytes by module, of `real_ranks`' questions.

A tensor counts once, by its storage, at the module in which it is first kept; weights do not count.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

from real_ranks import _validated

from moekit.megatron import stages
from moekit.megatron.forks import in_a_fork


def kept(question: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Bytes by module of a forward pass with a loss."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.global_vars import set_args
    from megatron.training.initialize import _initialize_distributed
    from megatron.training.models.gpt import GPTModelBuilder
    from torch.testing._internal.distributed.fake_pg import FakeStore

    run = _validated(question, 0)
    args = run.args
    stages.config(run)
    set_args(args)
    args.use_gloo_process_groups = False
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    _initialize_distributed(None, None, None)
    model_parallel_cuda_manual_seed(1)
    run.config.transformer_impl, run.config.persist_layer_norm = "local", False
    for fusion in stages.FUSIONS:
        setattr(run.config, fusion, False)
    group = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(stages._model_config(run)).build_model(group, vp_stage=None).bfloat16()
    yield _kept_by(model, args.micro_batch_size, args.seq_length)


def _kept_by(model: Any, sequences: int, length: int) -> dict[str, int]:
    import torch

    inside: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: inside.append(name))
        module.register_forward_hook(
            lambda _module, _inputs, _outputs: inside.clear() if len(inside) == 1 else inside.__delitem__(-1)
        )
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: list[tuple[str, Any]] = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append((inside[-1] if inside else "", tensor))  # no other storage gets its address meanwhile
        return tensor

    tokens = torch.randint(0, 900, (sequences, length))
    places = torch.arange(length)[None].expand(sequences, length)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, places, mask, labels=tokens)
    found = defaultdict[str, int](int)
    for module, tensor in alive:  # at the end: recomputation gives up outputs that were kept first
        found[module] += tensor.untyped_storage().nbytes()
    assert loss.requires_grad
    return dict(found)


def main() -> None:
    stages.load()
    import torch

    from moekit.job import cuda_on_cpu

    cuda_on_cpu._target = torch.device("cpu")
    os.environ["NCCL_ALGO"] = "Ring"
    answers = [in_a_fork(partial(kept, question), 120)[0][0] for question in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
