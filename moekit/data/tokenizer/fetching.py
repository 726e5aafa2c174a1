"""`moekit data tokenizer`: put a data set's tokenizer where training and tokenizing read it.

    <shared_root>/tokenizers/<name>/   tokenizer.json and what else a repository has of it;
                                       moekit.json: where they come from, and their sha256

The folder is filled under another name and renamed when it is whole and has been read: it is complete if it is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from moekit.data.dataset import Dataset
from moekit.data.dataset_rules import REPOSITORY
from moekit.data.folders import locked, make_folder
from moekit.data.tokenizer.hub import fetch_from_hub
from moekit.data.tokenizer.hub_child import is_wanted
from moekit.data.tokenizer.reading import TokenizerFacts, read_tokenizer
from moekit.problems import MoekitError, error, shortened

RECORD = "moekit.json"
ANOTHER = "move the folder away and run this again, or give the description another name for its `tokenizer`"


@dataclass(frozen=True)
class TokenizerRecord:
    """`moekit.json`: where a tokenizer comes from, and what it was found to be."""

    source: str
    """A repository of the Hub, or the absolute path of a local folder."""
    revision: str | None
    """The branch, tag or commit that was asked for; null: the newest."""
    commit: str | None
    """The repository's commit that it is of."""
    sha256: str
    """Of `tokenizer.json`."""
    vocab_size: int
    """Token ids, added ones among them."""
    end_of_document: str
    end_of_document_id: int
    others_sha256: dict[str, str]
    """Of each other file."""


@dataclass(frozen=True)
class Fetched:
    """A tokenizer that is there."""

    folder: Path
    facts: TokenizerFacts
    record: TokenizerRecord | None
    """None where it was put there by other means than moekit."""
    already: bool
    """Whether it was there before."""


def fetch_tokenizer(dataset: Dataset, shared_root: Path, given: str | None, tell: Callable[[str], None]) -> Fetched:
    """Make the tokenizer's folder where it is missing; hold it against the description where it is there.

    Two calls at the same time do the work once. A killed call leaves nothing that the next one takes for whole.

    Args:
        dataset: whose tokenizer it is.
        shared_root: the folder that holds `tokenizers/`; made if needed.
        given: another source than the description's: a repository, or a local folder from `/` or `.` on.
        tell: called with a sentence for each step that takes time.

    Raises:
        MoekitError: it cannot be fetched, is not what the description says, or another one is there.
    """
    folder = shared_root.absolute() / "tokenizers" / dataset.tokenizer
    if given is not None and not is_local(given):
        _check_repository(given)
    try:
        if there := _present(folder, dataset, given):
            return there
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), "waiting for another process that fetches it", tell):
            if there := _present(folder, dataset, given):
                return there
            make_folder(folder, lambda temporary: _fill(temporary, dataset, given, tell))
    except OSError as reason:
        what = f"cannot put the tokenizer there: {(reason.strerror or str(reason)).lower()}"
        raise error(what, "", str(reason.filename or folder)) from None
    made = _present(folder, dataset, given)
    assert made
    return replace(made, already=False)


def _fill(temporary: Path, dataset: Dataset, given: str | None, tell: Callable[[str], None]) -> None:
    source, commit = given or dataset.tokenizer_source, None
    revision = dataset.tokenizer_revision if source == dataset.tokenizer_source else None
    if source is None:
        what = f"the description of `{dataset.name}` says no `tokenizer_source`, and its tokenizer is not there"
        raise error(what, "name one there, or with `--from`", str(temporary.parent / dataset.tokenizer))
    if is_local(source):
        source = str(Path(source).resolve())
        _copy(Path(source), temporary)
    else:
        tell(f"fetching the tokenizer of {source}")
        commit = fetch_from_hub(source, revision, dataset.tokenizer_copy, temporary)
    try:
        facts = read_tokenizer(temporary, dataset.end_of_document, dataset.vocab_size)
    except MoekitError as unfit:  # told at the source: the temporary folder goes away
        raise MoekitError(*(replace(one, where=f"tokenizer.json of {source}") for one in unfit.problems)) from None
    others = {path.name: _sha256(path) for path in sorted(temporary.iterdir()) if path.name != "tokenizer.json"}
    record = TokenizerRecord(
        source=source,
        revision=revision,
        commit=commit,
        sha256=facts.sha256,
        vocab_size=facts.vocab_size,
        end_of_document=dataset.end_of_document,
        end_of_document_id=facts.end_of_document_id,
        others_sha256=others,
    )
    (temporary / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", "utf-8")


def is_local(source: str) -> bool:
    """Whether a tokenizer's source is a folder here, and no repository."""
    return source.startswith((".", "/"))


def _check_repository(given: str) -> None:
    if not REPOSITORY.fullmatch(given):
        raise error(f"`--from {shortened(given)}` is no `OWNER/NAME` and no local folder from `/` or `.` on")
    if Path(given).is_dir():
        raise error(f"`--from {given}` may be a repository or the folder here", f"write `./{given}` for the folder")


def _copy(source: Path, temporary: Path) -> None:
    try:
        names = sorted(path.name for path in source.iterdir() if path.is_file() and is_wanted(path.name))
    except OSError as reason:
        raise error(f"cannot be read: {(reason.strerror or str(reason)).lower()}", "", str(source)) from None
    if "tokenizer.json" not in names:
        raise error("has no `tokenizer.json`", "name the folder that has it", str(source))
    for name in names:
        shutil.copyfile(source / name, temporary / name)


def _present(folder: Path, dataset: Dataset, given: str | None) -> Fetched | None:
    """What is in the folder, if it is there and what the description and the command line say."""
    if not os.path.lexists(folder):
        return None
    record = _read_record(folder)
    if record is None:
        if given:
            raise _other(folder, "it was put there by other means than moekit")
        return Fetched(folder, read_tokenizer(folder, dataset.end_of_document, dataset.vocab_size), None, True)
    for name, sha256 in {"tokenizer.json": record.sha256, **record.others_sha256}.items():
        path = folder / name
        if not path.is_file():
            raise _other(folder, f"`{name}` is missing")
        if _sha256(path) != sha256:
            raise _other(folder, f"`{name}` is not the one that was fetched")
    if reason := _another_source(record, dataset, given):
        raise _other(folder, reason)
    if record.end_of_document == dataset.end_of_document and dataset.vocab_size in (None, record.vocab_size):
        known = TokenizerFacts(folder / "tokenizer.json", record.sha256, record.vocab_size, record.end_of_document_id)
        return Fetched(folder, known, record, True)
    return Fetched(folder, read_tokenizer(folder, dataset.end_of_document, dataset.vocab_size), record, True)


def _another_source(record: TokenizerRecord, dataset: Dataset, given: str | None) -> str:
    """How a folder's origin is not the one asked for; empty where it is."""
    asked = [one for one in ([given] if given else [dataset.tokenizer_source, dataset.tokenizer_copy]) if one]
    asked = [str(Path(one).resolve()) if is_local(one) else one for one in asked]
    if asked and record.source not in asked:
        return f"it comes from `{record.source}`, not from {' or '.join(f'`{one}`' for one in asked)}"
    wanted = dataset.tokenizer_revision
    if wanted and record.source == dataset.tokenizer_source and wanted not in (record.revision, record.commit):
        return f"it is revision `{record.commit}`, not `{shortened(wanted)}`"
    return ""


def _read_record(folder: Path) -> TokenizerRecord | None:
    try:
        said = json.loads((folder / RECORD).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.keys() != {field.name for field in fields(TokenizerRecord)}:
        raise _other(folder, f"its `{RECORD}` is not what this moekit writes, or damaged")
    return TokenizerRecord(**said)


def _other(folder: Path, reason: str) -> MoekitError:
    return error(f"another tokenizer is there: {reason}", ANOTHER, str(folder))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def said(fetched: Fetched, end_of_document: str) -> str:
    """What there is to say of a tokenizer, in two lines."""
    facts, record = fetched.facts, fetched.record
    origin = f"from {record.source}" if record else "put there by other means"
    if record and record.commit:
        origin += f" at {record.commit[:12]}"
    is_there = "is there already" if fetched.already else "written"
    return (
        f"{fetched.folder} {is_there}, {origin}\n"
        f"{facts.vocab_size:,} tokens, end of document `{end_of_document}` = {facts.end_of_document_id}, "
        f"sha256 {facts.sha256}"
    )


def as_json(fetched: Fetched) -> dict[str, object]:
    """The same for a script."""
    facts, record = fetched.facts, fetched.record
    return {
        "folder": str(fetched.folder),
        "already": fetched.already,
        "source": record and record.source,
        "commit": record and record.commit,
        "sha256": facts.sha256,
        "vocab_size": facts.vocab_size,
        "end_of_document_id": facts.end_of_document_id,
    }
