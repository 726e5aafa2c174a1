"""Counts, from files as Megatron writes them: its own `save_tpe` and `RouterTracer` make most of them here."""

import json
import random
import tracemalloc
from pathlib import Path

import pytest

from moekit.problems import MoekitError
from moekit.watch.counts import LayerKey, RankLayout, TokensPerExpertReader, routing_trace, tokens_per_expert
from moekit.watch.evenness import dead_experts, max_vio, rank_imbalance

DECODER_0 = LayerKey("decoder", None, 0)
DECODER_1 = LayerKey("decoder", None, 1)
TWO_RANKS = RankLayout(world_size=2, expert_model_parallel=2, expert_tensor_parallel=1, num_experts=4)
CAPTURE = Path(__file__).parent / "data"


def tpe_line(iteration: int, layer: int, tpe: list[list[int]], mtp_idx: int | None = None) -> str:
    block = {"block": "decoder"} if mtp_idx is None else {"block": "mtp", "mtp_idx": mtp_idx}
    return json.dumps({"iter": iteration, **block, "layer": layer, "tpe": tpe}) + "\n"


def append(folder: Path, rank: int, *lines: str) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        file.writelines(lines)


def by_iteration(folder: Path, layout: RankLayout) -> dict[int, dict[LayerKey, list[int]]]:
    return {interval.iteration: interval.layers for interval in tokens_per_expert(folder, layout)}


def test_max_vio_is_max_over_mean_minus_one() -> None:
    assert max_vio([2, 2, 4, 0]) == 1.0
    assert max_vio([5, 5, 5, 5]) == 0.0
    assert max_vio([0, 0, 0, 8]) == 3.0
    assert max_vio([0, 0, 0, 0]) is None


def test_rank_imbalance_and_dead_experts() -> None:
    assert rank_imbalance([1, 3, 0, 0], TWO_RANKS) == 2.0
    assert rank_imbalance([1, 3, 2, 2], TWO_RANKS) == 1.0
    assert rank_imbalance([0, 0, 0, 0], TWO_RANKS) is None
    assert dead_experts([1, 0, 2, 0]) == [1, 3]


@pytest.mark.parametrize(("world", "ep", "etp"), [(8, 4, 1), (8, 2, 2), (16, 4, 2), (6, 3, 1)])
def test_layout_is_megatrons(world: int, ep: int, etp: int) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    layout = RankLayout(world, ep, etp, num_experts=ep * 3)
    generator = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=world // ep // etp, pp=1, cp=1, order="tp-cp-ep-dp-pp", rank_offset=0
    )
    for group in generator.get_ranks("ep"):
        assert [layout.experts(rank).start // 3 for rank in group] == list(range(ep))
    for group in generator.get_ranks("tp"):
        assert len({layout.experts(rank) for rank in group}) == 1
        assert len([rank for rank in group if rank in layout.counting_ranks]) == 1
    for group in generator.get_ranks("dp"):
        assert len({layout.experts(rank) for rank in group}) == 1


def test_layouts_that_are_refused() -> None:
    with pytest.raises(MoekitError, match=r"`parallel\.pipeline_model` = 2"):
        RankLayout(8, 4, 1, 8, pipeline_model_parallel=2)
    with pytest.raises(MoekitError, match="8 ranks cannot be split into groups of expert parallel 3"):
        RankLayout(8, 3, 1, 9)
    with pytest.raises(MoekitError, match="9 experts cannot be split over 2 ranks"):
        RankLayout(8, 2, 1, 9)


def test_layout_from_megatrons_arguments() -> None:
    args = {"world_size": 2, "num_experts": 4, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 1}
    assert RankLayout.from_args(args) == TWO_RANKS
    assert RankLayout.from_args({"world_size": 2, "num_experts": None}) is None


def test_megatrons_own_writer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logging = pytest.importorskip("megatron.training.activation_logging")
    monkeypatch.setattr(logging.torch.distributed, "is_initialized", lambda: True)
    for rank, (first, second) in enumerate([([1, 2], [3, 4]), ([5, 6], [7, 8])]):
        monkeypatch.setattr(logging.torch.distributed, "get_rank", lambda rank=rank: rank)
        writer = logging.ActivationLogger(str(tmp_path))
        writer._decoder_tpe_records[3] = [first, second]
        writer._mtp_tpe_records[(0, 3)] = [second]
        writer.save_tpe(100)
    (interval,) = tokens_per_expert(tmp_path / "tokens_per_expert", TWO_RANKS)
    assert interval.iteration == 100
    assert interval.layers == {LayerKey("decoder", None, 3): [4, 6, 12, 14], LayerKey("mtp", 0, 3): [3, 4, 7, 8]}
    assert [key.name for key in interval.layers] == ["layer_3", "mtp_0_layer_3"]
    assert interval.coverage.complete


def test_replicas_add_up_and_expert_tensor_copies_do_not(tmp_path: Path) -> None:
    layout = RankLayout(world_size=8, expert_model_parallel=2, expert_tensor_parallel=2, num_experts=4)
    for rank in range(8):
        append(tmp_path, rank, tpe_line(1, 0, [[10 ** (rank // 2), 0]]))
    assert by_iteration(tmp_path, layout) == {1: {DECODER_0: [101, 0, 1010, 0]}}


def test_later_lines_win_after_a_restart(tmp_path: Path) -> None:
    for rank in range(2):
        append(tmp_path, rank, *(tpe_line(i, 0, [[i, 0]]) for i in (10, 20, 30)), '{"iter": 40, "block": "dec')
        append(tmp_path, rank, *(tpe_line(i, 0, [[i, 7]]) for i in (20, 30, 40)), '{"iter": 50, "blo')
    found = by_iteration(tmp_path, TWO_RANKS)
    assert list(found) == [10, 20, 30, 40]
    assert found[10][DECODER_0] == [10, 0, 10, 0]
    assert [found[i][DECODER_0] for i in (20, 30, 40)] == [[i, 7, i, 7] for i in (20, 30, 40)]


def test_what_is_missing_is_said_and_not_counted(tmp_path: Path) -> None:
    append(tmp_path, 0, tpe_line(1, 0, [[1, 1]]), tpe_line(2, 0, [[1, 1]]), tpe_line(2, 1, [[1, 1]]))
    append(tmp_path, 1, tpe_line(2, 0, [[1, 1], [1, 1]]), tpe_line(2, 1, [[3, 1]]))
    first, second = tokens_per_expert(tmp_path, TWO_RANKS)
    assert (first.layers, first.coverage.missing_ranks, first.coverage.partial_layers) == ({}, (1,), (DECODER_0,))
    assert (second.layers, second.coverage.missing_ranks) == ({DECODER_1: [1, 1, 3, 1]}, ())
    assert second.coverage.partial_layers == (DECODER_0,), "one micro batch on a rank and two on the other"
    assert not first.coverage.complete
    assert not second.coverage.complete
    assert list(tokens_per_expert(tmp_path / "absent", TWO_RANKS)) == []


def test_counts_of_another_layout_are_refused(tmp_path: Path) -> None:
    append(tmp_path, 0, tpe_line(1, 0, [[1, 1, 1]]))
    with pytest.raises(MoekitError, match=r"rank0.jsonl: 3 experts a rank in these counts, not 2 \(4 experts over 2"):
        list(tokens_per_expert(tmp_path, TWO_RANKS))


def test_reader_gives_each_iteration_once_it_is_whole(tmp_path: Path) -> None:
    reader = TokensPerExpertReader(tmp_path, TWO_RANKS)
    assert reader.poll() == []
    append(tmp_path, 0, tpe_line(10, 0, [[1, 2]]))
    assert reader.poll() == []
    line = tpe_line(10, 0, [[3, 4]])
    append(tmp_path, 1, line[:20])
    assert reader.poll() == []
    append(tmp_path, 1, line[20:])
    (interval,) = reader.poll()
    assert (interval.iteration, interval.layers) == (10, {DECODER_0: [1, 2, 3, 4]})
    assert reader.poll() == []


def test_reader_waits_for_the_layers_it_knows(tmp_path: Path) -> None:
    layout = RankLayout(1, 1, 1, 2)
    reader = TokensPerExpertReader(tmp_path, layout)
    append(tmp_path, 0, tpe_line(1, 0, [[1, 1]]), tpe_line(1, 1, [[1, 1]]), tpe_line(2, 0, [[1, 1]]))
    assert [interval.iteration for interval in reader.poll()] == [1]
    append(tmp_path, 0, tpe_line(2, 1, [[0, 2]]))
    (interval,) = reader.poll()
    assert interval.layers == {DECODER_0: [1, 1], DECODER_1: [0, 2]}


def test_reader_follows_a_restart(tmp_path: Path) -> None:
    reader = TokensPerExpertReader(tmp_path, TWO_RANKS)
    for rank in range(2):
        append(tmp_path, rank, *(tpe_line(i, 0, [[i, 0]]) for i in (10, 20, 30)))
    assert [interval.iteration for interval in reader.poll()] == [10, 20, 30]
    append(tmp_path, 0, tpe_line(20, 0, [[5, 5]]))
    assert reader.poll() == []
    append(tmp_path, 1, tpe_line(20, 0, [[5, 5]]), tpe_line(30, 0, [[6, 6]]))
    append(tmp_path, 0, tpe_line(30, 0, [[6, 6]]))
    assert [(i.iteration, i.layers[DECODER_0][0]) for i in reader.poll()] == [(20, 5), (30, 6)]


def test_reader_does_not_wait_for_a_lost_rank_forever(tmp_path: Path) -> None:
    reader = TokensPerExpertReader(tmp_path, TWO_RANKS)
    append(tmp_path, 0, *(tpe_line(i, 0, [[1, 1]]) for i in range(1, 21)))
    given = reader.poll()
    assert [interval.iteration for interval in given] == list(range(1, 13))
    assert all(interval.coverage.missing_ranks == (1,) for interval in given)


def test_reader_agrees_with_the_whole_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    reader, seen = TokensPerExpertReader(tmp_path, TWO_RANKS), {}
    for start in (0, 15, 27):
        for iteration in range(start, start + 20):
            for rank in (0, 1):
                for layer in (0, 1):
                    append(tmp_path, rank, tpe_line(iteration, layer, [[rng.randrange(99), 1] for _ in range(2)]))
                if rng.random() < 0.3:
                    seen.update({interval.iteration: interval for interval in reader.poll()})
    seen.update({interval.iteration: interval for interval in reader.poll()})
    assert list(dict(sorted(seen.items())).values()) == list(tokens_per_expert(tmp_path, TWO_RANKS))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak_kib(iterations: int) -> float:
        folder = tmp_path / str(iterations)
        for rank in range(2):
            append(folder, rank, *(tpe_line(i, 0, [[i, 9]] * 50) for i in range(iterations)))
        tracemalloc.start()
        assert sum(1 for _ in tokens_per_expert(folder, TWO_RANKS)) == iterations
        peak = tracemalloc.get_traced_memory()[1] / 1024
        tracemalloc.stop()
        return peak

    small, large = peak_kib(50), peak_kib(2000)
    assert large < small + 50


def trace_line(step: int, layer: int, rank: int, chosen: list[list[int]]) -> str:
    record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
    return json.dumps({**record, "num_tokens": len(chosen), "topk": len(chosen[0]), "top_indices": chosen}) + "\n"


def write_trace(folder: Path, rank: int, *lines: str) -> None:
    (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(lines))


def test_trace_of_all_ranks_without_evaluation_and_phantom_step(tmp_path: Path) -> None:
    evaluation = [trace_line(1, layer, 0, [[3, 2], [3, 2]]) for layer in (0, 1)] * 3
    for rank in range(2):
        own = [trace_line(step, layer, rank, [[0, 1], [0, 2]]) for step in (0, 1) for layer in (0, 1) for _ in range(2)]
        write_trace(tmp_path, rank, *own[:4], *evaluation, *own[4:], trace_line(2, 0, rank, [[3, 2]]))
    steps = list(routing_trace(tmp_path, TWO_RANKS, microbatches=2, train_iters=2))
    assert [interval.iteration for interval in steps] == [1, 2]
    assert all(i.layers == {DECODER_0: [8, 4, 4, 0], DECODER_1: [8, 4, 4, 0]} for i in steps)
    untrimmed = list(routing_trace(tmp_path, TWO_RANKS))
    assert [interval.iteration for interval in untrimmed] == [1, 2, 3]
    assert untrimmed[1].layers[DECODER_0] == [8, 4, 16, 12]


def test_trace_with_a_dropped_record_is_partial(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, trace_line(0, 0, 0, [[0, 1]]), trace_line(0, 1, 0, [[0, 1]]))
    write_trace(tmp_path, 1, trace_line(0, 0, 1, [[2, 1]]))
    (interval,) = routing_trace(tmp_path, TWO_RANKS)
    assert interval.layers == {DECODER_0: [1, 2, 1, 0]}
    assert interval.coverage.partial_layers == (DECODER_1,)


def test_megatrons_own_tracer_is_read(tmp_path: Path) -> None:
    tracing = pytest.importorskip("megatron.core.transformer.moe.router_trace")
    torch = pytest.importorskip("torch")
    for rank in range(2):
        tracer = tracing.RouterTracer(str(tmp_path), max_steps=9, rank=rank, training_mode=True)
        for step in range(2):
            tracer.record_indices([torch.tensor([[0, 1], [3, rank]])], step=step, layer_ids=[5])
            tracer.advance_step(step)
    assert [(i.iteration, i.layers) for i in routing_trace(tmp_path, TWO_RANKS)] == [
        (step, {LayerKey("decoder", None, 5): [3, 3, 0, 2]}) for step in (1, 2)
    ]
