"""Data sets written with numpy, as `moekit data tokenize` leaves them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from moekit.data.manifest import Listed, Manifest, manifest_files
from moekit.data.plan import DataFolder, InputFile, Plan, ShardRecord
from moekit.data.shards import HEADER, MAGIC, bin_path, idx_path

END = 0
VOCABULARY = 1000
TOKENIZER = b'{"a": "tokenizer"}'


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], token_type: str = "<u2") -> None:
    lengths = np.array([len(document) for document in documents], "<i4")
    ends = np.cumsum(lengths, dtype="<i8")
    pointers = (ends - lengths) * np.dtype(token_type).itemsize
    code = {"<i4": 4, "<u2": 8}[token_type]
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    idx_path(prefix).write_bytes(header + lengths.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes())
    bin_path(prefix).write_bytes(np.array([token for one in documents for token in one], token_type).tobytes())


def some_documents(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[*map(int, random.integers(1, VOCABULARY, random.integers(1, longest))), END] for _ in range(count)]


def a_plan(name: str = "own", tasks: int = 3, limit: int | None = None, vocab_size: int = VOCABULARY) -> Plan:
    return Plan(
        name=name,
        format="jsonl",
        text_key="text",
        id_key="id",
        files=tuple(InputFile(f"/source/{number}.jsonl", 10, None) for number in range(tasks)),
        tokenizer="letters",
        tokenizer_sha256=hashlib.sha256(TOKENIZER).hexdigest(),
        vocab_size=vocab_size,
        end_of_document="<end>",
        end_of_document_id=END,
        keep_fraction=None,
        tasks=tasks,
        max_document_mib=20,
        limit=limit,
        versions={"datatrove": "0.10.1", "tokenizers": "0.23.3"},
    )


def write_record(folder: DataFolder, plan: Plan, task: int, documents: Sequence[Sequence[int]]) -> None:
    prefix = folder.prefix(plan.name, task)
    tokens, index = bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()
    record = ShardRecord(
        task=task,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        rows=len(documents) + 2,
        empty=2,
        not_kept=0,
        bin_bytes=len(tokens),
        idx_bytes=len(index),
        bin_sha256=hashlib.sha256(tokens).hexdigest(),
        idx_sha256=hashlib.sha256(index).hexdigest(),
        seconds=1.0,
    )
    folder.record(task).parent.mkdir(exist_ok=True)
    folder.record(task).write_text(json.dumps(asdict(record)))


def write_data_set(root: Path, plan: Plan, shards: Sequence[Sequence[Sequence[int]]]) -> Path:
    """`<root>/data/<name>` with these shards, whole, and the tokenizer."""
    folder = DataFolder(root / "data" / (f"{plan.name}-sample" if plan.is_sample else plan.name))
    folder.path.mkdir(parents=True)
    folder.plan.write_text(json.dumps(asdict(plan)))
    for task, documents in enumerate(shards):
        write_pair(folder.prefix(plan.name, task), documents, plan.token_type)
        write_record(folder, plan, task, documents)
    tokenizer = root / "tokenizers" / plan.tokenizer
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "tokenizer.json").write_bytes(TOKENIZER)
    return folder.path


def own_data_set(root: Path, name: str = "own", counts: Sequence[int] = (30, 20, 25)) -> Path:
    plan = a_plan(name, len(counts))
    return write_data_set(root, plan, [some_documents(seed, count) for seed, count in enumerate(counts)])


def listed_data_set(root: Path, name: str, tokenizer: str, tokens: int, tokenizer_file: bytes = b"") -> Path:
    """A data set of one small shard, whose manifest says that it has this many tokens; and its tokenizer's file."""
    folder = root / "data" / name
    folder.mkdir(parents=True)
    prefix = folder / f"{name}_00000_tokens"
    write_pair(prefix, some_documents(0, 100))
    sizes = {f"{end}_bytes": prefix.with_name(f"{prefix.name}.{end}").stat().st_size for end in ("bin", "idx")}
    hashes = {"bin_sha256": "0" * 64, "idx_sha256": "0" * 64}
    shard = Listed(prefix.name, documents=100, tokens=tokens, **sizes, **hashes, weight=tokens)
    manifest = Manifest(
        name=name,
        fingerprint="0" * 64,
        tokenizer=tokenizer,
        tokenizer_sha256=hashlib.sha256(tokenizer_file).hexdigest(),
        vocab_size=VOCABULARY,
        end_of_document="<end>",
        end_of_document_id=END,
        documents=100,
        tokens=tokens,
        shards=(shard,),
        held_out=(),
        empty=(),
        parts=(),
        versions={},
    )
    for file, text in manifest_files(folder, manifest).items():
        (folder / file).write_text(text)
    (root / "tokenizers" / tokenizer).mkdir(parents=True)
    (root / "tokenizers" / tokenizer / "tokenizer.json").write_bytes(tokenizer_file)
    return folder
