"""Trainer and rollout engine: against float64 sums token by token, Megatron's formulas, and files that are none."""

import io
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.problems import MoekitError
from moekit.watch.router import mismatch
from moekit.watch.router.mismatch import Mismatch, lines, read

LOGS = st.floats(-12, 0)
SEQUENCES = st.lists(
    st.lists(st.tuples(LOGS, LOGS, st.booleans()), min_size=1, max_size=12), min_size=1, max_size=5
)  # (sequence, token) of trainer, engine, and whether it counts


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@given(SEQUENCES)
@settings(max_examples=150, deadline=None)
def test_probabilities_against_a_loop(tmp_path_factory: Any, sequences: list[list[tuple[float, float, bool]]]) -> None:
    path = tmp_path_factory.getbasetemp() / "rollouts.jsonl"
    records = [
        {"old_logprobs": [t[0] for t in one], "inference_logprobs": [t[1] for t in one], "mask": [t[2] for t in one]}
        for one in sequences
    ]
    written(path, *records)
    counted = [(old, engine) for one in sequences for old, engine, counts in one if counts]
    if not counted:
        with pytest.raises(MoekitError, match="nothing in"):
            read(path)
        return
    found, numbers = read(path), read(path).numbers
    ratios = [math.exp(old - engine) for old, engine in counted]
    differences = [abs(math.exp(old) - math.exp(engine)) for old, engine in counted]
    assert (found.tokens, found.sequences) == (len(counted), len(sequences))
    assert found.masked == sum(map(len, sequences)) - len(counted)
    expected = {
        "mean_inf_train_prob_abs_diff": math.fsum(differences) / len(counted),
        "min_inf_train_prob_abs_diff": min(differences),
        "max_inf_train_prob_abs_diff": max(differences),
        "mean_piold_to_inf_prob": math.fsum(ratios) / len(counted),
        "min_piold_to_inf_prob": min(ratios),
        "max_piold_to_inf_prob": max(ratios),
        "kl_plain": math.fsum(engine - old for old, engine in counted) / len(counted),
        "kl": math.fsum(r - 1 - (old - engine) for r, (old, engine) in zip(ratios, counted, strict=True))
        / len(counted),
    }
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for count, ratio in zip(found.beyond, mismatch.RATIOS, strict=True):
        apart = [abs(old - engine) for old, engine in counted]
        assert count == sum(one > math.log(ratio) for one in apart)


def test_the_divergence_is_that_of_tokens_that_the_engine_drew() -> None:
    """Of two distributions over 5 tokens: both means come near the exact sum, the second nearer."""
    chooser = np.random.default_rng(0)
    engine = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    trainer = np.array([0.45, 0.25, 0.15, 0.08, 0.07])
    exact = float((engine * np.log(engine / trainer)).sum())
    drawn, found = chooser.choice(5, 200_000, p=engine), Mismatch()
    found.add_probabilities(np.log(trainer[drawn]), np.log(engine[drawn]), np.ones(len(drawn), np.bool_))
    assert found.numbers["kl"] == pytest.approx(exact, rel=0.02)
    assert found.numbers["kl_plain"] == pytest.approx(exact, rel=0.2)
    assert found.numbers["mean_piold_to_inf_prob"] == pytest.approx(1, abs=0.01)


def test_a_tenth_of_the_choices_touches_nearly_every_token(tmp_path: Path) -> None:
    """The two numbers that are reported of one pair: 10 % of choices, 94 % of tokens (handbook 4)."""
    chooser = np.random.default_rng(0)
    engine = np.argsort(chooser.random((2000, 48, 16)), axis=2)[..., :4]
    trainer, differs = engine[..., ::-1].copy(), np.zeros((2000, 48), bool)
    differs[:1880] = chooser.random((1880, 48)) < 4.8 / 47 / 0.94
    differs[:1880, 0] = True  # 94 % in one layer, and elsewhere as many as make a tenth
    differs[:1880, 1:] &= chooser.random((1880, 47)) < 0.8 * 47 / 48
    trainer[differs] = np.array([0, 1, 2, 3])
    engine[differs] = np.array([0, 1, 2, 4])
    np.savez(tmp_path / "routing.npz", routing_indices=engine, trainer_indices=trainer)
    found = read(tmp_path / "routing.npz")
    assert found.numbers["other_choices"] == pytest.approx(differs.mean())
    assert found.numbers["other_choices"] == pytest.approx(0.1, abs=0.01)
    assert found.numbers["tokens_with_other_choices"] == 0.94
    text = list(lines(found, "routing.npz"))
    assert text[1] == "choices of 2,000 tokens, 48 layers each"
    assert text[3] == "  94.0% of tokens have other experts in at least one layer"
    assert found.as_json()["kl"] is None


def test_arrays_and_lines_say_the_same(tmp_path: Path) -> None:
    chooser = np.random.default_rng(1)
    old, engine = -chooser.random((2, 3, 7))
    mask = chooser.random((3, 7)) < 0.7
    chosen = chooser.integers(0, 8, (2, 3, 7, 2, 2))
    chosen[:, 0, 0] = -1
    arrays = {"old_logprobs": old, "inference_logprobs": engine, "mask": mask}
    arrays |= {"routing_indices": chosen[0], "trainer_indices": chosen[1]}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    written(tmp_path / "x.jsonl", *({name: one[n].tolist() for name, one in arrays.items()} for n in range(3)))
    said = [read(tmp_path / name).as_json() for name in ("x.npz", "x.jsonl")]
    assert [one.pop("sequences") for one in said] == [1, 3]
    for name, value in said[0].items():
        assert value == (pytest.approx(said[1][name], rel=1e-12) if isinstance(value, float) else said[1][name])
    assert said[0]["routed"] == 20  # the row of -1 is no token
    assert max(map(len, lines(read(tmp_path / "x.npz"), "x.npz"))) <= 80


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no\n", mismatch.NOT_JSON),
        ("[" * 100_000 + "\n", mismatch.NOT_JSON),
        ("[1]\n", mismatch.FOREIGN),
        ({"old_logprobs": [-1]}, mismatch.FOREIGN),
        ({"routing_indices": [[[1]]]}, mismatch.FOREIGN),
        ({"old_logprobs": [-1, [2]], "inference_logprobs": [-1, -1]}, mismatch.FOREIGN),
        ({"old_logprobs": ["-1"], "inference_logprobs": [-1]}, mismatch.FOREIGN),
        ({"old_logprobs": -1, "inference_logprobs": -1}, mismatch.FOREIGN),
        ({"old_logprobs": [-1, -1], "inference_logprobs": [-1]}, mismatch.CONTRADICTION),
        ({"old_logprobs": [-1], "inference_logprobs": [-1], "mask": [1, 1]}, mismatch.CONTRADICTION),
        ({"old_logprobs": [0.5], "inference_logprobs": [-1]}, "log probabilities above 0"),
        ({"routing_indices": [[1, 2]], "trainer_indices": [[1, 2]]}, mismatch.CONTRADICTION),
        ({"routing_indices": [[[1, 2]]], "trainer_indices": [[[1]]]}, mismatch.CONTRADICTION),
        ({"routing_indices": [[[1.5]]], "trainer_indices": [[[1.5]]]}, mismatch.FOREIGN),
    ],
)
def test_what_is_no_sequence_is_counted(tmp_path: Path, line: Any, reason: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line) + "\n"
    good = json.dumps({"old_logprobs": [-1.0], "inference_logprobs": [-1.5]}) + "\n"
    (tmp_path / "x").write_text(good + text + "\n" + good)
    found = read(tmp_path / "x")
    assert (found.tokens, found.sequences, found.skipped) == (2, 2, {reason: 1})
    (tmp_path / "x").write_text(text)
    with pytest.raises(MoekitError, match="nothing in"):
        read(tmp_path / "x")


def test_tokens_that_are_impossible_on_a_side_are_said(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"old_logprobs": [-1, -Infinity, NaN], "inference_logprobs": [-1, -1, -1]}\n')
    found = read(tmp_path / "x")
    assert (found.tokens, found.not_finite, found.numbers["kl"]) == (1, 2, 0)
    assert "  2 tokens have no finite log probability on a side, and are left out" in lines(found, "x")


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_arrays_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, path = tmp_path / "it ran", tmp_path / "x.npz"
    np.savez(path, old_logprobs=np.array([Bomb(trace)], dtype=object), inference_logprobs=np.zeros(1))
    with pytest.raises(MoekitError, match="cannot be read as arrays"):
        read(path)
    path.write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(MoekitError, match="nothing in"):
        read(path)
    assert not trace.exists()
    buffer = io.BytesIO()
    np.savez(buffer, old_logprobs=-np.ones(900), inference_logprobs=-np.ones(900))
    damaged = bytearray(buffer.getvalue())
    damaged[300:340] = bytes(40)
    path.write_bytes(damaged)
    with pytest.raises(MoekitError):
        read(path)
    path.write_bytes(buffer.getvalue())
    assert read(path).tokens == 900
    monkeypatch.setattr(mismatch, "_WHOLE_BYTES", 1000)
    with pytest.raises(MoekitError, match="more than 4 GiB"):
        read(path)


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path / "rollouts.jsonl", {"old_logprobs": [-1.0, -0.5], "inference_logprobs": [-1.1, -0.5]})

    def moekit(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moekit", "mismatch", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    said = moekit("rollouts.jsonl")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == (
        "rollouts.jsonl: 1 sequences\n"
        "probability of 2 tokens, trainer's against engine's\n"
        "  difference       mean 0.0175, most 0.035\n"
        "  trainer/engine   mean 1.05, least 1, most 1.11\n"
        "  KL divergence    0.00259 of the engine from the trainer; plain mean -0.05\n"
        "  times apart      50.00% beyond 1.1, 0.00% beyond 2, 0.00% beyond 10\n"
    )
    assert json.loads(moekit("rollouts.jsonl", "--json").stdout)["max_piold_to_inf_prob"] == pytest.approx(
        math.exp(0.1)
    )
    refused = moekit("none")
    assert (refused.returncode, refused.stderr) == (1, "error: cannot read `none`: no such file or directory\n")
