from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moekit.cli import app
from moekit.data import python_docs
from moekit.data.look import count_lengths, cut, look, open_index, rendered, visible
from moekit.data.shards import HEADER, MAGIC
from moekit.problems import MoekitError

END = 0
"""python-docs' end-of-document token."""


def write_pair(prefix: Path, documents: list[list[int]], kind: str = "<u2") -> Path:
    """A pair as datatrove writes it."""
    lengths = np.array([len(tokens) for tokens in documents], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(kind).itemsize
    header = HEADER.pack(MAGIC, 1, 8 if kind == "<u2" else 4, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.idx").write_bytes(b"".join([header, *(part.tobytes() for part in (lengths, pointers, bounds))]))
    Path(f"{prefix}.bin").write_bytes(np.array([token for tokens in documents for token in tokens], kind).tobytes())
    return prefix


def as_tokens(text: str) -> list[int]:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(python_docs.TOKENIZER / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return [*tokenizer.encode(text).ids, END]


def shown(*arguments: str, columns: int = 60) -> str:
    result = CliRunner().invoke(app, ["data", "look", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result
    return result.output


HOSTILE = "\x1b[2J\x1b]0;title\x07[bold red]not bold[/] \u202eesrever\u202c \x9b31m\r\x00 tab\there \u65e5\u672c\n" * 3


def test_hostile_text_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "s", [as_tokens(HOSTILE)])
    for more in ([], ["--document", "0"]):
        text = shown(str(prefix), "--tokenizer", str(python_docs.TOKENIZER), *more, columns=200)
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        assert r"\x1b[2J\x1b]0;title\x07[bold red]not bold[/] \u202eesrever\u202c \x9b31m\r\x00 tab\there 日本" in text


def test_every_character_is_printable_once_visible() -> None:
    text = visible("".join(map(chr, [*range(0x11000), 0xE0001, 0x10FFFF])), keep_lines=True)
    assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("columns", [60, 77, 100])
def test_texts_are_cut_to_the_width_also_where_letters_are_wide(tmp_path: Path, columns: int) -> None:
    from rich.cells import cell_len

    prefix = write_pair(tmp_path / "s", [as_tokens("漢字" * 300), as_tokens("a line\n" * 50), as_tokens("short")])
    text = shown(str(prefix), "--tokenizer", str(python_docs.TOKENIZER), columns=columns)
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(cell_len, lines[: lines.index("document 2, 3 tokens")])) <= columns
    assert text.count("  a line\n") == 6  # and not 50


def test_cut_says_that_it_cut() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abc..."


def test_a_document_is_shown_whole(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(300))
    prefix = write_pair(tmp_path / "s", [as_tokens("first"), as_tokens(text), as_tokens("third")])
    said = shown(f"{prefix}.idx", "--document", "1", "--tokenizer", str(python_docs.TOKENIZER))
    assert text in said
    assert "first" not in said
    assert "document 1," in said


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "s", [[70_000, 5, 6]], "<i4")
    said = shown(str(prefix))
    assert "  70000 5 6\n" in said
    assert "no tokenizer is known: `--tokenizer DIR` gives one" in said


def test_a_data_set_is_decoded_with_its_own_tokenizer(tmp_path: Path) -> None:
    from moekit.data.quickstart import prepare_python_docs

    pytest.importorskip("datatrove")
    prepared = prepare_python_docs(tmp_path, lambda _: None)
    expected = next(iter(python_docs.documents()))[1]
    for given in ("python-docs", str(prepared.prefix.parent), f"{prepared.prefix}.bin"):
        said = shown(given, "--shared-root", str(tmp_path), "--document", "0")
        assert expected in said
    seen = json.loads(shown("python-docs", "--shared-root", str(tmp_path), "--documents", "2", "--json"))
    assert (seen["documents"], seen["tokens"]) == (prepared.documents, prepared.tokens)
    assert [one["text"].startswith(expected) for one in seen["texts"]] == [True, False]
    assert seen["note"] == ""
    file = tmp_path / "tokenizers/python-docs/tokenizer.json"
    file.write_text(file.read_text() + "\n")
    assert "another than these tokens were made with" in shown("python-docs", "--shared-root", str(tmp_path))


def test_lengths_are_counted_exactly(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    lengths = [*map(int, random.lognormal(3, 1.5, 400) + 1), 1, 70_000, 70_000, 90_000]
    prefix = write_pair(tmp_path / "s", [[7] * length for length in lengths])
    found = count_lengths(open_index(prefix))
    assert np.repeat(found.values, found.counts).tolist() == sorted(lengths)
    assert (found.documents, found.tokens) == (len(lengths), sum(lengths))
    ordered = sorted(lengths)
    assert (found.at(0.5), found.at(0.9)) == (ordered[len(ordered) // 2 - 1], ordered[-(-len(ordered) * 9 // 10) - 1])
    assert found.share_in_longer(100) == pytest.approx(sum(one for one in lengths if one > 100) / sum(lengths))
    bins = found.bins()
    assert sum(documents for *_, documents, _ in bins) == len(lengths)
    assert sum(tokens for *_, tokens in bins) == sum(lengths)
    assert all(sum(low <= one <= high for one in lengths) == documents for low, high, documents, _ in bins)
    assert (bins[0][:2], bins[-1][:2]) == ((1, 1), (65_536, 131_071))


def test_eight_million_documents_take_little_memory(tmp_path: Path) -> None:
    documents, length = 8_000_000, 3
    prefix = tmp_path / "many"
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        index.write(np.full(documents, length, "<i4").tobytes())
        index.seek(HEADER.size + 12 * documents - 8)
        index.write(np.int64(2 * length * (documents - 1)).tobytes())
        index.truncate(HEADER.size + 12 * documents + 8 * (documents + 1))
    with Path(f"{prefix}.bin").open("wb") as tokens:
        tokens.truncate(2 * length * documents)
    tracemalloc.start()
    try:
        seen = look(prefix, None, 2, None, 4096, 80)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (seen["documents"], seen["tokens"], seen["median"]) == (documents, length * documents, length)
    assert peak < 4 * documents  # the lengths alone, at four bytes each
    assert "100.0%" in rendered(seen, 80, whole=False)


def _cut_idx(prefix: Path) -> None:
    file = Path(f"{prefix}.idx")
    file.write_bytes(file.read_bytes()[:-8])


def _cut_bin(prefix: Path) -> None:
    file = Path(f"{prefix}.bin")
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut_idx, "bytes, but its header lists 2 documents"),
        (_cut_bin, "its last document does not end where the .bin does, at 8 bytes"),
        (lambda prefix: Path(f"{prefix}.bin").unlink(), "cannot read: No such file or directory"),
        (lambda prefix: Path(f"{prefix}.idx").unlink(), "cannot read: No such file or directory"),
        (lambda prefix: Path(f"{prefix}.idx").write_bytes(b"PAR1"), "its first bytes are wrong"),
    ],
)
def test_a_damaged_shard_is_said_to_be(tmp_path: Path, damage: object, said: str) -> None:
    prefix = write_pair(tmp_path / "s", [[5, 6, END], [7, END]])
    damage(prefix)  # type: ignore[operator]
    result = CliRunner().invoke(app, ["data", "look", str(prefix)])
    assert isinstance(result.exception, MoekitError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no shard, folder or data set `nothing`\n    hint: data sets in "),
        ([""], "there is no shard, folder or data set ``"),
        (["empty"], "there is no whole shard in this folder"),
        (["s", "--document", "2"], "there is no document 2: this shard has 2, from 0"),
        (["s", "--tokenizer", "empty"], "there is no `tokenizer.json` in this folder"),
        (["s", "--tokenizer", "bad"], "this is no tokenizer: "),
    ],
)
def test_what_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    pytest.importorskip("tokenizers")
    write_pair(tmp_path / "s", [[5, 6, END], [7, END]])
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["data", "look", *arguments])
    assert isinstance(result.exception, MoekitError)
    assert said in str(result.exception)
