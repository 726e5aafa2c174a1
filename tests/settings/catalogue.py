"""docs/recipes.md: every shipped recipe, what it changes, what it needs, and how far it was judged here."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping

from differences import ROOT, base_name, base_of, changes, shown

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.recipe.load import load

HEAD = """# Shipped recipes

Made from the recipes by `pytest tests/settings --update-golden`. Each can be launched, or be the `base` of yours;
`moekit diff A B` puts two beside each other. A summary of a setting ends with the sections that it changes.

**Judged** says how far, on a machine without a GPU: by the *table* of that Megatron's options, which every recipe
passes; by the real Megatron 0.19.2, from its *parser* to its process groups; until the *model is built* on the meta
device; and by *three steps* of its trainer as rank 0 of all its ranks, made small as `moekit rehearse` does, without
what a CPU cannot do. Fused kernels are replaced by plain torch in both. No recipe is judged on a GPU here.
"""
GROUPS = (
    ("The handbook's own", "", "They have no folder: `moekit check first_moe`."),
    ("Settings", "settings/", "Each varies a recipe above, one thing at a time."),
    (
        "Models",
        "models/",
        "Sizes stand in `models/shapes/`, layouts in these. Every model also takes three steps with two processes on a "
        "CPU, made small.",
    ),
)


_WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}
_KEPT = "\0"
"""A space at which no line is broken."""


def page(judged: Mapping[str, Mapping[str, str]]) -> str:
    """The page, from what `recorded.yaml` keeps."""
    lines = [HEAD]
    for title, folder, words in GROUPS:
        names = [n for n in share.shipped_recipes() if n.startswith(folder) and ("/" in n) == bool(folder)]
        lines += [f"## {title}", "", *textwrap.wrap(words, 120, **_WHOLE_WORDS), ""]
        for name in names:
            lines += [*_entry(name, judged[name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, judged: Mapping[str, str]) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    yield from textwrap.wrap(f"{load(name).recipe.summary}. {comment(name)}", 120, **_WHOLE_WORDS)
    yield ""
    if base_of(name):
        fields = [_change(field, *values).replace(" ", _KEPT) for field, values in changes(name).items()]
        text = f"- changes `{base_name(name)}`: {'; '.join(fields)}"
        for line in textwrap.wrap(text, 120, subsequent_indent="  ", **_WHOLE_WORDS):
            yield line.replace(_KEPT, " ")
    yield f"- needs {_needs(name)}"
    yield from textwrap.wrap(f"- judged: {', '.join(_how_far(judged))}", 120, subsequent_indent="  ", **_WHOLE_WORDS)


def _change(field: str, before: object, after: object) -> str:
    if after is None:
        return f"`{field}` unset"
    return f"`{field}: {shown(after)}`" + ("" if before is None else f" (was {shown(before)})")


def comment(name: str) -> str:
    """The comment that a recipe opens with, in one paragraph."""
    opening = re.findall(r"^# ?(.*)$", (ROOT / f"{name}.yaml").read_text().partition("\nbase:")[0], re.MULTILINE)
    taken = [line for line in opening if not line.startswith("yaml-language-server")]
    return " ".join(taken)


def _needs(name: str) -> str:
    recipe, profile = load(name).recipe, share.made_for(name)
    megatron = f"Megatron {recipe.megatron.version}"
    if recipe.runtime.device == "cpu":
        return f"{megatron}, a CPU for {recipe.parallel.gpus} processes"
    cluster = find_cluster(profile)
    held = f"`--profile {profile}`" if profile else f"or others: held against {cluster.name}"
    return f"{megatron}, {recipe.parallel.gpus} {cluster.gpu.upper()} ({held})"


def _how_far(judged: Mapping[str, str]) -> Iterator[str]:
    yield "table"
    if "parse" in judged:
        yield f"not whole by Megatron 0.19.2 ({judged['parse']})"
    else:
        yield "parser to process groups"
        yield "model built" if judged["build"] == "passed" else f"model not ({judged['build']})"
    yield (
        judged["step"].replace("passed", "three steps") if "passed" in judged["step"] else f"no step ({judged['step']})"
    )
