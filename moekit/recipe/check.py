"""Everything that can be said against a recipe at the desk: its fields, Megatron's rules, Megatron's option table."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.megatron import flags
from moekit.megatron.table import Complaint, FlagTable, check, load, occurrences, shipped
from moekit.problems import MoekitError, Problem, shortened
from moekit.recipe.load import Loaded, fields_by_option
from moekit.recipe.rules import violations
from moekit.recipe.rules.violation import Target, Violation
from moekit.recipe.schema import Recipe


def problems_of(loaded: Loaded, target: Target) -> list[Problem]:
    """Every problem of a loaded recipe on a machine, in the order of its files' lines; empty when Megatron can start.

    A recipe with unreadable fields (`load_partly`) is held against the table alone: rules would blame what is missing.
    """
    found = list(loaded.problems)
    found += _argument_problems(loaded)
    if not loaded.problems:
        found += [_placed(violation, loaded) for violation in violations(loaded.recipe, target)]
    refused = any(problem.level == "error" for problem in found)
    if not refused and loaded.recipe.runtime.device == "cpu":
        from moekit.recipe.cpu import cpu_problems  # here: most recipes are for GPUs

        found += cpu_problems(loaded)
    return sorted(found, key=_line)


def _placed(violation: Violation, loaded: Loaded) -> Problem:
    """A rule's violation at its place, with the places of the other values it is about."""
    source, place = loaded.source, loaded.source.where(*violation.fields)
    others = [
        source.origin(name)
        for name in violation.fields[1:]
        if (node := source.find(name)) and str(node.place).rpartition(":")[0] != place.rpartition(":")[0]
    ]
    return Problem(place, violation.what, "; ".join(filter(None, (violation.hint, *others))), violation.level)


def _argument_problems(loaded: Loaded) -> Iterator[Problem]:
    """What Megatron's parser would say of the recipe's own arguments, at the fields that say them."""
    source = loaded.source
    try:
        table = load(loaded.recipe.megatron.version)
    except MoekitError as unknown:
        what = f"moekit has no flag table for `megatron.version: {shortened(loaded.recipe.megatron.version)}`"
        yield Problem(source.where("megatron.version"), what, unknown.problems[0].hint)
        return
    arguments = [a for a in flags.arguments(loaded.recipe) if a.field != "megatron.extra"]
    owners = [argument for argument in arguments for _ in argument.words]
    complaints = [(owners[complaint.position], complaint) for complaint in check(flags.argv(arguments), table)]
    misread = {owner.field: c.option for owner, c in complaints if c.option != owner.words[0]}
    for owner, complaint in complaints:
        if owner.field not in misread:
            yield _complaint(owner.field, complaint, source.where(owner.field), table)
    for field, option in misread.items():
        what = f"`{field}` has the value `{shortened(option)}`, which Megatron reads as an option"
        yield Problem(source.where(field), what)
    yield from _extra_problems(loaded.recipe.megatron.extra or (), source.where("megatron.extra"), table)


def _extra_problems(extra: tuple[str, ...], where: str, table: FlagTable) -> Iterator[Problem]:
    """What is wrong with `megatron.extra` by itself, and what of it a field says."""
    for complaint in check(extra, table):
        if not complaint.option:
            hint = "the option comes first, and each of its values is a word of its own: `[--option, value]`"
            yield Problem(where, f"{complaint.what} (from `megatron.extra`)", hint)
        elif not _field_for(complaint.option, table):
            yield Problem(where, f"{complaint.what} (from `megatron.extra`)", complaint.hint)
    names = [found.name for found in occurrences(extra, table)]
    launchs = _options_of_launch() if names else set()
    for name in names:
        if field := _field_for(name, table):
            yield Problem(where, f"`megatron.extra` says `{name}`, which has a field", f"use `{field}`")
        elif name in launchs:
            yield Problem(where, f"`megatron.extra` says `{name}`, which the launch sets", "leave it out")


def _options_of_launch() -> set[str]:
    """What a launch says of every run, whatever its recipe."""
    from moekit.launch.run_files import owned_arguments  # here: a recipe seldom has further arguments

    return {argument.words[0] for argument in owned_arguments(Recipe(), "name", "/", resume=False)}


def _complaint(field: str, complaint: Complaint, where: str, table: FlagTable) -> Problem:
    """A complaint in the words of the recipe: its field and not the option it becomes."""
    if complaint.kind == "unknown":
        what = f"Megatron {table.version} has no `{complaint.option}`, which `{field}` says"
        return Problem(where, what, _other_versions(complaint.option, table.version))
    return Problem(where, complaint.what.replace(f"`{complaint.option}`", f"`{field}`"), complaint.hint)


def _other_versions(option: str, version: str) -> str:
    having = [other for other in shipped() if other != version and option in load(other)]
    return f"`megatron.version: {having[0]}` has it" if having else "unset it with `null`"


def _field_for(option: str, table: FlagTable) -> str:
    """The field that sets what `option` sets, under whichever of its spellings; empty where none does."""
    if option not in table:
        return ""
    return next((field for said, field in fields_by_option().items() if _dest(said, table) == _dest(option, table)), "")


def _dest(option: str, table: FlagTable) -> str:
    found = table.option(option)
    return found.dest if found else option


def _line(problem: Problem) -> tuple[str, int]:
    file, _, line = problem.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (problem.where, 0)
