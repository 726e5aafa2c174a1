"""What a CPU cannot do of a recipe is refused at the line that asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moekit.problems import format_problem
from moekit.recipe.cpu import cpu_problems
from moekit.recipe.load import load


def found(folder: Path, text: str) -> list[str]:
    """The messages on the quickstart with sections over it, from the line number on."""
    path = folder / "changed.yaml"
    path.write_text(f"base: quickstart\n{text}")
    return [format_problem(problem).removeprefix(f"{path}:") for problem in cpu_problems(load(str(path)))]


@pytest.mark.parametrize("name", ["quickstart", "settings/quickstart_dense"])
def test_the_quickstart_asks_for_nothing_a_cpu_has_not(name: str) -> None:
    assert list(cpu_problems(load(name))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "moe: {dispatcher: flex}\n",
            "2: a CPU has no flex dispatcher: DeepEP, HybridEP and NCCL EP run on GPUs only",
        ),
        ("precision: {fp8_format: e4m3}\n", "2: a CPU has no FP8: its kernels are Transformer Engine's"),
        (
            "parallel:\n  context: 2\n",
            "3: a CPU has no context parallel: only Transformer Engine's attention has it"
            " (core/transformer/dot_product_attention.py:57)",
        ),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_where_it_is_said(tmp_path: Path, text: str, message: str) -> None:
    assert found(tmp_path, text) == [message]


def test_what_is_on_unless_turned_off_names_the_field(tmp_path: Path) -> None:
    (message,) = found(tmp_path, "model:\n  no_rope_fusion: null\n")
    assert message.endswith("\n    hint: add `no_rope_fusion: true` to `model`")
    assert "a CPU has no rotary embedding fusion" in message


def test_every_hint_turns_its_limit_off(tmp_path: Path) -> None:
    off = ["no_rope_fusion", "no_masked_softmax_fusion", "no_gradient_accumulation_fusion", "no_persist_layer_norm"]
    text = "model:\n  transformer_impl: null\n" + "".join(f"  {name}: null\n" for name in off)
    messages = found(tmp_path, text)
    hints = {message.partition("hint: add `")[2].partition("`")[0] for message in messages}
    assert hints == {"transformer_impl: local", *(f"{name}: true" for name in off)}
