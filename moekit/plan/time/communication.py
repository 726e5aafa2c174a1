"""What crosses which link, and for how long: the expert exchange of each dispatcher, and every other group's.

Ranks are laid out as Megatron does: tensor fastest, then context, data, pipeline; of the experts' layout, expert-tensor
fastest, then expert (core/parallel_state.py, order `tp-cp-ep-dp-pp`). So a group's ranks lie at an even stride.
"""

from __future__ import annotations

from math import comb

import numpy as np

from moekit.plan.candidates import Candidates, Floats, Ints
from moekit.plan.run import Facts
from moekit.plan.shape import Experts, Shape
from moekit.plan.time.hardware import Hardware

ELEMENT = 2
"""Bytes of an activation on its way, bf16 whatever the multiplications are in."""
_FLEX_NVLINK = 1.2
"""How much better DeepEP and HybridEP use NVLink than NCCL's all-to-all: 0.91 against 0.72 of H100's, 0.68 to 0.77
against 0.55 to 0.66 of GB200's (arXiv 2603.07685 Table 7)."""
_INSIDE_START_S = 20e-6
"""Of an exchange over NVLink: launch, meeting of the ranks. Assumed."""
FLEX = ("deepep", "hybridep", "ncclep")


def tokens(facts: Facts, candidates: Candidates) -> Floats:
    """Tokens of a micro batch on one context-parallel rank: `# (candidate,)`."""
    return candidates.micro_batch * facts.seq_length / candidates.context


def sharded_tokens(facts: Facts, candidates: Candidates) -> Floats:
    """The same between tensor-parallel blocks, where sequence parallelism divides them further."""
    return tokens(facts, candidates) / np.where(candidates.sequence_parallel, candidates.tensor, 1)


def distinct(units: Ints, topk: int, groups: int = 1, group_topk: int = 1) -> Floats:
    """How many of `units` nodes or ranks a token's experts lie on, on average: `# (candidate,)`.

    A token that is kept to `group_topk` of `groups` groups of experts, each of which lies on whole units or shares one,
    meets no more units than those have.
    """
    n = units.astype(np.float64)
    found: Floats = n * (1 - (1 - 1 / n) ** topk)
    if groups <= 1:
        return found
    limited = found.copy()
    for unit in np.unique(units):
        if groups % unit == 0:
            each = groups // int(unit)
            most = float(unit) * (1 - comb(groups - each, group_topk) / comb(groups, group_topk))
        else:
            reach = max(1.0, float(unit) * group_topk / groups)
            most = reach * (1 - (1 - 1 / reach) ** topk)
        limited[units == unit] = np.minimum(limited[units == unit], most)
    return limited


def exchange_ranks(candidates: Candidates, hardware: Hardware) -> tuple[Ints, Ints]:
    """Ranks of an expert group that NVLink joins, and how many such islands the group has."""
    together = np.minimum(candidates.expert, np.maximum(1, hardware.domain // candidates.expert_tensor))
    return together, -(-candidates.expert // together)


def exchange_bytes(
    shape: Shape, facts: Facts, candidates: Candidates, hardware: Hardware, experts: Experts
) -> tuple[Floats, Floats]:
    """Bytes that a GPU sends inside and across islands when a micro batch's tokens go to one layer's experts."""
    sent = sharded_tokens(facts, candidates) * (experts.latent or shape.hidden) * ELEMENT
    together, islands = exchange_ranks(candidates, hardware)
    group = candidates.expert
    copies = sent * experts.topk
    inside, across = copies * (together - 1) / group, copies * (group - together) / group
    flex = np.isin(candidates.dispatcher, FLEX)
    nodes = distinct(islands, experts.topk, facts.groups, facts.group_topk)
    ranks = distinct(group, experts.topk, facts.groups, facts.group_topk)
    inside = np.where(flex, sent * ranks * (together - 1) / together, inside)
    across = np.where(flex, sent * nodes * (islands - 1) / islands, across)
    gathers = candidates.dispatcher == "allgather"
    inside = np.where(gathers, sent * (together - 1), inside)
    across = np.where(gathers, sent * (group - together), across)
    return inside, across


def exchange(
    shape: Shape, facts: Facts, candidates: Candidates, hardware: Hardware, busiest: Floats
) -> tuple[Floats, Floats]:
    """Seconds of one way of one layer's exchange for a micro batch: what NVLink adds, and across islands.

    Both run at once, so the first is only what the network does not hide. `busiest`: rows of the busiest rank over the
    mean, which everybody waits for.
    """
    experts = shape.experts
    if experts is None:
        none = np.zeros(candidates.number)
        return none, none
    inside, across = exchange_bytes(shape, facts, candidates, hardware, experts)
    flex = np.isin(candidates.dispatcher, FLEX)
    inside_a_node = hardware.alltoall.get(1, hardware.gpu.nvlink * hardware.constants.nvlink)
    link = np.minimum(0.95 * hardware.gpu.nvlink, inside_a_node * np.where(flex, _FLEX_NVLINK, 1.0))
    _, islands = exchange_ranks(candidates, hardware)
    group = candidates.expert
    network = hardware.network
    start = (network.start_us + network.start_us_per_rank * group) * 1e-6
    by_network = across * busiest / _alltoall_rate(hardware, islands, group) + np.where(across > 0, start, 0)
    by_link = inside * busiest / link + np.where(inside > 0, _INSIDE_START_S, 0)
    shares = (candidates.expert_tensor - 1) * sharded_tokens(facts, candidates) * experts.topk
    gathered = shares * (experts.latent or shape.hidden) * ELEMENT * busiest
    return np.maximum(by_link - by_network, 0) + gathered / link, by_network


def _alltoall_rate(hardware: Hardware, islands: Ints, group: Ints) -> Floats:
    """Bytes a second that leave a GPU for other islands."""
    fitted = np.full(len(islands), hardware.gpu.network * hardware.network.share)
    measured = [nodes for nodes in sorted(hardware.alltoall) if nodes > 1]
    if not measured:
        return fitted
    bus = np.interp(islands, measured, [hardware.alltoall[nodes] for nodes in measured])
    # NCCL's bus bandwidth counts what stays inside too
    ranks = islands * hardware.node
    return np.where(islands > 1, bus * (ranks - hardware.node) / np.maximum(ranks - 1, 1), fitted)


def ring_rate(hardware: Hardware, ranks: Ints, stride: Ints) -> Floats:
    """Bytes a second of a reduction or gather over `ranks` GPUs that lie `stride` apart, as bus bandwidth."""
    together = np.clip(hardware.domain // stride, 1, ranks)
    link = hardware.gpu.nvlink * hardware.constants.nvlink
    cards = hardware.gpu.network * hardware.network.ring
    measured = [nodes for nodes in sorted(hardware.allreduce) if nodes > 1]
    if measured:
        nodes = np.maximum(1, ranks * stride // hardware.node)
        cards = np.interp(nodes, measured, [hardware.allreduce[n] for n in measured]) / hardware.node
    return np.where(ranks <= together, link, np.minimum(link, together * cards))


def ring(hardware: Hardware, size: Floats, ranks: Ints, stride: Ints) -> Floats:
    """Seconds to gather `size` bytes over a group, or to reduce and scatter them."""
    steps = (ranks - 1) / ranks
    return np.where(ranks > 1, size * steps / ring_rate(hardware, ranks, stride) + _INSIDE_START_S, 0.0)


def hop(hardware: Hardware, size: Floats, stride: Ints) -> Floats:
    """Seconds of one message of `size` bytes to the GPU `stride` further."""
    link = hardware.gpu.nvlink * hardware.constants.nvlink
    cards = hardware.gpu.network * hardware.network.ring
    return size / np.where(stride >= hardware.domain, cards, link) + _INSIDE_START_S
