"""How far upcycled layers are from the dense ones, by Megatron's own conversion and forward; JSON lines, one a case.

`python upcycled_forward.py`: two layers of width 64, float32, weights at random as Megatron makes them, one process.
"""

from __future__ import annotations

import json
import os
from typing import Any

CASES = [
    (activation, slices, experts, topk, softmax)
    for activation in ("squared_relu", "swiglu", "gelu")
    for slices, experts, topk in ((1, 8, 2), (2, 8, 2), (2, 8, 4), (4, 8, 4), (8, 64, 8), (2, 8, 3), (2, 2, 2))
    for softmax in ("last", "first")
]
HIDDEN, WIDTH, TOKENS = 64, 128, 64


def main() -> None:
    from moekit.job import cuda_on_cpu

    cuda_on_cpu.install()
    import torch
    from megatron.core import parallel_state, tensor_parallel

    os.environ.update(RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.random.model_parallel_cuda_manual_seed(1)
    torch.set_grad_enabled(False)
    for case in CASES:
        print(json.dumps([*case, *compare(*case)]), flush=True)


def compare(activation: str, slices: int, experts: int, topk: int, softmax: str) -> tuple[float, int]:
    """The first layer's distance from the dense one, relative, and how many rows of its router are different."""
    import torch
    from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict

    torch.manual_seed(0)
    dense = model(activation, WIDTH)
    moe = model(
        activation,
        WIDTH // slices,
        num_moe_experts=experts,
        moe_ffn_hidden_size=WIDTH // slices,
        moe_router_topk=topk,
        moe_router_pre_softmax=softmax == "first",
    )
    moe.load_state_dict(upcycle_state_dict([moe], [dense])["model"])
    hidden = torch.randn(TOKENS, 4, HIDDEN)
    (wanted, _), (found, _) = (one.decoder.layers[0].mlp(hidden) for one in (dense, moe))
    rows = torch.unique(moe.decoder.layers[0].mlp.router.weight, dim=0)
    return float((found - wanted).norm() / wanted.norm()), len(rows)


def model(activation: str, width: int, **experts: Any) -> Any:
    """A GPT of local layers, with experts where there are `experts`."""
    import torch.nn.functional as functions
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {"squared_relu": squared_relu, "swiglu": functions.silu, "gelu": functions.gelu}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=width,
        num_attention_heads=4,
        activation_func=known[activation],
        gated_linear_unit=activation == "swiglu",
        add_bias_linear=False,
        normalization="RMSNorm",
        transformer_impl="local",
        persist_layer_norm=False,
        bias_activation_fusion=False,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        **experts,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=256, max_sequence_length=TOKENS, position_embedding_type="rope")


if __name__ == "__main__":
    main()
