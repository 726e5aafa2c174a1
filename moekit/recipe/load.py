"""A recipe file and all it inherits from, as one `Recipe` whose every value knows where it comes from."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moekit import share
from moekit.problems import MoekitError, Problem, did_you_mean, error, shortened
from moekit.recipe import nodes
from moekit.recipe.build import build, is_section, markers
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import Flag, Owned

MOST_BASES = 8


@dataclass(frozen=True)
class Source:
    """The merged tree behind a loaded file."""

    shown: str
    tree: nodes.Mapping

    def find(self, name: str) -> nodes.Node | None:
        """The node of a dotted name, null ones included; None where no file mentions it."""
        node: nodes.Node = self.tree
        for key in name.split("."):
            entry = node.entries.get(key) if isinstance(node, nodes.Mapping) else None
            if entry is None:
                return None
            node = entry[1]
        return node

    def where(self, *names: str) -> str:
        """`file:line` of the first of the dotted names that is set, else of a section among them, else the file."""
        for name in (*names, *(name.rpartition(".")[0] for name in names)):
            node = self.find(name) if name else None
            if node is not None:
                return str(node.place)
        return self.shown

    def origin(self, name: str) -> str:
        """Where a value stands or is taken back, `` `name` comes from file:line ``; empty where no file mentions it."""
        node = self.find(name)
        if node is None:
            return ""
        is_null = isinstance(node, nodes.Scalar) and node.is_null
        return f"`{name}` {'is unset at' if is_null else 'comes from'} {node.place}"


@dataclass(frozen=True)
class Loaded:
    """A recipe and where its values come from."""

    recipe: Recipe
    source: Source
    name: str
    """The recipe's own name: its file's stem; `<sweep>-<variant>` of a sweep."""
    problems: tuple[Problem, ...] = ()
    """What could not be read; the recipe then lacks those values. Only `load_partly` and `load_each` leave any."""
    variant: Variant | None = None
    """Which run of a sweep it is; None of a recipe's own file."""

    @property
    def group(self) -> str | None:
        """What the tracker shows the run under, together with others; None: a run of its own."""
        return self.variant.sweep if self.variant else None

    @property
    def compared_with(self) -> str | None:
        """The run that it is to be measured against: the rung before, or the one whose control it is."""
        return self.variant.below.name if self.variant and self.variant.below.variant else None


@dataclass(frozen=True)
class Variant:
    """Which run of a sweep a recipe is."""

    sweep: str
    """The sweep's name."""
    key: str
    """The variant's own name in the file."""
    below: Loaded
    """What it changes: the rung before, the run whose control it is, or what all runs of the file have in common."""


def load(given: str) -> Loaded:
    """The recipe of a path or of a shipped name, or of `SWEEP:VARIANT`.

    Raises:
        MoekitError: with every problem of every file it inherits from, each with its file and line.
    """
    loaded = load_partly(given)
    if loaded.problems:
        raise MoekitError(*loaded.problems)
    return loaded


def load_partly(given: str) -> Loaded:
    """Like `load`, but what a field cannot take is left unset and listed, so that later checks can be made as well."""
    first, *more = load_each(given)
    if first.variant and file_and_variant(given)[1] is None:
        which = f"name one, such as `{shortened(f'{given}:{first.variant.key}')}`; `moekit show` lists them"
        raise error(f"`{shortened(given)}` is a sweep of {1 + len(more)} runs", which)
    return first


def load_each(given: str, name: str | None = None) -> list[Loaded]:
    """The recipe of a path or of a shipped name, or all of a sweep's, or the one of `SWEEP:VARIANT`.

    `name` names the run, or the sweep, in the place of its file. What a field cannot take is left unset and listed,
    as by `load_partly`.

    Raises:
        MoekitError: a file that cannot be taken apart at all, or nothing has that name.
    """
    file, key = file_and_variant(given)
    path = find(file)
    shown = file if path == Path(file) else show(path)
    problems: list[Problem] = []
    tree = _inherited(path, shown, (), problems)
    from moekit.recipe import sweep  # here: it builds on this file

    if sweep.is_sweep(tree):
        if key is None:
            return sweep.load_variants(tree, shown, path.stem if name is None else name, problems)
        run = sweep.named(sweep.load_variants(tree, shown, path.stem, problems), key, shown)
        return [replace(run, name=run.name if name is None else name)]
    if key is not None:
        raise error(f"`{shortened(file)}` is one recipe and no sweep: nothing in it is called `{shortened(key)}`")
    recipe = build(Recipe, tree, problems, elsewhere=field_that_says)
    return [Loaded(recipe, Source(shown, tree), path.stem if name is None else name, tuple(problems))]


def file_and_variant(given: str) -> tuple[str, str | None]:
    """A file or shipped name, and behind a colon the variant meant; a file whose name has a colon is only a file."""
    file, colon, key = given.rpartition(":")
    return (file, key) if colon and not os.path.lexists(given) else (given, None)


def find(given: str, folder: Path = Path(), place: str = "") -> Path:
    """The file that a path, from `folder`, or a shipped name means."""
    path = folder / given
    if is_there(path, given, place):
        return path
    shipped = share.folder("recipes") / f"{given}.yaml"
    if not given.endswith(".yaml") and not Path(given).is_absolute() and shipped.is_file():
        return shipped
    names = share.shipped_recipes() + share.shipped_sweeps()
    stem = given.removesuffix(".yaml").removeprefix("recipes/")
    in_a_folder = [f"did you mean `{name}`?" for name in names if name.endswith(f"/{stem}")]
    folders = "those in settings/, models/ and sweeps/"
    several = f"shipped are {', '.join(name for name in names if '/' not in name)}, and {folders}"
    hint = next(iter(in_a_folder), "") or did_you_mean(stem, names) or several
    is_folder = given and path.is_dir()  # an empty path would be the working directory
    what = f"`{shortened(given)}` is a directory" if is_folder else f"there is no recipe `{shortened(given)}`"
    raise MoekitError(Problem(place, what, hint))


def is_there(path: Path, given: str, place: str = "") -> bool:
    """Whether a path, given as `given`, is something to read and no folder.

    Raises:
        MoekitError: it cannot even be looked for: a name too long, a folder that may not be entered.
    """
    try:
        return path.exists() and not path.is_dir()
    except OSError as reason:
        what = f"`{shortened(given)}` cannot be read: {(reason.strerror or str(reason)).lower()}"
        raise MoekitError(Problem(place, what)) from None


def show(path: Path) -> str:
    """A path as the user would name it: from the working directory where it lies below."""
    resolved = path.resolve()
    try:
        return resolved.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(resolved)


def _inherited(
    path: Path, shown: str, children: tuple[tuple[Path, str], ...], problems: list[Problem]
) -> nodes.Mapping:
    """The tree of a file over its base's; `base` itself stays the child's own."""
    tree = nodes.read(path, shown, problems)
    if "base" not in tree.entries:
        return tree
    base = tree.entries["base"][1]
    if not isinstance(base, nodes.Scalar):
        raise MoekitError(Problem(str(base.place), "`base` must be one path or name", "a recipe has one parent"))
    if base.is_null:
        return tree
    chain = (*children, (path.resolve(), shown))
    parent = find(base.text, path.parent, str(base.place))
    parent_shown = (
        os.path.normpath(Path(shown).parent / base.text) if parent == path.parent / base.text else show(parent)
    )
    if parent.resolve() in [seen for seen, _ in chain]:
        steps = " → ".join([name for _, name in chain] + [parent_shown])
        raise MoekitError(Problem(str(base.place), f"recipe inherits from itself: {steps}"))
    if len(chain) >= MOST_BASES:
        raise MoekitError(Problem(str(base.place), f"inherits through more than {MOST_BASES} files"))
    inherited = _inherited(parent, parent_shown, chain, problems)
    from moekit.recipe import sweep

    if sweep.is_sweep(inherited):
        what = f"`{parent_shown}` is a sweep, which no recipe is built on"
        raise MoekitError(Problem(str(base.place), what, "name its `base` instead"))
    return nodes.merged(inherited, tree)


@functools.cache
def fields_by_option() -> dict[str, str]:
    """For each Megatron option that a field says, the field's dotted name."""
    return {option: name for name, _, option in _options()}


@functools.cache
def field_that_says(key: str) -> str | None:
    """The field meant by a key that is not one here: Megatron's own name, or a name of another section."""
    option = "--" + key.lstrip("-").replace("_", "-")
    if option in fields_by_option():
        return fields_by_option()[option]
    homes = [f"{section}.{key}" for section, cls in sections() if key in markers(cls)]
    return homes[0] if len(homes) == 1 else None


def sections() -> list[tuple[str, Any]]:
    """The recipe's sections in order, each with its dataclass."""
    return [(name, hint) for name, (hint, _) in markers(Recipe).items() if is_section(hint)]


def _options() -> list[tuple[str, str, str]]:
    """(dotted field, section, option) for every option that a field says."""
    found = []
    for section, cls in sections():
        for field in fields(cls):
            for mark in markers(cls)[field.name][1]:
                options = (mark.option,) if isinstance(mark, Flag) else mark.options if isinstance(mark, Owned) else ()
                found += [(f"{section}.{field.name}", section, option) for option in options]
    return found
