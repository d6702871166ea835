"""The native kernel reads and writes nothing but its tensors: each one lies flush with memory that may not be touched.

A sanitizer sees what is instrumented (`make fuzz`); a forbidden page sees everything, vector loads and all.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
from backends import BEST, natives

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "helpers" / "native_guard.py"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are forbidden by Linux's mprotect")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fresh.run(SCRIPT.read_text("utf8"), *arguments)


@linux
@natives
def test_no_byte_too_far(backend: str) -> None:
    done = run(backend.removeprefix("native-"))
    lines = done.stdout.splitlines()[-1:]
    assert done.returncode == 0 and lines == ["all done"], f"{done.returncode} at {lines}: {done.stderr[-1000:]}"


@linux
@pytest.mark.parametrize("backend", BEST)
def test_a_byte_too_far_would_be_seen(backend: str) -> None:
    assert run(backend.removeprefix("native-"), "planted").returncode == -signal.SIGSEGV
