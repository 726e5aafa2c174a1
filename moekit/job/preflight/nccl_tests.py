"""What nccl-tests' `alltoall_perf` and `all_reduce_perf` print. Pure.

Spaces and lines differ between versions, so rows are split at blanks; ranks of several nodes may share a line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d+)")
_COLUMNS = 13
"""size count type redop root, then time algbw busbw #wrong out of place, and again in place."""
_OUT_OF_PLACE = slice(5, 9)


@dataclass(frozen=True)
class Measured:
    """One run, at one message size."""

    busbw_gb_s: float = 0.0
    """Bus bandwidth, send and receive buffers apart; 1e9 bytes."""
    problem: str = ""
    """Why the number counts for nothing; empty where it does."""


def read_perf(text: str, size_bytes: int, nodes: Sequence[str], gpus: int, code: int = 0) -> Measured:
    """The out-of-place bus bandwidth at a size, of a run on `gpus` GPUs of each node.

    A run counts if its ranks are one world of one rank a GPU, and every value it received was right.
    """
    if problem := _world(text, nodes, gpus):
        return Measured(problem=problem)
    row = next((cells for line in text.splitlines() if (cells := _row(line, size_bytes))), None)
    if row is None:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
        ended = f"it ended with {code}" if code else "it printed no whole row"
        return Measured(problem=f"{ended} at {size_bytes} bytes: {last[:200]}")
    _, _, busbw, wrong = row[_OUT_OF_PLACE]
    if wrong == "N/A":
        return Measured(problem="its values were not checked (`-c 1`)")
    if wrong != "0":
        return Measured(problem=f"{wrong} values arrived wrong")
    if not _is_number(busbw):
        return Measured(problem=f"its bus bandwidth is `{busbw}`")
    if code or re.search(r"Out of bounds values : \d+ FAILED", text):
        return Measured(problem=f"it says FAILED, and ended with {code}")
    return Measured(float(busbw))


def _world(text: str, nodes: Sequence[str], gpus: int) -> str:
    """What is wrong with the list of ranks; empty where nothing is."""
    ranks = [(int(rank), host) for rank, _, host, _ in _RANK.findall(text)]
    wanted = len(nodes) * gpus
    zeros = sum(rank == 0 for rank, _ in ranks)
    if zeros > 1:
        what = f"{zeros} processes each say rank 0: each measured alone"
        return f"{what}. The program is built without MPI (`MPI=1`), or its MPI does not know srun's PMIx"
    if not ranks:
        return ""  # it did not come so far, and says why elsewhere
    if sorted(rank for rank, _ in ranks) != list(range(wanted)):
        return f"its list has {len(ranks)} ranks where {len(nodes)} nodes of {gpus} GPUs have {wanted}"
    of = Counter(host.partition(".")[0] for _, host in ranks)
    if len(of) != len(nodes) or set(of.values()) != {gpus}:
        return f"its ranks are {', '.join(f'{count} on {host}' for host, count in sorted(of.items()))}"
    return ""


def _row(line: str, size_bytes: int) -> list[str]:
    cells = line.split()
    return cells if len(cells) == _COLUMNS and cells[0] == str(size_bytes) else []


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
