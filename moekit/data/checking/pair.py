"""Check one pair of token files in one pass, in constant memory: all that Megatron relies on and does not look at.

Megatron checks the first 18 bytes of an index, and little else: a .bin that is too short is noticed when training
reaches the gap, and with `--no-mmap-bin-files` never (megatron/core/datasets/indexed_dataset.py:217-500). Here the
index is read in blocks of documents, and each block's tokens after it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from moekit.data.shards import HEADER, MAGIC, TOKEN_TYPES, bin_path, idx_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_DOCUMENTS = 1 << 17
CHUNK_BYTES = 1 << 20
"""Tokens read at a time: what stays in a core's cache while it is looked at."""

Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


@dataclass(frozen=True)
class Expected:
    """What the tokens should be; None is not checked."""

    token_type: str | None = None
    """numpy's name, as `Plan.token_type`."""
    end_of_document_id: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class Pair:
    """What a pair holds, as far as it could be read."""

    problem: str | None
    """The first thing that is wrong with it, a clause that follows the pair's name; None for a sound pair."""
    documents: int = 0
    tokens: int = 0
    token_type: str = ""
    largest_id: int = -1
    bin_sha256: str | None = None
    """With `sha256`."""
    idx_sha256: str | None = None


class _Damaged(Exception):
    """What is wrong with the pair; never leaves this file."""


def check_pair(prefix: Path, expected: Expected, sha256: bool = False, progress: Progress = lambda _: None) -> Pair:
    """Read a pair once and say what it holds, or what is the first thing wrong with it.

    Args:
        prefix: the path without `.bin` and `.idx`.
        expected: what the plan says of its tokens.
        sha256: take both files' on the way. A damaged pair has them too, where both can be read.
        progress: called for each MiB or so.
    """
    idx_sha256 = bin_sha256 = None
    try:
        with idx_path(prefix).open("rb") as index, bin_path(prefix).open("rb", buffering=0) as tokens:
            if sha256:
                idx_sha256 = hashlib.file_digest(index, "sha256").hexdigest()
            hasher = hashlib.sha256() if sha256 else None
            try:
                pair = _check(index, tokens, expected, hasher, progress)
            except _Damaged as damage:
                if sha256:
                    tokens.seek(0)
                    bin_sha256 = hashlib.file_digest(tokens, "sha256").hexdigest()
                return Pair(str(damage), bin_sha256=bin_sha256, idx_sha256=idx_sha256)
            return replace(pair, bin_sha256=hasher.hexdigest() if hasher else None, idx_sha256=idx_sha256)
    except FileNotFoundError as problem:
        return Pair(f"lacks {Path(str(problem.filename)).name}")
    except OSError as problem:
        return Pair(f"cannot be read: {problem.strerror}")


def _check(index: BinaryIO, tokens: FileIO, expected: Expected, hasher: Any, progress: Progress) -> Pair:
    token_type, documents = _header(index, expected)
    bin_bytes = os.fstat(tokens.fileno()).st_size
    reader = _Tokens(tokens, token_type, expected, hasher, progress)
    for first, ends in _blocks(index, documents, reader.token_bytes):
        if ends[-1] * reader.token_bytes > bin_bytes:
            least = int(ends[-1]) * reader.token_bytes
            raise _Damaged(f"has a .bin of {bin_bytes:,} bytes, and its .idx lists {least:,} or more")
        reader.read(first, ends)
    if reader.tokens * reader.token_bytes != bin_bytes:
        listed = reader.tokens * reader.token_bytes
        raise _Damaged(f"has a .bin of {bin_bytes:,} bytes, and its .idx lists {listed:,}")
    return Pair(None, documents, reader.tokens, token_type, reader.largest_id)


def _header(index: BinaryIO, expected: Expected) -> tuple[str, int]:
    """The token type and the number of documents, once the index's size is as both say."""
    index.seek(0)
    header, size_bytes = index.read(HEADER.size), os.fstat(index.fileno()).st_size
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise _Damaged("has an .idx that is no index of Megatron's: its first bytes are wrong")
    _, version, code, documents, bounds = HEADER.unpack(header)
    if version != 1 or code not in TOKEN_TYPES:
        raise _Damaged(f"has an .idx of version {version} with token type {code}, not version 1 with type 4 or 8")
    if bounds != documents + 1:
        raise _Damaged(f"has an .idx of {documents:,} sequences and {bounds:,} bounds of documents, not one more")
    if size_bytes != (expected_bytes := HEADER.size + 12 * documents + 8 * bounds):
        raise _Damaged(f"has an .idx of {size_bytes:,} bytes, and its header says {expected_bytes:,}")
    token_type = TOKEN_TYPES[code]
    if expected.token_type not in (None, token_type):
        raise _Damaged(f"has tokens of type {token_type}, and the plan's are {expected.token_type}")
    return token_type, documents


def _blocks(index: BinaryIO, documents: int, token_bytes: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The documents' ends in tokens, a block of documents at a time with the number of its first one."""
    import numpy as np

    def read(kind: str, start: int, first: int, count: int) -> NDArray[Any]:
        index.seek(start + first * np.dtype(kind).itemsize)
        found = np.fromfile(index, kind, count)
        if len(found) != count:
            raise _Damaged("has an .idx that got shorter while it was read")
        return found

    pointers_at = HEADER.size + 4 * documents
    bounds_at = pointers_at + 8 * documents
    tokens = 0
    for first in range(0, documents, BLOCK_DOCUMENTS):
        count = min(BLOCK_DOCUMENTS, documents - first)
        lengths = read("<i4", HEADER.size, first, count)
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        if lengths.min() < 1:
            raise _Damaged(f"lists document {first + int(np.argmax(lengths < 1)):,} with {lengths.min():,} tokens")
        pointers = read("<i8", pointers_at, first, count)
        if (wrong := pointers != (ends - lengths) * token_bytes).any():
            where = first + int(np.argmax(wrong))
            raise _Damaged(f"has a pointer to document {where:,} that does not follow from the lengths before it")
        bounds = read("<i8", bounds_at, first, count + 1)
        if (wrong := bounds != np.arange(first, first + count + 1)).any():
            where = first + int(np.argmax(wrong))
            raise _Damaged(f"has a bound of documents, number {where:,}, that is not {where:,}")
        tokens = int(ends[-1])
        yield first, ends
    if not documents and read("<i8", bounds_at, 0, 1)[0] != 0:
        raise _Damaged("lists no documents, and a bound of them that is not 0")


class _Tokens:
    """Reads a .bin from its beginning to its end, and looks at each token once."""

    def __init__(self, file: FileIO, token_type: str, expected: Expected, hasher: Any, progress: Progress) -> None:
        import numpy as np

        self.file, self.expected, self.hasher, self.progress = file, expected, hasher, progress
        self.token_bytes = np.dtype(token_type).itemsize
        self.buffer = memoryview(bytearray(CHUNK_BYTES))
        # Unsigned, so that a negative id is one that is too large.
        self.view = np.frombuffer(self.buffer, token_type.replace("i", "u"))
        self.tokens = 0
        self.largest_id = -1

    def read(self, first_document: int, ends: NDArray[np.int64]) -> None:
        """Read on to the end of these documents, the first of which has this number."""
        import numpy as np

        document = 0
        while self.tokens < ends[-1]:
            count = min(len(self.view), int(ends[-1]) - self.tokens)
            size_bytes = count * self.token_bytes
            chunk = self.buffer[:size_bytes]
            got = 0
            while got < size_bytes:
                if not (more := self.file.readinto(chunk[got:])):
                    raise _Damaged("has a .bin that got shorter while it was read")
                got += more
            if self.hasher:
                self.hasher.update(chunk)
            until = int(np.searchsorted(ends, self.tokens + count, "right"))
            self._look(self.view[:count], ends[document:until] - self.tokens - 1, first_document + document)
            self.tokens += count
            document = until
            self.progress(size_bytes)

    def _look(self, tokens: NDArray[Any], ends: NDArray[np.int64], document: int) -> None:
        """Check a chunk, in which the documents from `document` on end at these places."""
        import numpy as np

        largest = int(tokens.max())
        self.largest_id = max(self.largest_id, largest)
        vocab_size, end = self.expected.vocab_size, self.expected.end_of_document_id
        if vocab_size is not None and largest >= vocab_size:
            where = document + int(np.searchsorted(ends, int(np.argmax(tokens >= vocab_size))))
            signed = largest if largest < 1 << 31 or self.token_bytes == 2 else largest - (1 << 32)
            raise _Damaged(f"has token {signed:,} in document {where:,}, and the vocabulary ends at {vocab_size - 1:,}")
        if end is None:
            return
        is_end = tokens == end
        if np.count_nonzero(is_end) == len(ends) and is_end[ends].all():
            return
        if not is_end[ends].all():
            where = document + int(np.argmin(is_end[ends]))
            raise _Damaged(f"has a document, number {where:,}, that does not end with the end token {end}")
        is_end[ends] = False
        where = document + int(np.searchsorted(ends, int(np.argmax(is_end))))
        raise _Damaged(f"has the end token {end} before the end of document {where:,}")
