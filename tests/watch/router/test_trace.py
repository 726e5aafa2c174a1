"""The fast reader gives what `json` gives, of lines that Megatron's own tracer writes and of everything else."""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.watch.counts import LayerKey
from moekit.watch.router import digits, trace
from moekit.watch.router.sidecar import Part, load
from moekit.watch.router.trace import Call, Piece, calls, over, parse

FIELDS = {"step": 3, "stage": "pre_dispatch", "block": "decoder", "layer": 2, "rank": 1}
PIECES = trace.pieces


def record(rows: Any, **changes: Any) -> dict[str, Any]:
    topk = len(rows[0]) if isinstance(rows, list) and rows and isinstance(rows[0], list) else 2
    return {**FIELDS, "num_tokens": len(rows), "topk": topk, **changes, "top_indices": rows}


def line(rows: Any, **changes: Any) -> bytes:
    return json.dumps(record(rows, **changes)).encode() + b"\n"


def read(path: Path, num_experts: int | None = None) -> tuple[list[Call], Counter[str]]:
    skipped: Counter[str] = Counter()
    return list(calls(Piece(path, 0, path.stat().st_size), skipped, num_experts)), skipped


def rows_of(largest: int) -> st.SearchStrategy[list[list[int]]]:
    return st.integers(1, 9).flatmap(
        lambda k: st.lists(st.lists(st.integers(0, largest), min_size=k, max_size=k), min_size=1, max_size=60)
    )


@given(st.sampled_from([9, 99, 100, 999, 9999, 65535]).flatmap(rows_of), st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_what_json_reads(rows: list[list[int]], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "_BLOCK_BYTES", block)
        call = parse(line(rows))
    assert isinstance(call, Call)
    assert call.experts.tolist() == rows
    assert (call.step, call.layer, call.rank) == (3, LayerKey("decoder", None, 2), 1)


def expected(text: bytes) -> list[list[int]] | None:
    """What `json` makes of a record's rows, None where they are not those of a record."""
    try:
        rows = json.loads(text)["top_indices"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None
    tokens, topk = (json.loads(text).get(name) for name in ("num_tokens", "topk"))
    good = len(rows) == tokens and all(len(row) == topk for row in rows)
    return rows if good and all(type(n) is int and 0 <= n < 65536 for row in rows for n in row) else None


@given(rows_of(200), st.data())
@settings(max_examples=400, deadline=None)
def test_a_damaged_line_is_read_as_json_reads_it(rows: list[list[int]], data: st.DataObject) -> None:
    text = bytearray(line(rows))
    begin = text.index(b"[[")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(begin, len(text) - 4))
        kind = data.draw(st.sampled_from(("change", "remove", "insert", "swap")))
        byte = data.draw(st.sampled_from(b'0123456789, []-.eNax"{}\x00'))
        if kind == "change":
            text[place] = byte
        elif kind == "insert":
            text.insert(place, byte)
        elif kind == "swap":
            text[place], text[place + 1] = text[place + 1], text[place]
        else:
            del text[place]
    call, wanted = parse(bytes(text)), expected(bytes(text))
    assert (call.experts.tolist() if isinstance(call, Call) else None) == wanted


def damaged(text: bytes, chooser: random.Random) -> bytes:
    """One byte of the line changed, or one that its shape says."""
    place = chooser.randrange(len(text) - 1)
    return text[:place] + bytes([chooser.choice(b"0123456789, []")]) + text[place + 1 :]


@given(st.integers(0, 2**32), st.integers(1, 400))
@settings(max_examples=150, deadline=None)
def test_lines_read_together_are_as_each_by_itself(seed: int, batch: int) -> None:
    chooser = random.Random(seed)
    texts = []
    for step in range(12):
        topk = chooser.choice((2, 2, 2, 3))
        rows = [[chooser.randrange(120) for _ in range(topk)] for _ in range(chooser.randint(1, 4))]
        text = line(rows, step=step, num_tokens=len(rows) + chooser.choice((0,) * 20 + (1, -1)))
        texts.append(damaged(text, chooser) if chooser.random() < 0.05 else text)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(trace, "_BATCH_BYTES", batch * 10)
        path = Path(folder, "trace")
        path.write_bytes(b"".join(texts))
        found, skipped = read(path, 100)
    alone = [parse(text, 100) for text in texts]
    wanted = [one for one in alone if isinstance(one, Call)]
    assert [(one[:3], one.experts.tolist()) for one in found] == [(one[:3], one.experts.tolist()) for one in wanted]
    assert skipped == Counter(one for one in alone if isinstance(one, str))


def test_no_line_takes_a_row_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(line([[1, 2], [3, 4]], num_tokens=3) + line([[5, 6], [7, 0]], num_tokens=1) + line([[1, 2]]))
    found, skipped = read(path, 8)
    assert [call.experts.tolist() for call in found] == [[[1, 2]]]
    assert skipped == {trace.ROWS: 2}


def test_no_gap_between_numbers_but_a_comma_and_a_space() -> None:
    """Two gaps of one comma and none are as many commas; a number is not put together across a gap of one byte."""
    for text in (b"[[,  12 3]]", b"[[, 1 2]]", b"[[1 2, , 3]]", b"[[1, 2], 3, 4[]]"):
        assert digits.parse_rows(text, 1, len(text) - 1, (1, 2)) is None
        assert digits.parse_rows(text, 1, len(text) - 1, (2, 2)) is None
    for text in (b"[[7,12, , x3]]", b"[[7]12, , x3]]", b"[[7]12, , xx3]]", b"[[1 12, 1, x x3]]", b"[[,  12 3, x4]]"):
        assert digits.parse_rows(text, 1, len(text) - 1, (1, 3)) is None, text
    assert digits.parse_rows(b"[[07, 1]]", 1, 8, (1, 2)) is None
    assert digits.parse_rows(b"[[1, 1234]]", 1, 10, (1, 2)).tolist() == [[1, 1234]]  # type: ignore[union-attr]
    assert digits.parse_rows(b"[[12, 1]]", 1, 8, (1, 2)).tolist() == [[12, 1]]  # type: ignore[union-attr]
    assert digits.parse_rows(b"[[123, 1]]", 1, 9, (1, 2)).tolist() == [[123, 1]]  # type: ignore[union-attr]


HOSTILE: dict[str, list[bytes]] = {
    trace.NOT_JSON: [
        b"garbage\n",
        b'{"step": 3, "top_indices": [[1, 2]\n',
        line([[1, 2]])[:40] + line([[3, 4]]),
        b"[" * 100_000 + b"\n",
        line([[1, 2]]).replace(b"[[1", b"[[1 2"),
        line([[1, 2]]).replace(b"[[1, 2]]", b"[[" + b"9" * 5000 + b", 2]]"),
        b"\xff\xfe\x00\n",
        b"__import__('os').abort()\n",
    ],
    trace.FOREIGN: [
        b"{}\n",
        b"17\n",
        b"null\n",
        b'{"iter": 10, "block": "decoder", "layer": 0, "tpe": [[5, 3]]}\n',
        line([[1, 2]], step="3"),
        line([[1, 2]], step=True),
        line([[1, 2]], step=-1),
        line([[1, 2]], layer=1.0),
        line([[1, 2]], block="encoder"),
        line([[1, 2]], mtp_idx=False),
        line([[1, 2]], topk=0),
        line([[1, 2.0]]),
        line([[1, float("nan")]]),
        line([[1, float("inf")]]),
        line([[1, None]]),
        line([[1, True]]),
        line([["1", 2]]),
        line([[1, [2]]]),
        line("[[1, 2]]", num_tokens=1),
        line({"0": [1, 2]}),
        line([1, 2]),
    ],
    trace.ROWS: [
        line([[1, 2]], num_tokens=2),
        line([[1, 2]], topk=1),
        line([[1, 2], [3]]),
        line([[1, 2]], num_tokens=1 << 40, topk=1 << 40),
        line([[1, 2], [3, 4]], num_tokens=1, topk=4),
        line([[1, 2], [3, 4]], num_tokens=4, topk=1),
    ],
    trace.RANGE: [line([[1, 8]]), line([[-1, 2]]), line([[1, 10**30]]), line([[1, 65536]])],
}


@pytest.mark.parametrize(("reason", "text"), [(reason, text) for reason, texts in HOSTILE.items() for text in texts])
def test_what_cannot_be_used_is_counted_and_what_follows_is_read(tmp_path: Path, reason: str, text: bytes) -> None:
    path = tmp_path / "router_trace_rank1.jsonl"
    path.write_bytes(line([[0, 7]]) + text + b"\n" + line([[5, 6]]))
    found, skipped = read(path, 8)
    assert [call.experts.tolist() for call in found] == [[[0, 7]], [[5, 6]]]
    assert skipped == {reason: 1}


def test_other_spellings_are_records_too() -> None:
    compact = json.dumps(record([[1, 2], [3, 4]]), separators=(",", ":")).encode() + b"\r\n"
    first = json.dumps({"top_indices": [[1, 2], [3, 4]], **record([[1, 2], [3, 4]])}).encode() + b"\n"
    for text in (compact, first):
        assert parse(text, 8).experts.tolist() == [[1, 2], [3, 4]]  # type: ignore[union-attr]
    assert parse(line([], num_tokens=0), 8).experts.shape == (0, 2)  # type: ignore[union-attr]


def test_half_a_line_and_one_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"
    path.write_bytes(line([[0, 7]]) + line([[0, 7]])[:-10])
    assert read(path)[1] == {trace.HALF: 1}
    monkeypatch.setattr(trace, "LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr(trace, "_BUFFER_BYTES", 64)
    path.write_bytes(line([[0, 7]]) + b"x" * 5000 + b"\n" + line([[1, 2]]) + b"y" * 3000)
    found, skipped = read(path)
    assert len(found) == 2
    assert skipped == {trace.TOO_LONG: 2}
    path.write_bytes(b"")
    assert read(path) == ([], Counter())


def steps_of(found: Iterator[Call]) -> list[int]:
    return [call.step for call in found]


def test_pieces_together_have_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    chooser = random.Random(0)
    texts = [line([[0, 1]] * chooser.randint(1, 30), step=step) for step in range(40)]
    path.write_bytes(b"".join(texts))
    other.write_bytes(b"junk\n" + line([[1, 2]], step=99))
    for size in (1, 7, 100, 1000, 10**6, *(len(texts[0]) + change for change in (-1, 0, 1))):
        monkeypatch.setattr(trace, "pieces", partial(PIECES, size=size))
        skipped: Counter[str] = Counter()
        found = [step for steps in over([path, other], steps_of, skipped, workers=1) for step in steps]
        assert found == [*range(40), 99]
        assert skipped == {trace.NOT_JSON: 1}


def test_processes_give_the_same_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"".join(line([[0, 1]] * 20, step=step) for step in range(200)) + b"junk\n")
    monkeypatch.setattr(trace, "pieces", partial(PIECES, size=4000))
    results = []
    for workers in (1, 2):
        skipped: Counter[str] = Counter()
        results.append((list(over([path], steps_of, skipped, workers=workers)), skipped))
    assert results[0] == results[1]
    assert len(results[0][0]) > 5
    assert results[0][1] == {trace.NOT_JSON: 1}


def test_sidecars(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [0.15625, 3.0e38]], np.float32)
    path = tmp_path / "logits_rank1.bin"
    path.write_bytes(b"\0" * 6 + (values.view(np.uint32) >> 16).astype("<u2").tobytes())
    call = parse(line([[0], [1]], logit_offset=6, logit_bytes=8, logit_shape=[2, 2]))
    assert isinstance(call, Call)
    assert call.logits == Part(6, 2, 2)
    got = load(path, call.logits)
    assert got is not None
    np.testing.assert_allclose(got, values, rtol=2**-8)
    assert load(path, Part(8, 2, 2)) is None
    assert load(path, Part(0, 1 << 40, 1 << 40)) is None
    assert load(tmp_path / "none", call.logits) is None
    for wrong in ({"logit_bytes": 9}, {"logit_shape": [2, -2]}, {"logit_shape": [3, 2]}, {"logit_offset": "0"}):
        said = {"logit_offset": 6, "logit_bytes": 8, "logit_shape": [2, 2], **wrong}
        assert parse(line([[0], [1]], **said)).logits is None  # type: ignore[union-attr]


@pytest.mark.megatron
def test_megatrons_own_tracer(tmp_path: Path) -> None:
    """The same as its own reader, records and logits, with an MTP layer."""
    torch = pytest.importorskip("torch")
    tracing = pytest.importorskip("megatron.core.transformer.moe.router_trace")
    tracer = tracing.RouterTracer(str(tmp_path), 10, 1, training_mode=True, capture_logits=True)
    hidden = torch.randn(12, 16)
    weight = torch.randn(130, 16)
    router = SimpleNamespace(topk=3, gating=lambda states: states @ weight.T)
    for identity in (("decoder", None, 0), ("mtp", 1, 0)):
        chosen = (hidden @ weight.T).topk(3).indices
        chosen_map = torch.zeros(12, 130, dtype=torch.bool).scatter(1, chosen, True)
        tracer._record(router, (hidden,), (chosen_map, chosen_map), identity)
    tracer.advance_step(7)
    tracer.flush()
    path = tmp_path / "router_trace_rank1.jsonl"
    found, skipped = read(path, 130)
    assert not skipped
    assert [call.layer for call in found] == [LayerKey("decoder", None, 0), LayerKey("mtp", 1, 0)]
    for call, text in zip(found, path.read_text().splitlines(), strict=True):
        theirs = json.loads(text)
        assert call.experts.tolist() == theirs["top_indices"]
        assert call.step == 7
        assert call.logits is not None
        logits = load(tmp_path / "logits_rank1.bin", call.logits)
        assert torch.equal(torch.from_numpy(logits), tracing.load_logits_for_record(theirs, str(tmp_path)).float())
