"""`moekit data look`: a shard's first documents as text, and how long its documents are.

Everything is mapped and read in pieces, so a shard of any size takes the same memory. Text is made safe for terminals:
what could move a cursor or turn the writing around is shown as its escape.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.data.named import Facts, facts_of
from moekit.data.shards import HEADER, MAGIC, TOKEN_TYPES, bin_path, idx_path
from moekit.problems import MoekitError, error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_DOCUMENTS = 1 << 20
"""Lengths read at a time."""
SHORT = 1 << 16
"""Lengths below this are counted in one array, the few others by sorting."""
LINES = 6
"""Of each of the first documents, so many lines are shown."""


@dataclass(frozen=True)
class Index:
    """A shard's index and tokens, mapped."""

    prefix: Path
    lengths: NDArray[np.int32]
    """Tokens in each document, the end-of-document token included. (document,)"""
    pointers: NDArray[np.int64]
    """Where each document begins in the .bin, in bytes. (document,)"""
    tokens: NDArray[Any]
    """All tokens. (token,)"""

    def document(self, number: int, most: int | None = None) -> list[int]:
        """A document's token ids; of a long one the first `most`."""
        first = int(self.pointers[number]) // self.tokens.dtype.itemsize
        length = int(self.lengths[number])
        return [int(token) for token in self.tokens[first : first + min(length, most or length)]]


@dataclass(frozen=True)
class Lengths:
    """How many documents have which length."""

    values: NDArray[np.int64]
    """The lengths that occur, in tokens, ascending."""
    counts: NDArray[np.int64]
    """Documents of each."""

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return int((self.values * self.counts).sum())

    def at(self, share: float) -> int:
        """The least length that this share of the documents does not exceed, in tokens: 0.5 is the median."""
        import numpy as np

        return int(self.values[np.searchsorted(np.cumsum(self.counts), share * self.documents)])

    def share_in_longer(self, length: int) -> float:
        """The share of the tokens that lie in documents of more than `length` tokens."""
        longer = self.values > length
        return float((self.values * self.counts)[longer].sum() / self.tokens)

    def bins(self) -> list[tuple[int, int, int, int]]:
        """(first length, last length, documents, tokens) of each power of two, from the shortest to the longest."""
        found = []
        exponents = range(int(self.values[0]).bit_length() - 1, int(self.values[-1]).bit_length())
        for low in (1 << exponent for exponent in exponents):
            inside = (self.values >= low) & (self.values < 2 * low)
            tokens = (self.values * self.counts)[inside].sum()
            found.append((low, 2 * low - 1, int(self.counts[inside].sum()), int(tokens)))
        return found


def open_index(prefix: Path) -> Index:
    """Map a shard, after as much of a check as reading it needs; `moekit data check` does the rest.

    Raises:
        MoekitError: a file is missing, is no index of Megatron's, or the two do not belong together.
    """
    import numpy as np

    index, tokens = idx_path(prefix), bin_path(prefix)
    try:
        with index.open("rb") as file:
            header = file.read(HEADER.size)
        idx_bytes, bin_bytes = index.stat().st_size, tokens.stat().st_size
    except OSError as reason:
        what = f"cannot read: {reason.strerror}"
        raise error(what, "a shard is two files, `.bin` and `.idx`", str(reason.filename)) from None
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise _unreadable(index, "this is no index of Megatron's: its first bytes are wrong")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != 1 or code not in TOKEN_TYPES:
        raise _unreadable(index, f"it has version {version} and token type {code}; moekit reads version 1, type 4 or 8")
    if idx_bytes != HEADER.size + 12 * sequences + 8 * entries or not sequences:
        what = f"it has {idx_bytes:,} bytes, but its header lists {sequences:,} documents"
        raise _unreadable(index, what if sequences else "it lists no documents")
    kind = np.dtype(TOKEN_TYPES[code])
    lengths = np.memmap(index, "<i4", "r", HEADER.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
    if int(pointers[-1]) + int(lengths[-1]) * kind.itemsize != bin_bytes:
        raise _unreadable(index, f"its last document does not end where the .bin does, at {bin_bytes:,} bytes")
    return Index(prefix, lengths, pointers, np.memmap(tokens, kind, "r"))


def count_lengths(index: Index) -> Lengths:
    """How long a shard's documents are, in constant memory."""
    import numpy as np

    short, long = np.zeros(SHORT, np.int64), (np.zeros(0, np.int64), np.zeros(0, np.int64))
    for start in range(0, len(index.lengths), CHUNK_DOCUMENTS):
        chunk = np.asarray(index.lengths[start : start + CHUNK_DOCUMENTS])
        if chunk.min() < 1:
            raise _unreadable(idx_path(index.prefix), f"document {start + int(chunk.argmin())} has no token")
        short += np.bincount(chunk[chunk < SHORT], minlength=SHORT)
        values, counts = np.unique(chunk[chunk >= SHORT], return_counts=True)
        long = _merged(np.concatenate((long[0], values)), np.concatenate((long[1], counts)))
    occurring = np.flatnonzero(short)
    return Lengths(np.concatenate((occurring, long[0])), np.concatenate((short[occurring], long[1])))


def _merged(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    import numpy as np

    distinct, place = np.unique(values, return_inverse=True)
    merged = np.zeros(len(distinct), np.int64)
    np.add.at(merged, place, counts)
    return distinct, merged


@dataclass(frozen=True)
class Reader:
    """Token ids to text; without a tokenizer, the ids themselves."""

    decoder: Any
    """The `tokenizers.Tokenizer`, or None."""
    said: str
    """What the reader of the text has to know of it; empty where there is nothing."""

    def text(self, tokens: list[int]) -> str:
        """The tokens as text, special ones spelled out."""
        if self.decoder is None:
            return " ".join(map(str, tokens))
        return str(self.decoder.decode(tokens, skip_special_tokens=False))


def reader_of(prefix: Path, given: Path | None) -> Reader:
    """What decodes a shard: the tokenizer of the folder `given`, else the one that the shard's data set names.

    Raises:
        MoekitError: the given folder has no readable `tokenizer.json`, or `tokenizers` is not installed.
    """
    facts = facts_of(prefix.absolute().parent) if given is None else Facts(given)
    if facts.tokenizer is None:
        return Reader(None, "shown as token ids, as no tokenizer is known: `--tokenizer DIR` gives one")
    file = facts.tokenizer / "tokenizer.json"
    if not file.is_file():
        raise error(
            "there is no `tokenizer.json` in this folder", "`--tokenizer` takes a tokenizer's folder", str(given)
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise error("showing documents needs `tokenizers`", "run `pip install 'moekit[data]'`") from None
    try:
        decoder = Tokenizer.from_file(str(file))
    except Exception as reason:  # tokenizers raises no other class
        raise error(f"this is no tokenizer: {reason}", "give another with `--tokenizer`", str(file)) from None
    changed = facts.tokenizer_sha256 not in (None, hashlib.sha256(file.read_bytes()).hexdigest())
    return Reader(decoder, f"{file} is another than these tokens were made with" if changed else "")


def visible(text: str, keep_lines: bool = False) -> str:
    """Text without anything that a terminal obeys: other characters are shown as escapes such as `\\x1b`."""
    shown = (
        letter if letter.isprintable() or (keep_lines and letter == "\n") else ascii(letter)[1:-1] for letter in text
    )
    return "".join(shown)


def cut(text: str, width: int) -> str:
    """The beginning of a text that fits into `width` columns, with `...` where something is left out."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 3)).rstrip(" ") + "..."


def look(
    prefix: Path, tokenizer: Path | None, documents: int, document: int | None, sequence_length: int, width: int | None
) -> dict[str, Any]:
    """Everything that is shown of a shard, for `--json`.

    Args:
        tokenizer: the folder of the tokenizer to decode with; None for the data set's own.
        documents: how many to show, from the first.
        document: the number of the only one to show, whole, from 0; None for the first ones.
        sequence_length: the tokens of a training sequence, to set lengths against.
        width: columns that each text may take; None for whole texts.

    Raises:
        MoekitError: the shard or the tokenizer cannot be read, or there is no such document.
    """
    index = open_index(prefix)
    lengths, total = count_lengths(index), len(index.lengths)
    if document is not None and document >= total:
        raise error(f"there is no document {document}: this shard has {total:,}, from 0", "", str(idx_path(prefix)))
    numbers = range(min(documents, total)) if document is None else [document]
    reader = reader_of(prefix, tokenizer) if numbers else Reader(None, "")
    most = None if width is None or document is not None else LINES * width
    return {
        "shard": str(prefix),
        "documents": total,
        "tokens": lengths.tokens,
        "bytes_per_token": index.tokens.dtype.itemsize,
        "median": lengths.at(0.5),
        "p90": lengths.at(0.9),
        "max": int(lengths.values[-1]),
        "sequence_length": sequence_length,
        "share_in_longer": lengths.share_in_longer(sequence_length),
        "bins": [dict(zip(("from", "to", "documents", "tokens"), one, strict=True)) for one in lengths.bins()],
        "note": reader.said,
        "texts": [
            {
                "document": number,
                "tokens": int(index.lengths[number]),
                "text": reader.text(index.document(number, most)),
            }
            for number in numbers
        ],
    }


def rendered(seen: dict[str, Any], width: int, whole: bool) -> str:
    """What `look` found, as lines of `width` columns; a `whole` text keeps its line ends and is not cut."""
    lines = [visible(seen["shard"])]
    lines.append(
        f"  {seen['documents']:,} documents, {seen['tokens']:,} tokens of {seen['bytes_per_token']} bytes each"
    )
    if seen["note"]:
        lines.append(f"  {visible(seen['note'])}")
    for one in seen["texts"]:
        lines += ["", f"document {one['document']}, {one['tokens']:,} tokens"]
        text = visible(one["text"], keep_lines=True)
        lines += [text] if whole else _beginning(text, width)
    return "\n".join([*lines, "", *_histogram(seen, width)])


def _beginning(text: str, width: int) -> list[str]:
    """The first lines of a text, each cut to the width."""
    first, *more = text.split("\n", LINES)
    return [cut(f"  {line}", width).rstrip(" ") for line in (first, *more[: LINES - 1])] + ["  ..."] * (
        len(more) == LINES
    )


def _histogram(seen: dict[str, Any], width: int) -> list[str]:
    """Documents by length, a bar each power of two, and what that means for sequences."""
    bins = seen["bins"]
    most, names = max(one["documents"] for one in bins), [f"{one['from']:,}-{one['to']:,}" for one in bins]
    left = max(map(len, names))
    right = len(f"{most:,}")
    bar = max(10, width - left - right - 14)
    lines = [f"{'tokens':>{left}}  {'documents':<{bar}} {'':>{right}}  of tokens"]
    for name, one in zip(names, bins, strict=True):
        drawn = "█" * round(bar * one["documents"] / most) or ("▏" if one["documents"] else "")
        lines.append(
            f"{name:>{left}}  {drawn:<{bar}} {one['documents']:>{right},}  {one['tokens'] / seen['tokens']:>8.1%}"
        )
    lines.append(f"a document's length: median {seen['median']:,}, 90 % at most {seen['p90']:,}, max {seen['max']:,}")
    share, length = seen["share_in_longer"], seen["sequence_length"]
    return [*lines, f"{share:.1%} of the tokens are in documents longer than a sequence of {length:,}"]


def _unreadable(file: Path, what: str) -> MoekitError:
    return error(what, "`moekit data check` says what is wrong with a data set", str(file))
