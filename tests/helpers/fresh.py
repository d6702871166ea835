"""Runs a script in a process that no test has touched, in a fifth of the time that a new interpreter takes.

The process is forked from a server that has imported torch and transformers (`forked.py`), and no part of headwise.
What an import of headwise brings along is asked of a new interpreter, in `test_import.py`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

HERE = Path.cwd()


def context() -> ForkServerContext:
    """Where fresh processes come from."""
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload(["forked"])
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, PYTHONPATH=path):  # the server looks for `forked` there alone, or goes on without
        forkserver.ensure_running()
    return fresh


def run(
    code: str, *arguments: str, folder: Path = HERE, path: Sequence[Path] = (), **environment: str
) -> CompletedProcess[str]:
    """As `python -c code arguments` in the folder, with `path` before sys.path; its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as streams:
        files = [os.path.join(streams, name) for name in ("stdout", "stderr")]
        work = (code, arguments, folder, [str(entry) for entry in path], environment, files)
        process = context().Process(target=_child, args=work)
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = (Path(file).read_text("utf8", "replace") if os.path.exists(file) else "" for file in files)
    return CompletedProcess(["fresh", *arguments], process.exitcode or 0, out, err)


def run_unchecked(file: str) -> CompletedProcess[str]:
    """The tests of a file of this folder without the shape checker, whose wrappers torch's compiler cannot trace."""
    quietly = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a plugin came along
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    return run(code, *quietly, str(Path(__file__).with_name(file)), HEADWISE_UNCHECKED="1")


def _child(
    code: str, arguments: Sequence[str], folder: Path, path: list[str], environment: Mapping[str, str], files: list[str]
) -> None:
    leaked = sorted(module for module in sys.modules if module.split(".")[0] == "headwise")
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    assert not leaked, f"this interpreter is not fresh: it holds {', '.join(leaked)}"
    assert gc.get_freeze_count(), "the server has not imported forked.py"
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[:0] = ["-c", *arguments], path
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
