"""`moekit data`: from text to shards that Megatron can be trusted with."""

from __future__ import annotations

import typer

app = typer.Typer()
data = typer.Typer(no_args_is_help=True)
app.add_typer(data, name="data", help="Prepare, check and look at training data: text to shards.")
