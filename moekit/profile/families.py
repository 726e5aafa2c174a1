"""Which family a kernel, a copy or an operator on the CPU belongs to, by its name. Pure.

Names are those of PyTorch, Transformer Engine, cuBLAS, CUTLASS, FlashAttention, NCCL, DeepEP, HybridEP and Megatron's
fused kernels. What no pattern knows is `other compute`.
"""

from __future__ import annotations

import re
from functools import lru_cache

ATTENTION, GROUPED_GEMM, GEMM, PERMUTE = "attention", "grouped GEMM", "other GEMM", "permute and copy"
OTHER, ALL_TO_ALL, COMMUNICATION, IDLE = "other compute", "all-to-all", "other communication", "idle"
COMPUTE = (ATTENTION, GROUPED_GEMM, GEMM, PERMUTE, OTHER)
FAMILIES = (*COMPUTE, ALL_TO_ALL, COMMUNICATION)
"""In the order in which an instant that several families share is given to one: what computes hides what sends."""

_KERNELS = (
    # DeepEP's namespace and HybridEP's kernels carry tokens between ranks; some of DeepEP's only lay them out
    (ALL_TO_ALL, r"alltoall|all_to_all|deep_ep(?!::layout).*(dispatch|combine)|hybrid_ep|nccl.*sendrecv"),
    (COMMUNICATION, r"nccl|nvshmem|userbuffers|all_?reduce|all_?gather|reduce_?scatter|symm_mem|gloo"),
    (ATTENTION, r"flash|fmha|attention|attn|sdpa|scaled_softmax|scaled_masked_softmax|scaled_upper_triang|mha_"),
    (GROUPED_GEMM, r"group(ed)?_?(gemm|mm)|gemm_?grouped|GroupProblemShape|grouped"),
    (GEMM, r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|wgmma|dot_kernel|tensorop|matmul"),
    (
        PERMUTE,
        r"permut|deep_ep|gather|scatter|index_?(select|put|add|copy|fill)|indexing|sort|radix|memcpy|copy|CatArray|transpose"
        r"|make_row_id_map|chunk|moe_align|row_map",
    ),
)
_OPERATORS = (
    (ALL_TO_ALL, r"all_?to_?all"),
    (COMMUNICATION, r"^(c10d|gloo|nccl)::?|_(Reduce|Gather|Copy|Scatter)\w*Region|all_?reduce|all_?gather|barrier"),
    # Megatron's attention on a CPU: scores by baddbmm, their sum by bmm (core/transformer/dot_product_attention.py)
    (ATTENTION, r"attention|sdpa|::_?softmax|::bmm|::baddbmm"),
    (GROUPED_GEMM, r"group(ed)?_?(gemm|mm)"),
    (GEMM, r"::(mm|addmm|matmul|linear|_scaled_mm|dot|mv)\b|gemm"),
    (
        PERMUTE,
        r"permut|deep_ep|gather|scatter|index|sort|copy|::cat\b|::(clone|contiguous|to|_to_copy)\b|::repeat|masked_select",
    ),
)
_KERNEL_PATTERNS = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _KERNELS]
_OPERATOR_PATTERNS = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _OPERATORS]
_EXCHANGES = ("all_to_all", "alltoall")


@lru_cache(maxsize=1 << 16)
def of_kernel(name: str, collective: str = "") -> str:
    """The family of a GPU kernel or copy; `collective` is what PyTorch's profiler says NCCL did, where it does.

    NCCL sends tokens and pipeline stages by the same kernel, SendRecv: without `collective` it counts as all-to-all.
    """
    if collective:
        return ALL_TO_ALL if any(word in collective.lower() for word in _EXCHANGES) else COMMUNICATION
    return next((family for family, pattern in _KERNEL_PATTERNS if pattern.search(name)), OTHER)


@lru_cache(maxsize=1 << 16)
def of_operator(name: str) -> str:
    """The family of an operator that ran on a CPU."""
    return next((family for family, pattern in _OPERATOR_PATTERNS if pattern.search(name)), OTHER)


def is_unnamed_send(name: str, collective: str = "") -> bool:
    """Whether a kernel is NCCL's SendRecv and nothing says for whom."""
    return not collective and "sendrecv" in name.lower()
