"""`moekit prove`: does this stack train what it says, before a setting is blamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.options import JsonOption
from moekit.problems import error

if TYPE_CHECKING:
    from moekit.prove.judge import Result
    from moekit.prove.runs import Run
    from moekit.prove.train import Part

app = typer.Typer()
group = typer.Typer()
app.add_typer(group, name="prove")

RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="PATH",
        help="Where `runs/` and `proofs/` lie: a profile's `shared_root`.",
        show_default="moekit-local",
    ),
]
AgainOption = Annotated[bool, typer.Option("--again", help="Remove the runs that this trains, and train them anew.")]
PairOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--runs",
        metavar="CONTINUED UPCYCLED",
        help="Judge these two instead: folders of runs, or names below the root.",
    ),
]
TwiceOption = Annotated[
    tuple[str, str] | None,
    typer.Option("--runs", metavar="A B", help="Judge these two instead: folders of runs, or names below the root."),
]


@group.callback(invoke_without_command=True)
def prove(ctx: typer.Context) -> None:
    """Show that this stack trains what it says; alone: which proofs are on record.

    Before a setting is blamed for a run that learns badly or differs from another, rule out the stack itself
    (handbook 2.5, A.2). Small models are trained for it on this machine's CPU, about half a minute each proof; with
    `--runs`, two runs of a cluster are judged instead. Each proof leaves its record in `proofs/`, whether it holds
    (exit code 0) or not (1).
    """
    if ctx.invoked_subcommand is None:
        status(None, False)


@group.command("status")
def status(root: RootOption = None, as_json: JsonOption = False) -> None:
    """Print which proofs are on record, for which software."""
    from moekit.prove import record, report

    where = _root(root)
    if as_json:
        print(json.dumps({name: record.read(where, name) for name in record.NAMES}, indent=1))
        return
    for line in report.status(where):
        print(line)


@group.command("one-expert")
def one_expert(
    runs: PairOption = None, root: RootOption = None, again: AgainOption = False, as_json: JsonOption = False
) -> None:
    """An MoE of one expert, made of a dense run's checkpoint, trains as the dense run does.

    With one expert the router has no choice, so the layer computes what the dense one does. Over 15 steps on the same
    data the LM losses stay within 0.00087, the load-balancing loss is 1, and the router's weights, MoE layers x hidden
    size, are the ones without a gradient: else routing, experts or the conversion change what is computed. The dense
    run must go on without its optimizer state (`checkpoint.no_load_optim`), as an upcycled model begins.
    """
    from moekit.prove import judge
    from moekit.prove.train import ONE_EXPERT

    _of_one_checkpoint(judge.one_expert, ONE_EXPERT, runs, _root(root), again, as_json)


@group.command("slices")
def slices(
    runs: PairOption = None, root: RootOption = None, again: AgainOption = False, as_json: JsonOption = False
) -> None:
    """Experts cut from a dense run's layers give, before any training, that run's loss.

    Two slices of each layer, four copies of each: a token is sent to one copy of both. Megatron scales a slice's
    weights, so that their weighted sum is the whole layer. That is exact for squared ReLU and only near for SwiGLU, so
    the models here have squared ReLU, in fp32: their first losses stay within 0.00001.
    """
    from moekit.prove import judge
    from moekit.prove.train import SLICES

    _of_one_checkpoint(judge.slices, SLICES, runs, _root(root), again, as_json)


@group.command("deterministic")
def deterministic(
    runs: TwiceOption = None,
    without: Annotated[
        tuple[str, str] | None,
        typer.Option("--without", metavar="C D", help="With --runs: two runs without deterministic mode, to report."),
    ] = None,
    root: RootOption = None,
    again: AgainOption = False,
    as_json: JsonOption = False,
) -> None:
    """A recipe in deterministic mode, trained twice, logs the same numbers twice.

    LM loss, load-balancing loss, gradient norm and the count of zeros are equal to the last bit in 12 iterations. Only
    then does a difference between two runs say something of what they differ in. Without the mode the difference is
    reported.
    """
    from moekit.prove import judge
    from moekit.prove.train import DETERMINISTIC, NOT_DETERMINISTIC

    where = _root(root)
    if without and not runs:
        raise error("`--without` is for runs that are given", "give two in deterministic mode as well: `--runs A B`")
    _judge_or_train(runs, again)
    if runs is None:
        _train((*DETERMINISTIC, *NOT_DETERMINISTIC), where, again)
        runs = DETERMINISTIC[0].name, DETERMINISTIC[1].name
        without = NOT_DETERMINISTIC[0].name, NOT_DETERMINISTIC[1].name
    result = judge.deterministic(*_read(runs, where))
    plain = judge.twice("deterministic", *_read(without, where)) if without else None
    _finish(result, where, as_json, plain)


def _of_one_checkpoint(
    judge: Callable[[Run, Run], Result],
    parts: Sequence[Part],
    runs: tuple[str, str] | None,
    root: Path,
    again: bool,
    as_json: bool,
) -> None:
    """Train the parts, unless two runs are given; judge the last two."""
    _judge_or_train(runs, again)
    if runs is None:
        _train(parts, root, again)
        runs = parts[-2].name, parts[-1].name
    _finish(judge(*_read(runs, root)), root, as_json)


def _judge_or_train(runs: tuple[str, str] | None, again: bool) -> None:
    if runs and again:
        raise error("`--again` trains, and `--runs` judges what was trained", "leave one of them out")


def _root(given: Path | None) -> Path:
    from moekit.runs.look import LOCAL_ROOT

    return (given or Path(LOCAL_ROOT)).absolute()


def _train(parts: Sequence[Part], root: Path, again: bool) -> None:
    from moekit.prove.train import train

    if code := train(parts, root, again):
        raise typer.Exit(code)
    print(file=sys.stderr)


def _read(runs: tuple[str, str], root: Path) -> tuple[Run, Run]:
    from moekit.prove.runs import read_run

    return read_run(runs[0], root), read_run(runs[1], root)


def _finish(result: Result, root: Path, as_json: bool, without: Result | None = None) -> None:
    """Keep the record, print the proof, and exit with 1 where it does not hold."""
    from moekit.prove import record, report
    from moekit.recipe.load import show

    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kept = record.as_record(result, report.sentence(result), now, without)
    path = record.keep(root, kept)
    if as_json:
        print(json.dumps(kept, indent=1))
    else:
        for line in report.lines(result, without):
            print(line)
    sys.stdout.flush()  # before what follows on standard error
    print(f"with {record.software_text(kept['software'])}; on record in {show(path)}", file=sys.stderr)
    raise typer.Exit(0 if result.holds else 1)
