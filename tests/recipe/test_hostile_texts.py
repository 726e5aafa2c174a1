"""Any text in any field is refused by the field's name, or reaches Megatron byte for byte through a real shell."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from moekit.cluster.profile import find_cluster
from moekit.launch.flat import flat_yaml
from moekit.launch.run_files import lines, run_arguments
from moekit.megatron.flags import argv
from moekit.recipe.build import markers
from moekit.recipe.check import problems_of
from moekit.recipe.load import load_partly, sections
from moekit.recipe.schema import Recipe

CLUSTER = find_cluster()
TEXTS = [
    "$(touch owned)",
    "`touch owned`",
    "; rm -rf owned",
    "a && b | c > owned",
    "$HOME/${PATH}",
    'it\'s "quoted" \\ \\n \\\\',
    "--help",
    "-1e-5",
    "new\nline",
    "carriage\rreturn",
    "nul\0letter",
    "esc\x1b[31mred",
    "naïve 世界 🦙",
    "right\u202eleft",
    "  spaces around  ",
    "*?[a-z]~#!",
    "%s %n {0} {x}",
    "x" * 1000,
    "",
    "null",
    "[0]*1+[1]*15;import os",
    "../../etc/passwd",
    "=",
    "a=b",
]


def fields_of_text() -> Iterator[tuple[str, str, bool]]:
    """(section, field, whether it is a list) for every field that takes text of any kind."""
    for section, cls in sections():
        for name, (hint, _) in markers(cls).items():
            inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
            if inner is str or hasattr(inner, "parse") or get_origin(inner) not in (None, Mapping):
                yield section, name, inner is not hint


FIELDS = list(fields_of_text())


def recipe_with(path: Path, section: str, name: str, text: str, is_list: bool) -> Any:
    value = json.dumps(text, ensure_ascii=False)  # YAML reads JSON's strings
    path.write_text(f"base: first_moe\n{section}:\n  {name}: {f'[{value}]' if is_list else value}\n")
    return load_partly(str(path))


def through_bash(words: list[str], folder: Path) -> list[str]:
    """What a process gets that bash starts with the words of an argv file, as slurm/train.sh does."""
    (folder / "argv").write_text(lines(words))
    script = 'mapfile -t words <argv; printf "%s\\0" "${words[@]}"'
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, check=True, timeout=60)
    return done.stdout.decode().split("\0")[:-1]


def test_there_are_fields_of_text() -> None:
    assert len(FIELDS) > 50


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:16]))
def test_a_text_in_every_field(text: str, tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.mkdir()
    arrived: list[str] = []
    for section, name, is_list in FIELDS:
        field = f"{section}.{name}"
        loaded = recipe_with(tmp_path / "x.yaml", section, name, text, is_list)
        problems = [problem for problem in problems_of(loaded, CLUSTER) if problem.level == "error"]
        if problems:
            assert any(field in problem.what + problem.hint or name in problem.what for problem in problems), problems
            continue
        value = getattr(getattr(loaded.recipe, section), name)
        assert (value[0] if is_list else str(value)) == text
        if section not in ("runtime", "megatron") and field != "monitor.control_run":  # those reach no command
            words = argv(run_arguments(loaded.recipe, "x", "/shared", resume=False))
            assert any(text in word for word in words), field
            arrived += words
    if arrived:
        assert through_bash(arrived, shell) == arrived
    assert sorted(path.name for path in shell.iterdir()) == (["argv"] if arrived else [])


def test_some_texts_arrive_and_some_are_refused(tmp_path: Path) -> None:
    def problems(text: str) -> list[str]:
        loaded = recipe_with(tmp_path / "x.yaml", "data", "name", text, False)
        return [problem.what for problem in problems_of(loaded, CLUSTER)]

    assert problems("$(touch owned)") == []
    assert problems("  spaces around  ") == []
    assert problems("new\nline") == ["`data.name` has a newline, which no command line carries"]
    assert problems("") == ["`data.name` is empty"]


@pytest.mark.parametrize("text", [text for text in TEXTS if text.strip()], ids=lambda text: ascii(text[:16]))
def test_what_a_run_keeps_of_a_text_loads_to_the_same(text: str, tmp_path: Path) -> None:
    path, flat = tmp_path / "x.yaml", tmp_path / "flat.yaml"
    quoted = json.dumps(text, ensure_ascii=False)
    path.write_text(
        f"summary: {quoted}\nmegatron: {{extra: [{quoted}]}}\ndata: {{name: {quoted}, shards: [{quoted}, {quoted}]}}\n"
        f"runtime: {{environment: {{A: {quoted}, B: null}}, secrets: [{quoted}]}}\n"
    )
    loaded = load_partly(str(path))
    flat.write_text(flat_yaml(loaded.recipe))
    again = load_partly(str(flat))
    assert again.problems == ()
    assert again.recipe == loaded.recipe
    assert isinstance(again.recipe, Recipe)
