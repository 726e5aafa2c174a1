"""Rules on the libraries that carry tokens between experts' ranks: what DeepEP and HybridEP ask of a model."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.dispatch import flex_library
from moekit.recipe.rules.violation import Rule, Target, Violation, listed, variable
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import exchange_ranks

DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Over so many ranks DeepEP has a configuration (48 and 96 came with its 2.0)."""
_PEERS = 8
"""Up to so many ranks DeepEP's exchange is one over NVLink; beyond, it takes its kernels for several nodes."""
_QUEUE = 65536
_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def _carrier(recipe: Recipe) -> str | None:
    """`deepep` (the flex dispatcher's default), `hybridep` or `ncclep`; None where tokens go without a library."""
    moe = recipe.moe
    if not moe.num_experts or moe.dispatcher != "flex":
        return None
    return flex_library(recipe)


def _width(recipe: Recipe) -> tuple[str, int | None]:
    """The field that says how wide a token is on its way, and its value."""
    if recipe.moe.latent_size:
        return "moe.latent_size", recipe.moe.latent_size
    return "model.hidden_size", recipe.model.hidden_size


def _domain(recipe: Recipe, target: Target) -> int | None:
    """How many of the ranks HybridEP finds, or is told to find, in one NVLink domain; None where this is not known."""
    told = variable(_DOMAIN, recipe, target)
    if told is not None:
        return int(told) if told.isdigit() else None
    return None if target.gpu.startswith("gb") else target.gpus_per_node


def carriers_carry_bf16(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """DeepEP and HybridEP add up what comes back from the experts as bf16.

    Megatron, first step: `Unsupported type` (DeepEP 1.2.1, csrc/kernels/launch.cuh:84), in HybridEP an assertion
    (hybrid_ep.cu:223, permute.cu:413).
    """
    carrier = _carrier(recipe)
    if carrier in ("deepep", "hybridep") and not recipe.precision.bf16:
        yield Violation(
            ("moe.dispatcher", "moe.flex_dispatcher_backend", "precision.fp16"),
            f"`{carrier}` carries tokens in bf16, and the model is in {'fp16' if recipe.precision.fp16 else 'fp32'}",
            "`precision: {bf16: true, fp16: null}`, or `moe: {dispatcher: alltoall}`",
        )


def deepep_takes_multiprocessors_in_pairs(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """One half of its multiprocessors sends, the other receives; both fields set their number.

    Megatron, build: `The SM count must be even` (DeepEP 1.2.1, deep_ep/buffer.py:152;
    megatron/core/transformer/moe/token_dispatcher.py:1279).
    """
    if _carrier(recipe) != "deepep" or "--moe-flex-dispatcher-num-sms" in (recipe.megatron.extra or ()):
        return
    for name in ("deepep_num_sms", "hybridep_num_sms"):
        number = getattr(recipe.moe, name)
        if number is not None and number % 2:
            yield Violation(
                (f"moe.{name}", "moe.flex_dispatcher_backend"),
                f"moe.{name} = {number} is odd, and DeepEP takes multiprocessors in pairs",
                f"use {number + 1}",
            )


def deepep_is_configured_for_the_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """DeepEP has a table of exchanges it was tuned for, and runs no other.

    Megatron, first step: `Unsupported number of EP ranks: 40` (DeepEP 1.2.1, deep_ep/buffer.py:244;
    megatron/core/transformer/moe/fused_a2a.py:48).
    """
    ranks = exchange_ranks(recipe)
    if _carrier(recipe) == "deepep" and ranks > 1 and ranks not in DEEPEP_RANKS:
        yield Violation(
            ("moe.dispatcher", "parallel.expert_model", "parallel.expert_tensor"),
            f"DeepEP has no exchange between {ranks} ranks (`parallel.expert_model` times those of one expert)",
            f"it has them for {listed(list(map(str, DEEPEP_RANKS)))}; `dispatcher: alltoall` takes any",
        )


def deepep_stages_a_whole_token(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """From Hopper on a token passes a buffer of fixed size in shared memory, copied in pieces of fixed size.

    Megatron, first step: an assertion in the kernel, seen as `an illegal instruction was encountered`
    (DeepEP 1.2.1, csrc/kernels/intranode.cu:235, internode.cu:453, 1250, 1448; its issues 506 and 722).
    """
    field, width = _width(recipe)
    if _carrier(recipe) != "deepep" or width is None or target.gpu.startswith("a"):
        return
    step, most = (16, 8176) if exchange_ranks(recipe) <= _PEERS else (256, 7936)
    if width > most or width % step:
        where = "within a node" if exchange_ranks(recipe) <= _PEERS else "between nodes"
        yield Violation(
            (field, "moe.dispatcher"),
            f"{where} DeepEP carries tokens as wide as a multiple of {step}, up to {most}, and {field} = {width}",
            "use `dispatcher: alltoall`, or `flex_dispatcher_backend: hybridep`",
        )


def hybridep_reads_sixteen_bytes(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """HybridEP copies tokens, and the weights of all experts of a node, in whole pieces of 16 bytes.

    Megatron, first step: `The buffer config is not valid` (DeepEP's branch hybrid-ep, csrc/hybrid_ep/config.cuh:84).
    """
    field, width = _width(recipe)
    if _carrier(recipe) != "hybridep":
        return
    if width is not None and width % 16:
        yield Violation(
            (field, "moe.flex_dispatcher_backend"),
            f"HybridEP carries tokens as wide as a multiple of 16, and {field} = {width}",
        )
    domain, count, experts = _domain(recipe, target), recipe.parallel.expert_model or 1, recipe.moe.num_experts or 0
    near = domain and min(domain, exchange_ranks(recipe)) * (experts // count)
    if near and not experts % count and near % 4:
        yield Violation(
            ("moe.num_experts", "moe.flex_dispatcher_backend"),
            f"HybridEP looks at the experts of a node by fours, and there are {near}",
            "use a multiple of 4 for `moe.num_experts`, or `dispatcher: alltoall`",
        )


def hybridep_queues_hold_every_token(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Between nodes HybridEP posts three requests for each of a rank's tokens to one queue of the network card.

    Megatron, first step: `tx_depth > 0 && tx_depth < 65536` (DeepEP's branch hybrid-ep,
    csrc/hybrid_ep/buffer/internode_doca.cu:167; Megatron-LM issue 3999).
    """
    model, parallel, domain = recipe.model, recipe.parallel, _domain(recipe, target)
    if _carrier(recipe) != "hybridep" or not domain or exchange_ranks(recipe) <= domain or target.fabric == "efa":
        return
    parts = (parallel.context or 1) * (parallel.tensor_model or 1)
    tokens = (model.seq_length or 0) * (recipe.train.micro_batch_size or 0) // parts
    if 3 * tokens + 1 >= _QUEUE:
        yield Violation(
            ("train.micro_batch_size", "model.seq_length", "moe.flex_dispatcher_backend"),
            f"between nodes HybridEP takes at most {(_QUEUE - 2) // 3:,} tokens from a rank, and there are {tokens:,}",
            "lower `train.micro_batch_size`, or raise `parallel.context`",
        )


def hybridep_domains_divide_its_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The variable says how many of the ranks share NVLink, as on racks of GB200; without it HybridEP finds out.

    Megatron, first step: `The number of ranks 8 should be divisible by the number of ranks per node 16`
    (DeepEP's branch hybrid-ep, deep_ep/hybrid_ep_buffer.py; Megatron-Bridge pull request 1948).
    """
    told, ranks = variable(_DOMAIN, recipe, target), exchange_ranks(recipe)
    if _carrier(recipe) != "hybridep" or told is None:
        return
    if not told.isdigit() or int(told) == 0 or ranks % int(told):
        yield Violation(
            (f"runtime.environment.{_DOMAIN}", "parallel.expert_model"),
            f"{_DOMAIN} = {told} does not divide the {ranks} ranks between which tokens go",
            "unset it with `null`: HybridEP then finds out",
        )


RULES: tuple[Rule, ...] = (
    carriers_carry_bf16,
    deepep_takes_multiprocessors_in_pairs,
    deepep_is_configured_for_the_ranks,
    deepep_stages_a_whole_token,
    hybridep_reads_sixteen_bytes,
    hybridep_queues_hold_every_token,
    hybridep_domains_divide_its_ranks,
)
