"""Which rank a hang waits for: the one whose last completed collective is oldest, or one that says nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_COMPLETED = re.compile(
    rb"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)", re.IGNORECASE
)
_GROUP = re.compile(rb"PG (?:ID \d+ PG )?GUID ([\w-]+)(?:\(([\w-]+)\))?")
_WHOLE = "default_pg"
"""The group of all ranks. Of another name there are many, such as of expert parallelism, each with its own numbers."""
_UNNAMED = "of kind "
"""Begins what stands for a group where a line names none: who waits in one kind of collective may be of one group."""
_WORK = re.compile(rb"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
_MOST = 1 << 16


@dataclass
class Collectives:
    """What the watchdogs of torch's ProcessGroupNCCL said, by process group and rank."""

    completed: dict[tuple[str, int], int] = field(default_factory=dict)
    """(group, rank) to the last completed collective, in the order of enqueueing."""
    waited: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    """(group, rank) to the collective it waited in: its number and its kind."""

    def take(self, line: bytes, rank: int) -> None:
        """A watchdog's line of a rank; -1 where it names none."""
        if rank < 0 or len(self.completed) + len(self.waited) > _MOST:
            return
        group = _name(found) if (found := _GROUP.search(line)) else ""
        work = _WORK.search(line)
        if done := _COMPLETED.search(line):
            self.completed.setdefault((group, rank), int(done[2]))
        if work:
            kind = work[2].decode()
            self.waited.setdefault((group or f"{_UNNAMED}{kind}", rank), (int(work[1]), kind))

    def sentence(self, world: int = 0) -> str:
        """Who is waited for, as far as it is said; empty where it is not. `world`: ranks of the run, 0 unknown."""
        reached = dict(self.completed)
        for key, (number, _) in self.waited.items():
            reached.setdefault(key, number - 1)
        if not reached:
            return ""
        said = {rank for _, rank in reached}
        silent = [rank for rank in range(world) if rank not in said]
        if silent and len(silent) <= max(1, world // 2):
            names = ", ".join(map(str, silent[:8])) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
            return f"rank {names} completed nothing that its watchdog told of, while {len(said)} ranks waited"
        named = sorted(dict.fromkeys(group for group, _ in reached), key=lambda group: not group or _UNNAMED in group)
        for group in named:
            members = {rank: number for (one, rank), number in reached.items() if one == group}
            oldest, newest = min(members.values()), max(members.values())
            if oldest < newest:
                behind = sorted(rank for rank, number in members.items() if number == oldest)
                whole = f"rank {', '.join(map(str, behind[:8]))} had completed collective {oldest}"
                if not group or _UNNAMED in group:
                    return f"{whole}, others up to {newest}, if they are of one group, which their lines do not say"
                return f"{whole} of group `{group}`, the others up to {newest}"
        return ""


def _name(found: re.Match[bytes]) -> str:
    """A group's name with its number, which alone is its own."""
    number, name = found[1].decode(), (found[2] or b"").decode()
    return name if name == _WHOLE else f"{name} {number}".strip()
