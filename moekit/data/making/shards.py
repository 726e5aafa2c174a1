"""Makes shards: parts by worker processes, one an input file, put one behind the other in the order of the plan.

What a shard holds depends on the plan alone, and not on how many workers made it, or how often it was begun. A part
that a killed run has finished is used by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moekit.data.checking.pair import Expected, check_pair
from moekit.data.locking import locked
from moekit.data.making.parts import Part, Progress, Step, find_part, part_prefix, temporary
from moekit.data.making.workers import Job, make_parts
from moekit.data.places import load_record
from moekit.data.plan import DataFolder, Plan, ShardRecord
from moekit.data.planning import tokenizer_file, unwritable, versions, write_json
from moekit.data.shards import HEADER, MAGIC, TOKEN_TYPES, bin_path, idx_path
from moekit.data.sources import missing_package
from moekit.problems import error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NEEDED = ("datatrove", "tokenizers", "pyarrow", "orjson")


def make_shard(folder: DataFolder, plan: Plan, task: int, workers: int, progress: Progress) -> ShardRecord:
    """Make one shard, as a task of an array does; nothing where it is whole.

    Args:
        folder: the data set's; `plan` lies in it.
        workers: processes, each of one thread.
        progress: called in this thread with what was done, some times a second.

    Raises:
        MoekitError: another process is at it, a file cannot be read, has changed or cannot be written, a worker was
            killed, or no document is left.
    """
    with locked(folder, task, 1):
        return make_shards(folder, plan, [task], workers, progress)[0]


def make_shards(
    folder: DataFolder, plan: Plan, tasks: Sequence[int], workers: int, progress: Progress
) -> list[ShardRecord]:
    """Make some shards under a lock that the caller holds; arguments and errors as for `make_shard`."""
    records = {task: record for task in tasks if (record := find_shard(folder, plan, task, progress))}
    missing = [task for task in tasks if task not in records]
    for task in records:
        shutil.rmtree(folder.parts(task), ignore_errors=True)  # of a run that was killed after its last step
    if missing:
        _check_tools(folder, plan)
    try:
        parts = {task: _left_of(folder, plan, task, progress) for task in missing}
        jobs = [Job(task, at) for task in missing for at in range(len(plan.files_of(task))) if at not in parts[task]]
        for task in missing:
            if len(parts[task]) == len(plan.files_of(task)):
                records[task] = _assemble(folder, plan, task, parts[task])
        for job, part in make_parts(folder, plan, jobs, workers, progress):
            parts[job.task][job.file] = part
            if len(parts[job.task]) == len(plan.files_of(job.task)):
                records[job.task] = _assemble(folder, plan, job.task, parts[job.task])
        with contextlib.suppress(OSError):  # another task has its parts in it
            folder.parts(0).parent.rmdir()
    except OSError as reason:
        raise unwritable(folder.path, reason) from None
    return [records[task] for task in tasks]


def find_shard(folder: DataFolder, plan: Plan, task: int, progress: Progress = lambda _: None) -> ShardRecord | None:
    """The record of a shard that is whole: its files have the sizes that are put down. `progress` is told of others."""
    record = load_record(folder, task)
    if record is None:
        return None
    prefix = folder.prefix(plan.name, task)
    for file, size_bytes in ((bin_path(prefix), record.bin_bytes), (idx_path(prefix), record.idx_bytes)):
        has = file.stat().st_size if file.is_file() else None
        if has != size_bytes:
            state = "is gone" if has is None else f"has {has:,} bytes, not {size_bytes:,}"
            progress(Step(note=f"shard {task} is made again: `{file.name}` {state}"))
            return None
    progress(Step(record.documents, record.tokens, sum(one.size_bytes for one in plan.files_of(task)), reused=True))
    return record


def _check_tools(folder: DataFolder, plan: Plan) -> None:
    """What the plan says tokens are made with must be what is here."""
    for package in NEEDED:
        if find_spec(package) is None:
            raise missing_package(package)
    if (found := versions()) != plan.versions:
        there, here = (", ".join(f"{name} {said[name]}" for name in sorted(said)) for said in (plan.versions, found))
        raise error(f"the tokenization was begun with {there}, and here are {here}", "install what it was begun with")
    file = tokenizer_file(folder, plan)
    try:
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as reason:
        raise error(f"cannot be read: {str(reason.strerror).lower()}", where=str(file)) from None
    if sha256 != plan.tokenizer_sha256:
        hint = "bring the former one back, or tokenize under another name"
        raise error("the tokenizer is another than the one that the tokenization was begun with", hint, str(file))


def _left_of(folder: DataFolder, plan: Plan, task: int, progress: Progress) -> dict[int, Part]:
    """The parts of a shard that an earlier run has finished; what it left half done is removed."""
    folder.record(task).unlink(missing_ok=True)
    for left in folder.parts(task).glob(".*"):
        left.unlink()
    found = {}
    for number, file in enumerate(plan.files_of(task)):
        if part := find_part(part_prefix(folder, task, number)):
            found[number] = part
            progress(Step(part.documents, part.tokens, file.size_bytes, reused=True))
    return found


def _assemble(folder: DataFolder, plan: Plan, task: int, parts: dict[int, Part]) -> ShardRecord:
    """Put a shard's parts one behind the other, check what came of it, and give it its name."""
    if not any(part.documents for part in parts.values()):
        rows, empty, left = (sum(getattr(part, of) for part in parts.values()) for of in ("rows", "empty", "not_kept"))
        counts = f"of {rows:,} rows, {empty:,} have no text and {left:,} are not kept"
        what = f"shard {task} would hold no document: {counts}"
        hint = "take fewer `tasks`, or correct `text_key`, `keep_fraction` or `source`; its first file is {}"
        raise error(what, hint.format(plan.files_of(task)[0].path))
    prefixes = [part_prefix(folder, task, number) for number in sorted(parts)]
    prefix = folder.prefix(plan.name, task)
    whole = temporary(prefix)
    with bin_path(whole).open("wb") as out:
        for one in prefixes:
            with bin_path(one).open("rb") as tokens:
                shutil.copyfileobj(tokens, out, 2**20)
        out.flush()
        os.fsync(out.fileno())  # some file systems say only now that they are full
    with idx_path(whole).open("wb") as out:
        out.writelines(_index([idx_path(one) for one in prefixes], plan.token_type))
        out.flush()
        os.fsync(out.fileno())  # some file systems say only now that they are full
    pair = check_pair(whole, Expected(plan.token_type, plan.end_of_document_id, plan.vocab_size), sha256=True)
    if pair.problem or pair.documents != sum(part.documents for part in parts.values()):
        raise error(
            f"the shard {pair.problem or 'lacks documents'}", "is the disk sound? Run the same again", str(prefix)
        )
    record = _record(task, parts, bin_path(whole), idx_path(whole), str(pair.bin_sha256), str(pair.idx_sha256))
    for of in (bin_path, idx_path):
        of(whole).replace(of(prefix))
    write_json(folder.record(task), asdict(record))
    shutil.rmtree(folder.parts(task))
    return record


def _index(parts: Sequence[Path], token_type: str) -> Iterator[bytes]:
    """A shard's index (megatron/core/datasets/indexed_dataset.py:122-330), as datatrove would write it of all parts."""
    import numpy as np

    lengths: NDArray[np.int32] = np.concatenate([_lengths(part) for part in parts])
    code = next(code for code, name in TOKEN_TYPES.items() if name == token_type)
    yield HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    yield lengths.tobytes()
    ends = np.cumsum(lengths, dtype="<i8")
    yield ((ends - lengths) * np.dtype(token_type).itemsize).astype("<i8").tobytes()
    yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()


def _lengths(index: Path) -> NDArray[np.int32]:
    import numpy as np

    with index.open("rb") as file:
        documents = HEADER.unpack(file.read(HEADER.size))[3]
        return np.fromfile(file, "<i4", documents)


def _record(
    task: int, parts: dict[int, Part], tokens: Path, index: Path, tokens_sha256: str, index_sha256: str
) -> ShardRecord:
    made = list(parts.values())
    return ShardRecord(
        task=task,
        documents=sum(part.documents for part in made),
        tokens=sum(part.tokens for part in made),
        rows=sum(part.rows for part in made),
        empty=sum(part.empty for part in made),
        not_kept=sum(part.not_kept for part in made),
        bin_bytes=tokens.stat().st_size,
        idx_bytes=index.stat().st_size,
        bin_sha256=tokens_sha256,
        idx_sha256=index_sha256,
        seconds=round(sum(part.seconds for part in made), 3),
    )
