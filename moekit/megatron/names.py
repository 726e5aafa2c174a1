"""Which names a refusal is about: what the raising statement and the conditions around it read.

For `assert args.min_lr <= args.lr` these are `min_lr` and `lr`: dests and config fields, found in Megatron's source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# What holds Megatron's options: `args.lr`, `self.num_layers`, `self.config.hidden_size`, `model_config.x`.
_HOLDERS = ("args", "self", "config", "cfg", "tconfig")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_at(filename: str, line: int) -> tuple[str, ...]:
    """Attributes of arguments and configs, and the function's own parameters, that decide what happens at `line`.

    Nearest first: the statement itself, then the tests of the `if`s around it, inside its function. A local variable
    stands for what it was last assigned. Empty where the source cannot be read.
    """
    tree = _tree(filename)
    function = _innermost(tree, line) if tree else None
    if function is None:
        return ()
    around = list(_around(function.body, line))
    if not around:
        return ()
    parameters = {a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    found: dict[str, None] = {}
    for part in reversed(around):
        found.update(dict.fromkeys(_names(part, function, parameters - set(_HOLDERS), line)))
    return tuple(found)


@cache
def _tree(filename: str) -> ast.Module | None:
    try:
        return ast.parse(Path(filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _innermost(tree: ast.Module, line: int) -> Function | None:
    functions = [node for node in ast.walk(tree) if isinstance(node, Function) and _holds(node, line)]
    return max(functions, key=lambda node: node.lineno, default=None)


def _holds(node: ast.stmt | ast.excepthandler, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _around(body: list[ast.stmt], line: int) -> Iterator[ast.AST]:
    """From the outside in: the tests of the `if`s around `line`, and the statement or the head of the block there."""
    for statement in body:
        if not _holds(statement, line):
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        inner = [block for block in blocks if any(_holds(part, line) for part in block)]
        if not any(blocks):
            yield statement
        elif not inner:  # the head of an `if`, `for` or `with`
            yield from (getattr(statement, name) for name in ("test", "iter") if hasattr(statement, name))
        else:
            if isinstance(statement, ast.If) and not _is_elif(statement, inner[0]):
                yield statement.test
            yield from _around(inner[0], line)
        return


def _is_elif(statement: ast.If, block: list[ast.stmt]) -> bool:
    return block is statement.orelse and len(block) == 1 and isinstance(block[0], ast.If)


def _names(part: ast.AST, function: Function, parameters: set[str], line: int, depth: int = 3) -> Iterator[str]:
    """Names in order of the text; `depth` limits how far local variables are followed."""
    called = {id(node.func) for node in ast.walk(part) if isinstance(node, ast.Call)}
    for node in sorted(ast.walk(part), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))):
        if isinstance(node, ast.Attribute):
            if id(node) not in called and _is_holder(node.value) and not _is_holder(node):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            yield from (a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not _is_holder(node):
            if node.id in parameters:
                yield node.id
            elif depth and (value := _assigned(function, node.id, line)) is not None:
                yield from _names(value, function, parameters, value.lineno, depth - 1)


def _is_holder(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in _HOLDERS or name.endswith(("_config", "_args"))


def _assigned(function: Function, name: str, line: int) -> ast.expr | None:
    """What the local variable was last given before `line`."""
    values = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.lineno < line
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == name and node.value is not None
    ]
    return max(values, key=lambda value: value.lineno, default=None)
