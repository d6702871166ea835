"""The runner of the ledger compiles C++ in its copy of the tree, and says so where it has no compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_mutants import FILES, Mutant, fates, no_plugins, project, runner

__all__ = ["no_plugins"]  # a fixture of every test here
needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("cmake", path=runner.PROGRAMS)), reason="needs a C++ compiler and cmake"
)

NATIVE = {
    **FILES,
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.22)
project(fake LANGUAGES CXX)
add_library(native MODULE csrc/three.cpp csrc/four.cpp)
set_target_properties(native PROPERTIES PREFIX "" OUTPUT_NAME "_native" SUFFIX ".so"
                      LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/src/fake")
""",
    "csrc/three.h": "#pragma once\ninline int ten() { return 10; }\n",
    "csrc/three.cpp": '#include "three.h"\nextern "C" int three() { return ten() - 7; }\n',
    "csrc/four.cpp": 'extern "C" int four() { return 4; }\n',
    "src/fake/native.py": """import ctypes
import pathlib

library = ctypes.CDLL(pathlib.Path(__file__).parent / "_native.so")
SEVEN = 7
""",
    "tests/fake/test_native.py": """from fake.native import SEVEN, library


def test_sum():
    assert library.three() + library.four() == SEVEN
""",
}
NATIVE_FATES = [
    ("csrc/three.h", "return 10", "return 11", "killed"),
    ("csrc/four.cpp", "return 4", "return 2 + 2", "survived"),
    ("csrc/four.cpp", "return 4", "return four", "proves nothing"),
    ("csrc/four.cpp", "return 4", "return 5", "killed"),
    ("src/fake/native.py", "SEVEN = 7", "SEVEN = 3 + 4", "survived"),
    ("src/fake/native.py", "SEVEN = 7", "SEVEN = 8", "killed"),
]


def native_project(folder: Path) -> Path:
    return project(folder, [Mutant(*fate[:3], "tests/fake/test_native.py::test_sum") for fate in NATIVE_FATES], NATIVE)


@pytest.mark.slow
@needs_compiler
def test_cpp_is_compiled_in_the_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One job: the Python mutants come last, on the library of the restored sources."""
    code, report = fates(capsys, native_project(tmp_path), "--jobs", "1")
    assert code == 1 and not (tmp_path / "src" / "fake" / "_native.so").exists()
    got = sorted((x["file"], x["old"], x["new"], x["verdict"]) for x in report["mutants"])
    assert got == sorted(NATIVE_FATES)
    (why,) = [x["detail"] for x in report["mutants"] if x["verdict"] == "proves nothing"]
    assert why.startswith("does not compile: ") and "four.cpp" in why


def test_cpp_without_a_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, report = fates(capsys, native_project(tmp_path), "--only", "csrc")
    assert code == 0
    assert {(x["verdict"], x["detail"]) for x in report["mutants"]} == {("not run", "needs no-such-compiler")}
