"""The watching itself: reads a run's files again and again, asks what has become of it, and draws."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from moekit.launch.rundir import RunDir
from moekit.problems import error
from moekit.runs.logs import ASKED_EVERY_S
from moekit.runs.look import look_at
from moekit.runs.report import headline
from moekit.watch.live_view import alert_line, plain_line, render_live
from moekit.watch.metrics import LOSS
from moekit.watch.svg import Panel, svg
from moekit.watch.watching import TOKENS_PER_S, Picture, Watching
from moekit.writing import write_whole

_AT_ONCE = 5_000
"""Steps between two looks at the clock: a long run is drawn while it is still being read."""
_DRAWN_EVERY_S = 0.5
_PANELS = (
    ("lm loss, nats per token", (LOSS, "mtp_1 loss")),
    ("MaxVio, mean of the layers", ("router/max_vio_micro", "router/max_vio")),
    ("tokens/s", (TOKENS_PER_S,)),
    ("TFLOP/s of each GPU", ("throughput",)),
    ("gradient norm", ("grad-norm",)),
    ("balancing losses", ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss")),
    ("RMS logsumexp of the router, from its z-loss", ("z_loss_rms_logsumexp",)),
)


class Watched:
    """A run, with what has become of it: Slurm is asked every ten seconds at most."""

    def __init__(self, run: RunDir, control: str | None = None) -> None:
        self.watching = Watching(run.path, control)
        self.active = True
        self._run = run
        self._asked = -ASKED_EVERY_S
        self._state = ""

    def ask(self) -> None:
        """Look whether it waits, runs or has ended, unless that was asked just now."""
        if time.monotonic() < self._asked + ASKED_EVERY_S:
            return
        self._asked = time.monotonic()
        try:
            seen, problems = look_at(self._run)
        except OSError as failure:  # a folder that is not mine to write in, or a file system that hangs
            self._state = f"its state is not known: {failure.strerror}"
            return
        self._state = headline(seen).removeprefix(f"{seen.files.name}: ")
        self.active = seen.state.active or bool(problems)

    def picture(self) -> Picture:
        """What is known now."""
        return self.watching.picture(self._state)

    def now(self) -> Picture:
        """The picture once everything there is has been read."""
        self.ask()
        while self.watching.poll(_AT_ONCE) is not None:
            pass
        return self.picture()


def follow(watched: Watched, interval_s: float) -> None:
    """Draw until no job of the run is left: over and over on a terminal, else as lines."""
    if sys.stdout.isatty():
        _draw(watched, interval_s)
    else:
        _print_lines(watched, interval_s)


def show(picture: Picture) -> None:
    """Print a picture, with colours where the output is a terminal."""
    size = shutil.get_terminal_size((80, 24))
    Console(width=max(size.columns, 60)).print(render_live(picture, size.columns, size.lines), soft_wrap=True)


def write_plot(picture: Picture, path: Path) -> None:
    """Write the curves of a picture as SVG.

    Raises:
        MoekitError: it cannot be written, or nothing is there to draw.
    """
    if not picture.curves:
        raise error(f"run `{picture.name}` has no metrics yet, so there is nothing to plot")
    panels = [Panel(title, {name: picture.curves.get(name, []) for name in names}) for title, names in _PANELS]
    write_svg(picture.name, panels, path)


def write_svg(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Write panels as SVG, whole or not at all.

    Raises:
        MoekitError: it cannot be written.
    """
    write_whole(path, svg(title, panels))


def _draw(watched: Watched, interval_s: float) -> None:
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            watched.ask()
            last = not watched.active  # asked before the reading: what is read is then all there is
            new = True
            while new:
                drawn = time.monotonic()
                while new and time.monotonic() < drawn + _DRAWN_EVERY_S:
                    new = watched.watching.poll(_AT_ONCE) is not None
                live.update(render_live(watched.picture(), console.width, console.height), refresh=True)
            if last:
                break
            time.sleep(interval_s)
    show(watched.picture())


def _print_lines(watched: Watched, interval_s: float) -> None:
    said, state = (0, 0), ""
    while True:
        watched.ask()
        last = not watched.active
        while (begun := watched.watching.poll(_AT_ONCE)) is not None:
            for alert in begun:
                print(
                    alert_line(alert.attempt, alert.step, alert.time, alert.level, alert.title, alert.text), flush=True
                )
        picture = watched.picture()
        if picture.state != state and (said == (0, 0) or last):
            state = picture.state
            print(f"{picture.name}: {state}", flush=True)
        if picture.step and (picture.attempt, picture.step) != said:
            said = (picture.attempt, picture.step)
            print(plain_line(picture), flush=True)
        if last:
            return
        time.sleep(interval_s)
