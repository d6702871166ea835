"""Calls of more query rows than one strip has, under torch.compile: the tests of compiled_strips.py."""

import fresh
import pytest

pytestmark = pytest.mark.slow


def test_compiled_calls_of_several_strips() -> None:
    """In a process without the shape checker."""
    ran = fresh.run_unchecked("compiled_strips.py")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr[-1000:]
