"""The sessions that docs/data.md shows, run on Python's documentation in four files; speeds are masked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moekit
from moekit.data import python_docs

PAGE = Path(moekit.__file__).parents[1] / "docs/data.md"
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^\$ moekit (.*?)\n(.*?)(?=^\$|\Z)", re.MULTILINE | re.DOTALL)


def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    make_corpus(tmp_path)
    sessions = 0
    for language, name, text in FENCE.findall(PAGE.read_text()):
        if language == "yaml":
            (tmp_path / name).write_text(text)
            (tmp_path / "changed.yaml").write_text(text.replace("tasks: 2", "tasks: 4"))
        elif language == "data":
            if name == "damaged":
                shard = tmp_path / "moekit-local/data/manual/manual_00001_tokens.bin"
                os.truncate(shard, shard.stat().st_size - 2)
            for command, expected in SESSION.findall(text):
                sessions += 1
                assert masked(printed(command, tmp_path)) == masked(expected), command
    assert sessions >= 12


def make_corpus(folder: Path) -> None:
    """Text in four files, and a tokenizer."""
    documents = list(python_docs.documents())
    for name in ("text", "tokenizer"):
        (folder / name).mkdir()
    for part in range(4):
        lines = [json.dumps({"id": key, "text": text}) + "\n" for key, text in documents[part::4]]
        (folder / f"text/part_{part}.jsonl").write_text("".join(lines))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).write_bytes((python_docs.TOKENIZER / name).read_bytes())


def printed(command: str, folder: Path) -> str:
    """Everything that a command says, its folder called `/home/you`."""
    words = [sys.executable, "-m", "moekit", *command.split()]
    env = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env, cwd=folder, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return (done.stdout + done.stderr).replace(str(folder), "/home/you")


def masked(text: str) -> str:
    """Without how fast it was."""
    return re.sub(r"[\d,]+ tokens/s in .*", "N tokens/s", text)
