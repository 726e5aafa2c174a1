"""How the programs beside moekit are called in what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moekit.share import program


def test_a_program_is_called_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "moekit"):
        (tmp_path / ".venv" / "bin" / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert program("moekit") == ".venv/bin/moekit"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program("moekit") == str(tmp_path / ".venv" / "bin" / "moekit")
    monkeypatch.setenv("PATH", f"{tmp_path}/.venv/bin")
    assert program("moekit") == "moekit"
    assert program("trackio") == "trackio"  # nowhere: its name at least
