"""`moekit rehearse`: a recipe's own run, made small and trained here."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.options import JsonOption, ProfileOption
from moekit.problems import error, print_problems
from moekit.recipe.check_command import checked
from moekit.rehearse import report

if TYPE_CHECKING:
    from moekit.rehearse.plan import Part, Plan

app = typer.Typer()


@app.command("rehearse")
def rehearse(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Recipe files, or names of shipped ones.")],
    profile: ProfileOption = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", help="Keep the small runs in this new folder.", show_default="if refused"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe's own run, made small, on this machine's CPU: a minute before GPUs are held.

    Sizes shrink and the structure stays: layers of every kind, experts, router, balancer, dispatcher, layout,
    optimizer, schedule, checkpoints, logging. The real Megatron judges the recipe in full size, trains the small one as
    rank 0 of its whole world, and trains it in two real processes that save a checkpoint and go on from it. What a CPU
    cannot do is left out, or plain torch does it, and is named: that is not judged.

    Exit code 1 where Megatron refuses it, at file and line; else 0.
    """
    from moekit.cluster.profile import find_cluster
    from moekit.rehearse.plan import plan
    from moekit.rehearse.rehearsal import rehearse as rehearsed

    cluster = find_cluster(profile)
    plans = [plan(checked(recipe, cluster), cluster) for recipe in recipes]
    folder = _folder(keep)
    all_parts: list[list[Part]] = []
    try:
        for made, parts in zip(plans, rehearsed(plans, folder), strict=True):
            if all_parts and not as_json:
                print()
            all_parts.append(list(parts) if as_json else _shown(made, parts))
    finally:
        refused = any(report.answer(parts) == "refused" for parts in all_parts)
        if keep is None and not refused:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        told = [report.as_json(made, parts) for made, parts in zip(plans, all_parts, strict=True)]
        print(json.dumps(dict(zip(recipes, told, strict=True)), indent=1))
    if keep or refused:
        print(f"the small runs and their logs are in {folder}", file=sys.stderr)
    raise typer.Exit(1 if refused else 0)


def _shown(made: Plan, parts: Iterable[Part]) -> list[Part]:
    """The parts of a recipe, each said as it ends."""
    found: list[Part] = []
    _say(f"rehearsing {made.loaded.source.shown} on this machine's CPU", *report.begin(made))
    for part in parts:
        found.append(part)
        _say(*report.told(part))
    _say(*report.end(made, found))
    print_problems([problem for part in found for problem in part.problems])
    return found


def _folder(keep: Path | None) -> Path:
    """Where the small runs lie: a new folder."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="moekit-rehearsal-"))
    try:
        keep.mkdir(parents=True)
    except FileExistsError:
        raise error(f"`{keep}` already exists", "`--keep` takes a folder that is not there yet") from None
    except OSError as reason:
        raise error(f"`{keep}` cannot be made: {(reason.strerror or str(reason)).lower()}") from None
    return keep.absolute()


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)
