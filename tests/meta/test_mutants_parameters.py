"""The ledger of mutants names tests with their parameters: those exist, as pytest collects them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from backends import KNOWN, NATIVE  # noqa: E402
from mutants_ledger import read  # noqa: E402

LACKED = set(KNOWN) - {backend.removeprefix("native-") for backend in NATIVE}


def missing(tests: Iterable[str], collected: Iterable[str]) -> list[str]:
    """Return the tests whose function pytest collected, but with other parameters.

    The parameters of the kernel's tests are the instruction sets of the machine, so a test of a set that this machine
    lacks is not missing.
    """
    seen = set(collected)
    functions = {test.split("[")[0] for test in seen}
    absent = {test for test in tests if test not in seen and test.split("[")[0] in functions}
    return sorted(test for test in absent if not LACKED & set(re.split(r"[-\[\]]", test)))


def test_a_test_with_other_parameters_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LACKED", {"avx512_bf16", "amx_bf16"})
    seen = [f"tests/test_a.py::{name}" for name in ("test_b[3]", "test_b[5]", "test_b[native-avx2]", "test_c")]
    here = ["test_b[7]", "test_c[3]", "test_b[7-native-avx2]"]
    lacked = ["test_b[native-avx512_bf16]", "test_b[amx_bf16-3]"]
    other = ["test_d[3]"]
    named = [*seen, *(f"tests/test_a.py::{name}" for name in (*here, *lacked, *other))]
    assert missing(named, seen) == sorted(f"tests/test_a.py::{name}" for name in here)


def test_the_parameters_of_the_ledgers_tests_exist(request: pytest.FixtureRequest, collected: frozenset[str]) -> None:
    if any("[" in name for name in request.config.args):
        pytest.skip("pytest was asked for single parameters")
    named = {mutant.test for mutant in read(ROOT) if "[" in mutant.test}
    assert missing(named, collected) == []
