"""What is tokenized, put down before it begins: made from a data set's description, kept in `plan.json`, compared."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moekit.data.dataset import Dataset
from moekit.data.places import load_plan
from moekit.data.plan import DataFolder, InputFile, Plan
from moekit.data.sources import list_files, missing_package
from moekit.problems import MoekitError, error

PACKAGES = ("datatrove", "tokenizers")
"""What the tokens' values depend on."""
NAMED = 3
"""Files of each kind that a message names."""


def folder_of(shared_root: Path, name: str, limit: int | None = None) -> DataFolder:
    """A data set's folder: `<shared_root>/data/<name>`, of a sample `<shared_root>/data/<name>-sample`."""
    return DataFolder(shared_root.absolute() / "data" / (name if limit is None else f"{name}-sample"))


def tokenizer_file(folder: DataFolder, plan: Plan) -> Path:
    """The `tokenizer.json` of a plan, which lies in the same shared root as the data."""
    return folder.path.parent.parent / "tokenizers" / plan.tokenizer / "tokenizer.json"


def make_plan(dataset: Dataset, shared_root: Path, limit: int | None = None) -> Plan:
    """Find a data set's files and its tokenizer.

    Args:
        dataset: its description, with absolute paths.
        shared_root: holds `tokenizers/<tokenizer>`.
        limit: documents of each file at most, for a sample; its plan and shards are called `<name>-sample`.

    Raises:
        MoekitError: files or tokenizer are not there or cannot be used, there are more tasks than files, a package is
            missing, or Megatron could not read what lies there.
    """
    from moekit.data.tokenizer.reading import read_tokenizer

    folder = folder_of(shared_root, dataset.name, limit)
    _check_readable(folder.path)
    tokenizer = read_tokenizer(
        shared_root.absolute() / "tokenizers" / dataset.tokenizer, dataset.end_of_document, dataset.vocab_size
    )
    kind, files = list_files(dataset.source, dataset.format)
    if dataset.tasks > len(files):
        what = f"data set `{dataset.name}` has {dataset.tasks} tasks for {len(files)} input files"
        raise error(f"{what}; a task takes whole files", f"write `tasks: {len(files)}` or less")
    return Plan(
        name=folder.path.name,
        format=kind,
        text_key=dataset.text_key,
        id_key=dataset.id_key,
        files=files,
        tokenizer=dataset.tokenizer,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_document=dataset.end_of_document,
        end_of_document_id=tokenizer.end_of_document_id,
        keep_fraction=dataset.keep_fraction,
        tasks=dataset.tasks,
        max_document_mib=dataset.max_document_mib,
        limit=limit,
        versions=versions(),
    )


def _check_readable(folder: Path) -> None:
    """Megatron splits the file of `--data-args-path` at white space (megatron/training/utils/common_utils.py:523)."""
    if str(folder).split() != [str(folder)] or not str(folder).isprintable():
        what = f"Megatron cannot read data in `{folder}`: the path has a space or a character that cannot be printed"
        raise error(what, "take another shared root")


def versions() -> dict[str, str]:
    """The installed versions of what the tokens depend on.

    Raises:
        MoekitError: one is not installed.
    """
    try:
        return {package: version(package) for package in PACKAGES}
    except PackageNotFoundError as missing:
        raise missing_package(str(missing.name)) from None


def settle_plan(folder: DataFolder, plan: Plan) -> None:
    """Put a plan down in its folder, or find it there already.

    Only one process may do so at a time.

    Raises:
        MoekitError: the folder holds another plan, or files and no plan; or it cannot be written.
    """
    there = load_plan(folder)
    if there is None:
        _check_empty(folder)
        write_json(folder.plan, asdict(plan))
    elif changed := differences(there, plan):
        hint = "tokenize under another `name`, bring back what was, or move the folder away"
        raise error(f"the folder is of another tokenization: {'; '.join(changed)}", hint, str(folder.path))


def _check_empty(folder: DataFolder) -> None:
    """What lies in a folder without a plan is of unknown origin, and could be taken for shards."""
    own = {folder.lock.name, f".{folder.plan.name}.tmp"}
    names = {file.name for file in folder.path.iterdir()} if folder.path.is_dir() else set()
    if foreign := sorted(names - own):
        what = f"the folder has no `plan.json`, but holds `{foreign[0]}`"
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise error(what + more, "move the folder away, or tokenize under another `name`", str(folder.path))


def differences(old: Plan, new: Plan) -> list[str]:
    """What two plans do not have in common, one phrase for each field; none where they are the same."""
    found = []
    for field in fields(Plan):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name == "files":
            found += _changed_files(old.files, new.files)
        elif field.name == "versions":
            packages = sorted({*before, *after})
            found += [_change(name, before.get(name), after.get(name)) for name in packages]
        else:
            found.append(_change(field.name, before, after))
    return [phrase for phrase in found if phrase]


def _change(name: str, before: object, after: object) -> str:
    return "" if before == after else f"`{name}` was `{_said(before)}` and is `{_said(after)}`"


def _said(value: object) -> str:
    return "null" if value is None else str(value)


def _changed_files(old: tuple[InputFile, ...], new: tuple[InputFile, ...]) -> list[str]:
    before, after = ({file.path: file for file in files} for files in (old, new))
    kinds = {
        "changed": [path for path in before if path in after and before[path] != after[path]],
        "gone": [path for path in before if path not in after],
        "new": [path for path in after if path not in before],
    }
    return [_listed(kind, paths) for kind, paths in kinds.items() if paths]


def _listed(kind: str, paths: list[str]) -> str:
    count = f"{len(paths)} input file{'s are' if len(paths) > 1 else ' is'} {kind}"
    more = ", ..." if len(paths) > NAMED else ""
    return f"{count}: {', '.join(f'`{path}`' for path in paths[:NAMED])}{more}"


def write_json(path: Path, content: object) -> None:
    """Write a JSON file whole or not at all.

    Raises:
        MoekitError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as reason:
        raise unwritable(path, reason) from None


def unwritable(path: Path, reason: OSError) -> MoekitError:
    """What to tell where the disk takes no more, or never did."""
    hint = "make room, or the folder writable, and run the same again: it goes on where it was"
    return error(f"cannot be written: {str(reason.strerror).lower()}", hint, str(reason.filename or path))
