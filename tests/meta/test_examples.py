"""Each example runs, on its own, in a process of its own, and prints something."""

import subprocess
from pathlib import Path

import fresh
import pytest

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
SOURCE = EXAMPLES[0].parent.parent / "src"


def run(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    return fresh.run(code, folder=folder, path=[SOURCE])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    done = run(path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_broken_example_is_seen(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import headwise\nheadwise.no_such_thing\n")
    assert run(broken, tmp_path).returncode != 0
