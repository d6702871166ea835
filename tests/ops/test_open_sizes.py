"""One graph for every size of a call: see open_sizes.py."""

from __future__ import annotations

import fresh
import pytest

pytestmark = pytest.mark.slow


def test_no_option_pins_a_size() -> None:
    """The tests of open_sizes.py, in a process without the shape checker."""
    ran = fresh.run_unchecked("open_sizes.py")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr[-1000:]
