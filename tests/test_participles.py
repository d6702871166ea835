"""A name is the noun of what it is: these participles name nothing, neither in the package nor around it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("src", "tests", "examples", "benchmarks", "scripts")
PARTICIPLES = {"asked", "found", "given", "held", "told"}
PUBLIC = {  # keywords and fields that users write
    "src/headwise/nn/latent.py": {"held"},
    "src/headwise/nn/latent_form.py": {"held"},
    "src/headwise/reshape/heal.py": {"held"},
}
NAME = rf"\b(?:{'|'.join(sorted(PARTICIPLES))})\b"
LIKELY = re.compile(  # a line that may give such a name; the parser judges the files that have one
    rf"^[\w, *().\[\]]*{NAME}(?:[\w, *()]* |: [^=\n]*)=(?!=)|{NAME} :=|^ +(?:\w+(?:: [^\n]*?)?, )*\**{NAME}[,:]"
    rf"|\bfor [\w, *()]*{NAME}[\w, *()]* in |\b(?:with|except|import)\b[^\n]* as {NAME}"
    rf"|^ *(?:async )?(?:def|class) (?:[^\n]*[ (*])?{NAME}|\blambda [^:\n]*{NAME}|^{NAME}:",
)


def names(node: ast.AST) -> Iterator[str]:
    """What a node gives a name to."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name


def participles(path: str, source: str) -> list[str]:
    """Most files need no parser: no line of theirs may hold such a name."""
    if not any(LIKELY.search(line) for line in source.splitlines() if re.search(NAME, line)):
        return []
    bad = PARTICIPLES - PUBLIC.get(path, set())
    return [
        f"{path}:{getattr(node, 'lineno', '?')} names a thing {name!r}: say which thing it is"
        for node in ast.walk(ast.parse(source))
        for name in names(node)
        if name in bad
    ]


def test_no_name_is_a_participle() -> None:
    files = {p.relative_to(ROOT).as_posix(): p for room in ROOMS for p in (ROOT / room).rglob("*.py")}
    assert files.keys() >= PUBLIC.keys() and "tests/test_participles.py" in files
    assert [fault for path, file in files.items() for fault in participles(path, file.read_text("utf8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "{} = 1", "a, {} = 1, 2", "a, (b, *{}) = x", "{}: int = 1", "class A:\n    {}: int", "for {} in x: ...",
        "[1 for a, {} in x]", "if ({} := f()): ...", "def {}(): ...", "class {}: ...", "def f({}): ...",
        "def f(\n    a: int,\n    {}: int,\n): ...", "def f(\n    a,\n    **{},\n): ...", "lambda a, *{}: a",
        "with x as {}: ...", "import x as {}", "try: ...\nexcept E as {}: ...", "self.{} = 1",
    ],
)  # fmt: skip
def test_a_planted_one_is_seen(source: str) -> None:
    for word in PARTICIPLES:
        [fault] = participles("tests/planted.py", source.format(word))
        assert fault.startswith("tests/planted.py:") and repr(word) in fault
        assert not participles("tests/planted.py", source.format("weights"))


def test_public_keywords_stay() -> None:
    assert participles("src/headwise/reshape/heal.py", "def heal(held): ...") == []
    assert participles("src/headwise/reshape/heal.py", "def heal(found=1): ...") != []
