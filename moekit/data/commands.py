"""`moekit data`: here what makes shards, tokenizer to index; `shard_commands.py` has what is done with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from moekit.data.shard_commands import SharedRootOption, shards
from moekit.launch.commands import WithDryRun
from moekit.options import JsonOption, ProfileOption
from moekit.problems import MoekitError, error

app = typer.Typer()
data = typer.Typer(no_args_is_help=True)
app.add_typer(data, name="data", help="Prepare, check and look at training data: text to shards.")

DatasetArgument = Annotated[
    str, typer.Argument(metavar="DATASET", help="A data set's description, or the name of a shipped one.")
]


@data.command("tokenizer")
def tokenizer(
    dataset: DatasetArgument,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="OWNER/NAME|DIR",
            help="Take it from this repository of the Hub, or this local folder (`/...` or `./...`).",
            show_default="the description's `tokenizer_source`",
        ),
    ] = None,
    profile: ProfileOption = None,
    shared_root: SharedRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a data set's tokenizer, and check its vocabulary and end token.

    Tokenizing and training read the same files, in tokenizers/ of the shared root; their sha256 is put down beside
    them. One that is there already is held against the description. For a gated repository, ask for access on its page
    and run `hf auth login`, or take a copy with --from; so also where there is no network.

    moekit data tokenizer fineweb_edu --from unsloth/Llama-3.2-1B
    """
    from moekit.data.dataset import find_dataset
    from moekit.data.places import shared_root_of
    from moekit.data.tokenizer.fetching import as_json as fetched_as_json
    from moekit.data.tokenizer.fetching import fetch_tokenizer, said

    described = find_dataset(dataset)
    fetched = fetch_tokenizer(described, shared_root_of(profile, shared_root), source, _tell)
    print(json.dumps(fetched_as_json(fetched), indent=1) if as_json else said(fetched, described.end_of_document))


def _tell(step: str) -> None:
    print(f"{step} ...", file=sys.stderr)


@data.command("tokenize", cls=WithDryRun)
def tokenize(
    dataset: DatasetArgument,
    where: Annotated[
        Literal["slurm", "local"],
        typer.Option("--on", help="Where: `local` is this machine, `slurm` an array on the profile's `cpu_partition`."),
    ] = "local",
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="A sample: N documents of each file, in `<name>-sample`."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="Processes on this machine; each takes 0.4 GiB, and 0.14 for each MiB of `max_document_mib`.",
            show_default="`cpus_per_task`, at most this machine's CPUs",
        ),
    ] = None,
    profile: ProfileOption = None,
    shared_root: SharedRootOption = None,
    dry_run: Annotated[
        str | None,
        typer.Option(
            "--dry-run",
            metavar="[=DIR]",
            help="With `--on slurm`: print the array's files and stop; with =DIR, write them into that new folder.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tokenize a data set into shards, in data/ of the shared root.

    What it will do is put down first, in `plan.json`: files and their sizes, tokenizer, share kept, versions. The same
    command again finishes what is missing, after a kill or a full disk as well; where anything of the plan would
    differ, it is refused. The shards are the same for any number of workers. A shard has its record in shards/ once it
    is whole.

    moekit data tokenize fineweb_edu --limit 100

    moekit data tokenize my_text.yaml --workers 8

    moekit data tokenize fineweb_edu --on slurm --profile slurm/clusters/mine.yaml

    On Slurm each shard is an element of an array, on a node that sees the Python of this command. `moekit data status`
    says how it goes; the same command again submits what failed or is missing, once nothing of it waits or runs.
    """
    from moekit.data.array.submit import refuse_while_running
    from moekit.data.dataset import find_dataset
    from moekit.data.making.here import Stopped, stoppable, summary, tokenize_here
    from moekit.data.places import shared_root_of
    from moekit.data.planning import folder_of

    if where == "slurm" or dry_run is not None:
        if where == "local" or limit or workers:
            raise _not_together(where, limit, workers)
        raise typer.Exit(_tokenize_on_slurm(dataset, profile, shared_root, dry_run, as_json))
    described, root = find_dataset(dataset), shared_root_of(profile, shared_root)
    refuse_while_running(folder_of(root, described.name, limit))
    try:
        with stoppable():
            done = tokenize_here(described, root, limit, workers)
    except Stopped as stopped:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
    print(json.dumps(done.as_json(), indent=1) if as_json else summary(done))


def _not_together(where: str, limit: int | None, workers: int | None) -> MoekitError:
    """Options of `tokenize` of which one is for this machine, and another for Slurm."""
    if where == "local":
        return error("`--dry-run` shows what would be submitted", "add `--on slurm`")
    if limit:
        return error("`--limit` makes a sample, which takes no Slurm", "leave out `--on slurm`")
    hint = "`cpus_per_task` in the data set's description says how many CPUs an element has"
    return error(f"`--workers {workers}` is for this machine", hint)


def _tokenize_on_slurm(
    dataset: str, profile: str | None, shared_root: Path | None, dry_run: str | None, as_json: bool
) -> int:
    from moekit.cluster.profile import find_cluster
    from moekit.data.array import command as array_command

    cluster = find_cluster(profile)
    root = shared_root.absolute() if shared_root else Path(cluster.shared_root)
    if dry_run is not None:
        array_command.dry_run(dataset, cluster, root, dry_run, as_json)
        return 0
    return array_command.tokenize_on_slurm(dataset, cluster, root, profile, as_json)


@data.command("status")
def status(
    dataset: DatasetArgument,
    profile: ProfileOption = None,
    shared_root: SharedRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which shards of a data set are whole, and what has become of the others on Slurm.

    Of each that is not whole: its newest element, how that ended or why it waits, and the last line of its log.

    moekit data status fineweb_edu --profile slurm/clusters/mine.yaml
    """
    from moekit.data.array import command as array_command
    from moekit.data.places import shared_root_of

    array_command.status(dataset, shared_root_of(profile, shared_root), profile, as_json)


@data.command("index")
def index(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="Recipe or sweep files, or names of shipped ones.")
    ],
    where: Annotated[
        Literal["slurm", "local"] | None,
        typer.Option(
            "--on",
            help="Where to build: `local` is this machine, `slurm` a job on the profile's `cpu_partition`.",
            show_default="local where the recipe says `runtime.device: cpu`, else slurm",
        ),
    ] = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build Megatron's index of a recipe's data before GPUs are held.

    In a training, rank 0 builds it while all other GPUs wait: minutes with many shards. It lies in cache/ of the data
    set's folder, and the recipe's trainings find it there. A launch waits for a job that still builds it.

    moekit data index first_moe --profile slurm/clusters/mine.yaml
    """
    from moekit.cluster.profile import find_cluster
    from moekit.data.index import build_here, submit
    from moekit.launch.several import load_all
    from moekit.problems import print_problems
    from moekit.runs.look import LOCAL_ROOT
    from moekit.runs.report import with_profile

    cluster = find_cluster(profile)
    loaded, warnings = load_all(recipes, None, cluster)
    print_problems(warnings)
    local = where == "local" or (where is None and all(one.recipe.runtime.device == "cpu" for one in loaded))
    root = Path(cluster.shared_root) if profile else Path.cwd() / LOCAL_ROOT
    built = []
    for one in build_here(loaded, root) if local else submit(loaded, cluster):
        built.append(one)
        if not as_json:
            print(f"{one.loaded.name}: {f'job {one.job} builds the index' if one.job else one.said}")
            print(f"  index       {one.cache}\n  directory   {one.folder}")
    if as_json:
        print(json.dumps([one.as_json() for one in built], indent=1))
    else:
        print(f"  next        moekit launch {' '.join(recipes)}{with_profile(profile)}")


data.add_typer(shards)
