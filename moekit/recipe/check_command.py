"""`moekit check`: recipes held against Megatron, at the desk or by the real one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moekit.options import JsonOption, ProfileOption
from moekit.problems import MoekitError, Problem, error, print_problems
from moekit.recipe.load import Loaded, load_each, load_partly

if TYPE_CHECKING:
    from moekit.launch.real_check import Judged

app = typer.Typer()


@app.command("check")
def check(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Recipe files, or names of shipped ones.")],
    profile: ProfileOption = None,
    as_json: JsonOption = False,
    real: Annotated[
        bool, typer.Option("--real", help="Ask the real Megatron as well, on the CPU: 5 seconds, and 1 a recipe.")
    ] = False,
    megatron: Annotated[
        str | None,
        typer.Option(
            "--megatron",
            metavar="PATH",
            help="With --real: a Megatron-LM checkout to ask.",
            show_default="the installed megatron-core",
        ),
    ] = None,
    in_image: Annotated[
        bool, typer.Option("--in-image", help="With --real, on a cluster: ask in the profile's image, by srun.")
    ] = False,
) -> None:
    """Hold recipes against Megatron: every field, every rule, every option; a second, no GPU.

    Exit code 0 when Megatron can start each of them, else 1. Warnings alone are 0.

    With --real, Megatron's own stages run on this machine's CPU for the profile's GPUs, up to the model without its
    memory. A line for each recipe says what passed, what is refused, and what a CPU cannot judge.
    """
    from moekit.cluster.profile import find_cluster

    if not real and (megatron or in_image):
        raise error(f"`{'--megatron' if megatron else '--in-image'}` says whom `--real` asks", "add `--real`")
    cluster = find_cluster(profile)
    found, readable = _by_the_rules(recipes, cluster)
    judged = _by_the_real_one(readable, cluster, megatron, in_image, found) if real else {}
    # a sweep's runs share files, and so what is wrong with them
    problems = list(dict.fromkeys(problem for several in found.values() for problem in several))
    errors = [problem for problem in problems if problem.level == "error"]
    if as_json:
        listed: dict[str, Any] = {recipe: [_as_json(p) for p in several] for recipe, several in found.items()}
        if real:
            values = {recipe: answer.values for recipe, answer in judged.items()}
            listed = {recipe: {"problems": listed[recipe], **values.get(recipe, {})} for recipe in listed}
        print(json.dumps(listed, indent=1))
    else:
        print_problems(problems)
        for recipe, answer in judged.items():
            for line in answer.lines:
                print(f"{recipe}: {line}")
        _print_verdict(found, len(errors), len(problems) - len(errors), cluster.name, assumed=profile is None)
    raise typer.Exit(1 if errors else 0)


def _by_the_rules(recipes: list[str], cluster: Any) -> tuple[dict[str, list[Problem]], dict[str, Loaded]]:
    """What is wrong with each recipe at the desk, and those that can be read."""
    from moekit.recipe.check import problems_of

    found: dict[str, list[Problem]] = {}
    readable: dict[str, Loaded] = {}
    for recipe in recipes:
        try:
            several = load_each(recipe)
        except MoekitError as refused:
            found[recipe] = list(refused.problems)
            continue
        for loaded in several:
            name = recipe if len(several) == 1 else loaded.source.shown
            found[name] = problems_of(loaded, cluster)
            readable[name] = loaded
    return found, readable


def _by_the_real_one(
    readable: dict[str, Loaded], cluster: Any, megatron: str | None, in_image: bool, found: dict[str, list[Problem]]
) -> dict[str, Judged]:
    """What Megatron itself says of each; its refusals come behind what was `found`, also where there is no Megatron."""
    from moekit.launch.real_check import real_check

    try:
        judged = real_check(readable, cluster, megatron, in_image)
    except MoekitError as refused:
        raise MoekitError(*(problem for several in found.values() for problem in several), *refused.problems) from None
    for recipe, answer in judged.items():
        found[recipe] += answer.problems
    return judged


def _print_verdict(found: dict[str, list[Problem]], errors: int, warnings: int, cluster: str, assumed: bool) -> None:
    which = f"{', '.join(found)}" if len(found) == 1 else f"{len(found)} recipes"
    counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((errors, "problem"), (warnings, "warning")) if n]
    against = f"against {cluster}" + (" (no --profile given)" if assumed else "")
    print(f"{which}: {', '.join(counts) or 'no problems'}, checked {against}", file=sys.stderr)


def _as_json(problem: Problem) -> dict[str, str]:
    return {"level": problem.level, "where": problem.where, "what": problem.what, "hint": problem.hint}


def checked(recipe: str, cluster: Any) -> Loaded:
    """A recipe that Megatron can start; warnings are printed, errors raised."""
    from moekit.recipe.check import problems_of

    loaded = load_partly(recipe)
    problems = problems_of(loaded, cluster)
    if any(problem.level == "error" for problem in problems):
        raise MoekitError(*problems)
    print_problems(problems)
    return loaded
