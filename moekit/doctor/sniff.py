"""What Megatron's test of the GPUs (`monitor.gpu_sniff_test_interval`) said in a log: who is slow, in what, how often.

It times products of matrices and collectives on all ranks, and names those more than a tenth from the median
(megatron/training/gpu_sniff_test.py, `_gather_and_check`). One test says little: a rank shares its time with others.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

SAYS = ("GPU sniff test", ": median=.*, max=", "OUTLIER rank ", "Result: ALL RANKS OK")
"""Lines of it."""
_BEGINS = re.compile(rb"GPU sniff test(?: -- (.*?))?\s*$")
_METRIC = re.compile(rb"(?:^|:| ) *([A-Z][\w/-]* [^\[]*\[[^\]]*\]): median=")
_OUTLIER = re.compile(rb"OUTLIER rank (\d+)(?: \(([^)]*)\))?: (-?[\d.]+) \(([+-][\d.]+)%\)")
_RESULT = re.compile(rb"Result: (?:ALL RANKS OK|OUTLIERS DETECTED)")
_MOST = 1 << 14


@dataclass
class Slow:
    """A rank that was slower than the median."""

    host: str = ""
    tests: set[int] = field(default_factory=set)
    """In which tests, by their number."""
    most_percent: float = 0.0
    """How far below the median, at most; negative."""
    metric: str = ""
    """In what."""


@dataclass
class SniffTests:
    """The tests of a log."""

    done: int = 0
    """That told a result."""
    slow: dict[int, Slow] = field(default_factory=dict)
    """By rank."""
    _metric: str = ""

    def take(self, line: bytes) -> None:
        """A line of a test; others change nothing."""
        if found := _METRIC.search(line):
            self._metric = found[1].decode(errors="replace")
        elif found := _OUTLIER.search(line):
            self._outlier(int(found[1]), (found[2] or b"").decode(errors="replace"), float(found[4]))
        elif _RESULT.search(line):
            self.done += 1
        elif _BEGINS.search(line):
            self._metric = ""

    def _outlier(self, rank: int, host: str, percent: float) -> None:
        if percent >= 0 or len(self.slow) > _MOST:
            return
        slow = self.slow.setdefault(rank, Slow())
        slow.host = host or slow.host
        slow.tests.add(self.done)
        if percent < slow.most_percent:
            slow.most_percent, slow.metric = percent, self._metric

    @property
    def again(self) -> bool:
        """Whether a rank was slow in several tests, and in more than a few of them."""
        most = max((len(one.tests) for one in self.slow.values()), default=0)
        return most > 1 and most * 4 >= self.done

    def sentence(self) -> str:
        """The slowest ranks and their hosts; empty where none was slow."""
        if not self.slow:
            return ""
        ranked = sorted(self.slow.items(), key=lambda item: (-len(item[1].tests), item[1].most_percent))
        said = [_said(rank, one, max(self.done, 1)) for rank, one in ranked[:4]]
        if len(ranked) > 4:
            host, count = Counter(one.host for one in self.slow.values()).most_common(1)[0]
            said.append(f"and {len(ranked) - 4} more ranks" + (f"; {count} of them all on {host}" if host else ""))
        return f"tests of the GPUs: {'; '.join(said)}"


def _said(rank: int, one: Slow, tests: int) -> str:
    where = f" ({one.host})" if one.host else ""
    what = f" in `{one.metric}`" if one.metric else ""
    return f"rank {rank}{where} slow in {len(one.tests)} of {tests}, {one.most_percent:+.1f}%{what}"
