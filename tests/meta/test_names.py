"""One word, one thing: the names of types."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from test_architecture import Tree, real_tree, with_planted


@functools.cache
def types_in(source: str) -> list[str]:
    """The classes of a file, and the types that it gives a name."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar(" not in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [x.id for x in targets if isinstance(x, ast.Name) and re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", x.id)]
    return names


def one_meaning(tree: Tree) -> list[str]:
    """A type's name is defined once: in two rooms it would mean two things."""
    places: dict[str, list[str]] = {}
    for path in sorted(tree):
        for name in types_in(tree[path]):
            places.setdefault(name, []).append(path)
    return [
        f"{name} is defined in {' and '.join(paths)}; name one of them more precisely"
        for name, paths in places.items()
        if len(paths) > 1
    ]


def test_a_name_of_a_type_has_one_meaning() -> None:
    assert one_meaning(real_tree()) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("class Mask: ...", "Mask is defined in nn/planted.py and ops/masks/mask.py"),
        ("LatentForm = int | None", "LatentForm is defined in nn/latent_costs.py and nn/planted.py"),
    ],
)
def test_a_second_meaning_is_reported(source: str, fault: str) -> None:
    assert any(fault in line for line in one_meaning(with_planted("nn/planted.py", source)))
