"""The live view from fixed values: its text, its size, what is missing in it, and names that are hostile."""

import json
import math
import re
import time
import xml.dom.minidom
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moekit.watch.derive import DeadExpert
from moekit.watch.facts import Facts
from moekit.watch.health import Alert
from moekit.watch.live_view import alert_line, plain_line, render_live, short
from moekit.watch.svg import Panel, svg
from moekit.watch.watching import LayerLoad, Picture, Watching

GOLDEN = Path(__file__).parent / "data"
CAPTURE = GOLDEN / "run"
STEPS = range(10, 1010, 10)
SPIKE = Alert("loss_above_best", 2, 900, 1.8e9, "warn", "lm loss is 2.3, 0.15 above its best", "see z-loss", 2.3, 2.2)
SLOW = Alert("tflops_gap", 2, 940, 1.8e9 + 40, "warn", "130.1 TFLOP/s, 13% under", "see MaxVio", 0.13, 0.1)
PICTURE = Picture(
    name="moe_7b",
    state="running for 3 h 5 min on 2 nodes, n[1-2]",
    attempt=2,
    step=1000,
    time=1.8e9 + 100,
    facts=Facts(
        ("micro batch", "global batch"), "global_aux_loss", ("global_load_balancing_loss",), train_iters=20_000
    ),
    latest={
        "lm loss": 2.25,
        "mtp_1 loss": 2.71,
        "grad-norm": 0.431,
        "tokens/s": 1_234_567.0,
        "throughput": 130.1,
        "iteration-time": 3.4,
        "global_load_balancing_loss": 1.0123,
        "z_loss_rms_logsumexp": 4.57,
        "router/max_vio": 0.21,
        "router/max_vio_micro": 0.83,
        "router/busiest_rank": 5.0,
        "router/rank_imbalance": 1.17,
        "router/dead_experts": 1.0,
    },
    curves={
        "lm loss": [(x, 2 + 6 * math.exp(-x / 200)) for x in STEPS],
        "router/max_vio_micro": [(x, 0.8 + 2 * math.exp(-x / 100)) for x in STEPS],
        "tokens/s": [(x, 1.2e6 - 8e5 * math.exp(-x / 100)) for x in STEPS],
    },
    best_loss=2.15,
    layers=[LayerLoad(f"layer_{i}", i / 20, i / 50) for i in range(3, 61)],
    counted_step=1000,
    dead=[DeadExpert("layer_3", 7, 5)],
    alerts=[SPIKE, SLOW],
    active=["tflops_gap"],
)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 50)])
def test_the_whole_view(width: int, height: int, golden_file: Callable[[Path, str], None]) -> None:
    text = render_live(PICTURE, width, height).plain
    golden_file(GOLDEN / f"live_{width}x{height}.txt", text + "\n")


def test_the_page_shows_it_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    assert f"```text\n{(GOLDEN / 'live_80x24.txt').read_text()}```" in page


@pytest.mark.parametrize("width", [60, 80, 81, 119, 200])
@pytest.mark.parametrize("height", [20, 24, 25, 60])
@pytest.mark.parametrize("lacks", ["", "layers", "curves", "alerts", "all"])
def test_it_fits(width: int, height: int, lacks: str) -> None:
    picture = PICTURE
    if lacks == "all":
        picture = Picture("x" * 300, state="pending " * 30)
    elif lacks:
        picture = replace(PICTURE, **{lacks: {} if lacks == "curves" else []}, missing=["It is so. " * 20] * 2)
    lines = render_live(picture, width, height).plain.split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


def test_in_a_terminal_of_24_rows_all_parts_are_there() -> None:
    text = render_live(PICTURE, 80, 24).plain
    for words in (
        "moe_7b",
        "step 1,000 of 20,000",
        "LM loss",
        "MaxVio, micro batch",
        "tokens/s",
        "TFLOP/s a GPU 130.1",
    ):
        assert words in text
    for words in ("mtp 1 loss 2.710", "grad norm 0.431", "global load balancing loss 1.0123 (even: 1)", "4.57"):
        assert words in text
    for words in (
        "0.83 micro, 0.21 global, gap 0.62",
        "gap 0.62",
        "rank 5 1.17 of mean",
        "dead experts 1",
        "layer 3 to layer 60",
    ):
        assert words in text
    assert "08:00:40 step 940, attempt 2: 130.1 TFLOP/s" in text
    later = render_live(replace(PICTURE, time=1.8e9 + 86_400), 80, 24).plain
    assert "01-15 08:00 step 940, attempt 2: 130.1 TFLOP/s" in later


def test_alerts_that_hold_come_first_and_those_over_say_so() -> None:
    rows = [line for line in render_live(PICTURE, 100, 40).plain.split("\n") if "08:0" in line and "logged" not in line]
    assert [bool(re.search("over\\)", row)) for row in rows] == [False, True]


def test_a_layer_that_is_worse_stands_out() -> None:
    layers = [LayerLoad("layer_1", 0.1, 0.1), LayerLoad("layer_2", 1.9, 0.1), LayerLoad("mtp_0_layer_0", 0.1, 0.1)]
    text = render_live(replace(PICTURE, layers=layers), 80, 24)
    micro, whole = (line for line in text.plain.split("\n") if line.startswith(("  micro batch ", "  global batch ")))
    assert micro.endswith("▁█▁")
    assert whole.endswith("▁▁▁")
    assert "layer 1 to mtp 0 layer 0" in text.plain


@pytest.mark.parametrize(
    ("scopes", "words"),
    [
        (("micro batch",), "balanced per micro batch"),
        (("global batch",), "MaxVio, global batch 0.21"),
        (("sequence",), "balanced per sequence, which these counts cannot show"),
        (("global batch", "sequence"), "its part per sequence these counts cannot show"),
    ],
)
def test_the_scope_is_said(scopes: tuple[str, ...], words: str) -> None:
    facts = replace(PICTURE.facts, scopes=scopes)
    assert words in render_live(replace(PICTURE, facts=facts), 120, 40).plain


def test_no_metrics_yet() -> None:
    text = render_live(Picture("moe", state="pending, start not known yet (Resources)"), 80, 24).plain
    assert text == "  moe  pending, start not known yet (Resources)\n  no metrics yet"


HOSTILE = "[red]x[/] \x1b[31m\x07\u2028\ud800 <b>&"


def test_hostile_names_neither_colour_nor_break_anything() -> None:
    alert = replace(SLOW, title=HOSTILE, text=HOSTILE)
    picture = replace(PICTURE, name=HOSTILE, state=HOSTILE, alerts=[alert], missing=[HOSTILE])
    text = render_live(picture, 80, 40).plain
    assert text.count("[red]x[/] ?[31m") == 5
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\ud800]", text)
    assert "\x1b" not in alert_line(1, 2, 3.0, "warn", HOSTILE, HOSTILE)
    drawn = svg(HOSTILE, [Panel(HOSTILE, {HOSTILE: [(1, 2), (2, 3)]})])
    assert xml.dom.minidom.parseString(drawn).documentElement.tagName == "svg"
    json.dumps(picture.as_json()).encode("ascii")


def test_a_plain_line() -> None:
    assert plain_line(PICTURE) == (
        "step 1,000/20,000  attempt 2  lm loss 2.2500  MaxVio 0.830 (micro batch)  1,234,567 tokens/s  130.1 TFLOP/s"
        "  grad norm 0.431"
    )


def test_large_numbers_are_short() -> None:
    assert [short(value) for value in (0.0, 12.34, 999, 12_345, 1_250_000, 3.2e9)] == [
        *("0", "12.3", "999", "12.3k", "1.25M", "3.2G")
    ]


def test_no_number_is_null_in_json() -> None:
    picture = replace(PICTURE, latest={"lm loss": math.nan, "grad-norm": math.inf})
    assert json.loads(json.dumps(picture.as_json(), allow_nan=False))["latest"] == {"lm loss": None, "grad-norm": None}


def test_svg_leaves_out_what_has_no_points_and_stands_flat_lines() -> None:
    drawn = svg("run", [Panel("a", {"x": [(1.0, 2.0)], "y": []}), Panel("b", {"z": []})])
    assert drawn.count("<polyline") == drawn.count("<g ") == 1
    xml.dom.minidom.parseString(svg("run", []))


def test_a_real_run_that_was_resumed() -> None:
    watching = Watching(CAPTURE)
    while watching.poll(13) is not None:
        pass
    picture = watching.picture()
    assert (picture.attempt, picture.step, picture.counted_step) == (2, 160, 160)
    assert [layer.name for layer in picture.layers] == [f"layer_{i}" for i in range(4)]
    steps = [step for step, _ in picture.curves["lm loss"]]
    assert steps == sorted(set(steps)) == list(range(1, 161))
    assert [step for step, _ in picture.curves["router/max_vio_micro"]] == list(range(5, 161, 5))
    assert picture.missing == []
    assert picture.best_loss == min(value for _, value in picture.curves["lm loss"])


def test_a_resumed_attempt_takes_back_what_came_after_it(tmp_path: Path) -> None:
    def log(attempt: int, steps: range, loss: float) -> None:
        folder = tmp_path / "attempts" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"step": step, "time": 1.0 * step, "metrics": {"lm loss": loss, "grad-norm": 1.0}} for step in steps]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    log(1, range(1, 101), 3.0)
    watching = Watching(tmp_path)
    watching.poll(1000)
    log(2, range(41, 61), 5.0)
    watching.poll(1000)
    picture = watching.picture()
    assert picture.curves["lm loss"] == [(step, 3.0 if step <= 40 else 5.0) for step in range(1, 61)]
    assert (picture.step, picture.best_loss) == (60, 3.0)
