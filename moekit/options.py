"""Arguments and options that several commands take alike."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        envvar="MOEKIT_PROFILE",
        help="Cluster profile: a file, which `moekit init` writes, or a shipped name.",
        show_default="aws-p5",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]
