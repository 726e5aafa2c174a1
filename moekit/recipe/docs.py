"""The texts under the schema's fields, read from its source: what editors show on hover."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from typing import Any

from moekit.recipe.build import markers
from moekit.recipe.load import sections
from moekit.recipe.schema.markers import Flag, Owned


@functools.cache
def field_texts(cls: Any) -> dict[str, str]:
    """For each field of a dataclass, the string that stands under it, on one line."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(cls)))  # type: ignore[arg-type]
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    texts = {}
    for line, below in itertools.pairwise(body):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and is_text:
            texts[line.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return texts


def description(cls: Any, name: str) -> str:
    """All there is to say of a field: its text, what null means, Megatron's option, the handbook's section."""
    text = field_texts(cls)[name]
    said = [mark for mark in markers(cls)[name][1] if isinstance(mark, Flag | Owned)]
    if said and "Null" not in text:
        text += " Null: not said, Megatron decides."
    for mark in said:
        options = (mark.option,) if isinstance(mark, Flag) else mark.options
        text += f" Megatron: {', '.join(f'`{option}`' for option in options)}."
        text += f" Handbook {mark.handbook}." if mark.handbook else ""
    return text


def field_list(cls: Any, required: tuple[str, ...]) -> str:
    """Every field of a flat file's dataclass with its text, as a list."""
    texts, needed = field_texts(cls), dict.fromkeys(required, " Needed.")
    return "".join(f"- **`{name}`** {texts[name]}{needed.get(name, '')}\n" for name in markers(cls))


def reference() -> str:
    """`docs/recipe.md`: every field of every section."""
    lines = [
        "# Recipe fields",
        "",
        "Made by `moekit schema --markdown`; the text of each field stands under it in the code.",
        "",
    ]
    for section, cls in sections():
        lines += [f"## {section}", "", inspect.cleandoc(cls.__doc__ or ""), ""]
        lines += [f"- **`{section}.{name}`** {description(cls, name)}" for name in markers(cls)]
        lines.append("")
    return "\n".join(lines)
