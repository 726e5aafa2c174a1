"""The side step against references in float64, on files as Megatron writes them and on those a real run left."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.watch.counts import RankLayout, TokensPerExpertReader
from moekit.watch.derive import MOST_DEAD, RMS_LOGSUMEXP, Derived, Deriver, losses_of, router_values
from moekit.watch.facts import facts_of
from moekit.watch.metrics import MetricsReader, Step
from moekit.watch.series import Series
from moekit.watch.transport import socket_hosts

CAPTURE = Path(__file__).parent / "data" / "run"
ARGS = {"world_size": 2, "num_experts": 4, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 1}


def log(run: Path, attempt: int, steps: range, config: dict[str, Any] | None = ARGS, **metrics: float) -> None:
    folder = run / "attempts" / str(attempt)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        if config is not None:
            file.write(json.dumps({"event": "config", "config": config, "time": 1000.0 * attempt}) + "\n")
        for step in steps:
            values = {"lm loss": 1.0, **metrics}
            file.write(json.dumps({"step": step, "time": 1000.0 * attempt + step, "metrics": values}) + "\n")


def count(run: Path, rank: int, iteration: int, *layers: list[list[int]]) -> None:
    """One rank's counts at one iteration: by layer `# (micro batch, local expert)`."""
    folder = run / "checkpoints" / "tokens_per_expert"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        for layer, tpe in enumerate(layers):
            file.write(json.dumps({"iter": iteration, "block": "decoder", "layer": layer, "tpe": tpe}) + "\n")


def router(rows: list[Derived]) -> dict[int, dict[str, float]]:
    return {row.step: row.values for row in rows if row.kind == "router"}


@st.composite
def runs(draw: st.DrawFn) -> tuple[RankLayout, np.ndarray]:
    """A layout, and tokens `# (layer, replica, micro batch, expert)`."""
    ep, etp, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    layout = RankLayout(ep * etp * replicas, ep, etp, num_experts=ep * draw(st.integers(1, 3)))
    shape = (draw(st.integers(1, 3)), replicas, draw(st.integers(1, 4)), layout.num_experts)
    flat = draw(st.lists(st.integers(0, 10**6), min_size=math.prod(shape), max_size=math.prod(shape)))
    return layout, np.array(flat).reshape(shape)


def reference(layout: RankLayout, tokens: np.ndarray) -> dict[str, float]:
    """The same statistics, said in NumPy's words and float64."""
    found: dict[str, list[float]] = {"max_vio": [], "max_vio_micro": [], "rank_imbalance": []}
    for layer in tokens.astype(np.float64):
        whole = layer.sum(axis=(0, 1))
        micro = layer.reshape(-1, layout.num_experts)
        micro = micro[micro.sum(axis=1) > 0]
        if len(micro):
            found["max_vio"].append(whole.max() / whole.mean() - 1)
            found["max_vio_micro"].append((micro.max(axis=1) / micro.mean(axis=1) - 1).mean())
            ranks = whole.reshape(layout.expert_model_parallel, -1).sum(axis=1)
            found["rank_imbalance"].append(ranks.max() / ranks.mean())
    return {f"router/{name}": float(np.mean(values)) for name, values in found.items() if values}


@settings(max_examples=60, deadline=None)
@given(runs())
def test_statistics_are_those_of_a_reference(tmp_path_factory: pytest.TempPathFactory, made: Any) -> None:
    layout, tokens = made
    run = tmp_path_factory.mktemp("run")
    for rank in range(layout.world_size):
        own = layout.experts(rank)
        local = tokens[:, layout.group(rank), :, own.start : own.stop]
        count(run, rank, 10, *local.tolist())
    (counts,) = TokensPerExpertReader(run / "checkpoints" / "tokens_per_expert", layout).poll()
    values = router_values(counts, layout)
    expected = reference(layout, tokens)
    assert expected.keys() == {"router/max_vio", "router/max_vio_micro", "router/rank_imbalance"} & values.keys()
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name
    if expected:
        assert values["router/max_vio_gap"] == values["router/max_vio_micro"] - values["router/max_vio"]
        ranks = tokens.sum(axis=(0, 1, 2)).reshape(layout.expert_model_parallel, -1).sum(axis=1)
        assert values["router/busiest_rank"] == ranks.argmax()


def test_one_scope_is_not_the_others_mean(tmp_path: Path) -> None:
    log(tmp_path, 1, range(1, 11))
    count(tmp_path, 0, 10, [[4, 0], [0, 4]])  # uneven in each micro batch, even over both
    count(tmp_path, 1, 10, [[0, 0], [0, 0]])
    values = router(Deriver(tmp_path).poll())[10]
    assert values["router/max_vio_micro"] == values["router/max_vio_micro_layer_0"] == 3.0
    assert values["router/max_vio"] == 1.0
    assert values["router/max_vio_gap"] == 2.0
    assert values["router/dead_experts"] == 2


def test_of_a_real_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    run = shutil.copytree(CAPTURE, tmp_path / "run")
    rows = [row for row in Deriver(run).poll() if row.kind == "router"]
    assert {row.step: row.attempt for row in rows} == {step: 1 if step <= 60 else 2 for step in range(5, 161, 5)}
    last = rows[-1].values
    assert last["router/max_vio"] == pytest.approx(0.19, abs=0.005)
    assert last["router/max_vio_gap"] == 0  # one expert parallel group, one micro batch
    assert (last["router/dead_experts"], rows[2].values["router/dead_experts"]) == (0, 1)
    assert 1795986394 < rows[12].time < 1795986420  # of the second attempt


def test_counts_wait_for_the_steps_that_say_whose_they_are(tmp_path: Path) -> None:
    run = shutil.copytree(CAPTURE, tmp_path / "run")
    reader = MetricsReader(run)
    deriver, rows = Deriver(run, reader), []
    while True:
        steps = reader.poll(7)
        new = deriver.derive(steps, 7)
        rows += new
        if not steps and not new:
            break
    of = {row.step: row.attempt for row in rows if row.kind == "router"}
    assert of == {step: 1 if step <= 60 else 2 for step in range(5, 161, 5)}


def test_counts_are_of_the_attempt_that_wrote_them(tmp_path: Path) -> None:
    deriver = Deriver(tmp_path)

    def go_on(attempt: int, first: int, last: int) -> list[tuple[int, int]]:
        for step in range(first, last + 1):
            log(tmp_path, attempt, range(step, step + 1), ARGS if step == first else None)
            if step % 10 == 0:
                for rank in range(2):
                    count(tmp_path, rank, step, [[attempt, 1]])
        return [(row.attempt, row.step) for row in deriver.poll() if row.kind == "router"]

    assert go_on(1, 1, 45) == [(1, 10), (1, 20), (1, 30), (1, 40)]
    assert go_on(2, 21, 62) == [(2, 30), (2, 40), (2, 50), (2, 60)]
    assert go_on(3, 61, 75) == [(3, 70)]
    late = Deriver(tmp_path)  # one that comes when all is over gives the repeated ones as last written
    of = [(row.attempt, row.step) for row in late.poll() if row.kind == "router"]
    assert of == [(1, 10), (1, 20), (2, 30), (2, 40), (2, 50), (2, 60), (3, 70)]


def test_a_missing_rank_is_never_averaged_away(tmp_path: Path) -> None:
    log(tmp_path, 1, range(1, 31))
    for iteration in range(1, 21):
        count(tmp_path, 0, iteration, [[9, 1]])
    values = router(Deriver(tmp_path).poll())
    assert values
    assert all(value == {"router/missing_ranks": 1, "router/missing_layers": 1} for value in values.values())


def test_dead_experts_are_counted_in_a_row_and_named(tmp_path: Path) -> None:
    log(tmp_path, 1, range(1, 41))
    for iteration, busy in ((10, 0), (20, 0), (30, 5), (40, 0)):
        count(tmp_path, 0, iteration, [[busy, 7]], [[0, 0]])
        count(tmp_path, 1, iteration, [[7, 0]], [[0, 0]])
    rows = [row for row in Deriver(tmp_path).poll() if row.kind == "router"]
    assert [row.values["router/dead_experts"] for row in rows] == [2, 2, 1, 2]
    assert [row.values["router/longest_dead"] for row in rows] == [1, 2, 3, 4]
    assert [(one.layer, one.expert, one.counts) for one in rows[-1].dead] == [("layer_0", 3, 4), ("layer_0", 0, 1)]
    assert "router/max_vio_layer_1" not in rows[-1].values  # nothing was routed there: undefined, not 0


def test_a_restart_counts_dead_experts_anew(tmp_path: Path) -> None:
    deriver, longest = Deriver(tmp_path), []
    for attempt, iterations in ((1, (10, 20)), (2, (20, 30))):
        log(tmp_path, attempt, range(iterations[0] - 5, iterations[-1] + 1))
        for iteration in iterations:
            count(tmp_path, 0, iteration, [[0, 7]])
            count(tmp_path, 1, iteration, [[7, 7]])
        longest += [row.values["router/longest_dead"] for row in deriver.poll() if row.kind == "router"]
    assert longest == [1, 2, 1, 2]


def test_only_the_longest_dead_are_named(tmp_path: Path) -> None:
    args = {**ARGS, "num_experts": 32}
    log(tmp_path, 1, range(1, 11), args)
    for rank in range(2):
        count(tmp_path, rank, 10, [[1, *[0] * 15]])
    (row,) = [row for row in Deriver(tmp_path).poll() if row.kind == "router"]
    assert row.values["router/dead_experts"] == 30
    assert len(row.dead) == MOST_DEAD


def test_dense_layers_and_dense_runs_have_no_values(tmp_path: Path) -> None:
    log(tmp_path, 1, range(1, 11), {"world_size": 2, "num_experts": None})
    assert Deriver(tmp_path).poll() == []
    log(tmp_path / "moe", 1, range(1, 11))
    for rank in range(2):
        folder = tmp_path / "moe" / "checkpoints" / "tokens_per_expert"
        folder.mkdir(parents=True, exist_ok=True)
        line = {"iter": 10, "block": "decoder", "layer": 3, "tpe": [[1, 1]]}
        (folder / f"rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    values = router(Deriver(tmp_path / "moe").poll())[10]
    assert {name for name in values if "layer" in name and "missing" not in name} == {
        "router/max_vio_layer_3",
        "router/max_vio_micro_layer_3",
        "router/rank_imbalance_layer_3",
    }


def test_a_layout_that_is_refused_is_said_and_losses_go_on(tmp_path: Path) -> None:
    log(tmp_path, 1, range(1, 3), {**ARGS, "pipeline_model_parallel_size": 2}, z_loss=4.0)
    deriver = Deriver(tmp_path)
    assert [row.values for row in deriver.poll()] == [{RMS_LOGSUMEXP: 2.0}] * 2
    assert "pipeline" in deriver.refused


def test_z_loss_is_what_megatron_logs_without_its_coefficient() -> None:
    torch = pytest.importorskip("torch")
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits, coefficient = torch.randn(64, 8, dtype=torch.float64) * 3, 1e-3
    logged = float(moe_utils.z_loss_func(logits, coefficient) / coefficient)  # as router.py:699 records it
    row = losses_of(Step(1, 5, 0.0, {"z_loss": logged}))
    assert row is not None
    rms = float(torch.logsumexp(logits, -1).square().mean().sqrt())
    assert row.values[RMS_LOGSUMEXP] == pytest.approx(rms, rel=1e-12)


@pytest.mark.parametrize("z_loss", [math.nan, math.inf, -1.0])
def test_a_z_loss_that_is_none_gives_nothing(z_loss: float) -> None:
    assert losses_of(Step(1, 5, 0.0, {"z_loss": z_loss})) is None


def test_polling_looks_at_one_file_until_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RankLayout(64, 64, 1, num_experts=64)
    for rank in range(64):
        count(tmp_path, rank, 10, [[1]])
    reader = TokensPerExpertReader(tmp_path / "checkpoints" / "tokens_per_expert", layout)
    while reader.poll():
        pass
    reader.poll()
    opened = []
    monkeypatch.setattr(Path, "open", lambda path, *_: opened.append(path))
    assert reader.poll() == []
    assert opened == []
    monkeypatch.undo()
    for rank in range(64):
        count(tmp_path, rank, 20, [[1]])
    assert [counts.iteration for counts in reader.poll()] == [20]


CASES: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}, ("micro batch",), ("aux_loss",)),
    ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}, ("global batch",), ()),
    ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4}, ("sequence",), ("seq_aux_loss",)),
    (
        {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [1e-3]},
        ("micro batch", "global batch"),
        ("global_aux_loss",),
    ),
    ({"moe_router_load_balancing_type": "quantile_balancing"}, ("micro batch", "global batch"), ()),
    ({"moe_router_load_balancing_type": "sinkhorn"}, ("micro batch",), ()),
    ({"moe_router_load_balancing_type": "none", "moe_router_enable_expert_bias": True}, ("global batch",), ()),
    (
        {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-4,
            "moe_router_enable_expert_bias": True,
        },
        ("global batch", "sequence"),
        ("seq_aux_loss",),
    ),
    (
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 1e-4]},
        ("sequence",),
        ("seq_aux_loss",),
    ),
]


@pytest.mark.parametrize(("config", "scopes", "kinds"), CASES, ids=lambda case: str(case)[:40])
def test_scope_of_the_balancer(config: dict[str, Any], scopes: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    facts = facts_of({"num_experts": 8, **config})
    assert facts.scopes == scopes
    assert [name.removesuffix("load_balancing_loss") for name in facts.aux_losses] == [
        kind.removesuffix("aux_loss") for kind in kinds
    ]


def test_floor_of_the_balancing_loss_is_megatrons() -> None:
    """Every layer reads as even: what Megatron then logs is the floor."""
    torch = pytest.importorskip("torch")
    tracking = pytest.importorskip("megatron.core.transformer.moe.moe_logging")
    for freq, depths, repeated in (([0, 1, 1, 1], None, False), (1, 2, False), (2, 2, False), ([0, 1], 3, True)):
        layers = 4 if isinstance(freq, int) else len(freq)
        pattern = [int(i % freq == 0) for i in range(layers)] if isinstance(freq, int) else freq
        tracker = tracking.MoEMetricsTracker()
        total = layers + (depths or 0)
        for layer in (i for i, has in enumerate(pattern) if has):
            tracker.record("loss", torch.tensor(1.0), layer + 1, total)
        for depth in range(depths or 0) if pattern[-1] else ():
            share = 1 / (depths or 1) if repeated else 1.0
            tracker.record("loss", torch.tensor(share), layers + 1 + (0 if repeated else depth), total)
        moe_layers = tracker._count_moe_layers(layers, freq, depths)
        logged = float(tracker._aggregate(1.0, moe_layers, ["loss"])["loss"])
        config = {"num_experts": 8, "num_layers": layers, "moe_layer_freq": freq, "mtp_num_layers": depths}
        assert facts_of({**config, "mtp_use_repeated_layer": repeated}).aux_floor == pytest.approx(logged), config


NCCL = "0: node-7:411:530 [3] NCCL INFO "


def test_sockets_between_nodes_are_told_from_a_bootstrap(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        f"{NCCL}Bootstrap : Using eth0:10.0.0.4<0>\n{NCCL}NET/Plugin: Failed to find ncclCollNetPlugin symbol.\n"
        f"{NCCL}Using network AWS Libfabric\n{NCCL}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA\n"
    )
    assert socket_hosts(log) == ()
    with log.open("a") as file:
        file.write("x" * (1 << 20) + "\n")
        file.write(f"{NCCL}Using network Socket\n" * 3)
        file.write(f"{NCCL.replace('node-7', 'node-9')}Channel 01/0 : 1[0] -> 9[0] [send] via NET/Socket/0\n")
    assert socket_hosts(log) == ("node-7", "node-9")
    assert socket_hosts(tmp_path / "none") == ()


def test_what_the_log_says_is_told_once_an_attempt(tmp_path: Path) -> None:
    log(tmp_path, 1, range(1, 4))
    (tmp_path / "attempts/1/train.log").write_text(f"{NCCL}Using network Socket\n")
    rows = [row for row in Deriver(tmp_path).poll() if row.kind == "log"]
    assert [(row.attempt, row.step, row.values, row.hosts) for row in rows] == [
        (1, 1, {"nccl/socket": 1.0}, ("node-7",))
    ]


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(-1e6, 1e6)), max_size=400), st.integers(4, 50))
def test_a_series_keeps_its_end_and_few_points(steps: list[tuple[int, float]], most: int) -> None:
    series, whole = Series(most), {}
    for x, y in steps:
        series.add(x, y)
        whole = {at: value for at, value in whole.items() if at < x} | {x: y}
        points = series.points
        assert len(points) <= most + 2
        assert points[-1] == (x, y)
        assert [at for at, _ in points] == sorted({at for at, _ in points})
        assert all(whole[int(at)] == value for at, value in points)


@pytest.mark.parametrize("all_at_once", [True, False])
@pytest.mark.parametrize(("world", "ep"), [(4, 2), (4, 4), (1, 1)])
def test_an_attempt_on_other_ranks_is_read_by_its_own_layout(
    world: int, ep: int, all_at_once: bool, tmp_path: Path
) -> None:
    deriver = Deriver(tmp_path)
    log(tmp_path, 1, range(1, 31))
    for rank in range(2):
        for iteration in (10, 20):
            count(tmp_path, rank, iteration, [[1, 1]])
    if not all_at_once:
        assert [row.step for row in deriver.poll()] == [10, 20]
    log(tmp_path, 2, range(25, 61), {**ARGS, "world_size": world, "expert_model_parallel_size": ep})
    for rank in range(world):
        for iteration in (30, 40):
            count(tmp_path, rank, iteration, [[rank + 1] * (4 // ep)])
    rows = [row for row in deriver.poll() if row.kind == "router"]
    assert [(row.attempt, row.step) for row in rows] == [(2, 30), (2, 40)]
    assert (deriver.since, deriver.refused) == (25, "")
    busiest = 4 * 4 / (1 + 2 + 3 + 4) if ep == 4 else 1.0 if ep == 1 else 2 * 6 / 10
    assert rows[-1].values["router/max_vio"] == pytest.approx(busiest - 1)
