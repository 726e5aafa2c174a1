"""What one rank's processor did, and when: the intervals of a trace by stream and family."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moekit.profile.intervals import Intervals

_LONGEST_NS = 1 << 61  # two of them added or subtracted still fit; clocks that begin in 1970 stay below


@dataclass(frozen=True)
class Timeline:
    """One rank, or one device where a trace does not say which rank it is."""

    name: str
    source: str
    """The profiler, for people."""
    on_cpu: bool
    """Operators of the training thread, which nest, in place of kernels."""
    steps: int | None
    parts: Mapping[tuple[str, str], Intervals]
    """By stream (or thread) and family, as recorded."""
    window: tuple[int, int]
    """Nanoseconds at which the recording begins and ends."""
    unnamed_sends: int = 0
    """NCCL's SendRecv kernels of which nothing says whether they are all-to-all."""
    skipped: int = 0
    """Events without a usable time."""


@dataclass
class Recorder:
    """Collects intervals in 20 bytes each."""

    begins: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    codes: array[int] = field(default_factory=lambda: array("i"))
    names: dict[tuple[str, str], int] = field(default_factory=dict)
    unnamed_sends: int = 0

    def add(self, stream: str, family: str, begin_ns: int, end_ns: int) -> None:
        """One interval; nonsense times are the caller's to keep out."""
        self.begins.append(begin_ns)
        self.ends.append(end_ns)
        self.codes.append(self.names.setdefault((stream, family), len(self.names)))

    def __len__(self) -> int:
        return len(self.begins)

    def parts(self) -> dict[tuple[str, str], Intervals]:
        """All intervals by stream and family."""
        times = np.stack([np.frombuffer(self.begins, np.int64), np.frombuffer(self.ends, np.int64)], axis=1)
        codes = np.frombuffer(self.codes, np.int32)
        return {name: times[codes == code] for name, code in self.names.items()}

    def window(self) -> tuple[int, int]:
        """The first begin and the last end."""
        return min(self.begins), max(self.ends)


def nanoseconds(value: object) -> int | None:
    """Microseconds as a trace has them; None where they are no number that a clock could show."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) * 1000 < _LONGEST_NS:
        return None
    return round(value * 1000)
