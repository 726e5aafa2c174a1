"""`moekit preflight`: what the hardware does, before a model is blamed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moekit.options import JsonOption, ProfileOption
from moekit.problems import MoekitError, error

if TYPE_CHECKING:
    from moekit.preflight.submit import Wanted

app = typer.Typer()


@app.command("preflight")
def preflight(
    of: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Show what a run's last preflight found; or a folder's that has `verdict.json`."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Look at N nodes, in a job.")] = 1,
    nodelist: Annotated[str, typer.Option("--nodelist", metavar="n[1-4]", help="At these.", show_default=False)] = "",
    profile: ProfileOption = None,
    level: Annotated[
        int, typer.Option("--level", min=1, max=4, help="Of DCGM's diagnostic: 1 takes seconds, 2 minutes.")
    ] = 1,
    maintenance: Annotated[
        bool, typer.Option("--maintenance", help="Allow levels 3 and 4, which take up to hours.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Measure three times, and keep what is clean as this cluster's baseline.")
    ] = False,
    tried: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="NAME=VALUE", help="Compare a setting with its absence, in turn, same nodes."),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Submit, and do not wait for what comes of it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Look at nodes before they train: GPUs, limits, the all-to-all that experts use; name the bad ones.

    Every training job does it first (`launch --no-preflight` has it not); this is a job for it alone. Where an
    allocation is slow by this cluster's own baseline, pairs of its nodes are measured and the slow nodes named.

    Exit code 1 where nodes are refused.
    """
    if of is not None:
        _show(_verdict_of(of, profile), as_json)
        return
    from moekit.cluster.profile import find_cluster
    from moekit.launch import slurm
    from moekit.preflight.submit import Wanted, problems_of, settings

    cluster = find_cluster(profile)
    wanted = Wanted(nodes, nodelist, level, baseline, settings(tried or ()))
    if problems := problems_of(wanted, cluster, maintenance):
        raise MoekitError(*problems)
    if not slurm.available():
        raise error("there is no `sbatch` here", "run it on a login node")
    _submit(wanted, cluster, no_wait, as_json)


def _submit(wanted: Wanted, cluster: Any, no_wait: bool, as_json: bool) -> None:
    """Submit the job, and tell what comes of it."""
    from moekit.preflight.submit import read_verdict, submit, wait

    folder, job = submit(wanted, cluster)
    later = f"moekit preflight {folder}"
    if no_wait:
        print(json.dumps({"job": job, "directory": str(folder)}) if as_json else f"job {job}; then: {later}")
        return
    try:
        ended = wait(job, lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print(f"job {job} goes on; then: {later}", file=sys.stderr)
        raise typer.Exit(130) from None
    verdict = read_verdict(folder / "out")
    if verdict is None:
        state = ended.state if ended else "gone"
        raise error(f"job {job} is {state} and left no verdict", f"its log is in {folder}")
    _show(verdict, as_json)


def _verdict_of(given: str, profile: str | None) -> dict[str, Any]:
    """A verdict that was written earlier, by a run's name or a folder's path."""
    from moekit.preflight.submit import read_verdict
    from moekit.runs.look import find_run, roots

    folder = Path(given)
    for place in (folder, folder / "out"):
        if "/" in given and (verdict := read_verdict(place)):
            return verdict
    run = find_run(given, [] if "/" in given else roots(profile))
    for number in reversed(run.numbers()):
        if verdict := read_verdict(run.attempt(number).preflight):
            return verdict
    raise error(f"no attempt of run `{run.path.name}` has a verdict", "its job looks at the nodes when it starts")


def _show(verdict: dict[str, Any], as_json: bool) -> None:
    from moekit.preflight.report import lines

    print(json.dumps(verdict, indent=1) if as_json else "\n".join(lines(verdict)))
    if verdict["refused"]:
        raise typer.Exit(1)
