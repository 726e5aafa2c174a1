from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import EXPERTS, GLOBAL_BATCH, LAYERS, MICRO_BATCH, SEQ_LENGTH, TOPK, read_lines

from moekit.job import hooks

pytestmark = pytest.mark.megatron
torch = pytest.importorskip("torch")

RANKS = (0, 1)
MICRO_BATCHES = GLOBAL_BATCH // MICRO_BATCH // len(RANKS)
Counts = dict[tuple[int, int, int], list[int]]  # (iteration from 1, layer, micro batch) -> tokens of each expert


def counts_of(run_dir: Path) -> Counts:
    counts: Counts = {}
    for rank in RANKS:  # a rank holds consecutive experts
        for line in read_lines(run_dir / "checkpoints" / "tokens_per_expert" / f"rank{rank}.jsonl"):
            assert set(line) == {"iter", "block", "layer", "tpe"}
            for index, local in enumerate(line["tpe"]):
                counts.setdefault((line["iter"], line["layer"], index), []).extend(local)
    return counts


def traced(attempt: Path, rank: int) -> list[dict[str, Any]]:
    return read_lines(attempt / "routing" / f"router_trace_rank{rank}.jsonl")


@pytest.mark.train
def test_every_token_is_counted_once(trained: Path) -> None:
    counts = counts_of(trained)
    assert sorted(counts) == [
        (i, layer, m) for i in (2, 4, 6, 8) for layer in range(LAYERS) for m in range(MICRO_BATCHES)
    ]
    for experts in counts.values():
        assert len(experts) == EXPERTS
        assert sum(experts) == MICRO_BATCH * len(RANKS) * SEQ_LENGTH * TOPK
    assert any(max(experts) > min(experts) for experts in counts.values())


@pytest.mark.train
def test_the_first_and_the_last_iterations_are_traced_and_no_evaluation(trained: Path) -> None:
    for rank in RANKS:  # evaluations come before step 6, inside the second window, and after the last one
        records = Counter((r["step"], r["layer"]) for r in traced(trained / "attempts/1", rank))
        assert records == {(s, layer): MICRO_BATCHES for s in (0, 1, 5, 6, 7) for layer in range(LAYERS)}


@pytest.mark.train
def test_counts_are_those_of_the_trace(trained: Path) -> None:
    by_trace: dict[tuple[int, int, int], Counter[int]] = {}
    for rank in RANKS:
        seen: Counter[tuple[int, int]] = Counter()
        for record in traced(trained / "attempts/1", rank):
            place = (record["step"], record["layer"])
            chosen = Counter(expert for token in record["top_indices"] for expert in token)
            key = (record["step"] + 1, record["layer"], seen[place])
            by_trace[key] = by_trace.get(key, Counter()) + chosen
            seen[place] += 1
    both = {key: experts for key, experts in counts_of(trained).items() if key in by_trace}
    assert sorted({iteration for iteration, _, _ in both}) == [2, 6, 8]
    assert both == {key: [by_trace[key][expert] for expert in range(EXPERTS)] for key in both}


@pytest.mark.train
@pytest.mark.parametrize("resumed", [[]], indirect=True)
def test_recomputed_forwards_count_once_and_an_exit_interval_ends_a_run(trained: Path, resumed: Path) -> None:
    assert counts_of(resumed) == counts_of(trained)
    for attempt, steps in (("1", (0, 1, 2, 3)), ("2", (4, 5, 6, 7))):
        for rank in RANKS:
            records = traced(resumed / "attempts" / attempt, rank)
            places = Counter((r["step"], r["layer"]) for r in records)
            assert places == {(s, layer): MICRO_BATCHES for s in steps for layer in range(LAYERS)}
    straight = [r for r in traced(trained / "attempts/1", 0) if r["step"] >= 5]
    assert straight == [r for r in traced(resumed / "attempts/2", 0) if r["step"] >= 5]


@pytest.mark.parametrize(
    ("start", "exit_interval", "end"),
    [(0, None, 100), (0, 0, 100), (0, 40, 40), (39, 40, 40), (40, 40, 80), (90, 40, 100), (0, 1000, 100)],
)
def test_where_a_run_ends(start: int, exit_interval: int | None, end: int) -> None:
    assert hooks.end_iteration(start, 100, exit_interval) == end


@pytest.fixture
def logger_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's activation logging with our hooks, taken out again afterwards."""
    module = pytest.importorskip("megatron.training.activation_logging")
    for name in ("register_tpe_hooks", "_make_tpe_hook"):
        monkeypatch.setattr(module.ActivationLogger, name, getattr(module.ActivationLogger, name))
    assert hooks.tokens_per_expert() is not None
    return module


def local_experts() -> Any:
    """A real SequentialMLP of three experts of nothing: it splits its tokens by the counts it is given."""
    from types import SimpleNamespace

    from megatron.core.transformer.moe.experts import SequentialMLP

    class Identity(torch.nn.Module):
        def forward(self, tokens: Any, probs: Any) -> tuple[Any, None]:
            return tokens * 1.0, None

    experts = SequentialMLP.__new__(SequentialMLP)
    torch.nn.Module.__init__(experts)
    experts.config = SimpleNamespace(moe_apply_probs_on_input=False, fp8=None, fp4=None)
    experts.num_local_experts = 3
    experts.local_experts = torch.nn.ModuleList(Identity() for _ in range(3))
    return experts


def tree(path: str, leaf: Any) -> Any:
    """A module that has `leaf` at `path`."""
    for name in reversed(path.split(".")):
        parent = torch.nn.Module()
        parent.add_module(name, leaf)
        leaf = parent
    return leaf


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("decoder.layers.3.mlp.experts", {"block": "decoder", "layer": 3}),
        ("mtp.layers.1.mtp_model_layer.layers.2.mlp.experts", {"block": "mtp", "mtp_idx": 1, "layer": 2}),
        ("mtp.layers.1.mtp_model_layer.mlp.experts", {"block": "mtp", "mtp_idx": 1, "layer": 0}),
    ],
)
def test_local_experts_are_found_by_their_name(
    logger_module: Any, tmp_path: Path, path: str, place: dict[str, Any]
) -> None:
    experts, logger = local_experts(), logger_module.ActivationLogger(str(tmp_path))
    logger.register_tpe_hooks([tree(path, experts)])
    experts(torch.ones(6, 4), torch.tensor([1, 2, 3]), torch.ones(6))
    experts(torch.ones(6, 4), tokens_per_expert=torch.tensor([6, 0, 0]), permuted_probs=torch.ones(6))
    logger.save_tpe(7)
    logger.remove_tpe_hooks()
    experts(torch.ones(6, 4), torch.tensor([1, 2, 3]), torch.ones(6))
    logger.save_tpe(8)
    assert read_lines(tmp_path / "tokens_per_expert" / "rank0.jsonl") == [
        {"iter": 7, **place, "tpe": [[1, 2, 3], [6, 0, 0]]}
    ]


@pytest.mark.parametrize("reentrant", [True, False])
def test_grouped_layers_count_once_too_and_then_alone(
    logger_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    class Grouped(torch.nn.Module):  # in the place of Transformer Engine's, which needs a GPU
        def forward(self, tokens: Any, counts: list[int]) -> Any:
            return tokens * 2.0

    monkeypatch.setattr(logger_module, "_GROUPED_LINEAR_TYPES", (Grouped,))
    layer, experts = Grouped(), local_experts()
    experts.linear_fc1 = layer
    logger = logger_module.ActivationLogger(str(tmp_path))
    logger.register_tpe_hooks([tree("decoder.layers.0.mlp.experts", experts)])
    tokens = torch.ones(3, 4, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda t: layer(t, [1, 2]), tokens, use_reentrant=reentrant)
    out.sum().backward()
    experts(torch.ones(6, 4), torch.tensor([1, 2, 3]), torch.ones(6))  # its own call is not heard
    assert torch.equal(tokens.grad, torch.full((3, 4), 2.0))
    logger.save_tpe(1)
    lines = read_lines(tmp_path / "tokens_per_expert" / "rank0.jsonl")
    assert [line["tpe"] for line in lines] == [[[1, 2]]]


def test_a_steps_metrics_are_written_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = pytest.importorskip("megatron.training.training")
    from moekit.job.wandb_face import WandbFace

    path, seen = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(training, "save_checkpoint_and_time", lambda *_: seen.append(path.read_text()))
    face = WandbFace(path)
    monkeypatch.setitem(sys.modules, "wandb", face)
    assert hooks.metrics_before_checkpoint()
    face.init("moekit", "tiny", {})
    face.log({"lm loss": 5.0}, 7)
    assert '"step": 7' not in path.read_text()
    training.save_checkpoint_and_time(7)
    assert '"step": 7' in seen[0]
