"""Tokenizing with datatrove: what counts as text, what goes to the terminal, what is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moekit.data import python_docs
from moekit.data.shards import check_tokens, open_shard
from moekit.data.tokenize import BATCH_DOCUMENTS, tokenize
from moekit.problems import MoekitError

TOKENIZER = python_docs.TOKENIZER / "tokenizer.json"


def write_documents(folder: Path, texts: list[str]) -> Path:
    source = folder / "text.jsonl"
    lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(texts)]
    source.write_text("\n".join(lines) + "\n")
    return source


def test_each_document_ends_with_the_only_end_token_even_if_its_text_spells_it(tmp_path: Path):
    texts = ["<|endoftext|>", "before<|endoftext|>after", "混合专家 🧑‍🔬", " ", *["more"] * BATCH_DOCUMENTS]
    source = write_documents(tmp_path, texts)

    shard = open_shard(tokenize(source, TOKENIZER, "<|endoftext|>", tmp_path, "some"))

    check_tokens(shard, end_of_document=0, vocabulary=4096)
    assert shard.documents == len(texts)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokens, start = shard.read().tolist(), 0
    for text, length in zip(texts, shard.lengths.tolist(), strict=True):
        assert tokenizer.decode(tokens[start : start + length - 1], skip_special_tokens=False) == text
        start += length


def test_it_is_silent_leaves_no_process_and_does_not_touch_the_environment(tmp_path: Path):
    source = write_documents(tmp_path, ["a text"])
    code = f"""
import glob, os
from pathlib import Path
from moekit.data.tokenize import tokenize
before = dict(os.environ)
tokenize(Path({str(source)!r}), Path({str(TOKENIZER)!r}), "<|endoftext|>", Path({str(tmp_path)!r}), "some")
assert dict(os.environ) == before
children = "".join(Path(file).read_text() for file in glob.glob("/proc/self/task/*/children"))
assert children == "", children
"""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "Reading input file text.jsonl" in (tmp_path / "tokenize.log").read_text()


@pytest.mark.parametrize("package", ["datatrove", "tokenizers", "orjson"])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
):
    for module in [name for name in sys.modules if name.split(".")[0] in {"datatrove", package}]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]

    with pytest.raises(MoekitError) as refused:
        tokenize(tmp_path / "text.jsonl", TOKENIZER, "<|endoftext|>", tmp_path, "some")

    assert str(refused.value) == (
        f"error: preparing data needs `{package}`\n    hint: run `pip install 'moekit[data]'`"
    )


def test_importing_the_room_imports_none_of_the_heavy_packages():
    code = """
import sys, moekit.data.quickstart, moekit.data.tokenize, moekit.data.shards
heavy = {"datatrove", "tokenizers", "numpy", "torch", "loguru"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
