"""Text to token files with datatrove's MegatronDocumentTokenizer, which writes what Megatron reads.

The two steps, reader and tokenizer, are run here and not by one of datatrove's executors: an executor keeps a helper
process that outlives a killed run, and takes a folder it has once worked in for finished whatever is asked of it later.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moekit.problems import error

BATCH_DOCUMENTS = 32
"""Documents tokenized at a time; the tokenizer needs about 140 bytes of memory for each byte of their text."""


def tokenize(source: Path, tokenizer_file: Path, end_of_document: str, folder: Path, name: str) -> Path:
    """Write `<folder>/<name>_00000_tokens.bin` and `.idx`, and what datatrove has to say to `<folder>/tokenize.log`.

    Args:
        source: JSON lines with `id` and `text`, plain or compressed.
        tokenizer_file: a `tokenizer.json`.
        end_of_document: the token put after each document. The same letters within a text are tokenized as text.
        folder: an existing folder.
        name: how the files' names begin.

    Returns:
        The prefix: the path of both files without `.bin` and `.idx`.

    Raises:
        MoekitError: datatrove or what it needs is not installed.
        OSError: a file cannot be written.
    """
    try:
        import orjson  # noqa: F401  (datatrove's reader asks for it only when it runs)
        from datatrove.pipeline.readers import JsonlReader
        from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
    except ImportError as missing:
        package = str(missing.name).split(".")[0]
        raise error(f"preparing data needs `{package}`", "run `pip install 'moekit[data]'`") from None

    reader = JsonlReader(str(source.parent), glob_pattern=source.name)
    writer = MegatronDocumentTokenizer(
        str(folder),
        save_filename=name,
        tokenizer_name_or_path=str(tokenizer_file),
        eos_token=end_of_document,
        batch_size=BATCH_DOCUMENTS,
    )
    writer.tokenizer.encode_special_tokens = True
    with _log_to(folder / "tokenize.log"), _one_thread():
        try:
            writer.run(reader.run(rank=0, world_size=1), rank=0, world_size=1)
        except OSError as failure:
            _drop_files(failure)
            raise
    return folder / f"{name}_00000_tokens"


def _drop_files(failure: OSError) -> None:
    """Let go of what datatrove still has open: on a full disk its closing fails again, and Python 3.13 says so."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        traceback.clear_frames(failure.__traceback__)
        gc.collect()
    finally:
        sys.unraisablehook = before


@contextmanager
def _log_to(file: Path) -> Iterator[None]:
    """Send datatrove's messages to a file; importing it has made them go to the terminal."""
    from loguru import logger

    logger.remove()
    # catch=False: a full disk is reported by us, once, and not by the logger on the terminal.
    sink = logger.add(file, format="{time:YYYY-MM-DD HH:mm:ss} {level} {message}", catch=False)
    try:
        yield
    finally:
        logger.remove(sink)


@contextmanager
def _one_thread() -> Iterator[None]:
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
