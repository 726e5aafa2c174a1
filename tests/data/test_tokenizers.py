"""A tokenizer is held against its description: whole, of that size, with an end token that no text becomes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import END, small_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from moekit.data import python_docs
from moekit.data.tokenizer import reading as tokenizers
from moekit.data.tokenizer.reading import read_tokenizer
from moekit.problems import MoekitError


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return json.loads(small_tokenizer().to_str())


def put(folder: Path, content: Any) -> Path:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "tokenizer.json").write_bytes(data)
    return folder


def refusal(folder: Path, content: Any, vocab_size: int | None = None, end: str = END) -> str:
    with pytest.raises(MoekitError) as refused:
        read_tokenizer(put(folder, content), end, vocab_size)
    said = str(refused.value)
    assert str(folder / "tokenizer.json") in said
    return said


def test_what_is_found(tmp_path: Path, good: dict[str, Any]) -> None:
    found = read_tokenizer(put(tmp_path, good), END, 302)
    data = found.file.read_bytes()
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert (found.vocab_size, found.end_of_document_id) == (302, 301)


def test_the_quickstarts(tmp_path: Path) -> None:
    found = read_tokenizer(python_docs.TOKENIZER, python_docs.END_OF_DOCUMENT, python_docs.VOCABULARY)
    assert (found.vocab_size, found.end_of_document_id) == (4096, 0)


def test_the_size_counts_added_tokens(tmp_path: Path, good: dict[str, Any]) -> None:
    said = refusal(tmp_path, good, vocab_size=300)
    assert "has 302 tokens, added ones included, and the description says 300" in said


def test_ids_without_gaps(tmp_path: Path, good: dict[str, Any]) -> None:
    far = {**good, "model": {**good["model"], "vocab": {**good["model"]["vocab"], "a": 900}}}
    assert "has 302 tokens and among them the id 900: Megatron would find no embedding" in refusal(tmp_path, far)


# The end token


def test_no_such_end_token(tmp_path: Path, good: dict[str, Any]) -> None:
    said = refusal(tmp_path, good, end="<|end_of_txt|>")
    assert "has no token `<|end_of_txt|>`, which `end_of_document` names" in said
    assert "did you mean `<|end_of_text|>`?" in said


def test_end_token_in_the_plain_vocabulary(tmp_path: Path, good: dict[str, Any]) -> None:
    assert "has `a` as a plain token: a text with these letters would end there" in refusal(tmp_path, good, end="a")


def test_end_token_added_but_not_special(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(special=())
    tokenizer.add_tokens([AddedToken(END, special=False)])
    said = refusal(tmp_path, tokenizer.to_str().encode())
    assert f"has `{END}` as a plain token" in said
    assert "its special tokens are none" in said


def test_end_token_special_and_plain(tmp_path: Path) -> None:
    """As a whole word of the vocabulary, it is made of text even where special tokens are taken as text."""
    tokenizer = Tokenizer(models.WordLevel({"word": 0, "</s>": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    said = refusal(tmp_path, tokenizer.to_str().encode(), end="</s>")
    assert "turns the letters `</s>` in a text into its end token" in said


# What changes texts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.enable_truncation(512), "cuts each text after 512 tokens (`truncation`)"),
        (lambda one: one.enable_padding(length=64), "fills texts up to one length (`padding`)"),
    ],
)
def test_what_would_change_texts(tmp_path: Path, change: Callable[[Tokenizer], None], said: str) -> None:
    tokenizer = small_tokenizer()
    change(tokenizer)
    assert said in refusal(tmp_path, tokenizer.to_str().encode())


def test_merges_left_out_at_random(tmp_path: Path, good: dict[str, Any]) -> None:
    said = refusal(tmp_path, {**good, "model": {**good["model"], "dropout": 0.1}})
    assert "leaves merges out at random (`dropout`)" in said


def test_all_at_once(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(special=())
    tokenizer.enable_truncation(512)
    assert refusal(tmp_path, tokenizer.to_str().encode(), vocab_size=1).count("tokenizer.json: ") == 3


# Damage


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"model": 1}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17\n",
        b'{"model": {"type": "BPE", "vocab": {"a": 99999999999999999999}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"model": {"type": "WordLevel", "vocab": {}}}',
    ],
)
def test_damaged(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    said = refusal(tmp_path, content)
    assert len(said) < 600
    assert capfd.readouterr() == ("", "")


def test_cut_anywhere(tmp_path: Path, good: dict[str, Any]) -> None:
    data = json.dumps(good).encode()
    for length in random.Random(8).sample(range(len(data)), 40):
        refusal(tmp_path, data[:length])


def test_ids_that_nobody_could_count(tmp_path: Path, good: dict[str, Any]) -> None:
    hostile = {**good, "model": {**good["model"], "vocab": {**good["model"]["vocab"], "a": 4_294_967_295}}}
    assert "4,294,967,295" in refusal(tmp_path, hostile)


def test_larger_than_any(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(tokenizers.MOST_BYTES + 1)
    with pytest.raises(MoekitError, match="is larger than 256 MiB"):
        read_tokenizer(tmp_path, END, None)


def test_none_there(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="cannot be read: no such file or directory"):
        read_tokenizer(tmp_path / "nowhere", END, None)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(MoekitError, match="cannot be read: is a directory"):
        read_tokenizer(tmp_path, END, None)


def test_bytes_turned_over(tmp_path: Path, good: dict[str, Any]) -> None:
    """Whatever a byte becomes, it is a tokenizer that holds or a refusal, never another exception."""
    data, draw = bytearray(json.dumps(good).encode()), random.Random(9)
    outcomes = set()
    for _ in range(150):
        turned = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            turned[draw.randrange(len(turned))] = draw.randrange(256)
        try:
            read_tokenizer(put(tmp_path, bytes(turned)), END, 302)
            outcomes.add("read")
        except MoekitError:
            outcomes.add("refused")
    assert "refused" in outcomes
