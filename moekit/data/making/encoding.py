"""One input file to a part of a shard, with datatrove's tokenizer and writer of Megatron's token files.

Its pipelines and executors are not used. An executor keeps a helper process that outlives a killed run, and takes a
folder it has once worked in for finished whatever is asked of it later; a pipeline step batches by documents, which may
be of any length.

Imports datatrove and tokenizers, half a second: only workers and the quickstart import this file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer, MegatronTokenizedFile
from loguru import logger

from moekit.data.checking.pair import Expected, check_pair
from moekit.data.making.documents import Tally, texts_of
from moekit.data.making.parts import Part, Progress, Step
from moekit.data.plan import InputFile, Plan
from moekit.data.shards import bin_path, idx_path
from moekit.data.sources import HUB, check_unchanged
from moekit.problems import error

BATCH_BYTES = 2**20
"""Text tokenized at a time. More is not faster: 0.25, 1 and 8 MiB take the same time on one thread. It takes 140 MiB,
which the least memory that a description may give a worker has room for (dataset_rules.py)."""
REPORT_S = 0.5


def load_encoder(tokenizer: Path, end_of_document: str) -> MegatronDocumentTokenizer:
    """datatrove's tokenizer step: it puts the end token after each text, and takes one that a text spells for text."""
    step = MegatronDocumentTokenizer(".", tokenizer_name_or_path=str(tokenizer), eos_token=end_of_document)
    step.tokenizer.encode_special_tokens = True
    return step


def make_part(
    plan: Plan, file: InputFile, encoder: MegatronDocumentTokenizer, prefix: Path, progress: Progress
) -> Part:
    """Tokenize a file to `PREFIX.bin` and `PREFIX.idx`, and check both.

    The pair is whole only when this returns.

    Raises:
        MoekitError: the file cannot be read, has changed, or changes meanwhile; or a text became the end token.
        OSError: the pair cannot be written.
    """
    started = time.monotonic()
    check_unchanged(file)
    tally = Tally()
    out = MegatronTokenizedFile(str(prefix.parent), prefix.name, token_size=encoder.token_size)
    try:
        tokens = _encode(texts_of(file, plan, tally), plan, encoder, out, _reporting(tally, file, progress))
    finally:
        out.bin_file.close()
    out.close()
    if not file.path.startswith(HUB):  # there, a name and a version are always the same bytes
        check_unchanged(file)
    pair = check_pair(prefix, Expected(plan.token_type, plan.end_of_document_id, plan.vocab_size))
    if pair.problem or (pair.documents, pair.tokens) != (tally.documents, tokens):
        what = pair.problem or f"holds {pair.documents:,} documents, not {tally.documents:,}"
        raise error(f"what the tokenizer makes of the file {what}", "is it the right tokenizer?", file.path)
    logger.info(f"{file.path}: {tally.rows} rows, {tally.documents} documents, {tokens} tokens")
    return Part(
        tally.documents,
        tokens,
        tally.rows,
        tally.empty,
        tally.not_kept,
        bin_path(prefix).stat().st_size,
        idx_path(prefix).stat().st_size,
        time.monotonic() - started,
    )


def _reporting(tally: Tally, file: InputFile, progress: Progress) -> Callable[[int, bool], None]:
    """Takes the tokens written so far, and reports, now and then, what has been added."""
    last, reported_at = Step(), time.monotonic()

    def report(tokens: int, now: bool) -> None:
        nonlocal last, reported_at
        if not now and time.monotonic() - reported_at < REPORT_S:
            return
        total = Step(tally.documents, tokens, file.size_bytes if now else int(tally.share * file.size_bytes))
        added = (total.documents - last.documents, total.tokens - last.tokens, total.read_bytes - last.read_bytes)
        last, reported_at = total, time.monotonic()
        progress(Step(*added))

    return report


def _encode(
    texts: Iterable[str],
    plan: Plan,
    encoder: MegatronDocumentTokenizer,
    out: MegatronTokenizedFile,
    report: Callable[[int, bool], None],
) -> int:
    """Write each text as one document; how many tokens they are."""
    encode = encoder.tokenizer.encode_batch_fast  # without the offsets of `encode_batch`, else the same
    tokens = 0
    before: list[np.ndarray] = []  # of a document that is not at its end, piece by piece
    for batch in _batches(texts, plan.max_document_mib * 2**20):
        for encoded, (_, is_last) in zip(encode([piece for piece, _ in batch]), batch, strict=True):
            ids = np.array(encoded.ids, dtype=out.token_dtype)
            if not is_last:
                before.append(ids[:-1])  # the end token
                continue
            if before:
                ids = np.concatenate([*before, ids])
                before = []
            out.write(ids)
            tokens += len(ids)
        report(tokens, False)
    report(tokens, True)
    return tokens


def _batches(texts: Iterable[str], piece_bytes: int) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of texts, each with whether it is its text's last, some MiB at a time."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        for piece, piece_size, is_last in _pieces(text, piece_bytes):
            if batch and size + piece_size > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((piece, is_last))
            size += piece_size
    if batch:
        yield batch


def _pieces(text: str, most_bytes: int) -> Iterator[tuple[str, int, bool]]:
    """A text in pieces of some UTF-8 bytes at most, each with its size and whether it is the last.

    A piece ends where a line does, if there is one, else between two characters.
    """
    if text.isascii() and len(text) <= most_bytes:
        yield text, len(text), True
        return
    data = text.encode()
    start = 0
    while len(data) - start > most_bytes:
        end = data.rfind(b"\n", start, start + most_bytes) + 1
        if end <= start:
            end = start + most_bytes
            while data[end] & 0xC0 == 0x80:  # within a character
                end -= 1
        yield data[start:end].decode(), end - start, False
        start = end
    yield (data[start:].decode() if start else text), len(data) - start, True


@contextmanager
def logged_to(file: Path) -> Iterator[None]:
    """Send datatrove's messages to a file; importing it has made them go to the terminal."""
    file.parent.mkdir(parents=True, exist_ok=True)
    logger.remove()
    # catch=False: a full disk is reported by us, once, and not by the logger on the terminal.
    sink = logger.add(file, format="{time:YYYY-MM-DD HH:mm:ss} {level} {message}", catch=False)
    try:
        yield
    finally:
        logger.remove(sink)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the tokenizer from starting a thread on every core of what may be a shared login node."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
