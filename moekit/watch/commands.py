"""`moekit watch`: a run, while it trains and after."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.recipe.commands import JsonOption
from moekit.runs.commands import ProfileOption, RunArgument

if TYPE_CHECKING:
    from moekit.watch.watching import Picture

app = typer.Typer()


@app.command("watch")
def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, help="Seconds between two looks.")] = 2.0,
    control: Annotated[
        str | None,
        typer.Option("--control", help="The run with forced even routing to compare TFLOP/s with, over the recipe's."),
    ] = None,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write the curves there and end.")
    ] = None,
    profile: ProfileOption = None,
) -> None:
    """Show a run while it trains: loss, MaxVio and speed together, the router's layers, and what is worth an alert.

    It reads the run's files alone, so it goes from a login node too, and costs the training nothing. Ctrl-C ends the
    watching and not the run; it ends by itself once no job of the run is left. Where the output is no terminal, it is a
    line for each step that is new, and for each alert. With --json: one picture as an object, with the curves.
    """
    from moekit.runs.look import find_run, roots
    from moekit.watch import look

    found = find_run(run, [] if "/" in run else roots(profile))
    watched = look.Watched(found, control)
    if once or as_json or plot is not None:
        _print(watched.now(), as_json, plot)
        return
    try:
        look.follow(watched, interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print(picture: Picture, as_json: bool, plot: Path | None) -> None:
    """Print a picture, and write its curves where that is asked for."""
    from moekit.watch import look

    if plot is not None:
        look.write_plot(picture, plot)
    if as_json:
        print(json.dumps(picture.as_json(), indent=1))
    elif plot is None:
        look.show(picture)
    else:
        print(plot, file=sys.stderr)
