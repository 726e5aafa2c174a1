"""A Megatron command line, or the script around it, to a recipe: the inverse of `moekit.megatron.flags`.

Nothing disappears silently: what no field says goes to `megatron.extra`, and what the launch says itself is listed at
the end of the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moekit.megatron import table as tables
from moekit.megatron.table import FlagTable, Option
from moekit.problems import MoekitError, Problem
from moekit.recipe import nodes
from moekit.recipe.build import build, markers
from moekit.recipe.import_draft import Draft
from moekit.recipe.import_paths import Said, is_path, say_paths, spelled
from moekit.recipe.load import sections
from moekit.recipe.names import is_secret
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import Flag
from moekit.recipe.shell import Script, Word, megatron_words

_LAUNCHERS = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
_MACHINES = re.compile(r"PATH|PYTHONPATH|LD_LIBRARY_PATH|HOME|SLURM_\w+")
_INTEGER, _NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)"), re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def import_recipe(
    text: str,
    shown: str,
    *,
    version: str = "0.19.2",
    defines: Mapping[str, str] | None = None,
    gpus: int | None = None,
    name: str = "",
) -> str:
    """The recipe, as YAML text, of a command line or a bash script called `shown`.

    `version` names the Megatron whose options these are, `defines` gives variables that the script leaves open,
    `gpus` is the world size, where the text does not say it or is to be overruled; `name` becomes the recipe's
    `summary`.

    Raises:
        MoekitError: everything in the text that is unknown, unreadable or refused by a field, each with its line.
    """
    table = tables.load(version)
    script = megatron_words(text, shown, defines or {})
    draft = Draft(shown)
    _options(draft, script.words, table)
    _environment(draft, script, defines or {})
    world = gpus or script.gpus
    if world:
        draft.say("parallel.gpus", nodes.Place(shown, 1), [str(world)], plain=True)
    else:
        draft.problems.append(Problem(shown, "does not say on how many GPUs it runs", "`--gpus N` says it"))
    draft.say("megatron.version", nodes.Place(shown, 1), [version])
    tree = draft.tree(name or f"imported from {shown}")
    build(Recipe, tree, draft.problems)
    if draft.problems:
        found = {(problem.where, problem.what): problem for problem in draft.problems}
        raise MoekitError(*sorted(found.values(), key=_line))
    return draft.text(tree)


def _line(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 0


def _options(draft: Draft, words: Sequence[Word], table: FlagTable) -> None:
    """Every option of the command line to its field, to `megatron.extra` or to what is left out."""
    argv = [word.text for word in words]
    unknown = {position for position, word in enumerate(words) if word.unknown}
    wrong = {c.position: c for c in tables.check(argv, table) if c.kind != "twice" and c.position not in unknown}
    for position, complaint in wrong.items():
        hint = _elsewhere(complaint.option, table) if complaint.kind == "unknown" else ""
        draft.problems.append(Problem(str(words[position].place), complaint.what, hint or complaint.hint))
    found = list(tables.occurrences(argv, table))
    last = {one.option.dest: one for one in found if one.option}
    fields, paths = _fields(table), dict[str, Said]()
    for one, following in zip(found, [*found[1:], None], strict=True):
        said = words[one.position : following.position if following else len(words)]
        if one.option is None:
            draft.need(said)
        elif last[one.option.dest] is not one:
            again = last[one.option.dest]
            why = f"`{again.name}` at line {words[again.position].place.line} comes later, and the last one counts"
            draft.leave_out(spelled(said), said[0].place, why)
        elif one.option.dest == "exit_on_missing_checkpoint" and "load" in last:
            draft.leave_out(spelled(said), said[0].place, "the launch says it wherever it loads")
        elif wrong.keys().isdisjoint(range(one.position, one.position + len(said))):
            values = said[1:] if one.joined is None else [replace(said[0], text=one.joined), *said[1:]]
            taken = 0 if one.option.is_switch else 1 if one.option.nargs is None else len(values)
            draft.need(values[taken:])
            if is_path(one.option.dest):
                paths[one.option.dest] = Said(said, values[:taken])
            else:
                _option(draft, one.option, said, values[:taken], fields)
    say_paths(draft, paths)


def _option(
    draft: Draft, option: Option, said: Sequence[Word], values: Sequence[Word], fields: Mapping[tuple[str, str], str]
) -> None:
    draft.need(values)
    name = fields.get((option.dest, option.action))
    if name is None or not (option.is_switch or values):
        draft.extra += [nodes.Scalar(word.place, word.text, False) for word in said]
    elif option.is_switch:
        draft.say(name, said[0].place, ["true"], plain=True)
    elif not any(word.unknown for word in values):
        numeric = option.type in ("int", "float")
        draft.say(name, values[0].place, [_number(option.type, word.text) for word in values], plain=numeric)


def _fields(table: FlagTable) -> dict[tuple[str, str], str]:
    """The field that says what an option does, whatever its spelling: by what it sets and how."""
    found: dict[tuple[str, str], str] = {}
    for section, cls in sections():
        for name, (_, marks) in markers(cls).items():
            for option in (table.option(mark.option) for mark in marks if isinstance(mark, Flag)):
                if option:
                    found[option.dest, option.action] = f"{section}.{name}"
    return found


def _number(kind: str, text: str) -> str:
    """A number as the user spells it where a recipe reads that too, else in its shortest form."""
    if kind == "int" and not _INTEGER.fullmatch(text):
        return str(int(text))
    if kind == "float" and not _NUMBER.fullmatch(text):
        return repr(float(text))
    return text


def _elsewhere(option: str, table: FlagTable) -> str:
    having = [other for other in tables.shipped() if other != table.version and option in tables.load(other)]
    return f"`--megatron {having[0]}` has it" if having else ""


def _environment(draft: Draft, script: Script, defines: Mapping[str, str]) -> None:
    """Exported variables: values for the run, secrets by name, and those that machine or launcher set."""
    entries: dict[str, tuple[nodes.Place, nodes.Node]] = {}
    secrets: list[nodes.Node] = []
    for name, word in script.environment.items():
        place = word.place if word else nodes.Place(draft.shown, 1)
        if name in _LAUNCHERS:
            draft.leave_out(f"export {name}", place, "the launch sets it")
        elif _MACHINES.fullmatch(name):
            draft.leave_out(f"export {name}", place, "the cluster's profile and the image say it")
        elif word is None or is_secret(name):
            secrets.append(nodes.Scalar(place, name, False))
        elif defines.get(name) == "":
            draft.leave_out(f"export {name}", place, "`--set` leaves it empty")
        else:
            leave = f"`--set {name}=VALUE`, or `--set {name}=` to leave it out"
            draft.problems += [replace(problem, hint=leave) for problem in word.problems()]
            entries[name] = (place, nodes.Scalar(place, word.text, False))
    if entries:
        draft.values["runtime.environment"] = nodes.Mapping(nodes.Place(draft.shown, 1), entries)
    if secrets:
        draft.values["runtime.secrets"] = nodes.Sequence(secrets[0].place, tuple(secrets))
