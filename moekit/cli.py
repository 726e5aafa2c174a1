"""The command line: finds a command's room, and turns a user's mistakes into messages."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from moekit import __version__
from moekit.problems import MoekitError, error, print_problems

ROOMS = {
    "check": "moekit.recipe.check_command",
    "show": "moekit.recipe.commands",
    "flags": "moekit.recipe.commands",
    "diff": "moekit.recipe.commands",
    "new": "moekit.recipe.commands",
    "schema": "moekit.recipe.commands",
    "rules": "moekit.recipe.commands",
    "import": "moekit.recipe.commands",
    "plan": "moekit.plan.commands",
    "rehearse": "moekit.rehearse.commands",
    "init": "moekit.cluster.commands",
    "image": "moekit.image.commands",
    "data": "moekit.data.commands",
    "preflight": "moekit.preflight.commands",
    "launch": "moekit.launch.commands",
    "status": "moekit.runs.commands",
    "why": "moekit.runs.commands",
    "list": "moekit.runs.commands",
    "logs": "moekit.runs.commands",
    "cancel": "moekit.runs.commands",
    "resume": "moekit.runs.commands",
    "bundle": "moekit.runs.commands",
    "watch": "moekit.watch.commands",
    "compare": "moekit.watch.commands",
    "router": "moekit.watch.commands",
    "mismatch": "moekit.watch.commands",
    "experts": "moekit.watch.commands",
    "doctor": "moekit.doctor.commands",
    "profile": "moekit.profile.commands",
    "track": "moekit.track.commands",
    "dashboard": "moekit.track.commands",
    "prove": "moekit.prove.commands",
    "megatron": "moekit.megatron.commands",
}
"""Where each command lives; a room is imported when one of its commands is asked for."""


class Rooms(TyperGroup):
    """Imports only the room whose command is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(ROOMS)  # type: ignore[assignment]  # names alone, for "did you mean"

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, in the order of a run's life."""
        return list(ROOMS)

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command of that name, from its room."""
        if name not in ROOMS:
            return None
        room: typer.Typer = import_module(ROOMS[name]).app
        wanted = typer.Typer()  # with this command alone: typer takes every function of an app apart
        wanted.registered_commands = [info for info in room.registered_commands if info.name == name]
        wanted.registered_groups = [info for info in room.registered_groups if info.name == name]
        command = typer.main.get_group(wanted).commands[name]
        _unwrap(command)
        return command


def _unwrap(command: Any) -> None:
    """Make each paragraph of a command's help one line: typer keeps a docstring's line ends, wherever they fall."""
    for one in (command, *getattr(command, "commands", {}).values()):
        one.help = re.sub(r"(?<!\n)\n(?!\n)", " ", one.help or "")


app = typer.Typer(cls=Rooms, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moekit {__version__}")
        raise typer.Exit


@app.callback()
def moekit(
    version: bool = typer.Option(
        False, "--version", help="Print moekit's version.", callback=_print_version, is_eager=True
    ),
) -> None:
    """From a YAML recipe to a Mixture-of-Experts run that Megatron-Core trains."""


def main() -> None:
    """The `moekit` command. A user's mistake is printed and exits with 1; a defect keeps its traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # data is UTF-8 whatever the terminal is, file names as they are
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    if os.environ.get("COLUMNS") == "0":  # a terminal of unknown size; rich would print nothing into it
        del os.environ["COLUMNS"]
    try:
        _run()
    except MoekitError as refused:
        print_problems(refused.problems)
        sys.exit(1)


def _run() -> None:
    """Run the command and see its output out; a machine that gives out is a message as well."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise error("the working directory is not there any more", "`cd` to one that is") from None
    try:
        try:
            app()
        finally:
            if sys.stdout:  # none where the caller closed it
                sys.stdout.flush()
    except OSError as reason:
        if reason.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be printed
        if reason.errno == errno.EPIPE:
            sys.exit(1)  # its reader wants no more
        where = f" `{reason.filename}`" if reason.filename else ""
        raise error(f"cannot write{where}: {os.strerror(reason.errno).lower()}") from None


if __name__ == "__main__":
    main()
