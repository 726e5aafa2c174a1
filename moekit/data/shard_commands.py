"""`moekit data look | check | manifest | hash-table`: what is done with shards once they are there."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from moekit.options import JsonOption, ProfileOption
from moekit.problems import error, shortened

shards = typer.Typer()

SharedRootOption = Annotated[
    Path | None,
    typer.Option(
        "--shared-root",
        metavar="DIR",
        help="The folder that holds `data/` and `tokenizers/`.",
        show_default="the profile's, else moekit-local/ here",
    ),
]


@shards.command("look")
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


@shards.command("check")
def check(
    given: Annotated[
        list[str],
        typer.Argument(metavar="WHAT...", help="Data sets, by name or description, folders, or prefixes of shards."),
    ],
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Compare the files' hashes with those taken when they were made.")
    ] = False,
    megatron: Annotated[
        bool, typer.Option("--megatron", help="Read a sample through Megatron's own reader as well.")
    ] = False,
    remove_damaged: Annotated[
        bool,
        typer.Option("--remove-damaged", help="Remove damaged shards and their records, so that they are made again."),
    ] = False,
    end_token: Annotated[
        int | None, typer.Option("--end-token", metavar="ID", help="The end of a document, for shards without a plan.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", metavar="N", help="Token ids there are, for shards without a plan.")
    ] = None,
    profile: ProfileOption = None,
    shared_root: SharedRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check token files against all that Megatron relies on and does not look at; exit code 1 where anything is wrong.

    Each shard's sizes, pointers, documents, end tokens and largest id; its plan and record; the source's rows; and what
    lies beside it. Every byte is read once.

    moekit data check fineweb_edu --sha256

    moekit data check /data/own/part_00 --end-token 128001 --vocab-size 128256
    """
    from moekit.data.checking import report as check_report
    from moekit.data.checking.given import bytes_to_read, check_given
    from moekit.data.checking.given import remove_damaged as remove
    from moekit.data.checking.pair import Expected
    from moekit.data.places import shared_root_of
    from moekit.data.reading import reading

    root = shared_root_of(profile, shared_root)
    with reading("checking", bytes_to_read(given, root)) as progress:
        reports = check_given(given, root, Expected(None, end_token, vocab_size), sha256, progress)
    if megatron:
        from moekit.data.checking.megatron_reads import with_megatron

        reports = [with_megatron(report) for report in reports]
    values = [check_report.as_json(report) for report in reports]
    print(json.dumps(values, indent=1) if as_json else "\n\n".join(map(check_report.as_text, reports)))
    for file in remove(reports) if remove_damaged else ():
        print(f"removed {file}", file=sys.stderr)
    if any(report.findings for report in reports):
        raise typer.Exit(1)


@shards.command("manifest")
def manifest(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A data set, by name or description; with `--of` the blend's name.")
    ],
    parts: Annotated[
        list[str] | None,
        typer.Option("--of", metavar="NAME:WEIGHT", help="A data set of a blend, and its share; once for each."),
    ] = None,
    held_out: Annotated[
        int, typer.Option("--held-out", metavar="N", min=0, help="Keep the last N shards for validation alone.")
    ] = 0,
    profile: ProfileOption = None,
    shared_root: SharedRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the shards of a data set for training, once all are there and checked, their hashes included.

    Written are `manifest.json`, and `data-args.txt` for Megatron; with shards held out also `data-args.json`, which a
    recipe's `data.per_split: true` reads.

    moekit data manifest fineweb_edu --held-out 1

    moekit data manifest mixed --of fineweb_edu:0.7 --of code:0.3
    """
    from dataclasses import asdict

    from moekit.data.checking.given import bytes_to_read, folder_of
    from moekit.data.make_manifest import make_blend, make_manifest
    from moekit.data.places import shared_root_of
    from moekit.data.reading import reading

    root = shared_root_of(profile, shared_root)
    if parts and held_out:
        raise error("`--held-out` is about a data set by itself", "give it where each of the blend's is listed")
    notes: list[str] = []
    if parts:
        made, folder = make_blend(root, name, parts), root / "data" / name
    else:
        folder = folder_of(name, root) or Path(name)
        with reading("checking", bytes_to_read([name], root)) as progress:
            made, report = make_manifest(folder, held_out, progress)
        notes = [*report.notes, *(f"{finding.what}: {finding.remedy}" for finding in report.findings)]
    if as_json:
        print(json.dumps(asdict(made), indent=1))
        return
    print(f"{made.name}: {made.tokens:,} tokens in {made.documents:,} documents, {len(made.shards):,} shards")
    for part in made.parts:
        print(f"  of          {part.name}: {part.weight:.1%} of what is read, {part.tokens:,} tokens")
    if made.held_out:
        print(f"  held out    {sum(one.tokens for one in made.held_out):,} tokens in {len(made.held_out):,} shards")
    if made.empty:
        print(f"  left out    {len(made.empty):,} shards without documents: {shortened(', '.join(made.empty))}")
    said = f"{{name: {folder.name}{', per_split: true' if made.held_out else ''}}}"
    print(f"  written     {folder / 'manifest.json'}\n  next        `data: {said}` in a recipe")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


@shards.command("hash-table")
def hash_table(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="The data set's name, as `data.name` says it, or its description.")
    ],
    experts: Annotated[
        int | None, typer.Option("--experts", metavar="N", min=1, help="The recipe's `moe.num_experts`.")
    ] = None,
    topk: Annotated[int | None, typer.Option("--topk", metavar="K", min=1, help="The recipe's `router.topk`.")] = None,
    method: Annotated[
        Literal["greedy", "random", "round-robin"],
        typer.Option("--method", help="`greedy` spreads frequent tokens over the least loaded experts."),
    ] = "greedy",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random table.")] = 0,
    published: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take a published table: a `.safetensors`, `.pt` or `.npy`."),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor",
            metavar="NAME",
            help="With --from: this tensor; again for each further hash layer.",
            show_default="all that end in tid2eid",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What a recipe calls it.", show_default="the method, or the file's name"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", metavar="N", min=1, help="Token ids.", show_default="what the data set says"),
    ] = None,
    profile: ProfileOption = None,
    shared_root: SharedRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the table by which hash layers send each token id to its experts, and say how even their load is.

    Nothing balances a hash layer while it trains, and Megatron's own placeholder sends ids in turns. The table is
    written beside the data, where a recipe's `moe.hash_table` finds it.

    moekit data hash-table fineweb_edu --experts 64 --topk 8

    moekit data hash-table fineweb_edu --from model-00001-of-00046.safetensors --name v4
    """
    from moekit.data.dataset import find_dataset
    from moekit.data.hash_table.command import Asked, rendered
    from moekit.data.hash_table.command import hash_table as make
    from moekit.data.places import shared_root_of

    dataset = find_dataset(dataset).name if dataset.endswith((".yaml", ".yml")) else dataset
    asked = Asked(dataset, method, experts, topk, seed, vocab_size, published, tuple(tensors or ()), name)
    with _counting(as_json) as progress:
        found = make(asked, shared_root_of(profile, shared_root), progress)
    width = max(60, shutil.get_terminal_size().columns)
    print(json.dumps(found, indent=2) if as_json else rendered(found, dataset, width))


@contextlib.contextmanager
def _counting(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A line on standard error that tells how many tokens are counted, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("counting tokens"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
