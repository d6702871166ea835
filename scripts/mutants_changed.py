"""Measure with mutmut how many small faults in files of src the tests of their rooms notice.

    .venv/bin/python scripts/mutants_changed.py                                  the files that differ from main
    .venv/bin/python scripts/mutants_changed.py src/headwise/cache/rolling.py    these files
    .venv/bin/python scripts/mutants_changed.py --tests tests/cache/test_cache.py src/headwise/cache/rolling.py

mutmut changes an operator, a number or an argument of each function, one at a time, and runs the tests that reach that
function. It works in a copy of the tree. A mutant that survives shows code that no test of the room holds, or a change
that makes no difference; its diff is printed. The figure is for information: the exit code is 0 unless mutmut fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "site", "runs", "__pycache__", "*.egg-info")


def changed(base: str) -> list[str]:
    """Return the Python files of src that differ from `base`, as paths from the root; those of git's index included."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", "--merge-base", base, "--", "src/headwise/*.py"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def tests_of(files: Sequence[str]) -> list[str]:
    """Return the folders of tests of the rooms of these files: `src/headwise/cache/rolling.py` -> `tests/cache`."""
    rooms = sorted({Path(file).parts[2] for file in files})
    return [f"tests/{room}" for room in rooms if (ROOT / "tests" / room).is_dir()] or ["tests/ops"]


def settings(files: Sequence[str], tests: Sequence[str]) -> str:
    """Return mutmut's part of pyproject.toml."""
    lists = {
        "source_paths": ["src"],
        "only_mutate": files,
        "also_copy": ["README.md", "docs"],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-q"],
        "pytest_add_cli_args_test_selection": tests,
    }
    return "\n".join(["", "[tool.mutmut]", *(f"{name} = {json.dumps([*some])}" for name, some in lists.items()), ""])


def measure(files: Sequence[str], tests: Sequence[str], jobs: int) -> int:
    """Run mutmut in a copy of the tree, print each survivor's diff and the figure, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="mutmut-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        with (root / "pyproject.toml").open("a") as file:
            file.write(settings(files, tests))
        env = {"OMP_NUM_THREADS": "1", "HEADWISE_DRAW": "16", **os.environ}

        def mutmut(*arguments: str) -> str:
            command = [sys.executable, "-m", "mutmut", *arguments]
            return subprocess.run(command, cwd=root, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout

        try:
            mutmut("run", "--max-children", str(jobs))
            mutmut("export-cicd-stats")
        except subprocess.CalledProcessError as error:
            print(error.stdout[-2000:], file=sys.stderr)
            return 1
        for line in mutmut("results").split("\n"):
            name, _, verdict = line.strip().partition(": ")
            if verdict == "survived":
                print(mutmut("show", name))
        counts = json.loads((root / "mutants" / "mutmut-cicd-stats.json").read_text())
    noticed = counts["total"] - counts["survived"] - counts["no_tests"]
    print(f"{noticed} of {counts['total']} mutants noticed; no test reaches {counts['no_tests']}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", help="Python files of src; those that differ from --base by default")
    parser.add_argument("--base", default="main", help="a branch or commit")
    parser.add_argument("--tests", action="append", help="tests to run instead of the folders of the files' rooms")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side")
    options = parser.parse_args(arguments)
    files = options.files or changed(options.base)
    if missing := [file for file in files if not (ROOT / file).is_file() or not file.startswith("src/headwise/")]:
        parser.error(f"no files of src/headwise: {', '.join(missing)}")
    if not files:
        print(f"no Python file of src differs from {options.base}")
        return 0
    return measure(files, options.tests or tests_of(files), options.jobs)


if __name__ == "__main__":
    sys.exit(main())
