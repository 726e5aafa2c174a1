"""What somebody names of data: a shard, a folder or a data set's name, to shards, their tokenizer and vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moekit.data.places import load_plan
from moekit.data.plan import DataFolder
from moekit.data.shards import bin_path, idx_path
from moekit.problems import did_you_mean, error, shortened


@dataclass(frozen=True)
class Facts:
    """What a data set's folder says of the tokens in it; None where it does not."""

    tokenizer: Path | None = None
    """The folder of the tokenizer they were made with."""
    tokenizer_sha256: str | None = None
    """Of its `tokenizer.json`, as it was then."""
    vocab_size: int | None = None
    """Token ids that there are."""


def shards_of(given: str, shared_root: Path) -> list[Path]:
    """The prefixes of what is named: a prefix, its `.bin` or `.idx`, a folder, or a data set below `shared_root`.

    Raises:
        MoekitError: there is nothing of that name, or no shard in it.
    """
    path = Path(given)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if given and any(end(prefix).is_file() for end in (idx_path, bin_path)):
        return [prefix]
    folders = [folder for folder in (path, shared_root / "data" / given) if given and folder.is_dir()]
    if not folders:
        sets = sorted(one.name for one in (shared_root / "data").glob("*/"))
        hint = did_you_mean(given, sets) or f"data sets in {shared_root / 'data'}: {', '.join(sets) or 'none'}"
        raise error(f"there is no shard, folder or data set `{shortened(given)}`", hint)
    for folder in folders:
        if found := shards_in(folder):
            return found
    hint = "a shard is two files, `.bin` and `.idx`; `moekit data tokenize` makes them"
    raise error("there is no whole shard in this folder", hint, str(folders[-1]))


def shards_in(folder: Path) -> list[Path]:
    """The prefixes of the shards in a folder: those with a record where there is a plan, else all pairs, by name."""
    there = DataFolder(folder)
    if plan := load_plan(there):
        return [there.prefix(plan.name, task) for task in range(plan.tasks) if there.record(task).is_file()]
    pairs = (index.with_suffix("") for index in sorted(folder.glob("*.idx")))
    return [prefix for prefix in pairs if bin_path(prefix).is_file()]


def facts_of(folder: Path) -> Facts:
    """What the plan of a folder says of its tokens, or else the manifest of the data that comes with moekit.

    A tokenizer lies beside the data, in `<shared_root>/tokenizers`; where none is named it is called like the data.
    """
    folder = folder.absolute()
    plan = load_plan(DataFolder(folder))
    tokenizer = folder.parent.parent / "tokenizers" / (plan.tokenizer if plan else folder.name)
    found = tokenizer if (tokenizer / "tokenizer.json").is_file() else None
    if plan:
        return Facts(found, plan.tokenizer_sha256, plan.vocab_size)
    try:
        manifest = json.loads(DataFolder(folder).manifest.read_text("utf-8"))
    except (OSError, ValueError):
        return Facts(found)
    made = manifest.get("made_from", {}) if isinstance(manifest, dict) else {}
    return Facts(found, made.get("tokenizer.json"), manifest.get("vocabulary") if made else None)
