"""The edge of `moekit router`: imports what is asked for, prints, writes the picture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.launch.rundir import RunDir
from moekit.problems import CONTROL
from moekit.writing import write_whole

if TYPE_CHECKING:
    from moekit.watch.router.report import Report
    from moekit.watch.router.trace_report import TraceReport


def of_run(
    run: RunDir, last: int, layer: str | None, other: RunDir | None = None, serving_ep: int | None = None
) -> Report:
    """The report on a run, and how far it chooses as `other` does.

    Raises:
        MoekitError: there is nothing to report or to compare.
    """
    from moekit.watch.router.agree import disagree
    from moekit.watch.router.report import report

    found = report(run, last, layer, serving_ep)
    return found if other is None else replace(found, disagreement=disagree(run, other))


def apart(folder: Path, last: int, layer: str | None) -> Report:
    """The report on files that no recipe explains.

    Raises:
        MoekitError: there are none.
    """
    from moekit.watch.router.report import report_apart

    return report_apart(folder, last, layer)


def of_trace(run: RunDir, weights: bool, traffic: bool, served: int | None, layer: str | None) -> TraceReport:
    """What the calls of a run's newest trace weigh, also at a smaller k `served`, and cost.

    Raises:
        MoekitError: there is no trace, or not what is asked for in it.
    """
    from moekit.watch.router.trace_report import trace_report

    return trace_report(run, weights=weights, traffic=traffic, served=served, only=layer)


def of_rollouts(path: Path) -> tuple[dict[str, Any], Iterator[str]]:
    """How far trainer and rollout engine disagree, as an object and as text.

    Raises:
        MoekitError: the file cannot be read, or has nothing of both.
    """
    from moekit.watch.router import mismatch

    found = mismatch.read(path)
    return found.as_json(), mismatch.lines(found, CONTROL.sub("?", path.name))


def show(report: Report, traced: TraceReport | None = None) -> None:
    """Print a report as text."""
    from moekit.watch.router.render import lines

    width = max(shutil.get_terminal_size((80, 24)).columns, 60)
    for line in lines(report, width):
        print(line)
    if traced is not None:
        from moekit.watch.router import trace_report

        for line in trace_report.lines(traced):
            print(line)


def write_picture(report: Report, path: Path) -> None:
    """Write a report's heat maps, whole or not at all.

    Raises:
        MoekitError: it cannot be written.
    """
    from moekit.watch.router.render import picture

    write_whole(path, picture(report))
