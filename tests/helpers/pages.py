"""Runs a page of the documentation as its reader would: block after block, in an interpreter with no other imports.

`tests/meta/test_docs.py` calls `run_fresh`. Each page gets a process of its own, forked from one that has imported
torch and no part of headwise: so no page can lean on what pytest, another test or another page imported, and torch
is loaded once. For the same reason this file imports nothing of headwise.
"""

from __future__ import annotations

import ast
import doctest
import os
import re
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from fresh import context

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
INLINE = re.compile(r"`(headwise(?:\.\w+)+)")
IMPORT = re.compile(r"`(import headwise[\w.]*)`")


def run_fresh(name: str, text: str, folder: Path) -> int:
    """How many blocks ran. A wrong page raises AssertionError or its own error."""
    with ProcessPoolExecutor(1, mp_context=context()) as process:
        return process.submit(run_page, name, text, folder).result()


def run_page(name: str, text: str, folder: Path) -> int:
    """The blocks of a page, which share their names; then what its sentences name must be there, too."""
    leaked = sorted(module for module in sys.modules if module.split(".")[0] == "headwise")
    assert not leaked, f"this interpreter is not fresh: it holds {', '.join(leaked)}"
    os.chdir(folder)
    warnings.simplefilter("error")  # as in every test
    names: dict[str, object] = {"__name__": "__main__"}
    ran = sum(run_block(name, text, block, names) for block in FENCE.finditer(text))
    prose = FENCE.sub("", text)
    for statement in IMPORT.findall(prose) if ran else ():
        exec(statement, names)
    missing = [path for path in INLINE.findall(prose) if ran and not is_there(path, names)]
    assert not missing, f"{name} names what its imports do not give: {', '.join(missing)}"
    return ran


def run_block(name: str, text: str, block: re.Match[str], names: dict[str, object]) -> bool:
    """Whether there was something to run in a block."""
    line = text.count("\n", 0, block.start()) + 1
    body = re.sub(rf"^{block['indent']}", "", block["body"], flags=re.M)
    if block["language"] == "python":
        code = ast.increment_lineno(ast.parse(body, name), line)
        exec(compile(code, name, "exec"), names)
    elif block["language"] == "pycon":
        test = doctest.DocTestParser().get_doctest(body, names, name, name, line)
        said: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        runner.run(test, out=said.append, clear_globs=False)
        names.update(test.globs)
        assert not said, "".join(said)
    else:
        return False
    return True


def is_there(path: str, names: dict[str, object]) -> bool:
    """Whether a dotted name of headwise can be typed after the page's blocks."""
    first, *rest = path.split(".")
    target = names.get(first)
    for part in rest:
        target = getattr(target, part, None)
    return target is not None
