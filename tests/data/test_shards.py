"""Each kind of damage to a token file is found and named; each of these messages is checked whole."""

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from moekit.data.shards import (
    HEADER,
    MAGIC,
    bin_path,
    check_tokens,
    held_out_unigram_entropy_nats,
    idx_path,
    open_shard,
    split_documents,
)
from moekit.problems import MoekitError

DOCUMENTS = [[5, 6, 0], [7, 0], [9, 9, 9, 0], [8, 0]]


def write_shard(
    prefix: Path,
    documents: list[list[int]],
    code: int = 8,
    version: int = 1,
    pointer_shift: int = 0,
    bounds: list[int] | None = None,
) -> Path:
    letter, token_bytes = ("H", 2) if code == 8 else ("i", 4)
    lengths = [len(document) for document in documents]
    pointers = [sum(lengths[:at]) * token_bytes + pointer_shift * bool(at) for at in range(len(lengths))]
    bounds = list(range(len(documents) + 1)) if bounds is None else bounds
    index = HEADER.pack(MAGIC, version, code, len(documents), len(bounds))
    index += struct.pack(f"<{len(lengths)}i{len(pointers)}q{len(bounds)}q", *lengths, *pointers, *bounds)
    idx_path(prefix).write_bytes(index)
    tokens = [token for document in documents for token in document]
    bin_path(prefix).write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    return prefix


@pytest.mark.parametrize("code", [4, 8])
def test_a_whole_pair_is_read(tmp_path: Path, code: int):
    shard = open_shard(write_shard(tmp_path / "a.b_00000_tokens", DOCUMENTS, code))

    check_tokens(shard, end_of_document=0, vocabulary=10)
    assert (shard.documents, shard.tokens, shard.lengths.tolist()) == (4, 11, [3, 2, 4, 2])
    assert shard.read().tolist() == [5, 6, 0, 7, 0, 9, 9, 9, 0, 8, 0]


def change(edit: Callable[[Path], object]) -> Callable[[Path], Path]:
    def apply(prefix: Path) -> Path:
        edit(write_shard(prefix, DOCUMENTS))
        return prefix

    return apply


def cut(path: Path, size_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:size_bytes])


DAMAGES: list[tuple[Callable[[Path], Path], str]] = [
    (change(lambda prefix: cut(idx_path(prefix), 20)), "is no index of Megatron's: its first bytes are wrong"),
    (
        change(lambda prefix: idx_path(prefix).write_bytes(b"x" * 122)),
        "is no index of Megatron's: its first bytes are wrong",
    ),
    (
        lambda prefix: write_shard(prefix, DOCUMENTS, version=2),
        "has version 2 and token type 8; moekit reads version 1 with type 4 or 8",
    ),
    (
        lambda prefix: write_shard(prefix, DOCUMENTS, code=6),
        "has version 1 and token type 6; moekit reads version 1 with type 4 or 8",
    ),
    (change(lambda prefix: cut(idx_path(prefix), 121)), "has 121 bytes, but its header says 122"),
    (lambda prefix: write_shard(prefix, []), "lists no documents"),
    (
        lambda prefix: write_shard(prefix, DOCUMENTS, pointer_shift=2),
        "has document offsets that do not follow from the document lengths",
    ),
    (
        lambda prefix: write_shard(prefix, [[1, 0], []]),
        "has document offsets that do not follow from the document lengths",
    ),
    (
        lambda prefix: write_shard(prefix, DOCUMENTS, bounds=[0, 2, 4]),
        "has documents of several sequences; moekit reads one sequence a document",
    ),
    (change(lambda prefix: cut(bin_path(prefix), 21)), "lists 22 bytes of tokens, but the .bin has 21 bytes"),
    (change(lambda prefix: cut(bin_path(prefix), 0)), "lists 22 bytes of tokens, but the .bin has 0 bytes"),
    (
        lambda prefix: write_shard(prefix, [[1, 0], [2, 3], [4, 0]]),
        "lists document 1, which does not end with the end-of-document token 0",
    ),
    (
        lambda prefix: write_shard(prefix, [[1, 0], [2, 0, 3, 0]]),
        "lists document 1, which has, before its end, the end-of-document token 0",
    ),
    (
        lambda prefix: write_shard(prefix, [[1, 0], [10, 0]]),
        "lists document 1 with the token 10; the vocabulary ends at 9",
    ),
    (
        lambda prefix: write_shard(prefix, [[1, 0], [-1, 0]], code=4),
        "lists document 1 with the token -1; the vocabulary ends at 9",
    ),
]


@pytest.mark.parametrize(("make", "what"), DAMAGES)
def test_damage_is_named(tmp_path: Path, make: Callable[[Path], Path], what: str):
    prefix = make(tmp_path / "d")

    with pytest.raises(MoekitError) as refused:
        check_tokens(open_shard(prefix), end_of_document=0, vocabulary=10)

    assert str(refused.value) == f"{prefix}.idx: the file {what}\n    hint: prepare this data again"


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str):
    prefix = write_shard(tmp_path / "d", DOCUMENTS)
    Path(f"{prefix}.{suffix}").unlink()

    with pytest.raises(MoekitError) as refused:
        open_shard(prefix)

    assert str(refused.value) == (
        f"{prefix}.{suffix}: cannot read: No such file or directory\n    hint: prepare this data again"
    )


def test_the_unigram_entropy_is_that_of_the_held_out_documents_only(tmp_path: Path):
    prefix = write_shard(tmp_path / "d", DOCUMENTS)

    # The third document is held out: three of one token, one of another.
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert held_out_unigram_entropy_nats(prefix, "50,25,25") == pytest.approx(expected, abs=1e-12)


def test_a_split_without_validation_is_refused(tmp_path: Path):
    prefix = write_shard(tmp_path / "d", DOCUMENTS)

    with pytest.raises(MoekitError) as refused:
        held_out_unigram_entropy_nats(prefix, "100,0,0")

    assert str(refused.value) == (
        "error: the split `100,0,0` of 4 documents holds none out for validation\n    hint: try `95,5,0`"
    )


def test_a_split_covers_each_document_once():
    assert split_documents(238, "95,5,0") == [range(226), range(226, 238), range(238, 238)]
    assert split_documents(238, "100") == [range(238), range(238, 238), range(238, 238)]
