"""`moekit launch`: a checked recipe to a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from moekit.launch.elsewhere_commands import (
    ELSEWHERE,
    Asked,
    BucketOption,
    DetachOption,
    FlavorOption,
    ImageOption,
    NamespaceOption,
    ProbeOption,
    TimeoutOption,
    VolumeOption,
    YesOption,
    launch_elsewhere,
    refuse_unread,
)
from moekit.options import JsonOption, ProfileOption
from moekit.problems import MoekitError, error, print_problems, shortened
from moekit.recipe.load import Loaded

if TYPE_CHECKING:
    from moekit.cluster.profile import Cluster

app = typer.Typer()


class WithDryRun(TyperCommand):
    """Takes `--dry-run` alone as well as `--dry-run=DIR`: the word behind it is never its folder; `--probe` alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of a command line, with an empty folder where none is named."""
        for parameter in self.params:
            if parameter.name == "recipes":
                parameter.required = "--probe" not in args
        return super().parse_args(ctx, ["--dry-run=" if arg == "--dry-run" else arg for arg in args])


@app.command("launch", cls=WithDryRun)
def launch(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="Recipe or sweep files, or names of shipped ones.")
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="The run's name, its folder below `runs/`; a sweep's.", show_default="the recipe's"
        ),
    ] = None,
    where: Annotated[
        Literal["slurm", "local", "docker", "hf-jobs", "skypilot", "kubernetes"] | None,
        typer.Option(
            "--on",
            help="Where to train: `slurm` is a job, `local` this machine, `docker` a container on it, `hf-jobs` a "
            "machine rented from Hugging Face; of `skypilot` and `kubernetes` the files are written.",
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
    chain: Annotated[
        int,
        typer.Option(
            "--chain", metavar="N", help="Submit N jobs that follow each other, each from the last checkpoint."
        ),
    ] = 1,
    index_first: Annotated[
        bool | None,
        typer.Option(
            "--index-first/--no-index-first",
            help="Have a CPU job build the data's index before GPUs are held.",
            show_default="for several runs of the same data, where the profile has a `cpu_partition`",
        ),
    ] = None,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Have the job train without a look at its nodes.")
    ] = False,
    image: ImageOption = None,
    volume: VolumeOption = None,
    flavor: FlavorOption = None,
    probe: ProbeOption = False,
    timeout: TimeoutOption = None,
    bucket: BucketOption = None,
    namespace: NamespaceOption = None,
    yes: YesOption = False,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check recipes, make their run directories, and train them.

    On Slurm, from a login node, everything that is missing is told at once: image, checkout, tokenizer, data. Then the
    run's directory is written below the profile's `shared_root`, and its job submitted. `moekit status`, `logs`,
    `cancel` and `resume` take the run's name.

    Of several recipes, or of a sweep, all are checked before any is submitted, and the same command again submits only
    what is missing. A run that begins from another's checkpoint waits for that one.

    On this machine the run lies below `moekit-local/` (with `--profile`, below the profile's `shared_root`); the same
    command again goes on from the last checkpoint.

    On a rented machine the price and the timeout are shown first; Ctrl-C ends the job. docs/hf-jobs.md has that, and
    docs/elsewhere.md docker, SkyPilot and Kubernetes.
    """
    from moekit.cluster.profile import find_cluster
    from moekit.launch.several import load_all
    from moekit.runs.look import LOCAL_ROOT

    where = where or ("hf-jobs" if probe or flavor else None)
    run = (where, recipes or (), name, profile, dry_run, as_json)
    asked = Asked(*run, image, volume, flavor, probe, timeout, bucket, namespace, yes, detach)
    refuse_unread(asked, {"--chain": chain != 1, "--index-first": index_first, "--no-submit": no_submit})
    if where in ELSEWHERE:
        raise typer.Exit(launch_elsewhere(asked))
    cluster = find_cluster(profile)
    if no_preflight:
        cluster = replace(cluster, preflight=False)
    loaded, warnings = load_all(recipes, name, cluster)
    print_problems(warnings)
    local = where == "local" or (where is None and all(one.recipe.runtime.device == "cpu" for one in loaded))
    if local and (chain != 1 or index_first):
        raise error(f"`{'--index-first' if index_first else '--chain'}` is about jobs of Slurm", "add `--on slurm`")
    shared_root = Path(cluster.shared_root) if profile or not local else Path.cwd() / LOCAL_ROOT
    if dry_run is not None:
        dry = {one.name: _files(one, shared_root, None if local else cluster) for one in loaded}
        _print_or_write(dry, shared_root, dry_run, as_json, local)
    elif local:
        raise typer.Exit(_train_here(loaded, shared_root))
    elif no_submit:
        _write_only(loaded, cluster, as_json)
    elif where is None and not profile:
        raise _nowhere(recipes)
    else:
        _submit(loaded, cluster, profile, chain, index_first, as_json)


def _nowhere(recipes: list[str]) -> MoekitError:
    """A recipe for GPUs, and nothing that says which."""
    command = f"`moekit launch {shortened(' '.join(recipes))} --profile FILE`"
    ways = f"{command} submits it, `--on local` trains here, `--dry-run` shows the job"
    return error("no `--profile` says on which cluster to train", f"{ways}; `moekit init` writes a profile")


def _submit(
    loaded: list[Loaded], cluster: Cluster, profile: str | None, links: int, index_first: bool | None, as_json: bool
) -> None:
    """Submit runs, and say what became of them and what to do next."""
    from moekit.launch.data_there import said_of_epochs
    from moekit.launch.several import launch_several
    from moekit.runs.report import say_several, say_submitted

    launched, problems = launch_several(loaded, cluster, links, index_first)
    data = [*dict.fromkeys(filter(None, (said_of_epochs(one, Path(cluster.shared_root)) for one in loaded)))]
    refused = any(problem.level == "error" for problem in problems)
    if len(loaded) > 1 or loaded[0].variant is not None:
        say_several(launched, profile, as_json, data)
    elif submitted := launched[0].submitted:
        say_submitted(submitted, profile, as_json, data)
    print_problems(problems)
    if refused:
        raise typer.Exit(1)


def _train_here(loaded: list[Loaded], shared_root: Path) -> int:
    """Train on this machine, one run after another; the first exit code that is not 0 ends it."""
    from moekit.launch.local import launch_local

    for one in loaded:
        if code := launch_local(one, one.name, shared_root):
            return code
    return 0


def _write_only(loaded: list[Loaded], cluster: Cluster, as_json: bool) -> None:
    from moekit.launch.submit import write_only

    written = []
    for one in loaded:
        run, lacking = write_only(one, one.name, cluster)
        print_problems(lacking)
        written.append({"run": one.name, "directory": str(run.path), "jobs": []})
        if not as_json:
            print(f"{one.name} is written, and not submitted")
            print(f"  directory   {run.path}\n  next        `sbatch job.sbatch` there")
    if as_json:
        print(json.dumps(written[0] if len(written) == 1 else written, indent=1))


def _files(loaded: Loaded, shared_root: Path, cluster: Cluster | None) -> dict[str, str]:
    """The run directory's files, for this machine or for a cluster."""
    from moekit.launch.run_files import run_files
    from moekit.launch.script import slurm_files

    name = loaded.name
    return run_files(loaded, name, shared_root) if cluster is None else slurm_files(loaded, name, cluster)


def _print_or_write(runs: Mapping[str, Mapping[str, str]], root: Path, folder: str, as_json: bool, local: bool) -> None:
    """What a dry run gives: files on standard output, or in a folder; what to do next on standard error."""
    from moekit.launch.folders import claim, write

    one = next(iter(runs.values())) if len(runs) == 1 else None
    if folder:
        claim(Path(folder), "`--dry-run=DIR` takes a folder that is not there yet")
        for name, files in runs.items():
            write(Path(folder) if one else Path(folder, name), files)
        count = sum(map(len, runs.values()))
        start = f"; in {'it' if one else 'each'}, `sbatch job.sbatch` starts the job, where nodes see it: below {root}"
        many = "" if one else f" for {len(runs)} runs, each in a folder of its own"
        print(f"{count} files in {folder}{many}{'' if local else start}", file=sys.stderr)
    elif as_json:
        print(json.dumps(one or runs, indent=1))
    elif one:
        shown = {name: text for name, text in one.items() if not name.startswith("job/")}
        print("\n".join(f"==> {name} <==\n{text}" for name, text in shown.items()), end="")
        unseen, (name,) = len(one) - len(shown), runs
        print(
            f"nothing written; the run would lie in {root / 'runs' / name}, with {unseen} more files in job/",
            file=sys.stderr,
        )
    else:
        print("\n".join(str(root / "runs" / name) for name in runs))
        print(f"nothing written; {len(runs)} runs would lie there; `--dry-run=DIR` writes their files", file=sys.stderr)
