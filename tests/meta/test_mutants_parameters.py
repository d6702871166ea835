"""The ledger of mutants names tests with their parameters: those exist, as pytest collects them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mutants_ledger import read  # noqa: E402


def missing(tests: Iterable[str], collected: Iterable[str]) -> list[str]:
    """The tests whose function pytest saw, but with other parameters. A test for AMX is there on AMX alone."""
    seen = set(collected)
    functions = {test.split("[")[0] for test in seen}
    absent = {test for test in tests if test not in seen and test.split("[")[0] in functions}
    return sorted(test for test in absent if "-amx_" not in test)


def test_a_test_with_other_parameters_is_missing() -> None:
    seen = ["tests/test_a.py::test_b[3]", "tests/test_a.py::test_b[5]", "tests/test_a.py::test_c"]
    named = [*seen, "tests/test_a.py::test_b[7]", "tests/test_a.py::test_b[amx-amx_bf16]", "tests/test_a.py::test_d[3]"]
    assert missing(named, seen) == ["tests/test_a.py::test_b[7]"]
    assert missing(["tests/test_a.py::test_c[3]"], seen) == ["tests/test_a.py::test_c[3]"]


def test_the_parameters_of_the_ledgers_tests_exist(request: pytest.FixtureRequest, collected: frozenset[str]) -> None:
    if any("[" in name for name in request.config.args):
        pytest.skip("pytest was asked for single parameters")
    named = {mutant.test for mutant in read(ROOT / "tests" / "mutants.toml") if "[" in mutant.test}
    assert missing(named, collected) == []
