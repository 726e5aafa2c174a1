"""Read and check Megatron's token files: PREFIX.bin holds the tokens, PREFIX.idx where each document lies in it.

The layout is that of megatron/core/datasets/indexed_dataset.py:122-330. Megatron itself notices little of what can be
wrong with a pair, and a cut-off .bin only when training reaches the gap; these checks notice it before.
"""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.problems import MoekitError, error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token type, sequences, entries of the document index (one more than documents)."""
TOKEN_TYPES = {4: "<i4", 8: "<u2"}
"""Megatron's codes of the two types that token ids are written in."""


@dataclass(frozen=True)
class Shard:
    """A .bin/.idx pair whose sizes and offsets agree. A sequence is a document: that is how datatrove writes them."""

    prefix: Path
    token_type: str
    """numpy's name of the type, little-endian."""
    lengths: NDArray[np.int64]
    """Tokens in each document, the end-of-document token included. (document,)"""

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many tokens there are, the end-of-document tokens included."""
        return int(self.lengths.sum())

    def read(self) -> NDArray[Any]:
        """All tokens, one document after the other, mapped and not loaded. (token,)"""
        import numpy as np

        return np.memmap(bin_path(self.prefix), dtype=self.token_type, mode="r")


def bin_path(prefix: Path) -> Path:
    """`PREFIX.bin`; the prefix itself may hold dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`PREFIX.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def open_shard(prefix: Path) -> Shard:
    """Read the index of a pair and check everything that needs no look at the tokens.

    Raises:
        MoekitError: a file is missing or too short, or index and tokens do not belong together.
    """
    import numpy as np

    try:
        index = idx_path(prefix).read_bytes()
        bin_bytes = bin_path(prefix).stat().st_size
    except OSError as problem:
        raise error(f"cannot read: {problem.strerror}", "prepare this data again", str(problem.filename)) from None

    if len(index) < HEADER.size or not index.startswith(MAGIC):
        raise _damaged(prefix, "is no index of Megatron's: its first bytes are wrong")
    _, version, code, sequences, entries = HEADER.unpack_from(index)
    if version != 1 or code not in TOKEN_TYPES:
        raise _damaged(prefix, f"has version {version} and token type {code}; moekit reads version 1 with type 4 or 8")
    expected_bytes = HEADER.size + 12 * sequences + 8 * entries
    if len(index) != expected_bytes:
        raise _damaged(prefix, f"has {len(index):,} bytes, but its header says {expected_bytes:,}")
    if sequences == 0:
        raise _damaged(prefix, "lists no documents")

    token_bytes = np.dtype(TOKEN_TYPES[code]).itemsize
    lengths = np.frombuffer(index, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)
    bounds = np.frombuffer(index, "<i8", entries, HEADER.size + 12 * sequences)
    if lengths.min() < 1 or not np.array_equal(pointers, (np.cumsum(lengths) - lengths) * token_bytes):
        raise _damaged(prefix, "has document offsets that do not follow from the document lengths")
    if not np.array_equal(bounds, np.arange(sequences + 1)):
        raise _damaged(prefix, "has documents of several sequences; moekit reads one sequence a document")
    if bin_bytes != lengths.sum() * token_bytes:
        raise _damaged(
            prefix, f"lists {lengths.sum() * token_bytes:,} bytes of tokens, but the .bin has {bin_bytes:,} bytes"
        )
    return Shard(prefix, TOKEN_TYPES[code], lengths)


def check_tokens(shard: Shard, end_of_document: int, vocabulary: int) -> None:
    """Check that each document ends with its only end-of-document token and holds no id outside the vocabulary.

    Raises:
        MoekitError: one of these does not hold; the first document concerned is named, counted from 0.
    """
    import numpy as np

    tokens = shard.read()
    ends = np.cumsum(shard.lengths) - 1
    found = np.flatnonzero(tokens == end_of_document)
    if not np.array_equal(found, ends):
        first = min(np.setxor1d(found, ends))
        document = int(np.searchsorted(ends, first))
        what = "does not end with" if first in ends else "has, before its end,"
        raise _damaged(
            shard.prefix, f"lists document {document}, which {what} the end-of-document token {end_of_document}"
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
    if len(outside):
        document = int(np.searchsorted(ends, outside[0]))
        token = int(tokens[outside[0]])
        raise _damaged(
            shard.prefix, f"lists document {document} with the token {token}; the vocabulary ends at {vocabulary - 1}"
        )


def split_documents(documents: int, split: str) -> list[range]:
    """The documents that Megatron's `--split` gives to training, validation and test; a part may be empty.

    Args:
        documents: how many there are.
        split: up to three weights, as in `95,5,0`. A part with some weight, but too little for one document, is empty
            here; Megatron never finishes building it.

    Source: megatron/core/datasets/blended_megatron_dataset_config.py:155, blended_megatron_dataset_builder.py:470.
    """
    weights = [float(weight) for weight in re.findall(r"[.0-9]+", split)]
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    # Added one after the other, as Megatron does it: sum() rounds differently.
    shares = itertools.accumulate((weight / total for weight in weights), initial=0.0)
    bounds = [round(share * documents) for share in shares]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def held_out_unigram_entropy_nats(prefix: Path, split: str) -> float:
    """The least validation loss, in nats, of a model that knows only how often each token is in the held-out documents.

    A model with a smaller loss has learned to predict a token from those before it.

    Raises:
        MoekitError: the pair is damaged, or the split holds nothing out.
    """
    import numpy as np

    shard = open_shard(prefix)
    held_out = split_documents(shard.documents, split)[1]
    if not held_out:
        raise error(f"the split `{split}` of {shard.documents} documents holds none out for validation", "try `95,5,0`")
    first = int(shard.lengths[: held_out.start].sum())
    last = int(shard.lengths[: held_out.stop].sum())
    _, counts = np.unique(shard.read()[first:last], return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _damaged(prefix: Path, what: str) -> MoekitError:
    return error(f"the file {what}", "prepare this data again", str(idx_path(prefix)))
