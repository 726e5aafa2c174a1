"""Small data sets to tokenize, and what a plain writer makes of them: `encode_batch` and numpy, and no datatrove."""

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet
from small import END, TEXT, small_tokenizer
from tokenizers import Tokenizer

from moekit.data.dataset import Dataset
from moekit.data.plan import DataFolder
from moekit.data.shards import HEADER, MAGIC, bin_path, idx_path

LARGE = tuple(f"<|reserved_{number}|>" for number in range(66_000))
"""Tokens that make a vocabulary too large for 16 bits."""
WORDS = " ".join(TEXT[:3]).split()


def make_root(root: Path, large: bool = False) -> Path:
    """A shared root with the tokenizer `tiny`."""
    folder = root / "tokenizers" / "tiny"
    folder.mkdir(parents=True)
    special = ("<|begin_of_text|>", END, *(LARGE if large else ()))
    small_tokenizer(special).save(str(folder / "tokenizer.json"))
    return root


def make_texts(files: int = 4, documents: int = 12, seed: int = 0) -> list[list[str]]:
    """The texts of some files."""
    choice = random.Random(seed)
    return [[" ".join(choice.choices(WORDS, k=choice.randint(1, 60))) for _ in range(documents)] for _ in range(files)]


def write_texts(folder: Path, texts: Sequence[Sequence[str | None]], ending: str = "jsonl") -> list[Path]:
    """A file for each list of texts; a document's id is `<file>-<row>`."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:03d}.{ending}" for number in range(len(texts))]
    for number, path in enumerate(paths):
        rows = [{"id": f"{number}-{row}", "text": text, "score": 0.5} for row, text in enumerate(texts[number])]
        write_rows(path, rows)
    return paths


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One file of rows, in the format that its name says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=5)
        return
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _zstd}
    path.write_bytes(packers.get(path.suffix, bytes)(data))


def _zstd(data: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


def a_dataset(*sources: Path, **fields: Any) -> Dataset:
    """A description of them with the tokenizer `tiny`."""
    said = {"name": "some", "source": tuple(map(str, sources)), "tokenizer": "tiny", "end_of_document": END}
    return Dataset(**(said | {"cpus_per_task": 1, "memory_gib": 2, "max_document_mib": 4} | fields))


def plain(root: Path, texts: Sequence[str], end_token: str = END) -> tuple[bytes, bytes]:
    """What the .bin and .idx of these texts must hold (megatron/core/datasets/indexed_dataset.py:122-330)."""
    tokenizer = Tokenizer.from_file(str(root / "tokenizers" / "tiny" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(end_token)
    kind, code = (np.dtype("<i4"), 4) if tokenizer.get_vocab_size() > 65_536 else (np.dtype("<u2"), 8)
    documents = [
        np.array([*one.ids, end], kind)
        for first in range(0, len(texts), 200)
        for one in tokenizer.encode_batch(texts[first : first + 200], add_special_tokens=False)
    ]
    lengths = np.array([len(one) for one in documents], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype="<i8")[:-1]]) * kind.itemsize
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    index = HEADER.pack(MAGIC, 1, code, len(lengths), len(bounds))
    index += lengths.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    return np.concatenate(documents).tobytes(), index


def shard_bytes(folder: DataFolder, name: str, task: int) -> tuple[bytes, bytes]:
    """The .bin and .idx of a shard."""
    prefix = folder.prefix(name, task)
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


def visible(folder: Path) -> dict[str, bytes]:
    """Every file of a folder that says or holds something of its shards."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix in (".bin", ".idx"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_description(path: Path, source: Path | str, **fields: Any) -> Path:
    """A description on the disk, for the command."""
    said = {"name": "some", "source": [str(source)], "tokenizer": "tiny", "end_of_document": END, "memory_gib": 2}
    path.write_text(json.dumps(said | fields))
    return path


def command(description: Path, root: Path, *options: str) -> list[str]:
    """`moekit data tokenize`."""
    words = [sys.executable, "-m", "moekit", "data", "tokenize", description, "--shared-root", root, *options]
    return [str(word) for word in words]


def moekit(description: Path, root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(command(description, root, *options), capture_output=True, text=True, timeout=300)


def children(process: int) -> list[int]:
    """The processes that a process has started and that are there."""
    found = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(one) for one in thread.read_text().split()]
        except OSError:
            continue
    return found


def is_alive(process: int) -> bool:
    """Whether it runs; one that is dead and not asked for does not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
