"""Run inside a Megatron's own Python: build its real parser and print every option as JSON.

    python read_parser.py

Standard library and Megatron only, Python >= 3.10; `moekit.megatron.dump` starts it and shapes the result.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import sys
from typing import Any

ACTIONS = {
    argparse._StoreAction: "store",
    argparse._StoreTrueAction: "store_true",
    argparse._StoreFalseAction: "store_false",
}


def type_and_choices(action: argparse.Action) -> tuple[str, list[Any]]:
    """The name of an action's type and the values it takes on the command line.

    Megatron reads an enum by member name, through a function made for each enum
    (megatron/training/argument_utils.py `_get_enum_kwargs`), but lists the members as choices.
    """
    members = [cell.cell_contents for cell in getattr(action.type, "__closure__", None) or ()]
    enums = [member for member in members if isinstance(member, type) and issubclass(member, enum.Enum)]
    if enums:
        return enums[0].__name__, list(enums[0].__members__)
    name = "str" if action.type is None else getattr(action.type, "__name__", str(action.type))
    return name, list(action.choices or ())


def describe(action: argparse.Action, group: str) -> dict[str, dict[str, Any]]:
    """Each option string of one action with its fields."""
    result = {}
    for name in action.option_strings:
        if isinstance(action, argparse.BooleanOptionalAction):
            kind = "store_false" if name.startswith("--no-") else "store_true"
        else:
            kind = ACTIONS[type(action)]  # an action of another class: this file has to learn it
        fields: dict[str, Any] = {"dest": action.dest, "action": kind, "group": group}
        if kind == "store":
            fields["type"], fields["choices"] = type_and_choices(action)
            fields["nargs"] = action.nargs
        result[name] = fields
    return result


def main() -> None:
    """Print {"version", "arguments" (the file Megatron was read from), "options"}."""
    del sys.path[0]  # this file's folder
    with contextlib.redirect_stdout(sys.stderr):
        from megatron.core.package_info import __version__
        from megatron.training import arguments

        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        arguments.add_megatron_arguments(parser)
    options: dict[str, dict[str, Any]] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            options.update(describe(action, group.title or ""))
    print(json.dumps({"version": __version__, "arguments": arguments.__file__, "options": options}))


if __name__ == "__main__":
    main()
