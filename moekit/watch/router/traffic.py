"""What the choices of a routing trace cost the network: nodes reached a token, and bytes by the dispatcher's policy.

A token's copies are sent from the rank that traced it to the ranks of its expert parallel group that hold its experts
(`RankLayout`). With ranks in a row on nodes, as torchrun numbers them, that says how many nodes a token reaches, and
how many besides its own. The all-to-all dispatcher sends a copy for each expert (megatron/core/transformer/moe/
token_dispatcher.py, `MoEAlltoAllTokenDispatcher`), the flex dispatcher's DeepEP and HybridEP one for each node, which
hands it on inside. Bytes are those of a forward dispatch, without scales; the combine returns as many values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moekit.problems import error
from moekit.watch.counts import LayerKey
from moekit.watch.layout import RankLayout
from moekit.watch.router import trace
from moekit.watch.router.grid import Grid, Layer
from moekit.watch.router.logits import trace_paths
from moekit.watch.router.trace import Call

_TOGETHER = 1 << 10
"""Calls with fewer tokens are counted several at once."""


@dataclass
class LayerTraffic:
    """One layer's tokens, added up; shares and means are over `tokens`."""

    tokens: int = 0
    nodes: int = 0
    """Different nodes that hold a token's experts, over all tokens."""
    most_nodes: int = 0
    remote_nodes: int = 0
    """Those of them that are not the token's own."""
    most_remote_nodes: int = 0
    choices: int = 0
    """Experts that tokens chose: copies of a dispatcher that sends one for each."""
    remote_choices: int = 0
    """Those on other nodes than the token's own."""
    other_ranks: int = 0
    """Those on other ranks of the token's own node."""

    def merge(self, other: LayerTraffic) -> None:
        """Add another's tokens."""
        for name in ("tokens", "nodes", "remote_nodes", "choices", "remote_choices", "other_ranks"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_nodes = max(self.most_nodes, other.most_nodes)
        self.most_remote_nodes = max(self.most_remote_nodes, other.most_remote_nodes)

    @property
    def mean_nodes(self) -> float:
        """Nodes reached a token."""
        return self.nodes / self.tokens if self.tokens else float("nan")

    @property
    def mean_remote_nodes(self) -> float:
        """Nodes reached a token besides its own."""
        return self.remote_nodes / self.tokens if self.tokens else float("nan")


@dataclass(frozen=True)
class Copies:
    """What one copy of a token is, and how many of them the run's dispatcher sends."""

    width: int
    """Values: the hidden size, or the latent one, in which a latent MoE sends."""
    value_bytes: int
    policy: str
    """`expert`, `node`, or empty where it is neither."""
    dispatcher: str

    @property
    def size(self) -> int:
        """In bytes."""
        return self.width * self.value_bytes


@dataclass
class Traffic:
    """Of a trace."""

    gpus_per_node: int
    copies: Copies
    layers: dict[Layer, LayerTraffic] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    """Lines that were passed over, by reason."""

    def remote_bytes(self, layer: LayerTraffic, policy: str) -> float:
        """Bytes a token sends to other nodes in a forward dispatch: a copy for each `expert`, or for each `node`."""
        copies = {"expert": layer.remote_choices, "node": layer.remote_nodes}[policy]
        return copies * self.copies.size / layer.tokens if layer.tokens else float("nan")

    def as_json(self) -> dict[str, Any]:
        """All of it, layers by name."""
        layers = {}
        for layer, found in self.layers.items():
            layers[layer.name] = {
                "tokens": found.tokens,
                **{"nodes": found.mean_nodes, "most_nodes": found.most_nodes},
                **{"remote_nodes": found.mean_remote_nodes, "most_remote_nodes": found.most_remote_nodes},
                "remote_bytes_a_copy_per_expert": self.remote_bytes(found, "expert"),
                "remote_bytes_a_copy_per_node": self.remote_bytes(found, "node"),
            }
        return {
            "gpus_per_node": self.gpus_per_node,
            "copy": {"width": self.copies.width, "bytes": self.copies.size},
            "dispatcher": self.copies.dispatcher,
            "policy": self.copies.policy or None,
            "layers": layers,
            "skipped": dict(self.skipped),
        }


def copies_of(args: Mapping[str, Any]) -> Copies:
    """From Megatron's arguments.

    Raises:
        MoekitError: the width of what is sent is not known.
    """
    width = args.get("moe_latent_size") or args.get("hidden_size")
    if not width:
        raise error("bytes cannot be counted: the run does not say its `model.hidden_size`")
    kind = str(args.get("moe_token_dispatcher_type") or "allgather")
    backend = str(args.get("moe_flex_dispatcher_backend") or "deepep")
    by_node = kind == "flex" and backend in ("deepep", "hybridep")
    policy = "expert" if kind == "alltoall" else "node" if by_node else ""
    name = f"{kind} ({backend})" if kind == "flex" else kind
    narrow = args.get("bf16") or args.get("fp16")
    sent = str(args.get("moe_dispatch_fwd_dtype") or "")
    return Copies(int(width), 1 if "fp8" in sent else 2 if narrow else 4, policy, name)


def rank_of_experts(layout: RankLayout, rank: int, first_rank: int = 0) -> NDArray[np.int64]:
    """The (first) rank that holds each expert for tokens of `rank` of a pipeline stage. `# (expert,)`

    `first_rank` is where the stage begins.
    """
    etp, ep = layout.expert_tensor_parallel, layout.expert_model_parallel
    begin = first_rank + layout.group(rank) * etp * ep
    return begin + np.repeat(np.arange(ep, dtype=np.int64) * etp, layout.experts_per_rank)


def count(experts: NDArray[Any], owners: NDArray[np.int64], source: int, gpus_per_node: int) -> LayerTraffic:
    """Of one call: experts `# (token, choice)`, the rank that holds each `# (expert,)`, and the tokens' own rank."""
    if not experts.size:
        return LayerTraffic()
    ranks = owners[experts]
    nodes, home = np.sort(ranks // gpus_per_node, axis=1), source // gpus_per_node
    reached = 1 + np.count_nonzero(nodes[:, 1:] != nodes[:, :-1], axis=1)  # (token,)
    away = nodes != home
    remote = reached - ~away.all(axis=1)
    return LayerTraffic(
        tokens=len(experts),
        nodes=int(reached.sum()),
        most_nodes=int(reached.max()),
        remote_nodes=int(remote.sum()),
        most_remote_nodes=int(remote.max()),
        choices=experts.size,
        remote_choices=int(np.count_nonzero(away)),
        other_ranks=int(np.count_nonzero((ranks // gpus_per_node == home) & (ranks != source))),
    )


def traffic_of(folder: Path, grid: Grid, gpus_per_node: int, workers: int | None = None) -> Traffic:
    """The traffic of all calls in a trace's folder (`attempts/N/routing`), by layer.

    Raises:
        MoekitError: there is no record in it, ranks of one expert are on several nodes, or the width is not known.
    """
    layout = grid.experts
    if gpus_per_node < 1 or (gpus_per_node % layout.expert_tensor_parallel and layout.world_size > gpus_per_node):
        raise error(
            f"nodes of {gpus_per_node} GPUs cut the {layout.expert_tensor_parallel} ranks that share an expert",
            "nodes are counted where each expert is on one",
        )
    found = Traffic(gpus_per_node, copies_of(grid.args))
    for stage, paths in trace_paths(folder, grid).items():
        for path in paths:
            rank = int(path.stem.rpartition("rank")[2])
            first = stage * grid.stage_ranks
            owners = rank_of_experts(layout, rank - first, first)
            work = partial(_add_up, owners=owners, rank=rank, gpus_per_node=gpus_per_node)
            for part in trace.over([path], work, found.skipped, num_experts=layout.num_experts, workers=workers):
                for key, layer in part.items():
                    found.layers.setdefault(grid.layer(key, stage), LayerTraffic()).merge(layer)
    if not found.layers:
        raise error(
            "the run has no routing trace to count nodes from",
            "set `monitor.routing_trace` and collect a short one (handbook A.1)",
            str(folder),
        )
    found.layers = dict(sorted(found.layers.items()))
    return found


def _add_up(
    calls: Iterator[Call], owners: NDArray[np.int64], rank: int, gpus_per_node: int
) -> dict[LayerKey, LayerTraffic]:
    layers: dict[LayerKey, LayerTraffic] = {}
    waiting: dict[tuple[LayerKey, int], list[NDArray[Any]]] = {}

    def settle(key: tuple[LayerKey, int]) -> None:
        one = count(np.concatenate(waiting.pop(key)), owners, rank, gpus_per_node)
        layers.setdefault(key[0], LayerTraffic()).merge(one)

    for call in calls:
        key = call.layer, call.experts.shape[1]
        waiting.setdefault(key, []).append(call.experts)
        if len(call.experts) >= _TOGETHER or len(waiting[key]) >= _TOGETHER // 16:
            settle(key)
    for key in list(waiting):
        settle(key)
    return layers
