"""The files of bfloat16 values beside a routing trace: `logits_rankR.bin`, `hidden_states_rankR.bin`.

A record of the trace says where its own are (megatron/core/transformer/moe/router_trace.py:385).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Part(NamedTuple):
    """Where a sidecar file (`logits_rankR.bin`, `hidden_states_rankR.bin`) has a call's bfloat16 values."""

    offset: int
    rows: int
    width: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.rows * self.width * 2

    def cut(self, values: int) -> Iterator[tuple[slice, Part]]:
        """The rows in parts of about so many values, each with where its rows are among all."""
        step = max(1, values // max(1, self.width))
        for begin in range(0, self.rows, step):
            end = min(begin + step, self.rows)
            yield slice(begin, end), Part(self.offset + 2 * begin * self.width, end - begin, self.width)


def load(path: Path, part: Part) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The values `# (token, width)` of a sidecar file, bfloat16 widened; None where the file ends before them."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            if file.tell() < part.offset + part.size:
                return None
            file.seek(part.offset)
            data = file.read(part.size)
    except FileNotFoundError:
        return None
    wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
    return wide.view(np.float32).reshape(part.rows, part.width)
