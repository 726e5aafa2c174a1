"""`moekit doctor` of runs: what a real one left, changed where a fault would have changed it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moekit.doctor.evidence import Evidence, gather
from moekit.doctor.judge import shown
from moekit.doctor.report import Report, findings, lines, looked_at
from moekit.job.attempts import Attempt
from moekit.job.endings import Ending
from moekit.launch.rundir import RunDir
from moekit.runs.history import History, Start, read_history
from moekit.runs.look import look_at
from moekit.watch.derive import DeadExpert
from moekit.watch.health import NORM_HIGH, Alert
from moekit.watch.watching import LayerLoad

CAPTURE = Path(__file__).parents[1] / "watch" / "data" / "run"
NOISE = Path(__file__).parent / "data" / "noise.log"
STEPS = 400


def make(
    folder: Path, recipe: str, metrics: Callable[[int], dict[str, Any]], config: dict[str, Any], log: str
) -> RunDir:
    """A run of one attempt that logged so many steps, and a log."""
    attempt = folder / "moekit-local" / "runs" / "demo" / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt.parents[1] / "recipe.yaml").write_text(recipe)
    rows: list[dict[str, Any]] = [{"event": "config", "config": config}]
    rows += [{"step": step, "time": 1.7e9 + step, "metrics": metrics(step)} for step in range(1, STEPS + 1)]
    (attempt / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (attempt / "train.log").write_bytes(NOISE.read_bytes() + log.encode())
    return RunDir(attempt.parents[1])


MOE = {
    "num_experts": 64,
    "world_size": 8,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "expert_model_parallel_size": 8,
}


def healthy(step: int) -> dict[str, Any]:
    wave = 0.01 * (step % 7)
    return {
        "lm loss": 3 + 6 / step**0.5 + wave / 10,
        "grad-norm": 1 + wave,
        "load_balancing_loss": 1.02 + wave / 10,
        "z_loss": 4.0 + wave,
        "throughput": 120 + wave * 100,
        "iteration-time": 2.0,
    }


def evidence(run: RunDir) -> Evidence:
    return gather(run, read_history(look_at(run)[0]))


def keys(found: Iterable[Any]) -> list[str]:
    return [one.symptom.key for one in found]


def test_a_healthy_run_shows_nothing(tmp_path: Path) -> None:
    found = evidence(make(tmp_path, "base: first_moe\n", healthy, MOE, ""))
    assert shown(found) == []
    assert [one.key for one in findings(found) if one.key != "ending"] == []


def test_throughput_that_falls(tmp_path: Path) -> None:
    run = make(tmp_path, "base: first_moe\n", lambda s: {**healthy(s), "throughput": 120 if s < 200 else 90}, MOE, "")
    (one,) = shown(evidence(run))
    assert one.symptom.key == "throughput_falls"
    assert one.sentence == "90.0 TFLOP/s now, 120.0 at its best: 25% less"


def test_a_nan_without_a_sign(tmp_path: Path) -> None:
    run = make(
        tmp_path, "base: first_moe\n", lambda s: {**healthy(s), **({"lm loss": "NaN"} if s > 390 else {})}, MOE, ""
    )
    (one,) = shown(evidence(run))
    assert (one.symptom.key, one.sure) == ("nan_unannounced", "likely")
    assert "step 391" in one.sentence
    assert "grad-norm" in one.sentence


def test_a_nan_with_jumps_before_it(tmp_path: Path) -> None:
    def metrics(step: int) -> dict[str, Any]:
        jump = {"grad-norm": 9.0, "load_balancing_loss": 1.6} if 386 < step <= 390 else {}
        return {**healthy(step), **jump, **({"lm loss": "NaN"} if step > 390 else {})}

    assert keys(shown(evidence(make(tmp_path, "base: first_moe\n", metrics, MOE, "")))) == ["jump_before_nan"]


def test_z_loss_that_rises_before_a_spike(tmp_path: Path) -> None:
    def metrics(step: int) -> dict[str, Any]:
        z = 4.0 if step < 250 else 4.0 + (step - 250) * 1.0
        return {**healthy(step), "z_loss": z, **({"lm loss": 8.0} if step > 350 else {})}

    (one, *rest) = shown(evidence(make(tmp_path, "base: first_moe\n", metrics, MOE, "")))
    assert (one.symptom.key, one.sure, rest) == ("z_loss_before_spike", "sure", [])


@pytest.mark.parametrize(("at", "key"), [(40, "muon_diverges"), (300, "muon_spikes")])
def test_muon(tmp_path: Path, at: int, key: str) -> None:
    run = make(
        tmp_path, "base: settings/muon\n", lambda s: {**healthy(s), **({"lm loss": 12.0} if s > at else {})}, MOE, ""
    )
    assert keys(shown(evidence(run))) == [key]


def test_too_many_micro_batches_for_a_counter(tmp_path: Path) -> None:
    recipe = "base: settings/balance_global\ntrain: {global_batch_size: 4096, micro_batch_size: 1}\n"
    (one,) = shown(evidence(make(tmp_path, recipe, healthy, MOE, "")))
    assert one.symptom.key == "global_aux_counter"
    assert one.sentence.startswith("512 micro batches")


def test_out_of_memory_of_one_rank(tmp_path: Path) -> None:
    log = "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    run = make(tmp_path, "base: first_moe\n", healthy, MOE, log)
    found = evidence(run)
    assert keys(shown(found)) == ["one_rank_oom", "peak_fine_oom"]
    (memory, *_) = findings(found)
    assert memory.key == "gpu_memory"
    text = "\n".join(lines(Report("demo", findings(found), looked_at(found))))
    assert "rank 5 of 8 ran out of GPU memory; no counts say" in text
    assert "attempts/1/train.log:" in text


@pytest.mark.parametrize(
    ("busiest", "sure", "said"), [(5.0, "sure", "it holds the experts"), (2.0, "likely", "another")]
)
def test_out_of_memory_on_the_busiest_rank(tmp_path: Path, busiest: float, sure: str, said: str) -> None:
    log = "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    found = evidence(make(tmp_path, "base: first_moe\n", healthy, MOE, log))
    latest = {**found.picture.latest, "router/busiest_rank": busiest, "router/rank_imbalance": 1.84}
    one = shown(replace(found, picture=replace(found.picture, latest=latest)))[0]
    assert (one.symptom.key, one.sure) == ("one_rank_oom", sure)
    assert said in one.sentence
    assert "1.84 times the mean load" in one.sentence


LAYERS = [LayerLoad(f"layer_{layer}", 0.5, 3.0 if layer == 0 else 0.4) for layer in range(16)]
VIO = {"router/max_vio": 0.2, "router/max_vio_micro": 1.8}


@pytest.mark.parametrize(
    ("recipe", "picture", "alerts", "key"),
    [
        ("first_moe", {"layers": LAYERS}, [], "first_layers_uneven"),
        ("settings/balance_bias", {"latest": {"router/max_vio": 1.6}}, [], "bias_stays_uneven"),
        ("settings/balance_quantile", {"latest": VIO}, [], "quantile_micro_uneven"),
        ("settings/balance_global", {"latest": VIO}, [], "global_aux_slower"),
        ("first_moe", {}, ["aux_blind"], "aux_one_gpu_slow"),
        ("first_moe", {}, ["dead_expert"], "dead_with_aux"),
        ("first_moe", {}, [NORM_HIGH], "expert_norm_before_spike"),
        ("settings/experts_latent", {}, ["loss_above_best"], "latent_blows_up"),
        (
            "settings/muon",
            {"dead": [DeadExpert("layer_8", 1, 9), DeadExpert("layer_9", 2, 9)]},
            ["dead_expert"],
            "muon_layers_collapse",
        ),
        (
            "first_moe",
            {"dead": [DeadExpert("layer_0", 1, 9)], "layers": LAYERS},
            ["dead_expert"],
            "first_layers_collapse",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_numbers_and_alerts_show(
    tmp_path: Path, recipe: str, picture: dict[str, Any], alerts: list[str], key: str
) -> None:
    """Each as `moekit watch` derives it, put into a healthy run's; without it, it is not shown."""
    found = evidence(make(tmp_path, f"base: {recipe}\n", healthy, MOE, ""))
    assert key not in keys(shown(found))
    begun = [Alert(name, 1, 200, 0.0, "warn", f"{name} began", "", 1.0, 0.5) for name in alerts]
    seen = replace(
        found.picture, counted_step=2000, facts=replace(found.picture.facts, aux_losses=("load_balancing_loss",))
    )
    assert key in keys(shown(replace(found, picture=replace(seen, **picture), alerts=begun)))


def test_exit_16_twice_on_one_node(tmp_path: Path) -> None:
    found = evidence(make(tmp_path, "base: first_moe\n", healthy, MOE, ""))

    def start(number: int, node: str) -> Start:
        return Start(Attempt(number, Ending("rerun", "exit 16"), met=((0, node),)), False, "exit 16", "")

    twice = replace(found, history=History((start(1, "n1"), start(2, "n1"))))
    assert "exit_16_twice" in keys(shown(twice))
    assert "exit_16_twice" not in keys(shown(replace(found, history=History((start(1, "n1"), start(2, "n2"))))))


def test_upcycling_and_overlap(tmp_path: Path) -> None:
    log = "[rank0]: TypeError: load_checkpoint() got an unexpected keyword argument 'model'\n"
    assert keys(shown(evidence(make(tmp_path / "a", "base: upcycle\n", healthy, MOE, log)))) == ["upcycling_errors"]
    log = "AssertionError: disable full recomputation when enabling overlap_moe_expert_parallel_comm\n"
    assert keys(shown(evidence(make(tmp_path / "b", "base: first_moe\n", healthy, MOE, log)))) == ["overlap_assert"]


def test_sockets_on_several_nodes(tmp_path: Path) -> None:
    log = "n1:9:9 [0] NCCL INFO Using network Socket\nn2:9:9 [0] NCCL INFO Using network Socket\n"
    found = evidence(make(tmp_path, "base: first_moe\n", healthy, MOE, log))
    assert keys(shown(found)) == ["socket"]
    assert findings(found)[1 if findings(found)[0].key == "ending" else 0].key == "nccl_socket"


# The command


def doctor(folder: Path, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "COLUMNS": "100", "MOEKIT_PROFILE": ""}
    del environ["MOEKIT_PROFILE"]
    command = [sys.executable, "-m", "moekit", "doctor", *words]
    return subprocess.run(command, cwd=folder, env=environ, input=text, capture_output=True, text=True, timeout=120)


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A real run on a CPU that ended as it should, with a real log."""
    run = Path(shutil.copytree(CAPTURE, tmp_path / "moekit-local" / "runs" / "demo"))
    (run / "recipe.yaml").write_text("base: quickstart\n")
    newest = max((path for path in (run / "attempts").iterdir()), key=lambda path: int(path.name))
    shutil.copy(NOISE, newest / "train.log")
    (newest / "exit").mkdir(exist_ok=True)
    for rank in (0, 1):
        (newest / "exit" / f"rank{rank}.json").write_text('{"code": 0, "reason": "", "time": 1}')
    for other in (run / "attempts").iterdir():
        if other != newest:
            shutil.copytree(newest / "exit", other / "exit", dirs_exist_ok=True)
    return run


def test_a_real_healthy_run(captured: Path, tmp_path: Path) -> None:
    done = doctor(tmp_path, "demo")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[2] == "is the stack proven?"
    assert rows[3] == "  one-expert    not on record; `moekit prove one-expert` makes it"
    assert rows[4] == "  deterministic not on record; `moekit prove deterministic` makes it"
    assert "nothing found" in rows
    assert any(row.startswith("looked at  ") for row in rows)


def test_proofs_of_this_and_of_other_software(captured: Path, tmp_path: Path) -> None:
    newest = max((path for path in (captured / "attempts").iterdir()), key=lambda path: int(path.name))
    software = {"megatron": "0.19.2", "torch": "2.13.0", "transformer_engine": None, "device": "cpu"}
    (newest / "software.json").write_text(json.dumps(software))
    folder = tmp_path / "moekit-local" / "proofs"
    folder.mkdir()
    for name, torch in (("one-expert", "2.13.0"), ("deterministic", "2.9.0")):
        one = {"proof": name, "when": "2026-11-30T10:00:00Z", "verdict": "passed", "sentence": "it holds"}
        record = [{**one, "software": {**software, "torch": torch, "moekit": "0.1.0"}}]
        (folder / f"{name}.json").write_text(json.dumps(record))
    said = json.loads(doctor(tmp_path, "demo", "--json").stdout)
    assert [proof["state"] for proof in said["proofs"]] == ["passed", "other software"]
    assert said["findings"] == []


def test_a_log_on_standard_input(tmp_path: Path) -> None:
    text = NOISE.read_text() + "OSError: [Errno 38] Function not implemented\n"
    done = doctor(tmp_path, "-", text=text)
    assert done.returncode == 0, done.stderr
    assert "1. the shared file system has no locks (sure)" in done.stdout
    assert "`flock -n FILE true` on two nodes at once" in done.stdout
    assert "nothing found" in doctor(tmp_path, "-", text=NOISE.read_text()).stdout


def test_a_log_by_its_path(tmp_path: Path) -> None:
    """Written by a program for Windows, and by one that draws a progress bar."""
    (tmp_path / "some.log").write_bytes(b"n1: starts\r\nsrun: error: n4: task 4: Killed\r\n")
    said = json.loads(doctor(tmp_path, "some.log", "--json").stdout)
    assert (said["title"], said["findings"][0]["key"]) == ("log `some.log`", "rank_killed")
    bar = b"".join(b"\rLoading shards: %3d%%" % at for at in range(5000))
    (tmp_path / "bar.log").write_bytes(bar + b"\rOSError: [Errno 122] Disk quota exceeded\n")
    assert json.loads(doctor(tmp_path, "bar.log", "--json").stdout)["findings"][0]["key"] == "quota"


def test_words_alone(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--symptom", "dead experts in spite of aux loss")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2] == "learns badly: experts die in spite of an auxiliary loss"
    assert "aux_loss_coeff: 0.01" in done.stdout
    assert (
        json.loads(doctor(tmp_path, "--symptom", "dead_with_aux", "--json").stdout)["asked"][0]["key"]
        == "dead_with_aux"
    )


def test_what_is_refused(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: there is nothing to look at")
    done = doctor(tmp_path, "--symptom", "the coffee is cold")
    assert done.stderr.splitlines()[0] == "error: no symptom is near `the coffee is cold`"
    done = doctor(tmp_path, "nothere")
    assert done.returncode == 1
    assert "there is no run `nothere`" in done.stderr
