"""`moekit track | dashboard`: metrics on their way into Trackio, and its dashboard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.problems import error
from moekit.runs.commands import ProfileOption

if TYPE_CHECKING:
    from moekit.launch.rundir import RunDir

app = typer.Typer()


@app.command("track")
def track(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...]", help="Names of runs, or paths of their directories.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All runs, those too that are launched later.")] = False,
    profile: ProfileOption = None,
    once: Annotated[bool, typer.Option("--once", help="Send what is there now, and end.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=1.0, help="Seconds between two looks at the files.")
    ] = 30.0,
    space: Annotated[
        str | None,
        typer.Option(
            "--space",
            metavar="OWNER/NAME",
            help="Copy these runs to a Space of the Hugging Face hub too, every 10 minutes; needs HF_TOKEN.",
        ),
    ] = None,
) -> None:
    """Bring metrics into Trackio from a login node, until the runs have ended.

    Of runs of Slurm only this does; runs of this machine do it by themselves. Nothing is lost while it does not run:
    whatever is missing comes with the next one, each row once, however the last one ended. Ctrl-C ends it.
    """
    from moekit.launch.run_files import PROJECT
    from moekit.track.many import Tracker
    from moekit.track.space import SpaceCopy, need_token
    from moekit.track.storage import Storage

    if bool(runs) == every:
        raise error("`moekit track` takes runs, or `--all`", "`moekit list` names the runs there are")
    if space:
        need_token(space, os.environ)
    found = [_find(run, profile) for run in runs or []]
    root = _root(found, profile)
    storage = Storage((root / "trackio").resolve(), PROJECT)
    copy = SpaceCopy(space, PROJECT) if space else None
    tracker = Tracker((lambda: _all(root)) if every else (lambda: found), storage, _say, interval_s, copy)
    try:
        whole = tracker.follow(once)
    except KeyboardInterrupt:
        print("ended; the same command goes on")
        raise typer.Exit(130) from None
    finally:
        tracker.close()
    if not whole:
        raise typer.Exit(1)


@app.command("dashboard")
def dashboard(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's name, or its directory's path: it is brought first.")
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", metavar="P", help="A project of Trackio's.", show_default="moekit")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65535, help="Serve on this port or not at all.", show_default="first free from 7860"
        ),
    ] = None,
    profile: ProfileOption = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the commands that do the same, and end.")] = False,
) -> None:
    """Open Trackio's dashboard on the metrics of all runs, on 127.0.0.1 and until Ctrl-C.

    In a session of ssh, the line is printed that makes it reachable from the machine you sit at.
    """
    from moekit.launch.run_files import PROJECT
    from moekit.track.dashboard import dashboard_lines, tunnel_command

    found = _find(run, profile) if run else None
    trackio_dir = (_root([found] if found else [], profile) / "trackio").resolve()
    name = project or PROJECT
    if only_print:
        print("\n".join(dashboard_lines(trackio_dir, name, os.environ, port)))
        return
    from moekit.track import serve
    from moekit.track.storage import Storage

    storage = Storage(trackio_dir, name)
    if found is not None and project is None:
        serve.bring(found.path, storage)
    served = serve.serve(storage, found.path.name if found else None, port)
    try:
        _say(f"dashboard   {served.url}")
        _say(f"to write    {served.write_url}")
        if tunnel := tunnel_command(os.environ, served.port):
            _say(f"tunnel      {tunnel}\n            on the machine you sit at; then the address is the same there")
        _say("Ctrl-C ends it")
        serve.keep(storage, _say)
    except KeyboardInterrupt:
        served.close()


def _find(run: str, profile: str | None) -> RunDir:
    from moekit.runs.look import find_run, roots

    return find_run(run, [] if "/" in run else roots(profile))


def _root(found: list[RunDir], profile: str | None) -> Path:
    """The folder whose `trackio/` is meant: the one of the runs, else the profile's, else this machine's."""
    from moekit.runs.look import roots

    of_runs = sorted({run.path.parents[1] for run in found})
    if len(of_runs) > 1:
        both = " and ".join(map(str, of_runs[:2]))
        raise error(f"the runs lie in {both}, whose metrics are kept apart", "one command for each")
    if shared_roots := of_runs or roots(profile):
        return shared_roots[0]
    raise error("no profile says where runs lie", "give `--profile`, or set MOEKIT_PROFILE for all commands")


def _all(root: Path) -> list[RunDir]:
    from moekit.runs.look import all_runs

    return [run for run in all_runs([root]) if run.recipe.is_file()]


def _say(text: str) -> None:
    print(text, flush=True)
