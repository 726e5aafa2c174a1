"""Weights and traffic of a run's trace, on what a real run left."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError
from moekit.watch.router import sidecar, trace
from moekit.watch.router.grid import Grid
from moekit.watch.router.trace_report import lines, ranks_per_node, trace_report
from moekit.watch.router.weights import FLAT, Score

DATA = Path(__file__).parent / "data"


def test_weights_of_a_real_run() -> None:
    """Two steps old, so its gates are flat; what was chosen is what logits and a small bias choose."""
    found = trace_report(RunDir(DATA / "logits"), weights=True, traffic=False)
    assert found.traffic is None
    assert found.weights is not None
    assert found.weights.score == Score("sigmoid", scale=2.5)
    assert [layer.name for layer in found.weights.layers] == ["layer_0", "layer_1"]
    for layer in found.weights.layers.values():
        assert (layer.tokens, layer.verdict) == (2 * 2 * 2 * 128, FLAT)
        assert layer.spread("largest").mean == pytest.approx(2.5 * layer.spread("share").mean)
        assert 1 < layer.spread("ratio").mean < 1.1
    folder = RunDir(DATA / "logits").attempt(1).routing
    for line in (folder / "router_trace_rank0.jsonl").read_bytes().splitlines(keepends=True):
        call = trace.parse(line, 8)
        assert isinstance(call, trace.Call)
        assert call.logits is not None
        logits = sidecar.load(folder / "logits_rank0.bin", call.logits)
        assert logits is not None
        top = np.sort(np.argsort(-logits, axis=1)[:, :2], axis=1)
        assert (top == call.experts).all(axis=1).mean() > 0.95


def test_traffic_of_a_real_run_on_nodes_of_one_rank(tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(DATA / "logits", tmp_path / "run")))
    (run.path / "retry.json").write_text('{"ranks_per_node": 1}')
    found = trace_report(run, weights=False, traffic=True)
    assert found.traffic is not None
    chosen: dict[str, list[tuple[int, list[int]]]] = {}
    for rank in range(2):
        path = run.attempt(1).routing / f"router_trace_rank{rank}.jsonl"
        for record in map(json.loads, path.read_text().splitlines()):
            tokens = [(rank, token) for token in record["top_indices"]]
            chosen.setdefault(f"layer_{record['layer']}", []).extend(tokens)
    for layer, one in found.traffic.layers.items():
        nodes = [{expert // 4 for expert in token} for _, token in chosen[layer.name]]
        away = [sum(expert // 4 != rank for expert in token) for rank, token in chosen[layer.name]]
        assert one.nodes == sum(map(len, nodes))
        assert one.remote_choices == sum(away)
        assert one.remote_nodes == sum(count > 0 for count in away)
        assert found.traffic.remote_bytes(one, "expert") == pytest.approx(128 * np.mean(away))


def test_text_and_json_and_one_layer() -> None:
    found = trace_report(RunDir(DATA / "logits"), weights=True, traffic=True, only="layer_1")
    text = list(lines(found))
    assert max(map(len, text)) <= 80
    assert [line.split()[0] for line in text if line.startswith("  layer_")] == ["layer_1", "layer_1:", "layer_1"]
    assert "  nodes of 2 ranks, copies of 128 bytes; the run's dispatcher," in text
    said = json.loads(json.dumps(found.as_json()))
    assert said["traced_attempt"] == 1
    assert list(said["weights"]["layers"]) == list(said["traffic"]["layers"]) == ["layer_1"]
    assert said["weights"]["layers"]["layer_1"]["mass"] is None


def test_pipeline_stages_have_their_own_layers() -> None:
    found = trace_report(RunDir(DATA / "pp2"), weights=False, traffic=True)
    assert found.traffic is not None
    assert [layer.name for layer in found.traffic.layers] == ["layer_0", "layer_1", "layer_2", "layer_3"]


def test_runs_that_have_none(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="the routing trace has no logits"):
        trace_report(RunDir(DATA / "plain"), weights=True, traffic=False)
    run = RunDir(Path(shutil.copytree(DATA / "plain", tmp_path / "run")))
    shutil.rmtree(run.attempt(1).routing)
    with pytest.raises(MoekitError, match="has no routing trace"):
        trace_report(run, weights=False, traffic=True)


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"ranks_per_node": "8"}', '{"ranks_per_node": 0}', "\x00"])
def test_a_run_whose_nodes_are_not_known_is_on_one(tmp_path: Path, said: str) -> None:
    (tmp_path / "retry.json").write_text(said)
    grid = Grid.from_args({"num_experts": 8, "world_size": 4, "pipeline_model_parallel_size": 2})
    assert ranks_per_node(RunDir(tmp_path), grid) == 4


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from moekit.cli import main

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["moekit", "router", *words])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code, *capsys.readouterr()

    monkeypatch.chdir(DATA)
    code, said, _ = run("./logits", "--weights", "--traffic")
    assert code in (0, None)
    assert "weights, from all calls" in said
    assert "traffic of a forward dispatch" in said
    assert "traffic" not in run("./logits", "--weights")[1]
    assert {"sections", "weights", "traffic"} <= json.loads(
        run("./logits", "--weights", "--traffic", "--json")[1]
    ).keys()
    code, _, complaint = run("./plain", "--weights")
    assert code == 1
    assert "set `monitor.routing_trace_capture_logits`" in complaint
