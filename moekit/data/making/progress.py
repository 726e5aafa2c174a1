"""How far a tokenization has come, on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moekit.data.making.parts import Progress, Step

LINE_S = 30.0
"""Between two lines, where standard error is no terminal."""


@dataclass
class Count:
    """The sum of all steps."""

    all_bytes: int
    """Of the input files."""
    documents: int = 0
    tokens: int = 0
    read_bytes: int = 0
    reused_tokens: int = 0
    reused_bytes: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.documents += step.documents
        self.tokens += step.tokens
        self.read_bytes += step.read_bytes
        if step.reused:
            self.reused_tokens += step.tokens
            self.reused_bytes += step.read_bytes

    @property
    def share(self) -> float:
        """Of the input, from 0 to 1."""
        return min(self.read_bytes / self.all_bytes, 1.0) if self.all_bytes else 1.0

    def sentence(self, seconds: float) -> str:
        """What is done after this time, how fast, and what is left."""
        tokens_s = (self.tokens - self.reused_tokens) / max(seconds, 1e-3)
        done = self.read_bytes - self.reused_bytes
        left = f", {_duration(seconds * (self.all_bytes - self.read_bytes) / done)} left" if done else ""
        rate = f", {_short(tokens_s)} tokens/s" if tokens_s else ""
        return f"{self.documents:,} documents, {_short(self.tokens)} tokens{rate}{left}"


@contextmanager
def shown(all_bytes: int) -> Iterator[Progress]:
    """Take the steps of a tokenization and show them on standard error: a bar, or a line every half minute."""
    count, started = Count(all_bytes), time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (TaskProgressColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=1.0)

            def draw(step: Step) -> None:
                count.add(step)
                if step.note:
                    bar.console.print(step.note, markup=False, highlight=False)
                bar.update(task, completed=count.share, description=count.sentence(time.monotonic() - started))

            yield draw
        return

    printed_at = started

    def tell(step: Step) -> None:
        nonlocal printed_at
        count.add(step)
        now = time.monotonic()
        if step.note:
            print(step.note, file=sys.stderr)
        if now - printed_at >= LINE_S:
            printed_at = now
            print(f"{count.share:4.0%}  {count.sentence(now - started)}", file=sys.stderr, flush=True)

    yield tell


def _short(number: float) -> str:
    """`1,234`, `5.67 million`, `8.90 billion`."""
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return f"{number:,.0f}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{max(seconds, 0):.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
