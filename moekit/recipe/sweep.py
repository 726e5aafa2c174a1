"""A sweep file: named variants of one recipe, each a few fields, or a ladder of them.

It is a recipe with `sweep:` or `ladder:` in it. All else in the file is what its runs have in common:

    base: ../first_moe.yaml
    sweep:                              # each variant changes that recipe by itself
      low: {schedule: {lr: 2.5e-4}}
      high: {schedule: {lr: 1.0e-3}}

Of a `ladder:`, each rung goes on from the one before and is compared with it: advice that was measured in several
places does not add up by itself (handbook 5). `control: forced_balance` puts beside each variant with experts a run
that is the same but for even, random routing: how fast it could be (handbook 3.3). A variant is an ordinary recipe,
called `<sweep>-<variant>`, or `FILE:VARIANT` on a command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moekit import share
from moekit.problems import Problem, did_you_mean, error, shortened
from moekit.recipe import nodes
from moekit.recipe.build import build
from moekit.recipe.load import Loaded, Source, Variant, field_that_says, show
from moekit.recipe.names import RUN_NAME
from moekit.recipe.schema import Recipe
from moekit.recipe.values import plain_values

FORMS = ("sweep", "ladder")
CONTROL = "forced_balance"
"""The control there is: what it changes stands in `recipes/settings/forced_balance.yaml`."""
_OWN = (*FORMS, "control", "summary")
"""What the file says of itself and not of its runs."""
FIELD_TEXTS = {
    "sweep": "Makes this a sweep: a name for each run, and below it the fields that it changes of the rest of "
    "the file.",
    "ladder": "Makes this a ladder: like `sweep`, but each run goes on from the one before and is compared with it.",
    "control": "Of a sweep or ladder: also a run with even, random routing beside each that has experts. How fast it "
    "could be, and no model. Handbook 3.3.",
}
"""For editors, what each key means."""


def is_sweep(tree: nodes.Mapping) -> bool:
    """Whether a file is a sweep and no recipe."""
    return any(form in tree.entries for form in FORMS)


def load_variants(tree: nodes.Mapping, shown: str, name: str, problems: list[Problem]) -> list[Loaded]:
    """Every run of a sweep, controls behind their variants, from its tree over its base's.

    Args:
        tree: of the file and all it inherits from.
        shown: what the user calls the file.
        name: the sweep's, its file's stem.
        problems: what was found in reading the files; it is every run's.

    Raises:
        MoekitError: the sweep cannot be taken apart.
    """
    form, variants = _form(tree)
    control = _control(tree)
    common = nodes.Mapping(tree.place, {key: entry for key, entry in tree.entries.items() if key not in _OWN})
    base = below = Loaded(build(Recipe, common, [], elsewhere=field_that_says), Source(shown, common), name)
    runs: list[Loaded] = []
    for key, (place, node) in variants.entries.items():
        own = [*problems, *_name_problems(f"{name}-{key}", place)]
        changes = _changes(f"{form}.{key}", node, own)
        run = _changed(below, changes, name, key, own)
        if same := next((other for other in runs if not own and _equal(other.recipe, run.recipe)), None):
            own.append(_nothing_new(key, place, same))
        runs.append(replace(run, problems=(*run.problems, *own)))
        if control is not None and _takes_control(run):
            runs.append(_changed(run, control, name, f"{key}-{CONTROL}", []))
        below = run if form == "ladder" else base
    return runs


def named(runs: list[Loaded], key: str, shown: str) -> Loaded:
    """The run of a sweep that a user names."""
    by_key = {run.variant.key: run for run in runs if run.variant}
    if key in by_key:
        return by_key[key]
    hint = did_you_mean(key, by_key) or f"there are {', '.join(f'`{known}`' for known in by_key)}"
    raise error(f"sweep `{shortened(shown)}` has no `{shortened(key)}`", hint)


def _changed(below: Loaded, changes: nodes.Mapping, sweep: str, key: str, problems: list[Problem]) -> Loaded:
    """A run from the one that it changes; a summary is not handed on."""
    kept = {name: entry for name, entry in below.source.tree.entries.items() if name != "summary"}
    tree = nodes.merged(nodes.Mapping(below.source.tree.place, kept), changes)
    recipe = build(Recipe, tree, problems, elsewhere=field_that_says)
    file = below.source.shown if below.variant is None else below.source.shown.rpartition(":")[0]
    return Loaded(recipe, Source(f"{file}:{key}", tree), f"{sweep}-{key}", tuple(problems), Variant(sweep, key, below))


def _form(tree: nodes.Mapping) -> tuple[str, nodes.Mapping]:
    """`sweep` or `ladder`, and its variants."""
    first, *more = [form for form in FORMS if form in tree.entries]
    place, variants = tree.entries[first]
    if more:
        what = "a file has `sweep` or `ladder`, not both"
        raise error(what, f"`sweep` is at {place}", str(tree.entries["ladder"][0]))
    if not isinstance(variants, nodes.Mapping) or not variants.entries:
        hint = "`low: {schedule: {lr: 1.0e-4}}`, a line for each"
        raise error(f"`{first}` must be `name: fields` lines", hint, str(variants.place))
    return first, variants


def _changes(name: str, node: nodes.Node, problems: list[Problem]) -> nodes.Mapping:
    """What a variant changes; nothing where it says nothing."""
    if isinstance(node, nodes.Mapping):
        wrong = [key for key in node.entries if key in ("base", *FORMS, "control")]
        for key in wrong:
            place, hint = node.entries[key][0], "every variant has the base of the file"
            problems.append(Problem(str(place), f"`{name}` has a `{key}`", hint if key == "base" else ""))
        return nodes.Mapping(node.place, {key: value for key, value in node.entries.items() if key not in wrong})
    if not (isinstance(node, nodes.Scalar) and node.is_null):
        problems.append(Problem(str(node.place), f"`{name}` must be a section of the fields it changes"))
    return nodes.Mapping(node.place)


def _control(tree: nodes.Mapping) -> nodes.Mapping | None:
    """What the control changes, where the file asks for one."""
    if "control" not in tree.entries:
        return None
    _, node = tree.entries["control"]
    if not isinstance(node, nodes.Scalar):
        raise error(f"`control` must be `{CONTROL}`", where=str(node.place))
    if node.is_null:
        return None
    if node.text != CONTROL:
        raise error(f"`control` must be `{CONTROL}`, not `{shortened(node.text)}`", where=str(node.place))
    path = share.folder("recipes") / "settings" / f"{CONTROL}.yaml"
    read = nodes.read(path, show(path), [])
    return nodes.Mapping(read.place, {key: value for key, value in read.entries.items() if key != "base"})


def _takes_control(run: Loaded) -> bool:
    """Whether even routing says anything of a run: it has experts, and its own routing is not forced already."""
    balance = run.recipe.balance
    forced = balance.force_load_balancing or balance.force_biased is not None
    return run.recipe.moe.num_experts is not None and not forced


def _name_problems(name: str, place: nodes.Place) -> Iterator[Problem]:
    if not RUN_NAME.fullmatch(name):
        hint = "up to 100 letters, digits, `.`, `_`, `-`, at first a letter, digit or `_`"
        yield Problem(str(place), f"a run cannot be named `{shortened(name)}`", hint)


def _nothing_new(key: str, place: nodes.Place, same: Loaded) -> Problem:
    what = f"`{key}` is the same recipe as `{same.name}`"
    return Problem(str(place), what, "each of its fields has that value already: take it out, or `train.seed` differs")


def _equal(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes are the same run, whatever their summaries say."""
    a, b = plain_values(one), plain_values(other)
    return {**a, "summary": None} == {**b, "summary": None}
