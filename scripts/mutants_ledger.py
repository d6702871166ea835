"""The ledger of mutants, tests/ROOM/mutants.toml: what an entry is, whether it fits its file, and a draw of some."""

from __future__ import annotations

import ast
import functools
import random
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One fault to plant."""

    file: str
    old: str
    new: str
    test: str

    @property
    def room(self) -> str:
        """`src/headwise/nn/rotary.py` -> nn, `src/headwise/cli.py` -> cli; the Python around the kernel is native."""
        parts = Path(self.file).parts
        if parts[0] == "src":
            parts = parts[2:] or parts
        native = parts[0] == "ops" and "native" in parts[1]
        return "native" if native else Path(parts[0]).stem

    @property
    def is_native(self) -> bool:
        return self.file.startswith("csrc/")

    def applied_to(self, source: str) -> str:
        return source.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())!r} -> {' '.join(self.new.split())!r}"


def read(root: Path) -> list[Mutant]:
    """Return the entries of all rooms; a ValueError says which is malformed, or not beside its test."""
    return [mutant for ledger in sorted(root.glob("tests/*/mutants.toml")) for mutant in _entries(ledger, root)]


def _entries(ledger: Path, root: Path) -> list[Mutant]:
    keys, name = {field.name for field in fields(Mutant)}, ledger.relative_to(root)
    entries = tomllib.loads(ledger.read_text("utf8")).get("mutant", [])
    for number, entry in enumerate(entries, 1):
        if set(entry) != keys or not all(isinstance(value, str) for value in entry.values()):
            raise ValueError(f"{name}: mutant {number} has {sorted(entry)}, not texts for {sorted(keys)}")
        if not entry["test"].startswith(f"{name.parent.as_posix()}/"):
            raise ValueError(f"{name}: mutant {number} belongs beside its test, {entry['test']}")
    return [Mutant(**entry) for entry in entries]


def faults(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """What keeps entries from being run: each is a line with the entry."""
    lines = [f"{mutant}: {why}" for mutant in mutants for why in [_fault(mutant, root)] if why]
    return lines + [f"{mutant}: is there {n} times" for mutant, n in Counter(mutants).items() if n > 1]


def _fault(mutant: Mutant, root: Path) -> str | None:
    path = (root / mutant.file).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        return "no such file"
    source = path.read_text("utf8")
    if not mutant.old or (times := source.count(mutant.old)) != 1:
        return f"its old text must occur once in the file and occurs {times if mutant.old else 0} times"
    if mutant.old == mutant.new:
        return "its new text is the old one"
    if path.suffix == ".py":
        try:
            compile(mutant.applied_to(source), mutant.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"is no Python: {error.msg}"
    file, *names = mutant.test.split("[")[0].split("::")
    if not names or tuple(names) not in _tests(root / file):
        return f"there is no test {mutant.test}"
    return None


@functools.cache
def _tests(path: Path) -> set[tuple[str, ...]]:
    """The test functions of a file, as (name,) or (class, name)."""
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text("utf8")).body
    inside = [(outer.name, inner) for outer in body if isinstance(outer, ast.ClassDef) for inner in outer.body]
    functions = {(node.name,) for node in body if isinstance(node, ast.FunctionDef)}
    return functions | {(name, node.name) for name, node in inside if isinstance(node, ast.FunctionDef)}


def draw(mutants: Sequence[Mutant], count: int, seed: str) -> list[Mutant]:
    """Return `count` of them, the same for a seed; those of C++, which is compiled, only if the others are fewer."""
    shuffled = random.Random(seed).sample(mutants, len(mutants))
    return sorted(shuffled, key=lambda mutant: mutant.is_native)[:count]
