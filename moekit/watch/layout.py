"""Which experts a rank holds, and which ranks hold the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moekit.problems import error


@dataclass(frozen=True)
class RankLayout:
    """Which experts live on which rank (megatron/core/parallel_state.py:887, the expert `RankGenerator`).

    Expert tensor parallel ranks vary fastest, then expert parallel ranks; ranks that share an expert parallel rank are
    data parallel replicas of the same experts. Raises `MoekitError` for a layout that Megatron cannot have, and for
    pipeline parallelism, where each stage numbers its layers from 0 and the files do not tell the stages apart.
    """

    world_size: int
    expert_model_parallel: int
    expert_tensor_parallel: int
    num_experts: int
    pipeline_model_parallel: int = 1

    def __post_init__(self) -> None:
        if self.pipeline_model_parallel != 1:
            raise error(
                f"the layers of a run with `parallel.pipeline_model` = {self.pipeline_model_parallel} cannot be told"
                " apart: each pipeline stage numbers its own from 0",
                "MaxVio is read from runs without pipeline parallelism",
            )
        group = self.expert_model_parallel * self.expert_tensor_parallel
        if min(self.world_size, group, self.num_experts) < 1 or self.world_size % group:
            raise error(
                f"{self.world_size} ranks cannot be split into groups of expert parallel {self.expert_model_parallel}"
                f" x expert tensor parallel {self.expert_tensor_parallel}"
            )
        if self.num_experts % self.expert_model_parallel:
            raise error(f"{self.num_experts} experts cannot be split over {self.expert_model_parallel} ranks")

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> RankLayout | None:
        """The layout of a run from Megatron's arguments (the `config` line of `metrics.jsonl`); None if it is dense."""
        if not args.get("num_experts"):
            return None
        return cls(
            world_size=int(args["world_size"]),
            expert_model_parallel=int(args.get("expert_model_parallel_size") or 1),
            expert_tensor_parallel=int(
                args.get("expert_tensor_parallel_size") or args.get("tensor_model_parallel_size") or 1
            ),
            num_experts=int(args["num_experts"]),
            pipeline_model_parallel=int(args.get("pipeline_model_parallel_size") or 1),
        )

    @property
    def experts_per_rank(self) -> int:
        """Experts on one rank."""
        return self.num_experts // self.expert_model_parallel

    def experts(self, rank: int) -> range:
        """The global experts that `rank`'s local counts belong to, in their order."""
        ep_rank = (rank // self.expert_tensor_parallel) % self.expert_model_parallel
        return range(ep_rank * self.experts_per_rank, (ep_rank + 1) * self.experts_per_rank)

    def group(self, rank: int) -> int:
        """Which of the replicas of all experts `rank` is in: its expert parallel group, over expert tensor ranks."""
        return rank // (self.expert_tensor_parallel * self.expert_model_parallel)

    @property
    def counting_ranks(self) -> range:
        """The ranks whose counts add up to all tokens: one of each expert tensor group, whose ranks see the same."""
        return range(0, self.world_size, self.expert_tensor_parallel)
