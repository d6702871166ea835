"""`pip install headwise` without an extra runs, and what needs an extra says which.

No second torch is installed for this. A folder holds links to the core requirements of pyproject.toml and to all that
they require, and to nothing else; an interpreter that sees this folder alone runs `scripts/bare_install.py`. Packages
that an extra names are left out, though torch may require one (jinja2): headwise's core may not lean on that.
"""

import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
EXTRAS = [Requirement(text) for name in ("hf", "look") for text in PROJECT["optional-dependencies"][name]]


def closure(requirements: list[Requirement]) -> dict[str, metadata.Distribution]:
    """The distributions that pip would install for the requirements."""
    packages: dict[str, metadata.Distribution] = {}
    todo = list(requirements)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in packages or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        packages[name] = metadata.distribution(name)
        todo += [Requirement(text) for text in packages[name].requires or ()]
    return packages


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a bare install has, all but headwise itself."""
    folder = tmp_path_factory.mktemp("bare")
    needed = closure([Requirement(text) for text in PROJECT["dependencies"]])
    for name in needed.keys() - {canonicalize_name(requirement.name) for requirement in EXTRAS}:
        for top in {file.parts[0] for file in needed[name].files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(needed[name].locate_file(top))))
    return folder


def run(bare: Path, package: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """`scripts/bare_install.py` in an interpreter that sees the bare folder, this headwise, and nothing else."""
    (folder / "path").mkdir()
    (folder / "path" / "headwise").symlink_to(package)
    code = (
        f"import runpy, sys; sys.path += {[str(folder / 'path'), str(bare)]!r}\n"
        f"runpy.run_path({str(ROOT / 'scripts' / 'bare_install.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-I", "-S", "-B", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)


def test_the_bare_install_runs_and_says_what_it_lacks(bare: Path, tmp_path: Path) -> None:
    done = run(bare, ROOT / "src" / "headwise", tmp_path)
    assert (done.returncode, done.stdout) == (0, "the bare install runs\n"), done.stderr


def test_an_import_of_an_extra_in_the_core_is_seen(bare: Path, tmp_path: Path) -> None:
    package = tmp_path / "headwise"
    shutil.copytree(ROOT / "src" / "headwise", package, ignore=shutil.ignore_patterns("__pycache__", "_native.so"))
    planted = package / "nn" / "multihead.py"
    planted.write_text(planted.read_text("utf8") + "\nimport transformers\n")
    done = run(bare, package, tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'transformers'\n"), done.stderr


def test_an_extra_that_is_installed_is_seen(tmp_path: Path) -> None:
    done = run(Path(str(metadata.distribution("pandas").locate_file(""))), ROOT / "src" / "headwise", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("not a bare install: transformers,"), done.stderr
