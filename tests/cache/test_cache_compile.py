"""Caches under torch.compile: the tests of compiled_cache.py."""

import fresh
import pytest

pytestmark = pytest.mark.slow


def test_caches_compile() -> None:
    """In a process without the shape checker."""
    ran = fresh.run_unchecked("compiled_cache.py")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr[-1000:]
