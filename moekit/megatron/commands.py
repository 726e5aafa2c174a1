"""`moekit megatron table` and `patch`: the options of a Megatron, from its own parser; a checkout mended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()
group = typer.Typer(help="What moekit knows of Megatron.", no_args_is_help=True)
app.add_typer(group, name="megatron")


@group.callback()
def megatron() -> None:
    """What moekit knows of Megatron."""


@group.command()
def table(
    source: Annotated[
        str, typer.Option("--from", metavar="PATH|installed", help="A Megatron-LM checkout, or `installed`.")
    ] = "installed",
    python: Annotated[
        str | None, typer.Option("--python", help="The Python that has torch and Megatron.", show_default="this one")
    ] = None,
) -> None:
    """Print the option table of a Megatron as JSON, made by running its own parser.

    Recipes are checked against such a table; those of 0.19.2 and of the handbook's commit are shipped.
    """
    from moekit.megatron.dump import dump_table

    print(dump_table(source, python), end="")


@group.command()
def patch(
    checkout: Annotated[Path, typer.Argument(metavar="CHECKOUT", help="The folder of a Megatron-LM checkout.")],
    undo: Annotated[bool, typer.Option("--undo", help="Take the changes back, byte for byte.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print the difference and write nothing.")] = False,
) -> None:
    """Mend upcycling (`--moe-use-upcycling`) in a Megatron-LM checkout, for launches without moekit.

    A run that moekit launches has the same repairs in its process, whatever the checkout is like.
    """
    from moekit.megatron.patch import patch

    for line in patch(checkout, undo, only_print):
        print(line)
