"""The files of a data set, here or on the Hugging Face Hub: found, held against what they were, and opened."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from moekit.data.dataset_rules import format_of
from moekit.data.plan import InputFile
from moekit.problems import MoekitError, error

HUB = "hf://"
BLOCK_BYTES = 16 * 2**20
"""Read from the Hub at a time."""
CLIENTS = ("huggingface_hub", "httpx", "httpx2", "requests")
"""What the Hub's client raises is of one of these, by version."""


def list_files(sources: Iterable[str], wanted: str | None) -> tuple[str, tuple[InputFile, ...]]:
    """All files of some sources in the order of their paths, each once, and their format.

    Args:
        sources: files, folders or patterns, each absolute or `hf://datasets/OWNER/NAME/PATH`. Of a folder the files are
            taken whose names end as the format's do.
        wanted: `parquet` or `jsonl`; None: what the files' names end in.

    Raises:
        MoekitError: a source has no file, cannot be listed, or the format does not follow from the names.
    """
    found: dict[str, InputFile] = {}
    for source in sources:
        files = list(_on_hub(source, wanted) if source.startswith(HUB) else _local(source, wanted))
        if not files:
            raise error(f"no {wanted or 'parquet or jsonl'} file is there", "correct the data set's `source`", source)
        found |= {file.path: file for file in files}
    formats = {wanted or format_of(path) for path in found}
    if None in formats:
        path = next(path for path in found if format_of(path) is None)
        raise error("its name does not say what it is", "say it in the data set: `format: parquet` or `jsonl`", path)
    if len(formats) > 1:
        raise error("the sources hold both parquet and jsonl files", "make a data set of each")
    return str(formats.pop()), tuple(found[path] for path in sorted(found))


def check_unchanged(file: InputFile) -> None:
    """Check that a file is still what the plan has put down.

    Raises:
        MoekitError: it is gone, or has another size or version.
    """
    now = _hub_file(file.path) if file.path.startswith(HUB) else _local_file(file.path)
    if now != file:
        sizes = f"{file.size_bytes:,} bytes then, {now.size_bytes:,} now"
        what = sizes if now.size_bytes != file.size_bytes else "the same size, but written anew"
        hint = "bring the former file back, or tokenize under another name"
        raise error(f"the file has changed since its tokenization was planned: {what}", hint, file.path)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file's bytes, to read and to seek in."""
    if path.startswith(HUB):
        try:
            with _hub().open(path.removeprefix(HUB), "rb", block_size=BLOCK_BYTES) as remote:
                yield remote
        except Exception as reason:
            if type(reason).__module__.partition(".")[0] not in CLIENTS:
                raise  # of the reader's
            raise _unanswered(path, reason) from None
    else:
        with Path(path).open("rb") as file:
            yield file


def decompressed(path: str, file: BinaryIO) -> BinaryIO:
    """The bytes of a file that may be packed, as the end of its name says."""
    match Path(path).suffix:
        case ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=file))
        case ".bz2":
            return cast(BinaryIO, bz2.BZ2File(file))
        case ".xz":
            return cast(BinaryIO, lzma.LZMAFile(file))
        case ".zst":
            import pyarrow  # type: ignore[import-untyped]

            return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 2**20))
        case _:
            return io.BufferedReader(cast(io.RawIOBase, file), 2**20)


def _local(source: str, wanted: str | None) -> Iterator[InputFile]:
    path = Path(source)
    if path.is_dir():
        below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        paths = [str(file) for file in below if _belongs(file.name, wanted)]
    elif path.exists() or not glob.has_magic(source):
        paths = [source]
    else:
        paths = [file for file in glob.glob(source, recursive=True) if Path(file).is_file()]  # noqa: PTH207
    return map(_local_file, paths)


def _belongs(name: str, wanted: str | None) -> bool:
    """Whether a folder's file is meant: of the wanted format and not hidden."""
    return not name.startswith(".") and format_of(name) in ({wanted} if wanted else {"parquet", "jsonl"})


def _local_file(path: str) -> InputFile:
    try:
        found = Path(path).stat()
    except OSError as reason:
        raise error(
            f"cannot be read: {str(reason.strerror).lower()}", "correct the data set's `source`", path
        ) from None
    return InputFile(path, found.st_size, str(found.st_mtime_ns))


def _on_hub(source: str, wanted: str | None) -> Iterator[InputFile]:
    path, hub = source.removeprefix(HUB), _hub()
    with _asking(source):
        if glob.has_magic(path):
            found = hub.glob(path, detail=True)
        elif hub.isfile(path):
            found = {path: hub.info(path)}
        else:
            found = hub.find(path, detail=True)
            found = {name: info for name, info in found.items() if _belongs(Path(name).name, wanted)}
    return (_described(info) for info in found.values() if info["type"] == "file")


def _hub_file(path: str) -> InputFile:
    with _asking(path):
        # expand_info: else a refreshed answer lacks the blob's id
        return _described(_hub().info(path.removeprefix(HUB), refresh=True, expand_info=True))


def _described(info: dict[str, Any]) -> InputFile:
    return InputFile(HUB + info["name"], info["size"], info["blob_id"])


def _hub() -> Any:
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise missing_package("huggingface_hub") from None
    return HfFileSystem()


@contextmanager
def _asking(source: str) -> Iterator[None]:
    try:
        yield
    except MoekitError:
        raise
    except FileNotFoundError:
        what = "the Hub has no such data set or file, or does not show it to you"
        raise error(what, "correct the data set's `source`, or run `hf auth login`", source) from None
    except Exception as reason:  # the Hub's own, its HTTP library's, or the system's
        raise _unanswered(source, reason) from None


def _unanswered(source: str, reason: Exception) -> MoekitError:
    told = str(reason).strip().partition("\n")[0] or type(reason).__name__
    hint = "run the same again; without a network, name a local copy in `source`"
    return error(f"the Hub gives no answer: {told}", hint, source)


def missing_package(name: str) -> MoekitError:
    """What to tell where a package of the `data` extra is not installed."""
    return error(f"preparing data needs `{name}`", "run `pip install 'moekit[data]'`")
