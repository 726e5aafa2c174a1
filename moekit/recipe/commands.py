"""`moekit show | flags | diff | new | schema | import`: recipes at the desk."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moekit import share
from moekit.options import JsonOption, ProfileOption, RecipeArgument
from moekit.problems import MoekitError, error, shortened
from moekit.recipe.check_command import checked
from moekit.recipe.load import Loaded, file_and_variant, load, load_each
from moekit.recipe.values import differences, origins
from moekit.writing import write_new

app = typer.Typer()


@app.command("show")
def show(recipe: RecipeArgument, as_json: JsonOption = False) -> None:
    """Print a recipe flat: every value that is set or unset, and the file and line it comes from.

    Of a sweep, print its runs, each with what it changes; `FILE:VARIANT` is one of them.
    """
    runs = load_each(recipe)
    if runs[0].variant and file_and_variant(recipe)[1] is None:
        _show_sweep(runs, as_json)
        return
    rows = origins(load(recipe))
    if as_json:
        print(json.dumps({name: {"value": value, "where": where} for name, value, where in rows}, indent=1))
        return
    width = max((len(name) for name, _, _ in rows), default=0)
    wide = max((len(_text(value)) for _, value, _ in rows if len(_text(value)) <= 40), default=0)
    for name, value, where in rows:
        print(f"{name:{width}}  {_text(value):{wide}}  {where}")


def _text(value: Any) -> str:
    plain = isinstance(value, str) and value.isprintable()
    return value if plain else json.dumps(value, ensure_ascii=False)


@app.command("flags")
def flags(
    recipe: RecipeArgument,
    profile: ProfileOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Those of a start from the run's own checkpoint.")] = False,
    name: Annotated[str | None, typer.Option("--name", help="The run's name.", show_default="the recipe's")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print Megatron's arguments for a recipe, an option a line, quoted for a shell."""
    from moekit.cluster.profile import find_cluster
    from moekit.launch.run_files import run_arguments
    from moekit.launch.rundir import run_dir
    from moekit.megatron.flags import argv

    loaded = checked(recipe, cluster := find_cluster(profile))
    name = run_dir(cluster.shared_root, loaded.name if name is None else name).path.name
    arguments = run_arguments(loaded.recipe, name, cluster.shared_root, resume=resume)
    if as_json:
        print(json.dumps(argv(arguments), indent=1))
        return
    for argument in arguments:
        print(shlex.join(argument.words))


@app.command("diff")
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A recipe.")],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="Another recipe.", show_default="of a rung, the one before"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two recipes by what they resolve to, whatever they inherit.

    `FILE:RUNG` alone is compared with the rung before, a sweep's variant with what all of them have in common.
    """
    right = load(other or one)
    if other is None and right.variant is None:
        raise error(f"`{shortened(one)}` is no variant of a sweep", "give a second recipe to compare it with")
    left = right.variant.below if other is None and right.variant else load(one)
    rows = differences(left, right)
    if as_json:
        print(json.dumps({name: [was, now] for name, was, now in rows}, indent=1))
        return
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, was, now in rows:
        places = f"{left.source.where(name)} → {right.source.where(name)}"
        print(f"{name:{width}}  {_text(was)} → {_text(now)}  ({places})")
    if not rows:
        print("no difference", file=sys.stderr)


def _show_sweep(runs: list[Loaded], as_json: bool) -> None:
    """Every run of a sweep, with what it changes of which other."""
    if problems := [problem for run in runs for problem in run.problems]:
        raise MoekitError(*dict.fromkeys(problems))
    changes = {run.name: differences(run.variant.below, run) for run in runs if run.variant}
    if as_json:
        listed = {
            run.name: {
                "compared_with": run.compared_with,
                "changes": {name: [was, now] for name, was, now in changes[run.name]},
            }
            for run in runs
        }
        print(json.dumps(listed, indent=1))
        return
    for run in runs:
        beside = f", against {run.compared_with}" if run.compared_with else ""
        print(f"{run.name}{beside}{f': {run.recipe.summary}' if run.recipe.summary else ''}")
        for name, was, now in changes[run.name]:
            if name != "summary":
                print(f"    {name}  {_text(was)} → {_text(now)}")


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new recipe's name; NAME.yaml is written here.")],
    base: Annotated[str, typer.Option("--from", help="The recipe it changes: a path or a shipped name.")] = "first_moe",
) -> None:
    """Write a new recipe that inherits from another, ready to edit."""
    from moekit.recipe.names import RUN_NAME

    path = Path(name if name.endswith(".yaml") else f"{name}.yaml")
    if not RUN_NAME.fullmatch(path.stem):
        hint = "letters, digits, `.`, `_`, `-`, at first a letter, digit or `_`: its runs are called like it"
        raise error(f"a recipe cannot be named `{shortened(name)}`", hint)
    load(base)
    inherited = base if not Path(base).is_file() else os.path.relpath(base, path.parent)
    quoted = shlex.quote(str(path))
    text = (
        f"{schema_line(path)}\nbase: {json.dumps(inherited)}\nsummary: what this run is for\n\n"
        f"# Only what differs from {base}; `moekit show {quoted}` prints the whole.\n"
    )
    write_new(path, text, "choose another name, or edit it")
    print(f"{path} written; check it with `moekit check {quoted}`", file=sys.stderr)


def schema_line(path: Path) -> str:
    """The first line of a recipe: where editors find the schema."""
    return f"# yaml-language-server: $schema={os.path.relpath(share.folder('recipes') / 'schema.json', path.parent)}"


@app.command("schema")
def schema(
    of: Annotated[
        Literal["recipe", "profile", "dataset"],
        typer.Argument(metavar="[recipe|profile|dataset]", help="Of which kind of file."),
    ] = "recipe",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the fields as a page of text instead.")] = False,
) -> None:
    """Print the JSON Schema of a recipe, of a cluster profile or of a data set's description, for editors."""
    if of == "profile":
        from moekit.cluster import profile_schema

        print(profile_schema.reference() if markdown else profile_schema.schema_text(), end="")
        return
    if of == "dataset":
        from moekit.data import dataset_schema

        print(dataset_schema.reference() if markdown else dataset_schema.schema_text(), end="")
        return
    from moekit.recipe.docs import reference
    from moekit.recipe.jsonschema import schema_text

    print(reference() if markdown else schema_text(), end="")


@app.command("rules")
def rules(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Print those with this word in their name or text.")
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of them as a page of text instead.")] = False,
) -> None:
    """Print the rules that recipes are held against: the fact, when Megatron would notice, and the source."""
    from moekit.recipe.rules import page

    text = page.page() if markdown else page.found(word)
    if not text:
        raise error(f"no rule has `{shortened(word)}` in its name or text", "`moekit rules` prints all")
    print(text, end="")


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="FLAGS_OR_SCRIPT", help="A file; `-` reads standard input.")],
    defines: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A variable the script leaves open.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="The world size, where the text does not say it or is to be overruled."),
    ] = None,
    version: Annotated[str, typer.Option("--megatron", help="The Megatron whose options these are.")] = "0.19.2",
) -> None:
    """Turn a Megatron command line, or the script around it, into a recipe.

    What no field says goes to `megatron.extra`. The script is read, never run. Print it, or redirect it into a file.
    """
    from moekit.recipe.importing import import_recipe
    from moekit.recipe.nodes import read_text

    text = sys.stdin.read() if source == "-" else read_text(Path(source), source)
    pairs = dict(define.partition("=")[::2] for define in defines or ())
    shown = "standard input" if source == "-" else source
    recipe = import_recipe(text, shown, version=version, defines=pairs, gpus=gpus)
    print(f"{schema_line(Path('recipe.yaml'))}\n{recipe}", end="")
