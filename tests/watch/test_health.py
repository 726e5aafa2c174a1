"""Alerts: each on a stream that has its fault, silent on one that has not, told once until it is over."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from moekit.recipe.schema.watch import Monitor
from moekit.watch.alerting import Setting, control_tflops, thresholds
from moekit.watch.derive import Derived, Deriver, losses_of
from moekit.watch.facts import Facts
from moekit.watch.health import NORM_HIGH, NORM_LOW, Alert, Health, Thresholds
from moekit.watch.metrics import MetricsReader, Step

CAPTURE = Path(__file__).parent / "data" / "run"
FACTS = Facts(("micro batch",), "aux_loss", ("load_balancing_loss",), control_tflops=150.0, multi_node=True)

Made = tuple[list[Step], list[Derived]]


def healthy(first: int, last: int, attempt: int = 1, seed: int = 0, **over: Callable[[int], float]) -> Iterator[Made]:
    """Steps and what is derived of them, one step at a time; `over` makes other values of a name from the step."""
    rng = random.Random(seed)
    for number in range(first, last + 1):
        metrics: dict[str, float] = {
            "lm loss": 2 + 6 * math.exp(-number / 150) + rng.gauss(0, 0.02),
            "load_balancing_loss": 1.02 + rng.gauss(0, 0.003),
            "z_loss": 9 + rng.gauss(0, 0.2),
            "throughput": 145 + rng.gauss(0, 2),
            NORM_HIGH: 12 + rng.gauss(0, 0.5),
            f"{NORM_LOW}_layer_3": 0.4 + rng.gauss(0, 0.02),
        }
        router = {
            "router/max_vio": 0.2,
            "router/max_vio_micro": 0.4 + rng.gauss(0, 0.05),
            "router/dead_experts": 0.0,
            "router/longest_dead": 0.0,
        }
        for name, make in over.items():
            (router if name in router else metrics)[name] = make(number)
        step = Step(attempt, number, 1000.0 + number, metrics)
        derived = [row for row in [losses_of(step)] if row]
        if number % 10 == 0:
            derived.append(Derived(attempt, number, step.time, router))
        yield [step], derived


def alerts(made: Iterator[Made], health: Health | None = None, **limits: float) -> list[Alert]:
    health = health or Health(replace(Thresholds(), **limits), FACTS)
    return [alert for steps, derived in made for alert in health.take(steps, derived)]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_silent(seed: int) -> None:
    assert alerts(healthy(1, 1500, seed=seed)) == []


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_a_small_batchs_noise_is_no_spike(noise: float) -> None:
    rng = random.Random(1)
    flat = [rng.gauss(3, noise) for _ in range(3000)]
    assert alerts(healthy(1, 2999, **{"lm loss": flat.__getitem__})) == []


def test_the_real_run_is_silent() -> None:
    reader = MetricsReader(CAPTURE)
    deriver, health = Deriver(CAPTURE, reader), Health(Thresholds(), Facts())
    steps = reader.poll()
    health.facts = Setting(CAPTURE).facts(reader.config)
    assert health.facts.aux_losses == ("load_balancing_loss",)
    assert health.take(steps, deriver.derive(steps)) == []


def after(begin: int, value: float, otherwise: float) -> Callable[[int], float]:
    return lambda step: value if step >= begin else otherwise


FAULTS: list[tuple[str, str, dict[str, Callable[[int], float]], int]] = [
    ("loss_above_best", "loss_above_best", {"lm loss": after(500, 2.4, 2.2)}, 500),
    ("one_spike", "loss_above_best", {"lm loss": lambda step: 2.2 + 3 * (step == 500)}, 500),
    ("nan", "loss_not_finite", {"lm loss": after(500, math.nan, 2.2)}, 500),
    ("under_floor", "load_balancing_loss_under_floor", {"load_balancing_loss": after(500, 0.9, 1.01)}, 500),
    ("blind", "aux_blind", {"router/max_vio_micro": after(500, 1.6, 0.4)}, 520),
    ("z_loss", "z_loss_rise", {"z_loss": lambda step: (3 + max(0, step - 500) / 20) ** 2}, 540),
    ("wild", NORM_HIGH, {NORM_HIGH: after(500, 5700, 14)}, 500),
    ("dying", f"{NORM_LOW}_layer_3", {f"{NORM_LOW}_layer_3": after(500, 0.001, 0.4)}, 500),
    ("dead", "dead_expert", {"router/longest_dead": lambda step: max(0, step - 490) // 10}, 540),
    ("slow", "tflops_gap", {"throughput": after(500, 100.5, 147)}, 500),
]


@pytest.mark.parametrize(("key", "over", "at"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_a_fault_is_told_once(key: str, over: dict[str, Callable[[int], float]], at: int) -> None:
    (alert,) = alerts(healthy(1, 800, **over))
    assert alert.key == key
    assert at <= alert.step <= at + 20
    assert alert.time == 1000.0 + alert.step
    assert alert.title
    assert alert.text


SWITCHES = {
    "loss_above_best": "loss_above_best",
    "one_spike": "loss_above_best",
    "nan": "loss_above_best",
    "under_floor": "aux_under_floor",
    "blind": "max_vio",
    "z_loss": "z_loss_rise",
    "wild": "expert_norm",
    "dying": "expert_norm",
    "dead": "dead_expert_counts",
    "slow": "tflops_gap",
}


@pytest.mark.parametrize(("case", "over"), [(case[0], case[2]) for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_zero_switches_an_alert_off(case: str, over: dict[str, Callable[[int], float]]) -> None:
    assert alerts(healthy(1, 800, **over), **{SWITCHES[case]: 0}) == []


@pytest.mark.parametrize(("key", "over"), [case[1:3] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_an_alert_ends_and_begins_again(key: str, over: dict[str, Callable[[int], float]]) -> None:
    """The faulty stretch, the same healthy as before it, the faulty one again."""

    def twice(step: int) -> int:
        return step if step < 700 else 400 if step < 900 else step - 400

    again = {name: (lambda step, make=make: make(twice(step))) for name, make in over.items()}
    health = Health(Thresholds(), FACTS)
    first = alerts(healthy(1, 699, **again), health)
    assert list(health.active) == ([] if "nan" in key else [key] if health.active else [])
    assert alerts(healthy(700, 899, **again), health) == []
    assert health.active == {}
    second = alerts(healthy(900, 1099, **again), health)
    assert [alert.key for alert in [*first, *second]] == [key, key]


def test_control_is_compared_only_where_there_is_one_and_not_with_itself() -> None:
    slow = {"throughput": lambda step: 100.0}
    for facts in (replace(FACTS, control_tflops=None), replace(FACTS, forced=True)):
        assert alerts(healthy(1, 300, **slow), Health(Thresholds(), facts)) == []


def test_constant_0_of_a_loss_that_does_not_act_is_no_alert() -> None:
    """Megatron logs `load_balancing_loss` for `seq_aux_loss` too, as 0."""
    facts = replace(FACTS, aux_losses=("seq_load_balancing_loss",))
    made = healthy(1, 400, load_balancing_loss=lambda step: 0.0, seq_load_balancing_loss=lambda step: 1.01)
    assert alerts(made, Health(Thresholds(), facts)) == []


def test_a_fresh_router_is_left_alone() -> None:
    made = healthy(1, 99, **{"router/max_vio_micro": lambda step: 7.0, "router/longest_dead": lambda step: step // 10})
    assert alerts(made) == []


def test_sockets() -> None:
    row = Derived(1, 1, 5.0, {"nccl/socket": 1.0}, "log", hosts=("node-7",))
    step = Step(1, 1, 5.0, {})
    (alert,) = Health(Thresholds(), FACTS).take([step], [row])
    assert (alert.key, alert.level) == ("socket", "error")
    assert "node-7" in alert.title
    assert Health(Thresholds(), replace(FACTS, multi_node=False)).take([step], [row]) == []
    assert Health(Thresholds(socket=False), FACTS).take([step], [row]) == []
    health = Health(Thresholds(), FACTS)
    health.take([step], [row])
    health.take([Step(2, 1, 9.0, {})], [])  # an attempt that has found its plug-in
    assert health.active == {}


def test_a_resumed_attempt_is_held_to_what_was_before_it() -> None:
    """The loss fell fast, the attempt goes back to where it was high: that is no spike."""
    falling = {"lm loss": lambda step: 8 - step / 100}
    health = Health(Thresholds(), FACTS)
    assert alerts(healthy(1, 500, **falling), health) == []
    assert alerts(healthy(301, 520, attempt=2, **falling), health) == []


def test_the_first_steps_of_a_resumed_attempt_may_spike() -> None:
    health = Health(Thresholds(), FACTS)
    assert alerts(healthy(1, 500), health) == []
    spike = {"lm loss": lambda step: 2.2 + 2 * (step < 409)}
    assert alerts(healthy(401, 450, attempt=2, **spike), health) == []
    stays = {"lm loss": lambda step: 3.2}
    assert [alert.key for alert in alerts(healthy(441, 480, attempt=3, **stays), health)] == ["loss_above_best"]


def test_an_alert_is_over_when_the_attempt_before_the_spike_is_taken_up_again() -> None:
    health = Health(Thresholds(), FACTS)
    (alert,) = alerts(healthy(1, 520, **{"lm loss": after(500, 4.0, 2.2)}), health)
    assert list(health.active) == [alert.key]
    assert alerts(healthy(481, 540, attempt=2, **{"lm loss": lambda step: 2.2}), health) == []
    assert health.active == {}


def test_what_an_overtaken_attempt_still_says_does_not_count() -> None:
    health = Health(Thresholds(), FACTS)
    alerts(healthy(1, 300), health)
    alerts(healthy(301, 302, attempt=2), health)
    late = healthy(301, 400, attempt=1, **{"lm loss": lambda step: 9.0})
    assert alerts(late, health) == []


def test_every_limit_is_a_field_of_the_recipe() -> None:
    for field in fields(Thresholds):
        assert hasattr(Monitor(), f"alert_{field.name}"), field.name
    assert thresholds(None) == thresholds(Monitor()) == Thresholds()
    said: dict[str, Any] = {"alert_loss_above_best": 0.3, "alert_dead_expert_counts": 0, "alert_socket": False}
    expected = Thresholds(loss_above_best=0.3, dead_expert_counts=0, socket=False)
    assert thresholds(Monitor(**said)) == expected


def test_defaults_are_what_the_recipes_fields_say() -> None:
    import re

    from moekit.recipe import schema

    text = (Path(schema.__file__).parent / "watch.py").read_text()
    said = dict(re.findall(r'alert_(\w+): [^\n]*\n    """.*?Null: ([\d.]+|true)', text, re.DOTALL))
    defaults = {field.name: getattr(Thresholds(), field.name) for field in fields(Thresholds)}
    assert {name: value.rstrip(".") for name, value in said.items()} == {
        name: "true" if value is True else f"{value:g}" for name, value in defaults.items()
    }


def test_memory_is_constant() -> None:
    health = Health(Thresholds(), FACTS)
    alerts(healthy(1, 6000), health)
    kept = [len(series.points) for series in (health._loss._lowest, *(mean._means for mean in health._aux.values()))]
    assert max(kept) <= 2049


def control(root: Path, name: str, forced: bool, speeds: list[float]) -> None:
    import json

    folder = root / name / "attempts" / "1"
    folder.mkdir(parents=True)
    config = {"num_experts": 8, "moe_router_force_load_balancing": forced}
    lines = [{"event": "config", "config": config, "time": 1.0}]
    lines += [{"step": i + 1, "time": 2.0 + i, "metrics": {"throughput": speed}} for i, speed in enumerate(speeds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_control_is_a_run_with_forced_routing(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    control(tmp_path, "even", True, [80.0] * 10 + [149.0, 150.0] * 10)
    control(tmp_path, "learnt", False, [150.0] * 30)
    control(tmp_path, "young", True, [])
    assert control_tflops(run, "even") == (149.5, "")
    assert control_tflops(tmp_path / "elsewhere" / "mine", str(tmp_path / "even"))[0] == 149.5
    for name, words in (("learnt", "not forced"), ("young", "no TFLOP/s"), ("absent", "is no run in")):
        speed, why = control_tflops(run, name)
        assert speed is None
        assert words in why


def test_the_recipes_control_and_limits_reach_the_alerts(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    control(tmp_path, "even", True, [150.0] * 30)
    (run / "recipe.yaml").write_text("base: first_moe\nmonitor: {control_run: even, alert_tflops_gap: 0.02}\n")
    setting = Setting(run)
    assert (setting.missing, setting.thresholds.tflops_gap) == ("", 0.02)
    assert setting.facts({"num_experts": 8}).control_tflops == 150.0
    assert "is no run" in Setting(run, control="absent").missing
    (run / "recipe.yaml").write_text("monitor: [what\n")
    assert Setting(run).thresholds == Thresholds()
