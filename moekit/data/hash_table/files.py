"""The files around a hash layer's table: tokens counted in shards, published tables read, ours written for training.

    <shared_root>/data/<data set>/hash_tables/NAME.npy    (table, token id, choice), int32; job/hash_table.py reads it
                                              NAME.json   what it is, and of how many bytes; written last

One table serves all hash layers; a file of several has one for each of them, in order.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.data.hash_table.table import problem_of
from moekit.data.look import open_index
from moekit.data.shards import bin_path
from moekit.problems import MoekitError, error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_TOKENS = 1 << 22
TENSOR = "tid2eid"
"""How a published table's tensor ends: `layers.0.ffn.gate.tid2eid` of DeepSeek-V4."""
_SAFETENSORS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "I8": "i1", "U16": "<u2", "U32": "<u4"}
_HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors format's own."""

Progress = Callable[[int, int], None]
"""Called with tokens counted so far and tokens in all."""


@dataclass(frozen=True)
class Record:
    """`NAME.json`: what a launch must know of a table without reading it."""

    experts: int
    topk: int
    vocab_size: int
    """Rows: token ids that it knows."""
    tables: int
    """One for all hash layers, or one for each."""
    method: str
    """How it was made, or which tensors of which file it is."""
    counted_tokens: int
    max_vio: tuple[float, ...]
    """Of each table, for the tokens counted."""
    npy_bytes: int
    npy_sha256: str


def table_file(folder: Path, name: str) -> Path:
    """Where the table of a name lies, below a data set's folder."""
    return folder / "hash_tables" / f"{name}.npy"


def count_tokens(prefixes: list[Path], vocab_size: int, progress: Progress) -> NDArray[np.int64]:
    """How often each token id occurs in shards, in constant memory. (token id,)

    Raises:
        MoekitError: a shard cannot be read, or has an id outside the vocabulary.
    """
    import numpy as np

    shards = [open_index(prefix) for prefix in prefixes]
    counts, done, total = np.zeros(vocab_size, np.int64), 0, sum(len(shard.tokens) for shard in shards)
    for shard in shards:
        unsigned = shard.tokens.view(shard.tokens.dtype.str.replace("i", "u"))  # a negative id is one that is too large
        for start in range(0, len(unsigned), CHUNK_TOKENS):
            chunk = unsigned[start : start + CHUNK_TOKENS]
            if (largest := int(chunk.max())) >= vocab_size:
                what = f"it has token {largest:,}, and the vocabulary ends at {vocab_size - 1:,}"
                raise error(what, "`moekit data check` says what is wrong", str(bin_path(shard.prefix)))
            counts += np.bincount(chunk, minlength=vocab_size)
            done += len(chunk)
            progress(done, total)
    return counts


def read_published(file: Path, names: list[str], experts: int | None) -> tuple[list[str], NDArray[np.int32]]:
    """Published tables: the tensors' names, and what they hold. (table, token id, choice)

    Args:
        file: `.safetensors`, `.npy`, or what torch saved, which is read without running anything in it.
        names: the tensors to read, one for each hash layer; none for all whose names end in `tid2eid`, in order.
        experts: how many there are; None where the table says.

    Raises:
        MoekitError: the file cannot be read, has no such tensor, or a tensor is no table.
    """
    import numpy as np

    try:
        tensors = _tensors_of(file)
    except OSError as reason:
        raise error(f"cannot read: {reason.strerror or reason}", "", str(file)) from None
    except (ValueError, KeyError, TypeError) as reason:
        raise error(
            f"this is no file of tensors: {reason}", "give a `.safetensors`, `.npy` or `.pt`", str(file)
        ) from None
    wanted = names or sorted((name for name in tensors if name.endswith(TENSOR)), key=_numbers)
    if len(tensors) == 1 and not wanted:
        wanted = list(tensors)
    missing = [name for name in wanted if name not in tensors]
    if missing or not wanted:
        what = f"there is no tensor `{missing[0]}`" if missing else f"no tensor's name ends in `{TENSOR}`"
        some = ", ".join(sorted(tensors, key=_numbers)[:5])
        raise error(what, f"`--tensor` takes one of its {len(tensors)}: {some}", str(file))
    tables = [tensors[name]() for name in wanted]
    for name, table in zip(wanted, tables, strict=True):
        if problem := problem_of(table, experts):
            raise error(f"`{name}` {problem}", f"a hash layer's table ends in `{TENSOR}`", str(file))
    if len({table.shape for table in tables}) > 1:
        raise error("the tables have different shapes", "take one by `--tensor`", str(file))
    return wanted, np.stack(tables).astype(np.int32)


def _numbers(name: str) -> list[Any]:
    """`layers.10` after `layers.9`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _tensors_of(file: Path) -> Mapping[str, Callable[[], NDArray[Any]]]:
    """The tensors of a file by name, each read when it is called."""
    import numpy as np

    if file.suffix == ".npy":
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if array.ndim == 3:
            return {f"{number}.{TENSOR}": lambda table=table: table for number, table in enumerate(array)}  # type: ignore[misc]
        return {file.stem: lambda: array}
    if file.suffix == ".safetensors":
        return _safetensors_of(file)
    file.open("rb").close()  # what cannot be opened is told before torch is asked for
    try:
        import torch
    except ImportError:
        raise error(
            f"reading a `{file.suffix}` needs `torch`", "run `pip install 'moekit[local]'`", str(file)
        ) from None
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as reason:  # pickle's, zipfile's or torch's own, as the file has it
        raise ValueError(str(reason).partition("\n")[0]) from None
    found = {"tensor": saved} if isinstance(saved, torch.Tensor) else dict(saved)
    return {name: value.numpy for name, value in found.items() if isinstance(value, torch.Tensor)}


def _safetensors_of(file: Path) -> Mapping[str, Callable[[], NDArray[Any]]]:
    """Tensors of integers: eight bytes of a header's length, the header in JSON, the data."""
    import numpy as np

    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 0 < size <= min(_HEADER_LIMIT_BYTES, file.stat().st_size - 8):
            raise ValueError("its header's length is wrong")
        header = json.loads(opened.read(size))

    def reader(facts: dict[str, Any]) -> Callable[[], NDArray[Any]]:
        return lambda: np.array(
            np.memmap(
                file, _SAFETENSORS[facts["dtype"]], "r", 8 + size + facts["data_offsets"][0], tuple(facts["shape"])
            )
        )

    return {
        name: reader(facts)
        for name, facts in header.items()
        if name != "__metadata__" and (facts["dtype"] in _SAFETENSORS or name.endswith(TENSOR))
    }


def write_table(file: Path, tables: NDArray[np.int32], record: dict[str, Any]) -> bool:
    """Write a table and its record, each under another name first; False where the same table is there already.

    Raises:
        MoekitError: another table has this name, or the files cannot be written.
    """
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, tables, allow_pickle=False)
    content = buffer.getvalue()
    made = Record(npy_bytes=len(content), npy_sha256=hashlib.sha256(content).hexdigest(), **record)
    before = read_record(file)
    if before is not None:
        if before.npy_sha256 == made.npy_sha256:
            return False
        hint = "runs may have begun with it: give this one another by `--name`, or remove both files"
        raise error(f"another table is called `{file.stem}`: {before.method}, top-{before.topk}", hint, str(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, content)
        _replace(file.with_suffix(".json"), (json.dumps(asdict(made), indent=2) + "\n").encode())
    except OSError as reason:
        raise error(f"cannot be written: {reason.strerror}", "", str(reason.filename or file)) from None
    return True


def _replace(file: Path, content: bytes) -> None:
    temporary = file.with_name(f".tmp-{file.name}-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(file: Path) -> Record | None:
    """What is put down of the table `file`; None where there is no whole one.

    Raises:
        MoekitError: the record is not what moekit writes.
    """
    path = file.with_suffix(".json")
    try:
        said = json.loads(path.read_text("utf-8"))
        record = Record(**{**said, "max_vio": tuple(said["max_vio"])})
        return record if file.stat().st_size == record.npy_bytes else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError):
        raise _foreign(path) from None


def _foreign(path: Path) -> MoekitError:
    return error("this is not what moekit writes of a table", "remove it, and make the table again", str(path))
