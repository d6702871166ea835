"""A name with one leading underscore stays in its room; see `test_architecture` for how the tree is read."""

import ast
import re

import pytest
from test_architecture import Tree, inside, module_of, real_tree, room_of, with_planted


def private_names_stay(tree: Tree) -> list[str]:
    """No private name is imported from another room, and no `x._name` used that other rooms alone define."""
    homes: dict[str, set[str]] = {}
    for path, source in tree.items():
        for node in ast.walk(ast.parse(source)):
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            name = getattr(node, "attr", getattr(node, "id", "")) if stored else getattr(node, "name", "")
            homes.setdefault(name or "", set()).add(room_of(module_of(path)))
    faults = []
    for path, source in tree.items():
        mine = room_of(module_of(path))
        uses = {x.attr for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Attribute)}
        names = {name for name in uses if mine not in homes.get(name, {mine})}
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
