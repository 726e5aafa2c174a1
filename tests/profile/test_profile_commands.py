"""`moekit profile` as a user sees it: shares, waiting against moving, the first lever, stages, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import GEMM, KERNELS, PERMUTE, SEND, gpu_events, operator, write, write_nsys
from typer.testing import CliRunner

from moekit.cli import app
from moekit.problems import MoekitError
from moekit.profile import stages
from moekit.recipe.load import load
from moekit.recipe.patterns import PipelineLayout
from moekit.recipe.schema import Recipe

RECIPE = """
base: first_moe
profile: {enabled: true, use_pytorch_profiler: true, step_start: 3, step_end: 5, ranks: [0, 1]}
"""


def said(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["profile", *map(str, words)], env={"COLUMNS": "100"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def refused(*words: str | Path) -> str:
    with pytest.raises(MoekitError) as refusal:
        said(*words)
    return str(refusal.value)


def run(folder: Path, recipe: str = RECIPE) -> Path:
    """A run's directory with an attempt in it."""
    path = folder / "runs" / "one"
    (path / "attempts" / "1").mkdir(parents=True)
    (path / "recipe.yaml").write_text(recipe)
    return path


BALANCED = [(n, s, b, e) if n is not SEND else (n, s, b, b + 14) for n, s, b, e in KERNELS]


def test_shares_and_the_first_lever(tmp_path: Path) -> None:
    assert said(write(tmp_path / "rank-0.json.gz", gpu_events())) == (
        "rank-0.json.gz: GPU kernels of 1 rank, by PyTorch's profiler\n"
        "\n"
        "  family               of the step    runs for\n"
        "  attention                 10.0%       10.0%  █████\n"
        "  grouped GEMM              20.0%       20.0%  ██████████\n"
        "  other GEMM                10.0%       10.0%  █████\n"
        "  permute and copy           6.0%        6.0%  ███\n"
        "  other compute              4.0%        4.0%  ██\n"
        "  all-to-all                40.0%       50.0%  ███████████████████\n"
        "  other communication        5.0%       10.0%  ██\n"
        "  idle                       5.0%              ██\n"
        "\n"
        "  by rank               steps  ms a step  a2a exposed  a2a hidden    idle\n"
        "  rank 0                    1        0.1        40.0%       10.0%    5.0%\n"
        "\n"
        "  by stream of rank 0\n"
        "  stream 7             grouped GEMM 20.0%, attention 10.0%, other GEMM 10.0%\n"
        "  stream 30            all-to-all 50.0%\n"
        "  stream 31            other communication 10.0%\n"
        "\n"
        "  first: waiting or moving, since all-to-all is exposed for 40% of the step, and nothing says how\n"
        "  much of that is waiting for the rank with most tokens\n"
        "    `moekit router` for MaxVio; then record once more with `balance.force_load_balancing: true`, as\n"
        "    --control (handbook 3.7, Profiling, HB 2153 and 2159)\n"
        "  One at a time, each judged by the step's time: their gains do not add up (HB 2087).\n"
    )


def levers(*words: str | Path) -> list[str]:
    return [lever["name"] for lever in json.loads(said(*words, "--json"))["levers"]]


def test_waiting_against_moving(tmp_path: Path) -> None:
    path = write(tmp_path / "rank-0.json", gpu_events())
    control = write(tmp_path / "balanced.json", gpu_events(BALANCED))
    found = json.loads(said(path, "--control", control, "--json"))["forced_balance"]
    assert (found["all_to_all_ms"], found["balanced_ms"]) == (0.05, 0.028)
    assert (found["waiting_ms"], found["moving_ms"]) == (pytest.approx(0.022), 0.028)
    assert levers(path, "--control", control) == ["balance", "the fabric", "overlap"]
    assert levers(path, "--control", path) == ["the fabric", "overlap"]
    text = said(path, "--control", control)
    assert "so waiting 0.0 ms a step, moving 0.0 ms" in text
    assert text.count("first: ") == 1


def test_levers_follow_the_recipe(tmp_path: Path) -> None:
    overlapped = RECIPE + "overlap: {moe_expert_parallel_comm: true, delay_wgrad_compute: true}\n"
    path = run(tmp_path, overlapped)
    trace = write(path / "attempts/1/torch_profile/rank-0.json.gz", gpu_events())
    assert levers(path, "--control", trace) == ["the fabric"]
    permuting = [(PERMUTE if name == GEMM else name, *rest) for name, *rest in KERNELS]
    trace = write(tmp_path / "p.json", gpu_events(permuting))
    assert levers(trace) == ["waiting or moving", "fused permutation"]
    without = [one for one in permuting if one[0] != SEND]
    write(path / "attempts/1/torch_profile/rank-0.json.gz", gpu_events(without))
    fused = load(str(path / "recipe.yaml")).recipe.moe.permute_fusion
    assert levers(path) == ([] if fused else ["fused permutation"])


def test_a_run_has_its_newest_traces_of_all_ranks(tmp_path: Path) -> None:
    path = run(tmp_path)
    for rank in (0, 1, 10):
        write(path / f"attempts/1/torch_profile/rank-{rank}.json.gz", gpu_events(), rank)
    (path / "attempts/2").mkdir()
    found = json.loads(said(path, "--json"))
    assert [rank["name"] for rank in found["ranks"]] == ["rank 0", "rank 1", "rank 10"]
    assert found["share"]["all-to-all"] == 0.4
    assert sum(found["share"].values()) == pytest.approx(1)
    assert found["all_to_all"] == {"exposed_ns": 120_000, "hidden_ns": 30_000}


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    for rank, kernels in enumerate((KERNELS, BALANCED, KERNELS)):
        write(tmp_path / f"rank-{rank}.json", gpu_events(kernels), rank)
    assert "  rank 1 is least in all-to-all: 0.03 ms a step, half of the ranks 0.05 or more;\n" in said(tmp_path)
    (tmp_path / "rank-1.json").unlink()
    assert "is least in all-to-all" not in said(tmp_path)


def test_an_export_takes_its_steps_from_the_recipe(tmp_path: Path) -> None:
    path = run(tmp_path)
    (path / "attempts/1/nsys").mkdir()
    report = path / "attempts/1/nsys/node0.nsys-rep"
    report.write_bytes(b"x")
    text = refused(path)
    assert f"`nsys export --type sqlite --output {report.with_suffix('.sqlite')} {report}`" in text
    write_nsys(report.with_suffix(".sqlite"))
    (rank,) = json.loads(said(path, "--json"))["ranks"]
    assert (rank["name"], rank["source"], rank["steps"]) == ("node0 device 0", "Nsight Systems", 2)
    text = said(path)
    assert "by Nsight Systems" in text
    assert "NCCL's SendRecv kernels name no collective here" in text


def test_an_export_alone_needs_to_be_told_its_steps(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "a.sqlite")
    assert refused(path, "--control", path).startswith("error: a trace does not say how many steps it holds")
    assert "waiting 0.0 ms" in said(path, "--control", path, "--steps", "2")


def test_of_a_cpu_no_lever_is_named(tmp_path: Path) -> None:
    text = said(write(tmp_path / "rank-0.json", [operator("_AllToAll", 0, 50), operator("aten::mm", 50, 100)]))
    assert text.startswith("rank-0.json: CPU operators, no kernels of 1 rank")
    assert text.endswith("  No lever of handbook 3.7 is named from a CPU's trace.\n")


def test_the_picture(tmp_path: Path) -> None:
    hostile = tmp_path / "a<b>&.json"
    said(write(hostile, gpu_events()), "--plot", tmp_path / "x.svg")
    tree = ElementTree.parse(tmp_path / "x.svg")
    bars = [e for e in tree.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    assert len(bars) == 8
    assert sum(float(bar.attrib["width"]) for bar in bars) == pytest.approx(600, abs=1)
    assert "cannot write" in refused(hostile, "--plot", tmp_path / "none" / "x.svg")


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "has no traces" in refused(run(tmp_path))
    assert "is no run" in refused(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    assert "has no traces in it" in refused(tmp_path / "folder")
    assert "`--stages` reads timers" in refused(tmp_path, "--stages", "--steps", "2")


# Stages


def timers(forward: list[float], backward: list[float], prefix: str = "INFO:megatron.core.timers:") -> str:
    """A report as Megatron prints it, with others' lines around it."""
    rows = ["[Rank 1] (after 2 iterations) memory (MB)", f"{prefix}times across ranks (ms):", "  forward-backward:"]
    rows += ["     rank  0: 9999.00"]
    for name, times in (("forward-compute", forward), ("backward-compute", backward)):
        rows += [f"  {name}:", *(f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(times))]
    return "\n".join([*rows, "  optimizer:", "     rank  0: 7777.00", " [2026] iteration 3/ 300 | lm loss: 8.0", ""])


PIPELINE = "base: first_moe\nparallel: {gpus: 8, pipeline_model: 2, tensor_model: 1, expert_model: 4}\n"


def staged(folder: Path, recipe: str, *reports: str) -> Path:
    path = run(folder, recipe)
    (path / "attempts/1/train.log").write_text("noise\n" * 50 + "".join(reports))
    return path


def test_stages_by_rank_and_the_slowest(tmp_path: Path) -> None:
    recipe = PIPELINE + "model: {mtp_num_layers: 1}\n"
    warm, double = timers([900.0] * 8, [900.0] * 8), timers([1800.0] * 8, [1800.0] * 8)
    usual = timers([10, 10, 10, 10, 20, 20, 20, 28], [20, 20, 20, 20, 40, 40, 40, 40])
    path = staged(tmp_path, recipe, warm, double, usual, usual)
    found = json.loads(said(path, "--stages", "--json"))
    assert (found["reports"], found["slowest_stage"], found["slowest_holds_mtp"]) == (2, 1, True)
    first, last = found["stages"]
    assert (first["ranks"], first["forward_ms"], first["backward_ms"]) == ([0, 1, 2, 3], 10, 20)
    assert (last["ranks"], last["forward_ms"], last["backward_ms"]) == ([4, 5, 6, 7], 20, 40)
    assert last["slowest_rank"] == 7
    text = said(path, "--stages", "--plot", tmp_path / "s.svg")
    assert "Slowest is stage 1: 100% over the median of the others, rank 7 most." in text
    assert "It holds the MTP layer" in text
    assert "stage 1 (MTP)" in (tmp_path / "s.svg").read_text()


@pytest.mark.parametrize(("layout", "stage"), [(None, 1), ("Ettt|tmL", 1), ("Ett|tt|ttm|L", 0), ("Ett|tt|tt|mL", 1)])
def test_where_the_mtp_layer_is(layout: str | None, stage: int) -> None:
    given = PipelineLayout.parse(layout) if layout else None
    recipe = replaced(Recipe(), "parallel", pipeline_model=2, pipeline_model_layout=given)
    assert stages.mtp_stage(replaced(recipe, "model", mtp_num_layers=1)) == stage
    assert stages.mtp_stage(recipe) is None


def replaced(recipe: Recipe, section: str, **fields: Any) -> Recipe:
    return replace(recipe, **{section: replace(getattr(recipe, section), **fields)})


def test_a_log_without_ranks_times_says_how_to_get_them(tmp_path: Path) -> None:
    path = staged(tmp_path, PIPELINE, "(min, max) time across ranks (ms):\n    forward-compute ...: (1.00, 2.00)\n")
    assert "set `log: {timing_level: 2, timing_option: all}`" in refused(path, "--stages")


@pytest.mark.parametrize("prefix", ["", "INFO:megatron.core.timers:", "[default0]: "])
def test_prefixes_of_logs(prefix: str) -> None:
    (block,) = stages.blocks(timers([1, 2], [3, 4], prefix).splitlines())
    assert block == {"forward-compute": {0: 1.0, 1: 2.0}, "backward-compute": {0: 3.0, 1: 4.0}}


@given(st.text(st.sampled_from("rank 0:1.forwd-cmputes(){}\n\t acroi:times across ranks (ms):"), max_size=400))
def test_no_log_breaks_it(text: str) -> None:
    list(stages.blocks((timers([1], [2]) + text).splitlines()))


@pytest.mark.megatron
def test_ranks_lie_in_stages_as_megatrons_do() -> None:
    from megatron.core.parallel_state import RankGenerator

    for swapped, order in ((None, "tp-cp-ep-dp-pp"), (True, "tp-cp-ep-pp-dp")):
        recipe = replaced(
            Recipe(), "parallel", gpus=48, tensor_model=2, context=2, pipeline_model=3, use_tp_pp_dp_mapping=swapped
        )
        for ranks in RankGenerator(tp=2, ep=1, dp=4, pp=3, cp=2, order=order).get_ranks("pp"):
            assert [stages.stage_of(rank, recipe) for rank in ranks] == [0, 1, 2]
