"""`moekit init`: a profile of the cluster one is on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moekit.options import JsonOption
from moekit.problems import error, print_problems

if TYPE_CHECKING:
    from moekit.cluster.init import Found, Question
    from moekit.cluster.init_profile import Line

app = typer.Typer()

Word = str | None


def _option(name: str, text: str, default: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, help=text, show_default=default)
    return option


@app.command("init")
def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The profile to write.", show_default="CLUSTER.yaml")
    ] = None,
    partition: Annotated[Word, _option("--partition", "Partition of the GPU nodes.", "the first with GPUs")] = None,
    account: Annotated[Word, _option("--account", "Account to charge.", "your default one")] = None,
    qos: Annotated[Word, _option("--qos", "Quality of service.", "the account's default one")] = None,
    gpu: Annotated[Word, _option("--gpu", "GPU model: h100, gb200, ...", "by gres or nvidia-smi")] = None,
    fabric: Annotated[
        Literal["efa", "ib", "none"] | None,
        typer.Option("--fabric", help="The network between nodes.", show_default="what a node has"),
    ] = None,
    container: Annotated[
        Literal["pyxis", "none"] | None,
        typer.Option("--container", help="How jobs get their software.", show_default="pyxis where srun offers it"),
    ] = None,
    shared_root: Annotated[Word, _option("--shared-root", "The folder that all nodes share.", "asked")] = None,
    image: Annotated[Word, _option("--image", "With pyxis: the squashfs image to train in.", "asked")] = None,
    megatron_path: Annotated[
        Word, _option("--megatron-path", "Megatron-LM checkout that all nodes see, or `none`.", "asked")
    ] = None,
    python: Annotated[Word, _option("--python", "Without container: the interpreter with torch.", "python")] = None,
    setup_script: Annotated[
        Word, _option("--setup-script", "Without container: bash that a node sources before python.", "none")
    ] = None,
    wait_s: Annotated[int, typer.Option("--wait", min=0, metavar="SECONDS", help="For a free node; 0: ask none.")] = 60,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a profile of this cluster, from what Slurm and one of its nodes say, and try it.

    Run it on a login node. What nobody else can know is asked for; each question has an option, for scripts.
    """
    from moekit.cluster.init import Wishes
    from moekit.cluster.init import init as init_profile

    wishes = Wishes(
        partition=partition,
        account=account,
        qos=qos,
        gpu=gpu,
        fabric=fabric,
        container=container,
        shared_root=shared_root,
        image=image,
        megatron_path=megatron_path,
        python=python,
        setup_script=setup_script,
        wait_s=wait_s,
    )
    ask = _ask if sys.stdin.isatty() else None
    found = init_profile(path, wishes, force=force, ask=ask, tell=_tell)
    if as_json:
        print(json.dumps(_as_json(found), indent=1))
    else:
        _print(found)
    if found.problems:
        print_problems(found.problems)
        raise typer.Exit(1)


def _ask(question: Question) -> str:
    """Ask until there is an answer; on standard error, since standard output is for what was found."""
    default = f" [{question.default}]" if question.default else ""
    while True:
        print(f"{question.text}{default}: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise error(f"no answer to what `{question.option}` says", "give the option; nothing was written")
        if answer := line.strip() or question.default:
            return answer


def _tell(step: str) -> None:
    print(f"{step} ...", file=sys.stderr)


def _print(found: Found) -> None:
    cluster = found.cluster
    has = f"{cluster.nodes} nodes of {cluster.gpus_per_node} {cluster.gpu} in partition `{cluster.partition}`"
    print(f"{found.path} written: {has}, fabric {cluster.fabric}, container {cluster.container}")
    if found.test_only:
        print(f"sbatch would take its jobs: the first could start at {found.test_only}")
    if found.host:
        print(f"srun ran on {found.host}")
    for note in found.notes:
        print(f"note: {note}")
    print(f"next: {_next(found)}")


def _next(found: Found) -> str:
    from moekit.cluster.init import TRIED_RECIPE

    return f"moekit launch {TRIED_RECIPE} --profile {found.path}"


def _as_json(found: Found) -> dict[str, object]:
    return {
        "profile": str(found.path),
        "values": {line.name: _value(line.value) for line in found.lines},
        "sources": {name: why for line in found.lines for name, why in _sources(line)},
        "test_only": found.test_only or None,
        "srun_host": found.host or None,
        "notes": found.notes,
        "problems": [{"what": problem.what, "hint": problem.hint} for problem in found.problems],
        "next": _next(found),
    }


def _sources(line: Line) -> Iterator[tuple[str, str]]:
    if not isinstance(line.value, dict):
        yield line.name, line.why
        return
    yield from ((f"{line.name}.{name}", why) for name, (_, why) in line.value.items())


def _value(value: object) -> object:
    if isinstance(value, dict):
        return {name: text for name, (text, _) in value.items()}
    return value
