"""`moekit plan`: what a recipe costs, at the desk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from moekit.plan import report
from moekit.plan.parameters import parameters
from moekit.plan.plan import Plan, plan_of
from moekit.plan.upcycling import choices, dense_twin
from moekit.problems import error
from moekit.recipe.load import load

app = typer.Typer()


@app.command("plan")
def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a script.")] = False,
    explain: Annotated[
        Literal["parameters", "flops"] | None,
        typer.Option("--explain", help="Where each parameter is, or what the operations are for."),
    ] = None,
    upcycle: Annotated[
        bool, typer.Option("--upcycle", help="What MoEs the dense model can become, by granularity and experts.")
    ] = False,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Token ids of the tokenizer, before padding.")
    ] = None,
) -> None:
    """What a recipe's model is made of: exact parameters, also of each GPU, and floating-point operations.

    Counts are those of the model that Megatron builds, and operations are counted as Megatron's log counts them. What
    the recipe does not say is listed with who decides it; a number that rests on an assumption is marked.

    Memory, communication and time are not modelled yet: whether a run fits, and how fast it is, this does not say.
    """
    if upcycle and explain:
        raise error("`--upcycle` and `--explain` are two tables", "ask for one at a time")
    loaded = load(recipe)
    found = plan_of(loaded, vocab_size)
    if upcycle:
        slices = loaded.recipe.moe.upcycling_granularity if loaded.recipe.moe.use_upcycling else None
        _print_upcycling(found, slices, as_json)
    elif as_json:
        print(json.dumps(report.as_values(found), indent=1))
    else:
        shown = {"parameters": report.explained_parameters, "flops": report.explained_flops}
        _print_lines(shown[explain](found) if explain else report.as_lines(found))


def _print_upcycling(found: Plan, granularity: int | None, as_json: bool) -> None:
    dense = dense_twin(found.shape, granularity)
    if dense.dense is None:
        raise error("no layer of this model has a feed-forward network to make experts of")
    listed = choices(found.shape, granularity)
    if as_json:
        print(json.dumps([asdict(choice) for choice in listed], indent=1))
    else:
        _print_lines(report.upcycling_lines(listed, dense.dense.width, parameters(dense).total))


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
