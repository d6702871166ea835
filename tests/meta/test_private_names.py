"""A name with one leading underscore stays in its room; see `test_architecture` for how the tree is read."""

import ast
import functools
import re

import pytest
from source_tree import inside, module_of, parsed, room_of
from test_architecture import Tree, real_tree, with_planted


@functools.cache
def names_in(source: str) -> tuple[set[str], set[str]]:
    """(names that a file defines or sets, attributes that it uses)."""
    defined, used = set[str](), set[str]()
    for node in ast.walk(parsed(source)):
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        name = getattr(node, "attr", getattr(node, "id", "")) if stored else getattr(node, "name", "")
        defined.add(name or "")
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
    return defined, used


def private_names_stay(tree: Tree) -> list[str]:
    """No private name is imported from another room, and no `x._name` used that other rooms alone define."""
    homes: dict[str, set[str]] = {}
    for path, source in tree.items():
        for name in names_in(source)[0]:
            homes.setdefault(name, set()).add(room_of(module_of(path)))
    faults = []
    for path, source in tree.items():
        mine = room_of(module_of(path))
        names = {name for name in names_in(source)[1] if mine not in homes.get(name, {mine})}
        names |= {name.split(".")[-1] for name in inside(path, source) if room_of(name) != mine}
        faults += [f"{path} uses {name}, private to another room" for name in sorted(names) if re.match("_(?!_)", name)]
    return faults


@pytest.mark.parametrize(
    "line", ["cache._write(1)", "def f(x):\n    return x._write", "from ..cache.base import _write"]
)
def test_private_names_stay_in_their_room(line: str) -> None:
    assert private_names_stay(real_tree()) == []
    faults = private_names_stay(with_planted("look/planted.py", line))
    assert faults == ["look/planted.py uses _write, private to another room"]
