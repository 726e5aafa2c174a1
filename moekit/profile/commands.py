"""`moekit profile`: where a step's time goes, and which lever of handbook 3.7 comes first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from moekit.options import JsonOption
from moekit.problems import error
from moekit.runs.commands import ProfileOption
from moekit.writing import write_whole

app = typer.Typer()


@app.command("profile")
def profile_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TRACE",
            help="A run's name, or its directory's path; or a trace, or a folder of them.",
        ),
    ],
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="RUN|TRACE", help="The same with forced balance: waiting against moving."),
    ] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Forward and backward by pipeline stage, from the run's timers.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="Steps in a trace that does not say it, as nsys's."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write the shares there, as bars.")
    ] = None,
    as_json: JsonOption = False,
    profile: ProfileOption = None,
) -> None:
    """Say where a step's time goes, from traces of PyTorch's profiler or SQLite exports of Nsight Systems.

    Shares of the step by family: attention, grouped GEMM, other GEMM, permute and copy, all-to-all, other
    communication, idle; all-to-all exposed against hidden behind computing; by stream and rank; and which lever of
    handbook 3.7 comes first. Of a run its newest traces are read, `attempts/N/torch_profile/` or `attempts/N/nsys/`.
    Without kernels the operators of the CPU are shown, and said to be that. It reads files alone.
    """
    from moekit.runs.look import roots

    shared_roots = [] if "/" in what and (control is None or "/" in control) else roots(profile)
    if stages:
        if control is not None or steps is not None:
            raise error("`--stages` reads timers, so `--control` and `--steps` say nothing to it", "leave them out")
        _stages(what, shared_roots, plot, as_json)
        return
    from moekit.profile.traces import read

    profiled = read(what, shared_roots, steps)
    from moekit.profile import report
    from moekit.profile.bars import bars_svg

    against = None
    if control is not None:
        from moekit.profile.shares import waiting

        against = waiting(profiled.ranks, read(control, shared_roots, steps).ranks)
        if against is None:
            raise error("a trace does not say how many steps it holds, so steps cannot be compared", "give `--steps N`")
    if plot is not None:
        write_whole(plot, bars_svg(f"{profiled.name}: shares of the step", report.bars_of(profiled), ""))
    if as_json:
        print(json.dumps(report.as_json(profiled, against), indent=1))
        return
    print("\n".join(report.lines(profiled, against, shutil.get_terminal_size((100, 24)).columns)))


def _stages(given: str, shared_roots: list[Path], plot: Path | None, as_json: bool) -> None:
    from moekit.profile import stages
    from moekit.profile.bars import bars_svg
    from moekit.runs.look import find_run

    found = stages.read(find_run(given, shared_roots))
    if plot is not None:
        write_whole(plot, bars_svg(f"{found.name}: forward and backward of a step, ms", stages.by_timer(found), "ms"))
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
        return
    print("\n".join(stages.lines(found, shutil.get_terminal_size((100, 24)).columns)))
