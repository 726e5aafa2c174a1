"""`moekit watch` and `moekit compare`: a run while it trains and after, and two of them side by side."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.options import JsonOption
from moekit.runs.commands import ProfileOption, RunArgument

if TYPE_CHECKING:
    from moekit.watch.watching import Picture

app = typer.Typer()


@app.command("watch")
def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, help="Seconds between two looks.")] = 2.0,
    control: Annotated[
        str | None,
        typer.Option("--control", help="The run with forced even routing to compare TFLOP/s with, over the recipe's."),
    ] = None,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write the curves there and end.")
    ] = None,
    profile: ProfileOption = None,
) -> None:
    """Show a run while it trains: loss, MaxVio and speed together, the router's layers, and what is worth an alert.

    It reads the run's files alone, so it goes from a login node too, and costs the training nothing. Ctrl-C ends the
    watching and not the run; it ends by itself once no job of the run is left. Where the output is no terminal, it is a
    line for each step that is new, and for each alert. With --json: one picture as an object, with the curves.
    """
    from moekit.runs.look import find_run, roots
    from moekit.watch import look

    found = find_run(run, [] if "/" in run else roots(profile))
    watched = look.Watched(found, control)
    if once or as_json or plot is not None:
        _print(watched.now(), as_json, plot)
        return
    try:
        look.follow(watched, interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print(picture: Picture, as_json: bool, plot: Path | None) -> None:
    """Print a picture, and write its curves where that is asked for."""
    from moekit.watch import look

    if plot is not None:
        look.write_plot(picture, plot)
    if as_json:
        print(json.dumps(picture.as_json(), indent=1))
    elif plot is None:
        look.show(picture)
    else:
        print(plot, file=sys.stderr)


@app.command("compare")
def compare(
    one: Annotated[str, typer.Argument(metavar="A", help="The run to measure by: its name, or its directory's path.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The other run.")],
    last: Annotated[
        int, typer.Option("--last", min=1, metavar="N", help="Medians are over so many of the last common steps.")
    ] = 20,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            min=0,
            metavar="N",
            help="Leave out the first N steps.",
            show_default="the learning rate's warm-up, the longer of both",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write both runs' curves there.")
    ] = None,
    as_json: JsonOption = False,
    profile: ProfileOption = None,
) -> None:
    """Compare two runs: may they be compared, what is different, and is that more than noise.

    LM loss, MaxVio and TFLOP/s always together, as medians over the same steps, each difference with its noise. Where
    the recipes differ in one thing that the handbook has a bound for (FP8, NVFP4, one expert, upcycling, forced even
    routing), whether it is kept. It reads files alone, also of runs that still train. Exit code 0 whatever the verdict,
    1 where there is nothing to compare.
    """
    from moekit.runs.look import find_run, roots
    from moekit.watch import compare as comparing
    from moekit.watch import compare_text, look

    found = [find_run(run, [] if "/" in run else roots(profile)) for run in (one, other)]
    comparison = comparing.compare(found[0], found[1], last, warmup)
    if plot is not None:
        title = f"A {comparison.one.name}, B {comparison.other.name}"
        look.write_svg(title, compare_text.panels(comparison), plot)
    if as_json:
        print(json.dumps(comparison.as_json(), indent=1))
        return
    width = shutil.get_terminal_size((100, 24)).columns
    for row in compare_text.lines(comparison, width):
        print(row)


@app.command("router")
def router(
    run: RunArgument,
    layer: Annotated[
        str | None, typer.Option("--layer", metavar="NAME", help="One layer alone, as `layer_3` or `mtp_0_layer_0`.")
    ] = None,
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="The last N counted and traced steps.")] = 1,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="RUN", help="Compare the choices with this run's traces of the same tokens."),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="The experts' weights too, from a trace with logits: flat, or too sharp.")
    ] = False,
    serving_topk: Annotated[
        int | None,
        typer.Option("--serving-topk", min=1, metavar="K", help="Their weights too where only K are served a token."),
    ] = None,
    serving_ep: Annotated[
        int | None,
        typer.Option(
            "--serving-ep", min=1, metavar="N", help="The busiest of N serving ranks over their mean, moe_lb."
        ),
    ] = None,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="The nodes that a token reaches too, and the bytes that this costs.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write the experts' loads there, as heat maps.")
    ] = None,
    as_json: JsonOption = False,
    profile: ProfileOption = None,
) -> None:
    """Show how evenly a run's routers load its experts: MaxVio per micro batch, global batch and sequence, by layer.

    From counts of tokens per expert, from routing traces, or both: each says what it is of, and how much of it is
    there. Beside MaxVio the load of the expert parallel ranks, experts without a token, and hash layers as such. It
    reads files alone. RUN may also be a folder of counts without a recipe; then each rank's file stays apart.
    """
    from moekit.runs.look import find_run, roots
    from moekit.watch.router import show

    folder, traced = Path(run), None
    of_trace = weights or traffic or serving_topk is not None
    if (
        not (against or of_trace or serving_ep)
        and "/" in run
        and folder.is_dir()
        and not (folder / "recipe.yaml").exists()
    ):
        report = show.apart(folder, last, layer)
    else:
        found = [find_run(name, [] if "/" in name else roots(profile)) for name in (run, against) if name is not None]
        report = show.of_run(found[0], last, layer, found[1] if against else None, serving_ep)
        traced = show.of_trace(found[0], weights, traffic, serving_topk, layer) if of_trace else None
    if plot is not None:
        show.write_picture(report, plot)
    if as_json:
        print(json.dumps(report.as_json() | (traced.as_json() if traced else {}), indent=1))
        return
    show.show(report, traced)


@app.command("mismatch")
def mismatch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What both gave the same tokens: JSON Lines, or .npz.")],
    as_json: JsonOption = False,
) -> None:
    """Show how far a trainer and the engine that wrote its rollouts disagree: probabilities, and choices of experts.

    FILE has the log probabilities of both, or the experts that both chose, or all of it (docs/router.md). Difference
    and ratio of probabilities are those that Megatron's RL loop logs; beside them the KL divergence and tokens that are
    far apart. Choices are compared as `moekit router --against` does.
    """
    from moekit.watch.router import show

    found, text = show.of_rollouts(file)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for row in text:
        print(row)


@app.command("experts")
def experts(
    run: RunArgument,
    iteration: Annotated[
        int | None,
        typer.Option("--iteration", min=1, metavar="N", help="The activation dump to read.", show_default="the newest"),
    ] = None,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Write the curves of the diagnostic steps there.")
    ] = None,
    profile: ProfileOption = None,
) -> None:
    """Show what a run's experts compute: output norms over the layer's median, and what its diagnostic steps saw.

    Of diagnostic steps (`monitor.diagnose_interval`): norms, tokens that fp32 routes otherwise, dropped assignments,
    shared over routed, zeros in each expert's gradient, the spread of the expert bias. Of activation dumps
    (`monitor.activations_interval`): norms, and the RMS around latent projections. It reads files alone.
    """
    from moekit.runs.look import find_run, roots
    from moekit.watch import look
    from moekit.watch.experts import report as reporting

    found = find_run(run, [] if "/" in run else roots(profile))
    report = reporting.report(found.path, iteration)
    if plot is not None:
        look.write_svg(report.name, reporting.panels(report), plot)
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
        return
    for row in reporting.lines(report, shutil.get_terminal_size((100, 24)).columns):
        print(row)
