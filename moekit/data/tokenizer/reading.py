"""What a `tokenizer.json` says of itself, and whether token files made with it can be trusted.

Reading one takes 0.6 s of CPU time for a vocabulary of 128,256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moekit.problems import MoekitError, Problem, did_you_mean, error, shortened

MOST_BYTES = 256 << 20
"""The largest known, of 256,000 tokens, has 33 MB."""
SURROUNDINGS = ("{}", " {} ", "a{}b", "a {} b", "\n{}\n", "{}{}")


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer that text can be tokenized with."""

    file: Path
    """Its `tokenizer.json`."""
    sha256: str
    """Of that file."""
    vocab_size: int
    """Token ids, added ones among them."""
    end_of_document_id: int


def read_tokenizer(folder: Path, end_of_document: str, vocab_size: int | None) -> TokenizerFacts:
    """Read `<folder>/tokenizer.json` and hold it against what a data set's description says of it.

    Args:
        folder: a tokenizer's folder.
        end_of_document: the token put after each document; a special one, so that no text becomes it.
        vocab_size: ids that it must have; None: whatever it has.

    Raises:
        MoekitError: the file is missing, damaged, or not the tokenizer that is described: everything at once.
    """
    file = folder / "tokenizer.json"
    data = _bytes(file)
    tokenizer = _load(data, file)
    problems = [
        *_size(tokenizer, vocab_size, file),
        *_changes_texts(tokenizer, file),
        *_end_of_document(tokenizer, end_of_document, file),
    ]
    if problems:
        raise MoekitError(*problems)
    return TokenizerFacts(
        file=file,
        sha256=hashlib.sha256(data).hexdigest(),
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        end_of_document_id=tokenizer.token_to_id(end_of_document),
    )


def _bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as reason:
        hint = "`moekit data tokenizer DATASET` fetches it" if isinstance(reason, FileNotFoundError) else ""
        raise error(f"cannot be read: {(reason.strerror or str(reason)).lower()}", hint, str(file)) from None
    if len(data) > MOST_BYTES:
        raise error(f"is larger than {MOST_BYTES >> 20} MiB, the most that moekit reads", "", str(file))
    return data


def _load(data: bytes, file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise error("reading a tokenizer needs `tokenizers`", "run `pip install 'moekit[data]'`") from None
    try:
        return Tokenizer.from_buffer(data)
    except BaseException as reason:  # plain Exceptions for most, and a panic of Rust's is none
        if isinstance(reason, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        hint = "fetch it again, or take it from where it is whole"
        raise error(f"is damaged, or no tokenizer: {shortened(str(reason))}", hint, str(file)) from None


def _size(tokenizer: Any, vocab_size: int | None, file: Path) -> Iterator[Problem]:
    has = tokenizer.get_vocab_size(with_added_tokens=True)
    if vocab_size is not None and has != vocab_size:
        what = f"has {has:,} tokens, added ones included, and the description says {vocab_size:,}"
        yield Problem(str(file), what, "another tokenizer, or another `vocab_size` there")
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= has:  # Megatron makes the embedding as large as the count
        what = f"has {has:,} tokens and among them the id {largest:,}: Megatron would find no embedding for it"
        yield Problem(str(file), what, "ids must run from 0 without gaps: take another tokenizer")


def _changes_texts(tokenizer: Any, file: Path) -> Iterator[Problem]:
    if tokenizer.truncation:
        what = f"cuts each text after {tokenizer.truncation['max_length']:,} tokens (`truncation`)"
        yield Problem(str(file), what, "put `null` there, where it is kept, and fetch it again")
    if getattr(tokenizer.model, "dropout", None):
        what = "leaves merges out at random (`dropout`): the same text would become other tokens each time"
        yield Problem(str(file), what, "put `null` there, where it is kept, and fetch it again")
    if tokenizer.padding:
        what = "fills texts up to one length (`padding`)"
        yield Problem(str(file), what, "put `null` there, where it is kept, and fetch it again")


def _end_of_document(tokenizer: Any, token: str, file: Path) -> Iterator[Problem]:
    """The end token must be there, and must be what no text becomes, however it is spelled."""
    number, added = tokenizer.token_to_id(token), tokenizer.get_added_tokens_decoder()
    special = [one.content for one in added.values() if one.special]
    hint = did_you_mean(token, special) or f"its special tokens are {_listed(special)}"
    if number is None:
        yield Problem(str(file), f"has no token `{shortened(token)}`, which `end_of_document` names", hint)
    elif number not in added or not added[number].special:
        what = f"has `{shortened(token)}` as a plain token: a text with these letters would end there"
        yield Problem(str(file), what, hint)
    else:
        tokenizer.encode_special_tokens = True
        for around in SURROUNDINGS:
            if number in tokenizer.encode(around.replace("{}", token), add_special_tokens=False).ids:
                what = (
                    f"turns the letters `{shortened(token)}` in a text into its end token, as a special one and as text"
                )
                yield Problem(str(file), what, "name another in `end_of_document`")
                return


def _listed(special: list[str]) -> str:
    return ", ".join(f"`{shortened(one)}`" for one in special[:8]) + (" ..." if len(special) > 8 else "") or "none"
