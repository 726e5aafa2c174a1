"""`moekit launch`: a checked recipe to a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from moekit.problems import MoekitError, error, print_problems
from moekit.recipe.commands import JsonOption, ProfileOption, RecipeArgument, checked
from moekit.recipe.load import Loaded

if TYPE_CHECKING:
    from moekit.launch.cluster import Cluster

app = typer.Typer()


class _Launch(TyperCommand):
    """Takes `--dry-run` alone as well as `--dry-run=DIR`: the word behind it is never its folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--dry-run=" if arg == "--dry-run" else arg for arg in args])


@app.command("launch", cls=_Launch)
def launch(
    recipe: RecipeArgument,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The run's name, its folder below `runs/`.", show_default="the recipe's"),
    ] = None,
    where: Annotated[
        Literal["slurm", "local"] | None,
        typer.Option(
            "--on",
            help="Where to train: `local` is this machine, `slurm` a job.",
            show_default="local where the recipe says `runtime.device: cpu`, else slurm",
        ),
    ] = None,
    profile: ProfileOption = None,
    dry_run: Annotated[
        str | None,
        typer.Option(
            "--dry-run",
            metavar="[=DIR]",
            help="Print the files of the run directory and stop; with =DIR, write them into that new folder instead.",
        ),
    ] = None,
    no_submit: Annotated[
        bool, typer.Option("--no-submit", help="Write the run directory, and leave `sbatch job.sbatch` there to you.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe, make its run directory, and train it.

    On Slurm, from a login node, everything that is missing is told at once: image, checkout, tokenizer, data. Then the
    run's directory is written below the profile's `shared_root`, and its job submitted. `moekit status`, `logs`,
    `cancel` and `resume` take the run's name.

    On this machine the run lies below `moekit-local/` (with `--profile`, below the profile's `shared_root`); the same
    command again goes on from the last checkpoint.
    """
    from moekit.launch.cluster import find_cluster
    from moekit.launch.runs import LOCAL_ROOT

    cluster = find_cluster(profile)
    loaded = checked(recipe, cluster)
    name = name or loaded.name
    local = where == "local" or (where is None and loaded.recipe.runtime.device == "cpu")
    shared_root = Path(cluster.shared_root) if profile or not local else Path.cwd() / LOCAL_ROOT
    if dry_run is not None:
        files = _files(loaded, name, shared_root, None if local else cluster)
        _print_or_write(files, shared_root / "runs" / name, dry_run, as_json, local)
    elif local:
        from moekit.launch.local import launch_local

        raise typer.Exit(launch_local(loaded, name, shared_root))
    elif no_submit:
        _write_only(loaded, name, cluster, as_json)
    elif where is None and not profile:
        raise _nowhere(recipe)
    else:
        _submit(loaded, name, cluster, profile, as_json)


def _nowhere(recipe: str) -> MoekitError:
    """A recipe for GPUs, and nothing that says which."""
    ways = f"`moekit launch {recipe} --profile FILE` submits it, `--on local` trains here, `--dry-run` shows the job"
    return error("no `--profile` says on which cluster to train", f"{ways}; `moekit init` writes a profile")


def _submit(loaded: Loaded, name: str, cluster: Cluster, profile: str | None, as_json: bool) -> None:
    """Submit a run, and say what became of it and what to do next."""
    from moekit.launch.report import say_submitted
    from moekit.launch.submit import launch_slurm

    say_submitted(launch_slurm(loaded, name, cluster), profile, as_json)


def _write_only(loaded: Loaded, name: str, cluster: Cluster, as_json: bool) -> None:
    from moekit.launch.submit import write_only

    run, lacking = write_only(loaded, name, cluster)
    print_problems(lacking)
    if as_json:
        print(json.dumps({"run": name, "directory": str(run.path), "jobs": []}, indent=1))
    else:
        print(
            f"{name} is written, and not submitted\n  directory   {run.path}\n  next        `sbatch job.sbatch` there"
        )


def _files(loaded: Loaded, name: str, shared_root: Path, cluster: Cluster | None) -> dict[str, str]:
    """The run directory's files, for this machine or for a cluster."""
    from moekit.launch.rundir import run_files
    from moekit.launch.script import slurm_files

    return run_files(loaded, name, shared_root) if cluster is None else slurm_files(loaded, name, cluster)


def _print_or_write(files: Mapping[str, str], run: Path, folder: str, as_json: bool, local: bool) -> None:
    """What a dry run gives: files on standard output, or in a folder; what to do next on standard error."""
    from moekit.launch.folders import claim, write

    if folder:
        claim(Path(folder), "`--dry-run=DIR` takes a folder that is not there yet")
        write(Path(folder), files)
        start = f"; in it, `sbatch job.sbatch` starts the job, where nodes see it: below {run.parent.parent}"
        print(f"{len(files)} files in {folder}{'' if local else start}", file=sys.stderr)
    elif as_json:
        print(json.dumps(files, indent=1))
    else:
        shown = {name: text for name, text in files.items() if not name.startswith("job/")}
        print("\n".join(f"==> {name} <==\n{text}" for name, text in shown.items()), end="")
        unseen = len(files) - len(shown)
        print(f"nothing written; the run would lie in {run}, with {unseen} more files in job/", file=sys.stderr)
