"""Counts and traces to arrays: what real runs wrote, random layouts against loops, and every trap of such files."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError
from moekit.watch.counts import LayerKey
from moekit.watch.router import trace
from moekit.watch.router.grid import Grid, Layer, attempt_args
from moekit.watch.router.loads import max_vio
from moekit.watch.router.newest import NOT_COUNTS
from moekit.watch.router.read import NO_SEQUENCES, OTHER_BATCHES, Reading, read_counts, read_trace
from moekit.watch.router.report import LayerRow, report, report_apart

DATA = Path(__file__).parent / "data"
LAYER_0 = Layer(LayerKey("decoder", None, 0))
ARGS: dict[str, Any] = {
    **{"world_size": 2, "num_experts": 4, "expert_model_parallel_size": 2, "moe_router_topk": 2},
    **{"micro_batch_size": 2, "global_batch_size": 8, "seq_length": 2, "num_layers": 1},
}  # two micro batches a step
TWO_RANKS = Grid.from_args(ARGS)


def real(name: str) -> tuple[Path, Grid]:
    run = RunDir(DATA / name)
    return run.path, Grid.from_args(attempt_args(run)[1])


def both(name: str) -> tuple[Reading, Reading]:
    path, grid = real(name)
    folder = path / "checkpoints" / "tokens_per_expert"
    return read_counts(folder, grid, 1), read_trace(path / "attempts" / "1" / "routing", grid, 1)


def count_line(step: int, tpe: Any, layer: int = 0, **more: Any) -> str:
    return json.dumps({"iter": step, "block": "decoder", "layer": layer, "tpe": tpe, **more}) + "\n"


def trace_line(step: int, rank: int, chosen: list[list[int]], layer: int = 0, **more: Any) -> str:
    record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
    return json.dumps({**record, "num_tokens": len(chosen), "topk": 2, "top_indices": chosen, **more}) + "\n"


def write(folder: Path, name: str, *texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(texts))
    return folder


# What real runs wrote


@pytest.mark.parametrize("name", ["ep1", "pp2", "plain"])
def test_counts_and_trace_of_a_real_step_agree(name: str) -> None:
    """They are written by different hooks at different places, and dropless counts are what was chosen."""
    counts, traced = both(name)
    _, grid = real(name)
    assert list(counts.steps) == list(traced.steps) == [4]  # the trace's step 3
    assert list(counts.steps[4]) == list(traced.steps[4]) == list(grid.moe_layers)
    for layer, load in counts.steps[4].items():
        assert np.array_equal(load.counts, traced.steps[4][layer].counts)
        assert load.counts.sum() == 8 * 64 * 2  # sequences, tokens, top-k: each once
        sequences = traced.steps[4][layer].sequences
        assert sequences is not None
        assert sequences.sum(axis=-1).tolist() == [64 * 2] * 8
        assert np.array_equal(sequences.sum(axis=0), load.counts.sum(axis=(0, 1)))
    assert counts.coverage.share == traced.coverage.share == 1
    assert counts.recomputed is traced.recomputed is (name == "plain")


def test_a_real_trace_by_a_loop() -> None:
    """MaxVio of each sequence, with nothing of the reader's."""
    _, traced = both("ep1")
    lines = (DATA / "ep1" / "attempts" / "1" / "routing" / "router_trace_rank0.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))["step"] == 3 and record["layer"] == 1]
    expected = []
    for record in records:
        for sequence in (0, 1):
            chosen = Counter(expert for row in record["top_indices"][sequence::2] for expert in row)
            expected.append(max(chosen.values()) / (sum(chosen.values()) / 8) - 1)
    found = traced.steps[4][Layer(LayerKey("decoder", None, 1))].sequences
    assert max_vio(found).tolist() == pytest.approx(expected)


def test_capacity_is_labelled_in_both_sources() -> None:
    counts, traced = report(RunDir(DATA / "capacity")).sections
    processed = "after capacity (factor 1.0), padded to capacity"
    assert f"counts are {processed}: the experts' work, and not what the router asked for" in counts.notes
    assert f"choices are {processed}: not what the router asked for" in traced.notes
    assert any("rows of a routing map that is padded to capacity" in note for note in traced.notes)
    assert all(row.max_vio_sequence is None for row in traced.layers)


@pytest.mark.parametrize(
    ("more", "label"),
    [
        ({"moe_router_padding_for_quantization": True}, "padded for quantization"),
        ({"moe_router_padding_for_fp8": True}, "padded for quantization"),
        ({"moe_expert_capacity_factor": 1.25}, "after capacity (factor 1.25)"),
    ],
)
def test_counts_behind_anything_are_labelled(tmp_path: Path, more: dict[str, Any], label: str) -> None:
    for rank in (0, 1):
        write(tmp_path / "checkpoints" / "tokens_per_expert", f"rank{rank}.jsonl", count_line(1, [[1, 1], [2, 1]]))
    (section,) = of(tmp_path, **more).sections
    assert f"counts are {label}: the experts' work, and not what the router asked for" in section.notes
    assert Grid.from_args(ARGS).processed == ()


def test_forced_routing_is_a_control(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints" / "tokens_per_expert", "rank0.jsonl", count_line(1, [[1, 1], [2, 1]]))
    (section,) = of(tmp_path, moe_router_force_load_balancing=True).sections
    assert "routing is forced and not learnt: a control" in section.notes
    assert "ranks without records: 1" in section.notes


def test_a_real_resume_counts_its_last_attempt() -> None:
    folder = DATA.parent.parent / "data" / "run" / "checkpoints" / "tokens_per_expert"
    grid = Grid.from_args(ARGS | {"num_experts": 8, "num_layers": 4, "global_batch_size": 16, "micro_batch_size": 8})
    reading = read_counts(folder, grid, 1000)
    assert list(reading.steps) == list(range(5, 161, 5))
    assert reading.coverage.share == 1
    written = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    again = [record["tpe"] for record in written if record["iter"] == 70 and record["layer"] == 0]
    assert len(again) == 2
    assert reading.steps[70][LAYER_0].counts[0, 0, :4].tolist() == again[-1][0]


# Random layouts


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    ep, etp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    replicas, batches = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return {
        **{"world_size": ep * etp * pp * replicas, "num_experts": 8, "expert_model_parallel_size": ep},
        **{"expert_tensor_parallel_size": etp, "pipeline_model_parallel_size": pp, "num_layers": 2 * pp},
        **{"micro_batch_size": 2, "global_batch_size": 2 * batches * ep * etp * replicas, "seq_length": 3},
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.integers(0, 2**32))
def test_random_layouts_against_loops(tmp_path: Path, args: dict[str, Any], seed: int) -> None:
    """Tokens choose; counts and traces are written from that, and read back to the same, added up by hand."""
    rng, grid = np.random.default_rng(seed), Grid.from_args(args)
    ep, etp, pp = (args[f"{name}_parallel_size"] for name in ("expert_model", "expert_tensor", "pipeline_model"))
    stage_ranks = args["world_size"] // pp
    batches = args["global_batch_size"] // (2 * stage_ranks)
    chosen = rng.random((pp, stage_ranks, 2, batches, 6, 8)).argsort(axis=-1)[..., :2]
    expected = np.zeros(
        (2 * pp, stage_ranks // (ep * etp), batches, 8), np.int64
    )  # (layer, group, micro batch, expert)
    for place in np.ndindex(*chosen.shape):
        stage, rank, layer, batch = place[:4]
        expected[2 * stage + layer, rank // (ep * etp), batch, chosen[place]] += 1
    for stage, rank in np.ndindex(pp, stage_ranks):
        own, group = rank // etp % ep * (8 // ep), rank // (ep * etp)
        global_rank, parts = stage * stage_ranks + rank, slice(own, own + 8 // ep)
        lines = [count_line(7, expected[2 * stage + n, group, :, parts].tolist(), n) for n in (0, 1)]
        write(tmp_path, f"rank{global_rank}.jsonl", *lines)
        calls = [(n, chosen[stage, rank, n, batch].tolist()) for batch in range(batches) for n in (0, 1)]
        lines = [trace_line(6, global_rank, rows, n) for n, rows in calls]
        write(tmp_path, f"router_trace_rank{global_rank}.jsonl", *lines)
    for reading in (read_counts(tmp_path, grid, 1), read_trace(tmp_path, grid, 1)):
        assert reading.coverage.share == 1
        assert [layer.name for layer in reading.steps[7]] == [f"layer_{n}" for n in range(2 * pp)]
        for layer, load in reading.steps[7].items():
            assert np.array_equal(load.counts, expected[layer.key.layer])


def test_tensor_parallel_copies_count_once(tmp_path: Path) -> None:
    """Without sequence parallelism all ranks of a tensor group route the same tokens."""
    args = ARGS | {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "global_batch_size": 2}
    for rank in (0, 1):
        write(tmp_path, f"router_trace_rank{rank}.jsonl", trace_line(0, rank, [[0, 1], [0, 2], [0, 3], [0, 1]]))
    once = read_trace(tmp_path, Grid.from_args(args), 1)
    assert once.steps[1][LAYER_0].counts.tolist() == [[[4, 2, 1, 1]]]
    parts = read_trace(tmp_path, Grid.from_args(args | {"sequence_parallel": True}), 1)
    assert parts.steps[1][LAYER_0].counts.tolist() == [[[8, 4, 2, 2]]]
    assert parts.steps[1][LAYER_0].sequences is None


# Layers


def test_layers_of_pipeline_stages() -> None:
    args = ARGS | {"world_size": 4, "num_layers": 8, "pipeline_model_parallel_size": 2}
    local = LayerKey("decoder", None, 1)
    assert Grid.from_args(args).layer(local, 1).name == "layer_5"
    first = Grid.from_args(args | {"decoder_first_pipeline_num_layers": 3})
    assert [first.layer(local, stage).name for stage in (0, 1)] == ["layer_1", "layer_4"]
    unknown = Grid.from_args(args | {"pipeline_model_parallel_layout": "Et*3|t*5L"})
    assert [unknown.layer(local, stage).name for stage in (0, 1)] == ["stage_0_layer_1", "stage_1_layer_1"]
    assert unknown.layer(LayerKey("mtp", 0, 0), 1).name == "mtp_0_layer_0"


@pytest.mark.parametrize(
    "more",
    [
        {"virtual_pipeline_model_parallel_size": 2},
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"num_virtual_stages_per_pipeline_rank": 2},
    ],
)
def test_interleaved_chunks_are_refused(more: dict[str, int]) -> None:
    with pytest.raises(MoekitError, match="chunks of an interleaved pipeline are merged in these files"):
        Grid.from_args(ARGS | {"world_size": 4, "pipeline_model_parallel_size": 2} | more)


def test_dense_runs_and_sizes_that_do_not_fit_are_refused() -> None:
    for more, message in (
        ({"num_experts": None}, "the run is dense"),
        ({"pipeline_model_parallel_size": 3}, "2 ranks cannot be split into 3 pipeline stages"),
        ({"expert_model_parallel_size": 3}, "2 ranks cannot be split into groups"),
        ({"use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2}, "are not told apart by pipeline stage"),
    ):
        with pytest.raises(MoekitError, match=message):
            Grid.from_args(ARGS | more)


def test_mtp_depths_stay_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [count_line(1, [[1, 0], [1, 0]])]
        lines += [count_line(1, [[0, 3], [0, 3]], block="mtp", mtp_idx=depth) for depth in (0, 1)]
        write(tmp_path, f"rank{rank}.jsonl", *lines)
    found = read_counts(tmp_path, TWO_RANKS, 1).steps[1]
    assert [layer.name for layer in found] == ["layer_0", "mtp_0_layer_0", "mtp_1_layer_0"]


# What is missing


def test_a_missing_rank_is_a_missing_observation(tmp_path: Path) -> None:
    grid = Grid.from_args(ARGS | {"world_size": 4, "global_batch_size": 16})
    for rank in (0, 1, 2):
        write(tmp_path, f"rank{rank}.jsonl", count_line(1, [[3, 1], [1, 1]]))
    reading = read_counts(tmp_path, grid, 1)
    load = reading.steps[1][LAYER_0]
    assert load.counts.tolist() == [[[3, 1, 3, 1], [1, 1, 1, 1]]]  # of the group that is whole
    assert not load.whole
    assert (reading.coverage.found, reading.coverage.expected, reading.coverage.missing_ranks) == (3, 4, {3})


def test_a_skipped_record_is_missing_and_no_zero(tmp_path: Path) -> None:
    """Megatron skips a call in which tokens were dropped; which call it was is then not known."""
    rows = [[0, 1], [0, 2], [0, 3], [0, 1]]
    write(tmp_path, "router_trace_rank0.jsonl", trace_line(0, 0, rows), trace_line(0, 0, rows))
    write(tmp_path, "router_trace_rank1.jsonl", trace_line(0, 1, rows))
    reading = read_trace(tmp_path, TWO_RANKS, 1)
    assert reading.steps[1][LAYER_0].counts.shape == (0, 2, 4)
    assert (reading.coverage.found, reading.coverage.expected) == (3, 4)
    sequences = reading.steps[1][LAYER_0].sequences
    assert sequences is not None
    assert len(sequences) == 6  # each is whole by itself


def test_a_layer_that_is_nowhere_counts_as_missing(tmp_path: Path) -> None:
    grid = Grid.from_args(ARGS | {"num_layers": 3, "moe_layer_freq": [0, 1, 1]})
    for rank in (0, 1):
        write(tmp_path, f"rank{rank}.jsonl", count_line(1, [[3, 1], [1, 1]], 1))
    reading = read_counts(tmp_path, grid, 1)
    assert (reading.coverage.found, reading.coverage.expected) == (2, 4)
    assert [layer.name for layer in reading.absent] == ["layer_2"]


def test_all_zero_batches_are_undefined(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "checkpoints" / "tokens_per_expert", f"rank{rank}.jsonl", count_line(1, [[0, 0], [2, 1]]))
    (section,) = of(tmp_path).sections
    (row,) = section.layers
    assert row.max_vio_micro is not None
    assert (row.max_vio_micro.observations, row.max_vio_micro.undefined) == (1, 1)
    assert "1 micro batches without any token have no MaxVio" in section.notes


def test_counts_of_another_number_of_micro_batches(tmp_path: Path) -> None:
    """Twice the lists of a step and not in pairs, as of two chunks: no count of this layer."""
    for rank in (0, 1):
        write(tmp_path, f"rank{rank}.jsonl", count_line(1, [[1, 2], [3, 4], [5, 6], [7, 8]]))
    reading = read_counts(tmp_path, TWO_RANKS, 1)
    assert len(reading.steps[1][LAYER_0].counts) == 0
    assert reading.coverage.found == 0
    assert reading.coverage.rejected == {OTHER_BATCHES: 2}


# Restarts


def test_what_a_restart_left_behind_is_no_part_of_the_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        before = [count_line(step, [[1, 1], [1, 1]]) for step in (10, 20, 30, 40)]
        after = [count_line(step, [[2, 1], [1, 1]]) for step in (20, 30)]
        write(tmp_path, f"rank{rank}.jsonl", *before, '{"iter": 50, "blo', *after, '{"iter": 40, "block": "dec')
    reading = read_counts(tmp_path, TWO_RANKS, 9)
    assert list(reading.steps) == [10, 20, 30]
    assert reading.steps[20][LAYER_0].counts[0, 0].tolist() == [2, 1, 2, 1]
    assert list(read_counts(tmp_path, TWO_RANKS, 1).steps) == [30]


def of(path: Path, last: int = 1, **more: Any) -> Any:
    """The report on a run directory of these files."""
    (path / "recipe.yaml").write_text("base: quickstart\n")
    attempt = path / "attempts" / "1"
    attempt.mkdir(parents=True, exist_ok=True)
    if not (attempt / "metrics.jsonl").exists():
        event = {"event": "config", "config": ARGS | more, "time": 1.0}
        (attempt / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    return report(RunDir(path), last)


def traced_attempt(path: Path, attempt: int, first: int, steps: range, chosen: list[list[int]], **more: Any) -> None:
    folder = path / "attempts" / str(attempt)
    for rank in (0, 1):
        lines = [trace_line(step, rank, chosen) for step in steps for _ in (0, 1)]
        write(folder / "routing", f"router_trace_rank{rank}.jsonl", *lines)
    events = [{"event": "config", "config": ARGS | more, "time": 1.0}, {"step": first, "time": 2.0, "metrics": {}}]
    write(folder, "metrics.jsonl", *(json.dumps(event) + "\n" for event in events))


def test_traces_of_all_attempts_each_step_once(tmp_path: Path) -> None:
    """Megatron's tracer begins its file anew, so each attempt has its own; the later one's steps hold."""
    traced_attempt(tmp_path, 1, 1, range(0, 6), [[0, 1]] * 4)
    traced_attempt(tmp_path, 2, 4, range(3, 5), [[2, 3]] * 4)
    (section,) = of(tmp_path, 4).sections
    assert section.steps == [2, 3, 4, 5]
    assert section.layers[0].load == [32, 32, 32, 32]


def test_attempts_on_other_ranks_are_left_out(tmp_path: Path) -> None:
    traced_attempt(tmp_path, 1, 1, range(0, 3), [[0, 1]] * 4, world_size=4)
    traced_attempt(tmp_path, 2, 4, range(3, 5), [[2, 3]] * 4)
    counts = tmp_path / "checkpoints" / "tokens_per_expert"
    for rank in (0, 1):
        old = count_line(2, [[9, 9], [9, 9]])
        write(counts, f"rank{rank}.jsonl", old, count_line(4, [[2, 2], [2, 2]]))
    for section in of(tmp_path, 9).sections:
        assert section.steps in ([4], [4, 5])
        assert "attempts on other ranks are left out: 1" in section.notes


# Rows of traces


def test_records_that_contradict_themselves_are_rejected(tmp_path: Path) -> None:
    good = trace_line(0, 0, [[0, 1], [0, 2], [0, 3], [0, 1]])
    lines = [
        trace_line(0, 0, [[0, 1], [0, 2]], num_tokens=3),
        trace_line(0, 0, [[0, 4], [0, 2]]),
        trace_line(0, 0, [[0, 1], [0, -1]]),
        good,
        "[" * 100_000 + "\n",
        "\x00\xff\n",
        good,
    ]
    write(tmp_path, "router_trace_rank0.jsonl", *lines)
    write(tmp_path, "router_trace_rank1.jsonl", good, good)
    reading = read_trace(tmp_path, TWO_RANKS, 1)
    assert reading.steps[1][LAYER_0].counts.tolist() == [[[8, 4, 2, 2]] * 2]
    assert reading.coverage.rejected == {trace.ROWS: 1, trace.RANGE: 2, trace.NOT_JSON: 2}


def test_masked_rows_are_left_out(tmp_path: Path) -> None:
    rows = [[0, 1], [-1, -1], [0, 3], [0, 1]]
    for rank in (0, 1):
        half = '{"step": 0, "stage": "pre_disp'
        write(tmp_path, f"router_trace_rank{rank}.jsonl", trace_line(0, rank, rows), half, trace_line(0, rank, rows))
    reading = read_trace(tmp_path, TWO_RANKS, 1)
    assert reading.steps[1][LAYER_0].counts.tolist() == [[[6, 4, 0, 2]] * 2]
    sequences = reading.steps[1][LAYER_0].sequences
    assert sequences is not None
    assert sequences[:2].tolist() == [[2, 1, 0, 1], [1, 1, 0, 0]]
    assert reading.masked == 4


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"sft": True}, "sequences are packed (`--sft`)"),
        ({"reset_position_ids": True}, "sequences are packed (`--reset-position-ids`)"),
        ({"context_parallel_size": 2}, "context parallel ranks hold parts of sequences"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "sequence parallel ranks hold parts"),
        ({"micro_batch_size": None}, "`train.micro_batch_size` or `model.seq_length` is not known"),
    ],
)
def test_sequences_are_refused_where_rows_do_not_tell_them(more: dict[str, Any], reason: str) -> None:
    args = ARGS | {"expert_tensor_parallel_size": 1} | more
    assert Grid.from_args(args).no_sequences.startswith(reason)
    assert Grid.from_args(ARGS).no_sequences == ""


def test_rows_that_are_no_whole_sequences(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, f"router_trace_rank{rank}.jsonl", *[trace_line(0, rank, [[0, 1], [0, 2]])] * 2)
    reading = read_trace(tmp_path, TWO_RANKS, 1)
    assert reading.steps[1][LAYER_0].sequences is None
    assert reading.coverage.rejected == {NO_SEQUENCES: 4}


def test_an_empty_trace_is_said(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "attempts" / "1" / "routing", f"router_trace_rank{rank}.jsonl")
    with pytest.raises(MoekitError, match=r"its files are empty: Megatron writes nothing for calls that drop tokens"):
        of(tmp_path)


# Counts that are none


def hostile() -> Iterator[str]:
    for tpe in (
        None,
        [],
        [[]],
        [[1]] * 2 + [[1, 2]],
        [[-1, 2]],
        [[1.5, 2]],
        [[2**70, 1]],
        [[2**50, 1]],
        "ab",
        [[True]],
    ):
        yield count_line(1, tpe)
    for change in ({"layer": -1}, {"layer": "0"}, {"layer": None}, {"block": "x"}, {"mtp_idx": "a"}, {"block": 3}):
        yield count_line(1, [[1, 2]], **change)


@pytest.mark.parametrize("line", list(hostile()))
def test_lines_that_are_no_counts(tmp_path: Path, line: str) -> None:
    good = count_line(1, [[1, 2], [3, 4]])
    for rank in (0, 1):
        write(tmp_path, f"rank{rank}.jsonl", good, line)
    reading = read_counts(tmp_path, TWO_RANKS, 1)
    assert reading.steps[1][LAYER_0].counts.tolist() == [[[1, 2, 1, 2], [3, 4, 3, 4]]]
    assert reading.coverage.rejected == {NOT_COUNTS: 2}


def test_noise_is_passed_over_and_counted(tmp_path: Path) -> None:
    good = count_line(1, [[1, 2], [3, 4]])
    for rank in (0, 1):
        write(tmp_path, f"rank{rank}.jsonl", '{"iter": "x"}\n', "\n", "[" * 100_000 + "\n", "no\n", good)
    reading = read_counts(tmp_path, TWO_RANKS, 9)
    assert list(reading.steps) == [1]
    assert reading.coverage.rejected == {trace.NOT_JSON: 6}


def test_counts_of_another_layout_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "rank0.jsonl", count_line(1, [[1, 2, 3], [1, 2, 3]]))
    with pytest.raises(MoekitError, match=r"rank0.jsonl: 3 experts a rank in these counts, not 2"):
        read_counts(tmp_path, TWO_RANKS, 1)


# Without a recipe


def test_without_a_recipe_files_stay_apart(tmp_path: Path) -> None:
    """Expert 0 is on every rank, and a layer's number on every stage: nothing is added up."""
    shutil.copytree(DATA / "pp2" / "checkpoints" / "tokens_per_expert", tmp_path / "tokens_per_expert")
    found = report_apart(tmp_path)
    assert (found.experts, found.expert_parallel) == (None, None)
    assert [section.source for section in found.sections] == [f"rank {rank}" for rank in range(4)]
    rows: list[LayerRow] = found.sections[3].layers
    assert [row.name for row in rows] == ["layer_0", "layer_1"]
    assert rows[0].load == [59 + 76, 59 + 66, 70 + 65, 85 + 45]
    with pytest.raises(MoekitError, match="a trace alone does not say how many experts there are"):
        report_apart(DATA / "pp2" / "attempts" / "1" / "routing")
    with pytest.raises(MoekitError, match=r"and no `rank\*.jsonl` with counts"):
        report_apart(DATA)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_are_messages_or_gaps(tmp_path: Path, seed: int) -> None:
    """Bytes of real files turned, cut and doubled: what is read is never more than there was."""
    rng = random.Random(seed)
    run = Path(shutil.copytree(DATA / "ep1", tmp_path / "run"))
    for path in (*run.glob("attempts/1/routing/*"), *run.glob("checkpoints/*/*")):
        text = bytearray(path.read_bytes())
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(text))
            match rng.randrange(3):
                case 0:
                    text[at] = rng.choice(b'0-9e.,[]{}"\n\x00\xff')
                case 1:
                    del text[at : at + rng.randrange(1, 200)]
                case 2:
                    text[at:at] = text[at : at + rng.randrange(1, 200)]
        path.write_bytes(text)
    try:
        sections = report(RunDir(run), 4).sections
    except MoekitError:
        return
    for section in sections:
        assert 0 <= section.found <= section.expected
