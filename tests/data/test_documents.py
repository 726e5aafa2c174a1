"""What of a file becomes a document: formats, odd texts, and files that are not what they should be."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenized import write_rows, write_texts

from moekit.data.making.documents import Tally, is_kept, texts_of
from moekit.data.plan import InputFile, Plan
from moekit.problems import MoekitError

ODD = [
    "a\x00b",
    "\ufeffbegins with a mark",
    "line\r\nline",
    " ",
    "\n",
    "\U0010ffff\ue000",
    "नमस्ते العربية 混合专家 🧑‍🔬",
]
PLANES = ["".join(chr(plane << 16 | 0x1234 + at) for at in range(5)) for plane in range(17)]


def a_plan(path: Path, **fields: Any) -> Plan:
    said: dict[str, Any] = {"name": "some", "text_key": "text", "id_key": "id", "files": (), "tokenizer": "tiny"}
    said |= {"tokenizer_sha256": "", "vocab_size": 300, "end_of_document": "<end>", "end_of_document_id": 299}
    said |= {"keep_fraction": None, "tasks": 1, "max_document_mib": 1, "limit": None, "versions": {}}
    return Plan(**(said | {"format": "parquet" if path.suffix == ".parquet" else "jsonl"} | fields))


def read(path: Path, **fields: Any) -> tuple[list[str], Tally]:
    tally = Tally()
    stat = path.stat()
    file = InputFile(str(path), stat.st_size, str(stat.st_mtime_ns))
    return list(texts_of(file, a_plan(path, **fields), tally)), tally


def refused(path: Path, **fields: Any) -> str:
    with pytest.raises(MoekitError) as raised:
        read(path, **fields)
    return str(raised.value).partition("\n")[0]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "jsonl.bz2", "jsonl.xz", "parquet"])
def test_every_format_gives_the_same_texts(tmp_path: Path, ending: str):
    rows = [*ODD, "", *PLANES[:0xD], None, *PLANES[0xE:]]
    (path,) = write_texts(tmp_path / "text", [rows], ending)
    texts, tally = read(path)
    assert texts == [text for text in rows if text]
    assert (tally.rows, tally.empty, tally.not_kept, tally.documents) == (len(rows), 2, 0, len(rows) - 2)
    assert 0.9 < tally.share <= 1


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_is_kept_follows_from_the_id_and_not_from_file_or_row(tmp_path: Path, ending: str):
    rows = [{"id": f"urn:{number}", "text": f"text {number}"} for number in range(2000)]
    write_rows(tmp_path / f"all.{ending}", rows)
    write_rows(tmp_path / f"end.{ending}", rows[1700:])
    texts, tally = read(tmp_path / f"all.{ending}", keep_fraction=0.25)
    assert texts == [row["text"] for row in rows if is_kept(row["id"], 0.25)]
    assert 400 < len(texts) < 600
    assert tally.rows == tally.documents + tally.not_kept == 2000
    assert set(read(tmp_path / f"end.{ending}", keep_fraction=0.25)[0]) == {
        text for text in texts if int(text.split()[1]) >= 1700
    }
    assert set(texts) < set(read(tmp_path / f"all.{ending}", keep_fraction=0.5)[0])
    assert len(read(tmp_path / f"all.{ending}", keep_fraction=1.0)[0]) == 2000


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_limit_counts_documents_and_not_rows(tmp_path: Path, ending: str):
    (path,) = write_texts(tmp_path / "text", [["", "one", None, "two", "three"]], ending)
    texts, tally = read(path, limit=2)
    assert texts == ["one", "two"]
    assert (tally.rows, tally.empty) == (4, 2)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_another_key_is_named_with_those_there_are(tmp_path: Path, ending: str):
    (path,) = write_texts(tmp_path / "text", [["one", "two"]], ending)
    told = refused(path, text_key="content")
    assert str(path) in told
    assert "`content`" in told
    assert "`id`, `text`, `score`" in told
    assert "`uuid`" in refused(path, id_key="uuid", keep_fraction=0.5)
    assert read(path, id_key="uuid")[0] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"text": "half \\ud800"}', "the line is no JSON"),
        (b'{"text": "caf\xe9"}', "the line is no JSON"),
        (b'{"text": "cut', "the line is no JSON"),
        (b'["text"]', "the line is no JSON object"),
        (b'{"text": 5}', "`text` is no text, but int"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes, told: str):
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "fine"}\r\n\n' + line + b"\n")
    assert refused(path).startswith(f"{path}:3: {told}")


@pytest.mark.parametrize("identity", [None, [1], True])
def test_a_document_without_an_id_is_refused_where_ids_choose(tmp_path: Path, identity: Any):
    path = tmp_path / "some.jsonl"
    write_rows(path, [{"id": 7, "text": "fine"}, {"id": identity, "text": "not"}])
    assert refused(path, keep_fraction=1.0).startswith(f"{path}:2: the document has no id in `id`")
    assert read(path)[0] == ["fine", "not"]


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "jsonl.xz", "parquet"])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, ending: str):
    (path,) = write_texts(tmp_path / "text", [[f"text {number}" * 9 for number in range(500)]], ending)
    path.write_bytes(path.read_bytes()[:-40])
    assert refused(path).startswith(f"{path}: cannot be read to its end: ")
    path.write_bytes(b"what is this?" * 5)
    assert refused(path).startswith(f"{path}: cannot be read to its end: ")


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "jsonl.xz", "jsonl.bz2"])
def test_packed_pieces_one_behind_the_other_are_read_to_the_last(tmp_path: Path, ending: str):
    one, two = write_texts(tmp_path / "text", [["one"], ["two"]], ending)
    one.write_bytes(one.read_bytes() + two.read_bytes())
    assert read(one)[0] == ["one", "two"]


def test_a_damaged_page_of_parquet_is_refused(tmp_path: Path):
    (path,) = write_texts(tmp_path / "text", [[f"text {number}" * 50 for number in range(500)]], "parquet")
    data = bytearray(path.read_bytes())
    data[1000:1400] = bytes(400)
    path.write_bytes(data)
    assert refused(path).startswith(f"{path}: cannot be read to its end: ")


def test_a_column_that_holds_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "some.parquet"
    write_rows(path, [{"text": 5, "id": "a"}])
    assert "the column `text` holds int64 and no text" in refused(path)


def test_only_the_columns_that_matter_are_read(tmp_path: Path):
    """A column that cannot be turned into Python's values would be noticed."""
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "some.parquet"
    times = pyarrow.array([2**50], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"text": ["fine"], "id": ["a"], "when": times}), path)
    with pytest.raises((OverflowError, ValueError)):
        parquet.read_table(path).to_pylist()
    assert read(path, keep_fraction=1.0)[0] == ["fine"]


def test_json_of_one_line_is_no_lines(tmp_path: Path):
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps([{"text": "a"}]))
    assert "the line is no JSON object" in refused(path)
