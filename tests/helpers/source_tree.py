"""The source tree as the architecture rules read it: imports, functions and their sizes."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(path: str) -> str:
    """`nn/rotary.py` -> `headwise.nn.rotary`, `nn/__init__.py` -> `headwise.nn`."""
    return ".".join(["headwise", *Path(path).with_suffix("").parts]).removesuffix(".__init__")


def room_of(module: str) -> str:
    """`headwise.nn.rotary` -> `nn`; the package's own `__init__` is the room ''."""
    return [*module.split("."), ""][1]


parsed = functools.cache(ast.parse)  # for every rule; none changes a tree


@functools.cache
def imports(path: str, source: str) -> list[str]:
    """Every dotted name a file imports, wherever in the file; `from a import b` is a.b."""
    names: list[str] = []
    package = module_of(path).split(".")
    if Path(path).stem != "__init__":
        package = package[:-1]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def inside(path: str, source: str) -> set[str]:
    """The imports of a file that are ours."""
    return {name for name in imports(path, source) if name.split(".")[0] == "headwise"}


@functools.cache
def functions(source: str) -> list[tuple[str, Function]]:
    """Every function with its qualified name, methods and inner functions included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, Function):
                yield prefix + child.name, child
            if isinstance(child, Function | ast.ClassDef):
                inner = f"{prefix}{child.name}."
            yield from walk(child, inner)

    return list(walk(parsed(source), ""))


def code_lines(function: Function) -> int:
    """Lines from `def` to the end, less the docstring: what a reader must hold, not what explains it."""
    first = function.body[0]
    is_doc = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    doc = (first.end_lineno or 0) - first.lineno + 1 if is_doc else 0
    return (function.end_lineno or 0) - function.lineno + 1 - doc


def options(function: Function) -> int:
    """How many parameters a caller may leave out: those with a default. `*args` and `**kwargs` are not counted.

    Nor is an operand: `value`, which a cache stands for.
    """
    operands = [x.arg for x in function.args.args[-len(function.args.defaults) or 99 :]].count("value")
    defaults = len(function.args.defaults) + sum(default is not None for default in function.args.kw_defaults)
    return defaults - operands
