"""`moekit router` as a process, on what real runs left; and how fast it is on many ranks."""

import json
import shutil
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from moekit.launch.rundir import RunDir
from moekit.watch.router.report import LayerRow, Report, Section, Spread, report

DATA = Path(__file__).parent / "data"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "counts.py"


def router(*words: str, cwd: Path = DATA) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moekit", "router", *words], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_counts_and_trace_as_text() -> None:
    done = router("./pp2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "pp2: 8 experts over 2 expert parallel ranks, balanced by aux_loss"
    assert "counts, behind the dispatch, step 4: 8 of 8 records" in lines
    assert "routing trace, ahead of the dispatch, step 4: 16 of 16 records" in lines
    layer_2 = next(line for line in lines if line.startswith("  layer_2"))
    assert layer_2.split() == ["layer_2", "0.29", "0.33", "0.05", "1.03", "1.04", "1", "0"]
    assert max(map(len, lines)) <= 80


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "router.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert shown == router("./pp2").stdout


def test_against_another_run() -> None:
    said = router("./pp2", "--against", "./pp2").stdout
    assert "against pp2, step 4, 512 tokens in 4 layers:\n  0.0% of choices" in said
    assert json.loads(router("./pp2", "--against", "./pp2", "--json").stdout)["disagreement"]["tokens"] == 0
    assert router("./pp2", "--against", "./ep1").returncode == 1


@pytest.mark.parametrize(("gone", "left"), [("checkpoints", "trace"), ("attempts/1/routing", "counts")])
def test_one_source_alone(tmp_path: Path, gone: str, left: str) -> None:
    run = Path(shutil.copytree(DATA / "plain", tmp_path / "run"))
    shutil.rmtree(run / gone)
    (section,) = report(RunDir(run)).sections
    assert (section.source, section.steps, section.found) == (left, [4], section.expected)


def test_json_and_one_layer() -> None:
    said = json.loads(router("./ep1", "--layer", "layer_1", "--last", "2", "--json").stdout)
    counts, trace = said["sections"]
    assert (counts["steps"], trace["steps"]) == ([2, 4], [3, 4])
    (layer,) = counts["layers"]
    assert layer["name"] == "layer_1"
    assert layer["max_vio_micro"]["observations"] == 8
    assert layer["max_vio_global"]["observations"] == 2
    assert layer["max_vio_sequence"] is None
    assert trace["layers"][0]["max_vio_sequence"]["observations"] == 16
    assert sum(layer["load"]) == 2 * 8 * 64 * 2
    refused = router("./ep1", "--layer", "layer_9")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: there is no layer `layer_9` in what was read\n")


def test_serving_ranks() -> None:
    """moe_lb: the experts' loads of the global batch over other ranks than the run's own."""
    said = json.loads(router("./pp2", "--serving-ep", "4", "--json").stdout)
    assert said["serving_ep"] == 4
    for section in said["sections"]:
        for layer in section["layers"]:
            ranks = [sum(layer["load"][at : at + 2]) for at in range(0, 8, 2)]
            assert layer["moe_lb"]["mean"] == pytest.approx(max(ranks) * 4 / sum(ranks))
    text = router("./pp2", "--serving-ep", "2").stdout.splitlines()
    assert text[1] == "moe_lb: the busiest over the mean of 2 serving ranks, experts in a row and once each"
    row = next(line for line in text if line.startswith("  layer_1")).split()
    assert row[4] == row[7] == "1.05"  # over as many ranks as the run has, it is the run's own
    refused = router("./pp2", "--serving-ep", "3")
    assert (refused.returncode, refused.stderr) == (1, "error: 8 experts cannot be split over 3 serving ranks\n")


def test_plot(tmp_path: Path) -> None:
    done = router(str(DATA / "ep1"), "--plot", "x.svg", cwd=tmp_path)
    assert done.returncode == 0
    picture = xml.dom.minidom.parse(str(tmp_path / "x.svg"))
    titles = [node.firstChild.data for node in picture.getElementsByTagName("title")]
    assert len(titles) == 2 * 2 * 8  # sources, layers, experts
    assert titles[0].startswith("layer_0, expert 0: ")
    refused = router(str(DATA / "ep1"), "--plot", "none/x.svg", cwd=tmp_path)
    assert refused.stderr.startswith("error: cannot write `none/x.svg`: no such file or directory\n")


def test_without_a_recipe(tmp_path: Path) -> None:
    shutil.copytree(DATA / "pp2" / "checkpoints" / "tokens_per_expert", tmp_path / "tokens_per_expert")
    said = router(str(tmp_path) + "/").stdout
    assert "no recipe says which experts and layers these are, so each rank's file stays apart" in said
    assert said.count("own experts, step 4: 2 of 2 records") == 4


def test_runs_without_anything(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("base: quickstart\n")
    refused = router(str(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: run `{tmp_path.name}` has no counts and no routing trace\n"
        "    hint: `monitor.tokens_per_expert_interval` and `monitor.routing_trace` write them\n"
    )


def test_hash_layers_stand_beside_learned_ones() -> None:
    from moekit.watch.router.render import lines, picture

    def row(name: str, hashed: bool, load: list[int], max_vio: float) -> LayerRow:
        one = Spread(max_vio, max_vio, 1)
        return LayerRow(name, hashed, one, one, None, one, one, 0, [e for e, n in enumerate(load) if not n], load)

    rows = [row("layer_0", True, [8, 0, 4, 4], 1.0), row("layer_1", False, [4, 4, 4, 4], 0.0)]
    said = "\n".join(lines(Report("x", 4, 1, "bias", [Section("counts", [5], rows, 1, 2, [], ["a note"])]), 80))
    assert "  layer_0 #" in said
    assert "mean of the layers: 1.00 of hash layers, 0.00 of learned ones" in said
    assert "no token in layer_0: expert 1\n" in said
    assert "1 of 2 records (50.0%)" in said
    assert "  a note\n" in said
    assert "██ ·· ▄▄ ▄▄" in said
    assert "<svg" in picture(Report("<&\x1b", 4, 1, "bias", [Section("counts", [5], rows, 1, 2, [], [])]))


def test_the_first_moe_layers_are_the_hash_layers(tmp_path: Path) -> None:
    run = Path(shutil.copytree(DATA / "pp2", tmp_path / "run"))
    metrics = run / "attempts" / "1" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"num_layers"', '"moe_num_hash_layers": 3, "num_layers"'))
    for section in report(RunDir(run)).sections:
        assert [row.hashed for row in section.layers] == [True, True, True, False]


def test_many_ranks_take_no_time() -> None:
    """The benchmark, small: 4,096 ranks take under 10 seconds there, 128 of them a thirtieth."""
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--ranks", "128", "--steps", "3"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("counts of 128 ranks, 7,424 records: ")
