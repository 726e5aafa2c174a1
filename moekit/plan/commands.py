"""`moekit plan`: what a recipe costs, at the desk."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moekit.options import JsonOption, ProfileOption, RecipeArgument
from moekit.plan.given import Given
from moekit.plan.parameters import parameters
from moekit.plan.plan import Plan, plan_of_given
from moekit.plan.report import model
from moekit.plan.upcycling import choices, dense_twin
from moekit.problems import error
from moekit.recipe.load import Loaded, load

if TYPE_CHECKING:
    from moekit.plan.desk import Wishes

app = typer.Typer()

_Load = "How uneven the experts are"
_Search = "Another layout"


@app.command("plan")
def plan(
    recipe: RecipeArgument,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
    explain: Annotated[
        Literal["parameters", "flops", "memory", "time", "traffic"] | None,
        typer.Option("--explain", help="The terms of one of the numbers; `traffic` is the experts' bytes."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a picture: FILE.html or FILE.svg.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Other than `parallel.gpus`.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, help="Other than `train.micro_batch_size`.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Token ids of the tokenizer, before padding.")
    ] = None,
    rank_imbalance: Annotated[
        float | None,
        typer.Option("--rank-imbalance", min=1.0, help="Busiest expert rank over the mean.", rich_help_panel=_Load),
    ] = None,
    counts: Annotated[
        str | None,
        typer.Option(
            "--counts", metavar="RUN_OR_FILE", help="Tokens of each expert that a run counted.", rich_help_panel=_Load
        ),
    ] = None,
    maxvio: Annotated[
        float | None,
        typer.Option("--maxvio", min=0.0, help="Busiest expert over the mean, less 1.", rich_help_panel=_Load),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Walk the legal layouts for the fastest that fit.", rich_help_panel=_Search)
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write the one taken as a recipe.", rich_help_panel=_Search),
    ] = None,
    upcycle: Annotated[
        bool, typer.Option("--upcycle", help="What MoEs the dense model can become, by granularity and experts.")
    ] = False,
) -> None:
    """What a recipe costs before any GPU is held: parameters, operations, memory of each GPU, time of a step, hours.

    Parameters are those of the model that Megatron builds, operations are counted as Megatron's log counts them; memory
    and time are models, and say of each number how sure it is. What the recipe does not say is listed with who decides
    it.

    With --search, the fastest layouts of the same model and batch that fit the GPUs and that `moekit check` accepts, as
    single changes to measure. Capacity, limits of groups and number formats are never touched.
    """
    from moekit.plan.desk import Wishes

    if sum(map(bool, (upcycle, explain, search))) > 1:
        raise error("`--upcycle`, `--explain` and `--search` are different tables", "ask for one at a time")
    if write and not search:
        raise error("`--write` writes the layout that `--search` takes", "add `--search`")
    wishes = Wishes(recipe, load(recipe), profile, vocab_size, gpus, micro_batch, rank_imbalance, counts, maxvio)
    if upcycle:
        _upcycling(wishes.asked(), vocab_size, as_json)
    elif search:
        _searched(wishes, as_json, write)
    else:
        _planned(wishes, explain, as_json, report)


def _planned(wishes: Wishes, explain: str | None, as_json: bool, picture: Path | None) -> None:
    from moekit.plan import desk

    given = Given.of(wishes.asked())
    plan = plan_of_given(given, wishes.vocab_size)
    if explain in ("parameters", "flops"):
        shown = {"parameters": model.explained_parameters, "flops": model.explained_flops}
        _print_lines(shown[explain](plan))
        return
    found = desk.estimated(wishes, given, plan)
    cures = desk.remedies(wishes, found)
    if picture:
        desk.write_picture(plan, found, cures, picture)
    if as_json:
        print(json.dumps(desk.as_values(plan, found, cures), indent=1))
    else:
        _print_lines(desk.explained(plan, found, explain) if explain else desk.lines(plan, found, cures))


def _searched(wishes: Wishes, as_json: bool, write: Path | None) -> None:
    from moekit.plan import desk

    found = desk.searched(wishes)
    if write:
        desk.write_child(found, wishes, write)
    if as_json:
        print(json.dumps(desk.search_values(found), indent=1))
    else:
        _print_lines(desk.search_lines(found))
    if write:
        print(f"{write} written; check it with `moekit check {write}`", file=sys.stderr)


def _upcycling(loaded: Loaded, vocab_size: int | None, as_json: bool) -> None:
    plan = plan_of_given(Given.of(loaded), vocab_size)
    granularity = loaded.recipe.moe.upcycling_granularity if loaded.recipe.moe.use_upcycling else None
    _print_upcycling(plan, granularity, as_json)


def _print_upcycling(found: Plan, granularity: int | None, as_json: bool) -> None:
    dense = dense_twin(found.shape, granularity)
    if dense.dense is None:
        raise error("no layer of this model has a feed-forward network to make experts of")
    listed = choices(found.shape, granularity)
    if as_json:
        print(json.dumps([asdict(choice) for choice in listed], indent=1))
    else:
        _print_lines(model.upcycling_lines(listed, dense.dense.width, parameters(dense).total))


def _print_lines(lines: Iterable[str]) -> None:
    coloured = sys.stdout.isatty()
    for line in lines:
        if coloured and line.startswith(("  █", "  stage ")):
            _print_coloured(line)
        else:
            print(line)


def _print_coloured(line: str) -> None:
    """A chart's line with its shades in the picture's colours."""
    from rich.console import Console
    from rich.text import Text

    from moekit.plan.bars import COLOURS, SHADES

    text = Text(line)
    for shade, colour in zip(SHADES, COLOURS, strict=True):
        text.highlight_regex(re.escape(shade) + "+", colour)
    Console(soft_wrap=True, highlight=False).print(text)
