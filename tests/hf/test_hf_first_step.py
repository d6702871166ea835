"""The first training step of a process, with gradient checkpointing, in the ways that transformers' users train."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import fresh
import pytest

HELPERS = Path(fresh.__file__).parent
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs the package accelerate"
)


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("trainer", marks=needs_accelerate), "ddp", "fsdp", "selective"])
def test_the_first_step_gives_the_gradients_of_eager(way: str) -> None:
    code = "import sys, first_steps; getattr(first_steps, sys.argv[1])()"
    done = fresh.run(code, way, path=[HELPERS], HEADWISE_UNCHECKED="1")
    assert done.returncode == 0, done.stderr[-2000:]
