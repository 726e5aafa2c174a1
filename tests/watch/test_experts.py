"""Expert norms from activation dumps: against float64, merged, joined, refused; damaged and hostile files."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moekit.problems import MoekitError
from moekit.watch.experts import diagnostics, dumps, report
from moekit.watch.experts.norms import LayerNorms, Rms, merge, part

torch = pytest.importorskip("torch")

WIDTH = 6
ARGS: dict[str, Any] = {"num_experts": 4, "world_size": 2, "expert_model_parallel_size": 2}
TWO = dumps.Shape.of(ARGS)
FC2 = "decoder.layers.0.mlp.experts.linear_fc2"


def layer_norms(rows: list[int], means: list[float]) -> LayerNorms:
    return part(range(len(rows)), rows, [row * mean for row, mean in zip(rows, means, strict=True)], WIDTH, len(rows))


def grouped(counts: list[int], seed: int, dtype: Any = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(sum(counts), WIDTH, generator=generator).to(dtype)
    return {f"{FC2}/input0": torch.zeros(sum(counts), 3), f"{FC2}/input1": counts, f"{FC2}/output0": output}


def separate(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same as local experts write it."""
    parts = torch.split(tensors[f"{FC2}/output0"], tensors[f"{FC2}/input1"])
    prefix = "decoder.layers.0.mlp.experts.local_experts"
    return {f"{prefix}.{expert}.linear_fc2/output0": output for expert, output in enumerate(parts)}


def save(run_dir: Path, name: str, tensors: dict[str, Any], iteration: int = 10, chunk: str = "model_chunk0") -> Path:
    folder = run_dir / "checkpoints" / "activations" / f"iter_{iteration:07}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({chunk: tensors}, folder / name)
    return folder / name


def reference(outputs: list[Any], counts: list[int]) -> list[float]:
    """Mean norms in float64, plainly."""
    whole = np.concatenate([output.double().numpy() for output in outputs])
    norms, at, means = np.sqrt((whole**2).sum(axis=1)), 0, []
    for count in counts:
        means.append(float(norms[at : at + count].mean()) if count else float("nan"))
        at += count
    return means


# Sums and what follows from them


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1e6)), min_size=4, max_size=4), min_size=1, max_size=5)
)
def test_merged_norms_are_those_of_all_tokens_together(shards: list[list[tuple[int, float]]]) -> None:
    merged = merge(layer_norms([rows for rows, _ in shard], [mean for _, mean in shard]) for shard in shards)
    for expert in range(4):
        every = [mean for shard in shards for mean in [shard[expert][1]] * shard[expert][0]]
        assert merged.rows[expert] == len(every)
        assert np.isnan(merged.mean[expert]) if not every else merged.mean[expert] == pytest.approx(np.mean(every))
    there = [mean for mean in merged.mean.tolist() if mean == mean]
    assert merged.empty == [expert for expert in range(4) if not merged.rows[expert]]
    middle = float(np.median(there)) if there else 0.0
    if middle:
        assert merged.extremes == pytest.approx((max(there) / middle, min(there) / middle))
    else:
        assert merged.extremes is None


def test_the_median_is_of_the_layer_and_not_of_a_rank() -> None:
    halves = [part([0, 1], [1, 1], [1, 3], WIDTH, 4), part([2, 3], [1, 1], [10, 10], WIDTH, 4)]
    assert [half.extremes for half in halves] == [(1.5, 0.5), (1, 1)]
    assert merge(halves).extremes == (10 / 6.5, 1 / 6.5)


def test_empty_experts_have_no_part_and_a_zero_median_no_ratio() -> None:
    some = layer_norms([2, 0, 2, 2], [1, 0, 2, 30])
    assert (some.median, some.empty, some.extremes) == (2, [1], (15, 0.5))
    dead = layer_norms([2, 2, 2, 2], [0, 0, 0, 5])
    assert (dead.median, dead.over_median, dead.extremes) == (0, None, None)
    assert layer_norms([0, 0], [0, 0]).median is None
    wild = layer_norms([1, 1, 1], [1, float("inf"), 1])
    assert (wild.not_finite, wild.median, wild.extremes) == ([1], None, None)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(MoekitError, match="different shapes"):
        merge([part([0], [1], [1], 4, 2), part([1], [1], [1], 8, 2)])
    for experts, rows, sums in (
        ([0, 1], [1], [1]),
        ([0, 4], [1, 1], [1, 1]),
        ([1, 1], [1, 1], [1, 1]),
        ([0], [-1], [0]),
    ):
        with pytest.raises(MoekitError, match="do not fit"):
            part(experts, rows, sums, 4, 4)


def test_rms_is_over_all_elements() -> None:
    assert (Rms(8, 2) + Rms(0, 6)).value == 1
    assert Rms(0, 0).value is None


# Dumps


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dump_is_read_as_float64_reads_it(tmp_path: Path, local: bool, dtype: Any) -> None:
    counts, means = [[5, 0], [1, 300]], []
    for rank in (0, 1):
        tensors = grouped(counts[rank], rank, dtype)
        means += reference([tensors[f"{FC2}/output0"]], counts[rank])
        save(tmp_path, f"mp_rank_00_{rank:03}.pth", separate(tensors) if local else tensors)
    dump = dumps.read(tmp_path, 10, TWO)
    assert (dump.refused, dump.skipped) == ({}, [])
    assert dump.norms["layer_0"].rows.tolist() == [5, 0, 1, 300]
    assert dump.norms["layer_0"].mean == pytest.approx(means, nan_ok=True)
    assert dump.norms["layer_0"].width == WIDTH


def test_expert_tensor_shards_are_joined_before_the_norm(tmp_path: Path) -> None:
    shape = dumps.Shape.of({**ARGS, "world_size": 4, "expert_tensor_parallel_size": 2})
    means = []
    for expert_rank in (0, 1):
        shards = [grouped([3, 4], 10 * expert_rank + rank) for rank in (0, 1)]
        whole = shards[0][f"{FC2}/output0"] + shards[1][f"{FC2}/output0"]
        means += reference([whole], [3, 4])
        for rank, tensors in enumerate(shards):
            save(tmp_path, f"mp_rank_{rank:02}_{expert_rank:03}.pth", tensors)
    assert dumps.read(tmp_path, 10, shape).norms["layer_0"].mean == pytest.approx(means, rel=1e-6)
    (tmp_path / "checkpoints/activations/iter_0000010/mp_rank_01_001.pth").unlink()
    dump = dumps.read(tmp_path, 10, shape)
    assert (dump.norms, list(dump.refused)) == ({}, ["layer_0"])
    assert dump.refused["layer_0"].startswith("1 of 2 expert tensor parallel shards are there")
    save(tmp_path, "mp_rank_01_001.pth", grouped([4, 3], 5))
    assert "not of the same tokens" in dumps.read(tmp_path, 10, shape).refused["layer_0"]


def test_rows_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    padded = grouped([3, 4], 0)
    padded[f"{FC2}/input1"] = [3, 3]
    save(tmp_path, "mp_rank_00_000.pth", padded)
    save(tmp_path, "mp_rank_00_001.pth", grouped([3, 4], 1))
    assert dumps.read(tmp_path, 10, TWO).refused == {"layer_0": "it has 7 rows for 6 tokens: padded rows are no tokens"}
    for said in ({"moe_pad_expert_input_to_capacity": True}, {"moe_router_padding_for_fp8": True}, {"fp8": "hybrid"}):
        with pytest.raises(MoekitError, match="pads what the experts compute"):
            dumps.Shape.of({**ARGS, **said})
    with pytest.raises(MoekitError, match="are not known"):
        dumps.Shape.of({})
    with pytest.raises(MoekitError, match="dense"):
        dumps.Shape.of({"num_layers": 2})


def test_a_shard_that_is_missing_leaves_no_median(tmp_path: Path) -> None:
    save(tmp_path, "mp_rank_00_000.pth", grouped([3, 4], 0))
    dump = dumps.read(tmp_path, 10, TWO)
    assert (dump.norms, dump.refused) == ({}, {"layer_0": "1 of 2 expert parallel shards are missing"})


def test_stages_chunks_and_depths_are_apart(tmp_path: Path) -> None:
    shape = dumps.Shape(4, 1, 1, 2)
    one = separate(grouped([1, 2, 3, 4], 0))
    mtp = {key.replace("decoder.layers.0", "mtp.layers.1.mtp_model_layer"): value for key, value in one.items()}
    save(tmp_path, "mp_rank_00_000.pth", one)
    save(tmp_path, "mp_rank_00_001.pth", {**one, **mtp})
    assert list(dumps.read(tmp_path, 10, shape).norms) == [
        "stage_0_layer_0",
        "stage_1_layer_0",
        "stage_1_mtp_1_layer_0",
    ]


def test_latent_projections_have_an_rms_on_both_sides(tmp_path: Path) -> None:
    for rank in (0, 1):
        latent = torch.full((5, 2, 3), 2.0 if rank else 4.0)
        at = "decoder.layers.0.mlp.fc2_latent_proj"
        save(tmp_path, f"mp_rank_00_{rank:03}.pth", {f"{at}/input0": latent, f"{at}/output0": latent * 10})
    of = dumps.read(tmp_path, 10, TWO).latent["layer_0"]
    assert {name: rms.value for name, rms in of.items()} == pytest.approx(
        {"fc2_latent_proj input0": 10**0.5, "fc2_latent_proj output0": 10 * 10**0.5}
    )


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "it ran"
    save(tmp_path, "mp_rank_00_000.pth", {**grouped([1, 2], 0), "x": Bomb(trace)})
    (tmp_path / "checkpoints/activations/iter_0000010/mp_rank_00_001.pth").write_bytes(pickle.dumps(Bomb(trace)))
    dump = dumps.read(tmp_path, 10, TWO)
    assert not trace.exists()
    assert dump.norms == {}
    assert [one.partition(":")[0] for one in dump.skipped] == ["mp_rank_00_000.pth", "mp_rank_00_001.pth"]
    pickle.loads((tmp_path / "checkpoints/activations/iter_0000010/mp_rank_00_001.pth").read_bytes())
    assert trace.exists()  # it is one that would have


@pytest.mark.parametrize("content", ["empty", "half", "text", "list", "foreign", "name"])
def test_damaged_and_foreign_files_are_skipped_and_said(tmp_path: Path, content: str) -> None:
    save(tmp_path, "mp_rank_00_000.pth", grouped([3, 4], 0))
    path = save(tmp_path, "mp_rank_00_001.pth", grouped([3, 4], 1))
    if content == "half":
        path.write_bytes(path.read_bytes()[:400])
    elif content == "list":
        torch.save([1, 2], path)
    elif content == "foreign":
        torch.save({"model": torch.zeros(3)}, path)
    elif content == "name":
        path.rename(path.with_name("mp_rank_00_007.pth"))
    else:
        path.write_text("" if content == "empty" else "no weights")
    dump = dumps.read(tmp_path, 10, TWO)
    assert len(dump.skipped) == 1
    assert dump.skipped[0].startswith("mp_rank_00_00")
    assert dump.refused == {"layer_0": "1 of 2 expert parallel shards are missing"}


@pytest.mark.parametrize(
    "harm",
    [
        {f"{FC2}/input1": None},
        {f"{FC2}/input1": [3]},
        {f"{FC2}/input1": [-1, 8]},
        {f"{FC2}/input1": [3, "4"]},
        {f"{FC2}/output0": torch.zeros(7)},
        {f"{FC2}/output0": torch.zeros(7, WIDTH, dtype=torch.int32)},
        {f"{FC2}/output0": "seven rows"},
    ],
)
def test_a_layer_that_is_not_as_megatron_writes_it_is_refused(tmp_path: Path, harm: dict[str, Any]) -> None:
    save(tmp_path, "mp_rank_00_000.pth", {**grouped([3, 4], 0), **harm})
    save(tmp_path, "mp_rank_00_001.pth", grouped([3, 4], 1))
    dump = dumps.read(tmp_path, 10, TWO)
    assert (dump.norms, list(dump.refused)) == ({}, ["layer_0"])


# Diagnostic steps


def line(step: int, rank: int, layer: int = 0, **measures: Any) -> str:
    first = 2 * rank
    record = {
        "step": step,
        "time": 1.0,
        "block": "decoder",
        "layer": layer,
        "rank": rank,
        "experts": [first, first + 1],
    }
    norms = {"rows": [2, 1], "sum_l2": [2.0, 3.0 + rank], "width": WIDTH}
    return json.dumps({**record, "norms": norms, "flips": {"tokens": 10, "flipped": rank}, **measures}) + "\n"


def write(run_dir: Path, attempt: int, rank: int, text: str) -> None:
    folder = run_dir / "attempts" / str(attempt) / "diagnostics"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.jsonl").write_text(text)


def test_ranks_of_a_step_are_taken_together(tmp_path: Path) -> None:
    shared = [{"tokens": 4, "zero_routed": 2, "sum": 6.0, "largest": 5.0}, {"tokens": 2, "zero_routed": 0, "sum": 2.0}]
    zeros = [{"zeros": [1, 2], "elements": [4, 4]}, {"zeros": [0, 0], "elements": [4, 0]}]
    for rank in (0, 1):
        write(tmp_path, 1, rank, line(5, rank, shared_over_routed=shared[rank], zeros=zeros[rank]))
    one = diagnostics.read(tmp_path, 4).steps[5]["layer_0"]
    assert one.norms is not None
    assert one.norms.mean.tolist() == [1, 3, 1, 4]
    assert (one.flips, one.dropped, one.shared_over_routed, one.zero_routed) == (1 / 20, None, 2, 2)
    assert one.zeros == [0.25, 0.5, 0, None]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_all_measures_of_random_ranks_against_float64(tmp_path: Path, seed: int, replicas: int) -> None:
    """EP 2 and its replicas, each with tokens of its own: what is read is of all tokens, never a mean of means."""
    chooser = np.random.default_rng(seed)
    norms: list[list[float]] = [[] for _ in range(4)]
    ratios: list[float] = []
    flips: list[bool] = []
    drops: list[bool] = []
    zeros = np.zeros((4, 2), np.int64)
    for rank in range(2 * replicas):
        first, own = 2 * (rank % 2), [chooser.random(chooser.integers(0, 4)) for _ in (0, 1)]
        for expert, values in enumerate(own):
            norms[first + expert] += values.tolist()
        flipped, dropped = chooser.random(chooser.integers(1, 9)) < 0.3, chooser.random(chooser.integers(1, 9)) < 0.2
        apart, unrouted = chooser.random(chooser.integers(0, 5)), int(chooser.integers(0, 3))
        some = chooser.integers(0, 5, (2, 2))  # (expert, zero or other)
        zeros[first : first + 2] += some
        flips, drops, ratios = [*flips, *flipped], [*drops, *dropped], [*ratios, *apart]
        record = json.loads(line(5, rank)) | {"experts": [first, first + 1]}
        record["norms"] = {"rows": [len(one) for one in own], "sum_l2": [float(one.sum()) for one in own], "width": 4}
        record["flips"] = {"tokens": len(flipped), "flipped": int(flipped.sum())}
        record["dropped"] = {"assignments": len(dropped), "dropped": int(dropped.sum())}
        tokens = len(apart) + unrouted
        record["shared_over_routed"] = {"tokens": tokens, "zero_routed": unrouted, "sum": float(apart.sum())}
        record["zeros"] = {"zeros": some[:, 0].tolist(), "elements": some.sum(axis=1).tolist()}
        write(tmp_path, 1, rank, json.dumps(record) + "\n")
    for path in (tmp_path / "attempts/1/diagnostics").iterdir():
        if int(path.stem[4:]) >= 2 * replicas:  # of an example before this one
            path.unlink()
    found = diagnostics.read(tmp_path, 4).steps[5]["layer_0"]
    assert found.norms is not None
    assert found.norms.mean == pytest.approx([np.mean(one) if one else np.nan for one in norms], nan_ok=True)
    assert found.flips == pytest.approx(np.mean(flips))
    assert found.dropped == pytest.approx(np.mean(drops))
    assert found.shared_over_routed == (pytest.approx(np.mean(ratios)) if ratios else None)
    expected = [zero / (zero + other) if zero + other else None for zero, other in zeros.tolist()]
    assert found.zeros == (expected if zeros.any() else [])


def test_half_a_layer_has_no_norms_and_a_later_attempt_counts(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, line(5, 0) + line(10, 0))
    write(tmp_path, 1, 1, line(5, 1) + line(10, 1))
    write(tmp_path, 2, 0, line(10, 0, norms={"refused": "for a reason"}, flips={"refused": "another"}))
    write(tmp_path, 2, 1, line(10, 1))
    found = diagnostics.read(tmp_path, 4).steps
    assert found[5]["layer_0"].norms is not None
    assert found[10]["layer_0"].norms is None
    assert found[10]["layer_0"].refused == {"norms": "for a reason", "flips": "another"}
    assert found[10]["layer_0"].flips == 0.1
    (tmp_path / "attempts/2/diagnostics/rank1.jsonl").unlink()
    assert diagnostics.read(tmp_path, 4).steps[10]["layer_0"].refused["norms"] == "2 of 4 experts are not recorded"


@pytest.mark.parametrize(
    "harm",
    [
        {"layer": "0"},
        {"layer": -1},
        {"block": "encoder"},
        {"experts": [0, 9]},
        {"experts": [0, 0]},
        {"experts": "01"},
        {"norms": [1]},
        {"norms": {"rows": [1], "sum_l2": [1, 1], "width": 4}},
        {"norms": {"rows": [1, "1"], "sum_l2": [1, 1], "width": 4}},
        {"flips": {"tokens": "10", "flipped": 0}},
        {"zeros": {"zeros": {}, "elements": [1, 1]}},
        {"bias": {"refused": 5}},
    ],
)
def test_lines_that_are_no_records_are_counted(tmp_path: Path, harm: dict[str, Any]) -> None:
    bad = json.dumps({**json.loads(line(5, 0)), **harm})
    write(tmp_path, 1, 0, line(5, 0) + bad + "\nnull\nno JSON\n" + line(6, 0) + line(7, 0)[:40])
    found = diagnostics.read(tmp_path, 4)
    assert (list(found.steps), found.skipped) == ([5, 6], 3)


# The command


def run_of(tmp_path: Path, **args: Any) -> Path:
    run_dir = tmp_path / "runs" / "small"
    (run_dir / "attempts/1").mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text("summary: a run\n")
    config = {"event": "config", "time": 1.0, "config": {**ARGS, **args}}
    (run_dir / "attempts/1/metrics.jsonl").write_text(json.dumps(config) + "\n")
    return run_dir


def moekit(*words: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "moekit", "experts", *words], capture_output=True, text=True, check=False, env=env
    )


def test_the_command_shows_both_sources(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path)
    for rank in (0, 1):
        tensors = grouped([3, 0] if rank else [3, 4], rank)
        if rank:
            tensors[f"{FC2}/output0"] *= 100
        save(run_dir, f"mp_rank_00_{rank:03}.pth", tensors)
        write(run_dir, 1, rank, line(5, rank, dropped={"refused": "padding"}))
    done = moekit(run_dir)
    assert done.returncode == 0, done.stderr
    assert "activation dump of iteration 10" in done.stdout
    assert "expert 2" in done.stdout
    assert "▄▄█·" in done.stdout
    assert "the routing weights are in the norms" in done.stdout
    assert "diagnostic step 5, of 1" in done.stdout
    assert "dropped: not measured, padding" in done.stdout
    said = json.loads(moekit(run_dir, "--json", "--plot", tmp_path / "x.svg").stdout)
    assert said["dump"]["layers"]["layer_0"]["empty"] == [3]
    assert said["steps"]["5"]["layer_0"]["norms"]["max_over_median"] == 2
    assert "largest expert output norm" in (tmp_path / "x.svg").read_text()
    refused = moekit(run_dir, "--iteration", "20")
    assert refused.returncode == 1
    assert refused.stderr == ("error: there is no activation dump of iteration 20\n    hint: the newest are: 10\n")


def test_a_run_that_wrote_nothing_says_how_to_ask_for_it(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path)
    with pytest.raises(MoekitError, match="has written nothing of its experts"):
        report.report(run_dir)
    write(run_dir, 1, 0, line(5, 0))
    padded = run_of(tmp_path / "padded", fp8="hybrid")
    save(padded, "mp_rank_00_000.pth", grouped([3, 4], 0))
    assert "`fp8` pads what the experts compute" in report.report(padded).no_dump
    with pytest.raises(MoekitError, match="is dense"):
        report.report(run_of(tmp_path / "dense", num_experts=None))
