"""`moekit data`: from text to shards that Megatron can be trusted with."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from moekit.recipe.commands import JsonOption, ProfileOption

app = typer.Typer()
data = typer.Typer(no_args_is_help=True)
app.add_typer(data, name="data", help="Prepare, check and look at training data: text to shards.")

DatasetArgument = Annotated[
    str, typer.Argument(metavar="DATASET", help="A data set's description, or the name of a shipped one.")
]
SharedRootOption = Annotated[
    Path | None,
    typer.Option(
        "--shared-root",
        metavar="DIR",
        help="The folder that holds `data/` and `tokenizers/`.",
        show_default="the profile's, else moekit-local/ here",
    ),
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
    from moekit.data.tokenizer_fetching import as_json as fetched_as_json
    from moekit.data.tokenizer_fetching import fetch_tokenizer, said

    described = find_dataset(dataset)
    fetched = fetch_tokenizer(described, shared_root_of(profile, shared_root), source, _tell)
    print(json.dumps(fetched_as_json(fetched), indent=1) if as_json else said(fetched, described.end_of_document))


def _tell(step: str) -> None:
    print(f"{step} ...", file=sys.stderr)


@data.command("look")
def look(
    shard: Annotated[
        str,
        typer.Argument(
            metavar="SHARD",
            help="A shard's prefix, its .bin or .idx, a folder of shards, or a data set's name: of those the first.",
        ),
    ],
    documents: Annotated[int, typer.Option("--documents", metavar="N", min=0, help="Show the first N.")] = 3,
    document: Annotated[
        int | None, typer.Option("--document", metavar="K", min=0, help="Show document K alone, whole; from 0.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="DIR", help="Decode with this one.", show_default="the data set's own"),
    ] = None,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", metavar="N", min=1, help="Set lengths against sequences of N tokens.")
    ] = 4096,
    profile: ProfileOption = None,
    shared_root: SharedRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a shard's first documents as text, and how long its documents are.

    What a terminal would obey is shown as an escape. A shard of any size takes the same memory.

    moekit data look fineweb_edu --documents 5

    moekit data look moekit-local/data/python-docs/python-docs_00000_tokens --document 17
    """
    from moekit.data.look import look as look_at
    from moekit.data.look import rendered
    from moekit.data.named import shards_of
    from moekit.data.places import shared_root_of

    width = max(60, shutil.get_terminal_size().columns)
    prefix = shards_of(shard, shared_root_of(profile, shared_root))[0]
    seen = look_at(prefix, tokenizer, documents, document, sequence_length, None if as_json else width)
    print(json.dumps(seen, indent=2) if as_json else rendered(seen, width, document is not None))


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
