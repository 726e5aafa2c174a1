"""The checkpoints of a run: which are complete, which one the next start takes, and which are kept.

Read from what lies in `checkpoints/` alone, by whoever starts or watches a run: standard library only, also for
Python 3.9. An `OSError` of these functions is the file system's, and says nothing about a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator

if __package__:
    from .saved import UnreadableError, common_state, differences, saved_arguments, stored, unzipped
else:  # in a run's `job/`
    from saved import (  # type: ignore[import-not-found,no-redef]
        UnreadableError,
        common_state,
        differences,
        saved_arguments,
        stored,
        unzipped,
    )

__all__ = ["Found", "UnreadableError", "differences", "latest", "missing", "prune", "saved_arguments", "settle"]

TRACKER = "latest_checkpointed_iteration.txt"
INCOMPLETE = "incomplete"
"""The folder where `settle` puts what is not complete."""
NEWER = "newer"
"""The folder where `settle` puts complete ones that are newer than the one the run goes on from."""
_PRUNED = ".pruned-"
_FOLDER = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class Found:
    """The checkpoint that a start goes on from."""

    step: int = 0
    """Its iteration; 0 without one, and for Megatron's `release`."""
    folder: Path | None = None
    """None: there is none."""
    said: tuple[str, ...] = ()
    """A sentence for each checkpoint that is passed over, and for what is wrong with the file that names the last."""


def missing(folder: Path) -> str:
    """Why a checkpoint's folder is not complete; empty if it is.

    Every file that must be there is, and is at least as long as the parts in it; their bytes are not read.
    """
    if not folder.is_dir():
        return "it is not there"
    try:
        if (folder / ".metadata").exists():
            return _missing_of_distributed(folder)
        if any(folder.glob("mp_rank_*")):
            return _missing_of_ranks(folder)
        return "it is empty" if not os.listdir(folder) else "`.metadata` is missing"  # noqa: PTH208
    except UnreadableError as unreadable:
        return str(unreadable)


def _missing_of_distributed(folder: Path) -> str:
    """torch_dist, which Megatron completes by `metadata.json`; torch_dcp and fsdp_dtensor, by `.metadata` alone."""
    parts = stored(folder)
    ends: dict[str, int] = {}
    for name, offset, length in (part for of_one in parts.values() for part in of_one):
        ends[name] = max(ends.get(name, 0), offset + length)
    for name, end in sorted(ends.items()):
        size = _size(folder / name)
        if size is None:
            return f"`{name}` is missing"
        if size < end:
            return f"`{name}` has {size:,} of {end:,} bytes"
    common = folder / "common.pt"
    if not common.exists() and not any("/shard_" in name for name in parts):
        return ""
    if not (folder / "metadata.json").exists():
        return "`metadata.json` is missing"
    try:
        json.loads((folder / "metadata.json").read_bytes())
    except ValueError:
        return "`metadata.json` is cut off"
    return "`common.pt` is missing" if common_state(folder, parts) is None else ""


def _missing_of_ranks(folder: Path) -> str:
    """torch: a folder for each rank of a model; with the distributed optimizer it has two files."""
    ranks = sorted(folder.glob("mp_rank_*"))
    divided = any((rank / "distrib_optim.pt").exists() for rank in ranks)
    for rank in ranks:
        for name in ["model_optim_rng.pt", *(["distrib_optim.pt"] if divided else [])]:
            path = rank / name
            if not path.exists():
                return f"`{rank.name}/{name}` is missing"
            with path.open("rb") as file:
                unzipped(file, f"{rank.name}/{name}")
    said = saved_arguments(folder)
    tensor, pipeline, expert = (
        said.get(f"{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline", "expert")
    )
    alike = (said.get("expert_tensor_parallel_size") or tensor) == tensor
    needed = pipeline * (tensor * expert if alike else max(tensor, expert))
    return f"{len(ranks)} of {needed} folders `mp_rank_*` are there" if len(ranks) < needed else ""


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def steps(checkpoints: Path) -> list[int]:
    """The iterations of all checkpoints in a folder, complete or not, ascending."""
    try:
        names = os.listdir(checkpoints)  # noqa: PTH208
    except FileNotFoundError:
        return []
    found = (_FOLDER.fullmatch(name) for name in names)
    return sorted(int(name[1]) for name in found if name and (checkpoints / name[0]).is_dir())


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where Megatron saves an iteration."""
    return checkpoints / f"iter_{step:07d}"


def tracked(checkpoints: Path) -> str | None:
    """What Megatron's file says is the last checkpoint: an iteration, or `release`; None without that file."""
    try:
        with (checkpoints / TRACKER).open("rb") as file:
            return file.read(100).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _iteration(word: str | None) -> int | None:
    return int(word) if word and re.fullmatch(r"[0-9]{1,18}", word) else None


def latest(checkpoints: Path) -> Found:
    """The checkpoint to go on from.

    Megatron's file decides, for a person may have set it back; where what it names is not complete, the newest complete
    one below it.
    """
    word, there, said = tracked(checkpoints), steps(checkpoints), []
    if word == "release":
        if not (reason := missing(checkpoints / word)):
            return Found(0, checkpoints / word)
        said.append(f"the checkpoint `release` is passed over: {reason}")
    step = _iteration(word)
    if word is not None and word != "release" and step is None:
        said.append(f"`{TRACKER}` names no checkpoint, it says {word!r}: the newest complete one is taken")
    if word is None and there:
        said.append(f"there is no `{TRACKER}`: the newest complete checkpoint is taken")
    if step is not None and step not in there:
        said.append(f"the checkpoint of iteration {step}, which `{TRACKER}` names, is not there")
    newer: list[int] = []
    for other in reversed(there):
        if reason := missing(folder_of(checkpoints, other)):
            said.append(f"the checkpoint of iteration {other} is passed over: {reason}")
        elif step is not None and other > step:
            newer.append(other)
        else:
            return Found(other, folder_of(checkpoints, other), (*_set_back(newer, other), *said))
    if newer:
        return Found(newer[0], folder_of(checkpoints, newer[0]), tuple(said))
    return Found(said=tuple(said))


def _set_back(newer: list[int], step: int) -> Iterator[str]:
    for other in newer:
        yield f"the checkpoint of iteration {other} is complete too, but `{TRACKER}` names {step}, which is taken"


def settle(checkpoints: Path) -> Found:
    """`latest`, with all others that a start could trip over out of its way; nothing is deleted.

    What is not complete goes to `incomplete/`, what is newer to `newer/`: Megatron would save over it file by file, and
    a save that is cut off would then look whole. Megatron's file is made to name the one found. Where none is complete
    though that file is there, all stays as it is, for a person to look at.
    """
    found = latest(checkpoints)
    word = tracked(checkpoints)
    if (found.folder is None and word is not None) or (found.folder and found.folder.name == "release"):
        return found
    said = list(found.said)
    for step in steps(checkpoints):
        if found.folder and step <= found.step:  # training does not come by it again
            continue
        folder = folder_of(checkpoints, step)
        place = _aside(folder, INCOMPLETE if missing(folder) else NEWER)
        said.append(f"`{folder.name}` lies in `{place}` now")
    if found.folder is not None and _iteration(word) != found.step:
        temporary = checkpoints / f".{TRACKER}.{os.getpid()}"
        temporary.write_text(str(found.step))
        temporary.replace(checkpoints / TRACKER)
    return replace(found, said=tuple(said))


def _aside(folder: Path, name: str) -> str:
    """Move a checkpoint into a folder beside it, under a name that is free there; the new place."""
    place = folder.parent / name
    place.mkdir(exist_ok=True)
    number = 1
    while (place / f"{folder.name}-{number}").exists():
        number += 1
    return str(folder.rename(place / f"{folder.name}-{number}").relative_to(folder.parent.parent))


def prune(checkpoints: Path, keep_last: int, keep_every: int | None = None) -> list[int]:
    """Delete checkpoints but the newest `keep_last` and the multiples of `keep_every`; the iterations that are gone.

    Nothing is, until the newest `keep_last` are complete. Only what is older than the one that Megatron's file names
    counts: that one stays, and what is newer is being written, or another's.
    """
    for left in checkpoints.glob(f"{_PRUNED}*"):
        shutil.rmtree(left)
    last = _iteration(tracked(checkpoints))
    older = [step for step in reversed(steps(checkpoints)) if last is not None and step <= last]
    complete: list[int] = []
    while older and len(complete) < keep_last:
        step = older.pop(0)
        if not missing(folder_of(checkpoints, step)):
            complete.append(step)
    if len(complete) < keep_last or last not in complete:
        return []
    gone = [step for step in older if not (keep_every and step % keep_every == 0)]
    for step in gone:
        folder = folder_of(checkpoints, step)
        with contextlib.suppress(FileNotFoundError):  # somebody else's doing
            shutil.rmtree(folder.rename(checkpoints / f"{_PRUNED}{folder.name}"))
    return gone
