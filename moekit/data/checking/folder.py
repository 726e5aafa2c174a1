"""Check the shards of a folder against what Megatron relies on, the plan, their records, the source and the tokenizer.

A shard without a record was not finished; one whose files disagree with its record is damaged, or another's.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from moekit.data.checking.pair import Expected, Pair, Progress, check_pair
from moekit.data.checking.source_rows import compare_rows
from moekit.data.manifest import Listed, Manifest, as_listed, fingerprint, prefix_of, read_manifest
from moekit.data.places import load_plan, load_record
from moekit.data.plan import DataFolder, Plan, ShardRecord
from moekit.data.shards import bin_path, idx_path
from moekit.problems import MoekitError

Kind = Literal["missing", "unfinished", "damaged", "swapped", "stale", "rows", "foreign", "tokenizer", "manifest"]
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    what: str
    """A sentence in the present tense, without a final period."""
    remedy: str
    files: tuple[Path, ...] = ()
    """What is to be removed: a damaged shard's pair and record."""


@dataclass(frozen=True)
class ShardCheck:
    """What became of one shard."""

    prefix: Path
    pair: Pair | None = None
    """None where it was not read."""
    record: ShardRecord | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Report:
    """What became of a folder, or of some pairs."""

    folder: Path | None
    plan: Plan | None
    shards: tuple[ShardCheck, ...]
    others: tuple[Finding, ...] = ()
    """What is wrong with no shard in particular."""
    notes: tuple[str, ...] = field(default=())
    """What could not be checked, and why."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that is wrong."""
        return (*(finding for shard in self.shards for finding in shard.findings), *self.others)


def check_pairs(
    prefixes: Sequence[Path], expected: Expected, sha256: bool = False, progress: Progress = lambda _: None
) -> Report:
    """Check pairs that no plan speaks of."""

    def one(prefix: Path) -> ShardCheck:
        pair = check_pair(prefix, expected, sha256, progress)
        remedy = "make it again, or copy it again from where it is whole"
        finding = Finding("damaged", f"`{prefix.name}` {pair.problem}", remedy)
        return ShardCheck(prefix, pair, None, (finding,) if pair.problem else ())

    unknown = [name for name in ("end_of_document_id", "vocab_size") if getattr(expected, name) is None]
    options = " and ".join(f"`--{'end-token' if 'end' in name else 'vocab-size'}`" for name in unknown)
    notes = (f"no plan says which ids are right; {options} would check them",) if unknown else ()
    with ThreadPoolExecutor(THREADS) as pool:
        return Report(None, None, tuple(pool.map(one, prefixes)), (), notes)


def check_folder(
    path: Path, only: Collection[str] | None = None, sha256: bool = False, progress: Progress = lambda _: None
) -> Report:
    """Check the folder of a data set: by its plan, else by its manifest, else each pair that is there by itself.

    Args:
        path: the folder.
        only: names of shards, without `.bin`; None is all of them, and what lies beside them.
        sha256: compare the files' hashes with what was put down when they were made.
        progress: called with the bytes read since the last call.

    Raises:
        MoekitError: plan or manifest cannot be read.
    """
    plan = load_plan(DataFolder(path))
    if plan:
        return _check_planned(DataFolder(path), plan, only, sha256, progress)
    if manifest := read_manifest(path):
        return _check_listed(path, manifest, only, sha256, progress)
    names = sorted({file.stem for file in token_files(path)} if only is None else only)
    return replace(check_pairs([path / name for name in names], Expected(), sha256, progress), folder=path)


def token_files(path: Path) -> list[Path]:
    """All .bin and .idx files of a folder, hidden ones left out."""
    return sorted(file for file in path.glob("[!.]*") if file.suffix in (".bin", ".idx"))


def removable(report: Report) -> list[Path]:
    """The files of damaged shards that are there, records first: without its record a shard is not whole."""
    found = {file for finding in report.findings for file in finding.files if file.exists()}
    return sorted(found, key=lambda file: (file.suffix != ".json", file))


def _check_planned(
    folder: DataFolder, plan: Plan, only: Collection[str] | None, sha256: bool, progress: Progress
) -> Report:
    names = {folder.prefix(plan.name, task).name: task for task in range(plan.tasks)}
    tasks = [task for name, task in names.items() if only is None or name in only]
    records, unreadable = {}, {}
    for task in range(plan.tasks):
        try:
            records[task] = load_record(folder, task)
        except MoekitError as problem:
            records[task], unreadable[task] = None, problem.problems[0].what
    listed = [as_listed(folder.prefix(plan.name, task).name, made) for task, made in records.items() if made]
    notes: list[str] = []

    def one(task: int) -> ShardCheck:
        prefix, record = folder.prefix(plan.name, task), records[task]
        if record is None:
            return ShardCheck(prefix, findings=tuple(_without_record(folder, plan, task, unreadable.get(task))))
        expected = Expected(plan.token_type, plan.end_of_document_id, plan.vocab_size)
        again = as_listed(prefix.name, record)
        remedy = (
            f"`moekit data check {folder.path.name} --remove-damaged` removes it and its record, then "
            f"{_tokenize(plan)} makes it again"
        )
        files = (folder.record(task), bin_path(prefix), idx_path(prefix))
        check = _compare(prefix, again, expected, listed, sha256, progress)
        rows, note = compare_rows(plan, task, record)
        notes.extend([note] if note else [])
        findings = [replace(finding, remedy=remedy, files=files) for finding in check.findings]
        findings += [Finding("rows", f"`{prefix.name}` {rows}", remedy, files)] if rows and not findings else []
        return replace(check, record=record, findings=tuple(findings))

    with ThreadPoolExecutor(THREADS) as pool:
        shards = tuple(pool.map(one, tasks))
    others = tuple(_beside(folder, plan, names, records)) if only is None else ()
    return Report(folder.path, plan, shards, others, tuple(dict.fromkeys(notes)))


def _tokenize(plan: Plan) -> str:
    """The command that finishes a plan."""
    name = plan.name.removesuffix("-sample")
    return f"`moekit data tokenize {name}{f' --limit {plan.limit}' if plan.is_sample else ''}`"


def _without_record(folder: DataFolder, plan: Plan, task: int, unreadable: str | None) -> Iterator[Finding]:
    """Why a shard is not whole."""
    prefix, remedy = folder.prefix(plan.name, task), f"{_tokenize(plan)} makes it"
    there = tuple(path for path in (bin_path(prefix), idx_path(prefix)) if path.exists())
    if unreadable:
        what, files = f"the record of `{prefix.name}` {unreadable}", (folder.record(task), *there)
        yield Finding("damaged", what, f"{remedy} again, once `--remove-damaged` has removed it", files)
    elif there:
        what = f"`{prefix.name}` is there without a record: it was not finished, or is of another plan"
        yield Finding("unfinished", what, f"{remedy} anew", there)
    else:
        yield Finding("missing", f"`{prefix.name}` is not made yet", remedy)


def _check_listed(
    path: Path, manifest: Manifest, only: Collection[str] | None, sha256: bool, progress: Progress
) -> Report:
    """A folder without a plan: the shards of its manifest."""
    listed = [*manifest.shards, *manifest.held_out]
    expected = Expected(None, manifest.end_of_document_id, manifest.vocab_size)

    def one(shard: Listed) -> ShardCheck:
        return _compare(prefix_of(path, shard), shard, expected, listed, sha256, progress)

    with ThreadPoolExecutor(THREADS) as pool:
        shards = tuple(pool.map(one, (one for one in listed if only is None or Path(one.prefix).name in only)))
    names = {Path(shard.prefix).name for shard in listed} | {*manifest.empty}
    others = [] if only is not None else [*_foreign(path, names), *_other_tokenizer(path, manifest)]
    return Report(path, None, shards, tuple(others))


def _compare(
    prefix: Path, known: Listed, expected: Expected, all_known: Sequence[Listed], sha256: bool, progress: Progress
) -> ShardCheck:
    """Check a pair against what is known of it, and say whose files it has where they are not its own."""
    pair = None
    if not (found := _by_size(prefix, known, all_known)):
        pair = check_pair(prefix, expected, sha256, progress)
        found = _by_hash(prefix, known, all_known, pair) if sha256 else None
        if pair.problem and not (found and found[0] == "swapped"):
            found = "damaged", pair.problem
        elif not found and (pair.documents, pair.tokens) != (known.documents, known.tokens):
            what = f"has {pair.tokens:,} tokens in {pair.documents:,} documents, and its record says"
            found = "stale", f"{what} {known.tokens:,} in {known.documents:,}"
    again = "make it again, or copy it again from where it is whole"
    findings = (Finding(found[0], f"`{prefix.name}` {found[1]}", again),) if found else ()
    return ShardCheck(prefix, pair, findings=findings)


def _by_size(prefix: Path, known: Listed, all_known: Sequence[Listed]) -> tuple[Kind, str] | None:
    """What the sizes of a pair's files say against it."""
    for path, name in ((bin_path(prefix), "bin_bytes"), (idx_path(prefix), "idx_bytes")):
        if not path.exists():
            return "missing", f"lacks {path.name}"
        found, wanted = path.stat().st_size, getattr(known, name)
        if found != wanted:
            what = f"has {found:,} bytes of {path.suffix}, and its record says {wanted:,}"
            others = [Path(one.prefix).name for one in all_known if getattr(one, name) == found]
            return ("swapped", f"{what}, as that of `{others[0]}`") if len(others) == 1 else ("damaged", what)
    return None


def _by_hash(prefix: Path, known: Listed, all_known: Sequence[Listed], pair: Pair) -> tuple[Kind, str] | None:
    """What the hashes of a pair's files say against it."""
    for ending, name in ((".bin", "bin_sha256"), (".idx", "idx_sha256")):
        found = getattr(pair, name)
        if found is not None and found != getattr(known, name):
            whose = [Path(one.prefix).name for one in all_known if getattr(one, name) == found]
            if whose:
                return "swapped", f"has the {ending} of `{whose[0]}`"
            return "damaged", f"has another {ending} than was made, of the same size"
    return None


def _beside(
    folder: DataFolder, plan: Plan, names: Collection[str], records: dict[int, ShardRecord | None]
) -> Iterator[Finding]:
    """What lies beside the shards: files of no shard, a manifest of other shards, and the tokenizer."""
    yield from _foreign(folder.path, names)
    for record in sorted(folder.record(0).parent.glob("*.json")):
        if not re.fullmatch(r"\d{5,}", record.stem) or int(record.stem) >= plan.tasks:
            what = f"`shards/{record.name}` is the record of no shard of this plan"
            yield Finding("foreign", what, f"remove it: {record}")
    yield from _other_tokenizer(folder.path, plan)
    again = f"`moekit data manifest {plan.name}` writes it again"
    try:
        manifest = read_manifest(folder.path)
    except MoekitError as problem:
        yield Finding("manifest", f"`manifest.json` {problem.problems[0].what}", again)
        return
    if manifest is None:
        return
    made = {folder.prefix(plan.name, task).name: record for task, record in records.items() if record}
    listed = [replace(one, weight=one.tokens) for one in (*manifest.shards, *manifest.held_out)]
    if manifest.fingerprint != fingerprint(plan):
        yield Finding("manifest", "`manifest.json` is of another plan", again)
    elif any(one.prefix not in made or one != as_listed(one.prefix, made[one.prefix]) for one in listed):
        yield Finding("manifest", "`manifest.json` lists shards that have been made again since", again)


def _foreign(path: Path, names: Collection[str]) -> Iterator[Finding]:
    pairs: dict[str, list[Path]] = {}
    for file in token_files(path):
        if file.stem not in names:
            pairs.setdefault(file.stem, []).append(file)
    for name, files in pairs.items():
        what = f"`{name}` is no shard of this data set, and has files here"
        yield Finding("foreign", what, f"nothing reads it; move it away: {' '.join(map(str, files))}")


def _other_tokenizer(path: Path, made: Plan | Manifest) -> Iterator[Finding]:
    file = path.absolute().parent.parent / "tokenizers" / made.tokenizer / "tokenizer.json"
    if path.absolute().parent.name != "data" or not file.is_file():
        return
    if hashlib.sha256(file.read_bytes()).hexdigest() != made.tokenizer_sha256:
        what = f"tokenizer `{made.tokenizer}` is not the one that these shards were made with: {file}"
        yield Finding("tokenizer", what, "put that one back, or tokenize anew under another name")
