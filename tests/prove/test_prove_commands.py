"""`moekit prove` over runs that exist: what it prints, its exit code, and the record it leaves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import (
    DENSE,
    DETERMINISTIC,
    MOE,
    REPEATED,
    SLICES,
    SOFTWARE,
    SQUARED,
    dense_steps,
    make_run,
    metrics,
    moe_steps,
)

from moekit.problems import MoekitError
from moekit.prove import record


def prove(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moekit", "prove", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A dense run and its MoE of one expert, below `root`."""
    root = tmp_path / "root"
    root.mkdir()
    make_run(root, "dense", DENSE, dense_steps())
    make_run(root, "moe", MOE, moe_steps())
    return tmp_path


def test_a_proof_that_holds(pair: Path) -> None:
    done = prove(pair, "one-expert", "--runs", "dense", "moe", "--root", "root")
    assert (done.returncode, done.stderr) == (
        0,
        "with Megatron 0.19.2, torch 2.13.0, no Transformer Engine, on cpu, by moekit "
        f"{record.read(pair / 'root', 'one-expert')[0]['software']['moekit']}; "
        "on record in root/proofs/one-expert.json\n",
    )
    lines = done.stdout.splitlines()
    assert "step n is iteration 15 + n of `dense`" in lines[0]
    assert lines[-1] == "proven: an MoE of one expert is the dense model it was made of, and trains as it does"
    rows = [line.split() for line in lines if line.strip()[:1].isdecimal()]
    assert len(rows) == 15
    assert rows[6] == ["7", "6.930000", "6.930000", "0", "0", "512", "1.000000"]


def test_a_proof_that_fails_says_where_it_parts_and_leaves_that(pair: Path) -> None:
    steps = moe_steps()
    steps[4]["lm loss"] += 0.002
    steps[9]["lm loss"] -= 0.003
    make_run(pair / "root", "scaled", MOE, steps)
    done = prove(pair, "one-expert", "--runs", "dense", "scaled", "--root", "root")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "not proven: LM loss, MoE less dense parts at step 4, by 0.002, where 0.00087 is allowed"
    )
    assert "Traceback" not in done.stderr
    (kept,) = record.read(pair / "root", "one-expert")
    assert kept["verdict"] == "failed"
    assert kept["checks"][0] == {
        "what": "LM loss, MoE less dense",
        "holds": False,
        "bound": 0.00087,
        "largest": pytest.approx(0.003),
        "parts_at": 4,
        "parts_by": pytest.approx(0.002),
    }


def test_json_is_the_record(pair: Path) -> None:
    done = prove(pair, "one-expert", "--runs", "root/runs/dense", "root/runs/moe", "--root", "root", "--json")
    assert done.returncode == 0
    shown = json.loads(done.stdout)
    assert [shown] == json.loads((pair / "root/proofs/one-expert.json").read_text())
    assert shown["runs"] == [{"name": n, "folder": f"root/runs/{n}"} for n in ("dense", "moe")]
    assert shown["steps"][0] == {
        "step": 1,
        "iterations": [16, 1],
        "lm loss": [6.99, 6.99],
        "grad-norm": [0.8, 0.8],
        "num-zeros": [0, 512],
        "load_balancing_loss": [None, 1.0],
    }


def test_a_refusal_leaves_no_record(pair: Path) -> None:
    make_run(pair / "root", "own", MOE, moe_steps(), "moe: {use_upcycling: null}")
    done = prove(pair, "one-expert", "--runs", "dense", "own", "--root", "root")
    assert (done.returncode, done.stdout) == (1, "")
    assert "run `own` begins from its own initialisation, so its losses show nothing here" in done.stderr
    assert not (pair / "root/proofs").exists()


def test_a_loss_that_is_no_number_is_kept_by_name(pair: Path) -> None:
    steps = moe_steps()
    steps[2]["lm loss"] = math.nan
    make_run(pair / "root", "nan", MOE, steps)
    done = prove(pair, "one-expert", "--runs", "dense", "nan", "--root", "root", "--json")
    assert done.returncode == 1
    shown = json.loads(done.stdout)
    assert (shown["checks"][0]["largest"], shown["steps"][1]["lm loss"][1]) == ("nan", "nan")


def test_slices(tmp_path: Path) -> None:
    make_run(tmp_path, "dense", SQUARED, dense_steps(1, 30))
    make_run(tmp_path, "moe", SLICES, {1: metrics(1, loss=6.99 + 2e-5, balance=1.2)})
    done = prove(tmp_path, "slices", "--runs", "dense", "moe", "--root", ".")
    assert done.returncode == 1
    ending = "not proven: LM loss of the first step, MoE less dense parts at step 1, by 2e-05, where 1e-05 is allowed"
    assert done.stdout.splitlines()[-1] == ending


def test_deterministic_with_two_more_runs_for_comparison(tmp_path: Path) -> None:
    steps = {n: metrics(n, balance=1.1) for n in range(1, 13)}
    other = {n: {**found, "lm loss": found["lm loss"] + (0.00063 if n > 2 else 0)} for n, found in steps.items()}
    for name, recipe, logged in (
        ("a", DETERMINISTIC, steps),
        ("b", DETERMINISTIC, steps),
        ("c", REPEATED, steps),
        ("d", REPEATED, other),
    ):
        make_run(tmp_path, name, recipe, logged)
    done = prove(tmp_path, "deterministic", "--runs", "a", "b", "--without", "c", "d", "--root", ".")
    assert done.returncode == 0
    assert "without deterministic mode, `c` and `d` for comparison:" in done.stdout
    assert "LM loss              at most 0.00063: differs from step 3 on" in done.stdout
    assert done.stdout.splitlines()[-1] == "proven: the recipe, trained twice, is the same training twice"
    (kept,) = record.read(tmp_path, "deterministic")
    assert kept["without_deterministic_mode"]["checks"][0]["parts_at"] == 3
    failed = prove(tmp_path, "deterministic", "--runs", "a", "b", "--without", "a", "c", "--root", ".")
    assert failed.returncode == 1
    assert "`precision.deterministic_mode` is True in `a` and unset in `c`" in failed.stderr


def test_a_record_of_each_software_is_kept(pair: Path) -> None:
    root = pair / "root"
    for name, recipe, steps in (("dense2", DENSE, dense_steps()), ("moe2", MOE, moe_steps())):
        make_run(root, name, recipe, steps, software=[{**SOFTWARE, "torch": "2.14.0", "device": "NVIDIA H100"}])
    for runs in (("dense", "moe"), ("dense2", "moe2"), ("dense", "moe")):
        assert prove(pair, "one-expert", "--runs", *runs, "--root", "root").returncode == 0
    kept = record.read(root, "one-expert")
    assert sorted(one["software"]["device"] for one in kept) == ["NVIDIA H100", "cpu"]
    done = prove(pair, "status", "--root", "root")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert sum(line.startswith("one-expert: passed on 20") for line in lines) == 2
    assert "slices: not on record; `moekit prove slices` makes it" in lines
    as_json = json.loads(prove(pair, "status", "--root", "root", "--json").stdout)
    assert as_json == {"one-expert": kept, "slices": [], "deterministic": []}


def test_alone_it_says_what_is_on_record(tmp_path: Path) -> None:
    done = prove(tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        *(f"{name}: not on record; `moekit prove {name}` makes it" for name in record.NAMES),
        "records are kept in moekit-local/proofs",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"proof": "other"}]', '{"proof": "slices"}'])
def test_a_file_that_is_no_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "proofs").mkdir()
    (tmp_path / "proofs/slices.json").write_text(text)
    with pytest.raises(MoekitError, match="this is no record of proofs"):
        record.read(tmp_path, "slices")
