"""The memory of caches as a process that has run for long gets it: full of numbers of others, not of zeros.

What was never written is masked, but a masked number is read. Under pytest, and in the processes of `ranks.py`, every
cache begins with numbers that would show in any result that they reach: 127 as int8, and as floats NaN and 3e38, which
overflows as soon as it is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

LARGE = 1 << 20  # bytes; what is larger comes from the system, as zeros, and tests look at which of it is resident


def filled(x: Tensor) -> Tensor:
    """The tensor, full of such numbers where it is small."""
    if x.nbytes >= LARGE or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x
    if not x.is_floating_point():
        return x.fill_(127)
    x.fill_(torch.nan).view(-1)[::2] = 3e38  # of scales: those of every second token
    return x


def install() -> None:
    """Fills the memory of all caches that this process makes from here on."""
    from headwise.cache import storage as store

    vars(store)["reserve"] = _reserve


def _reserve(*arguments: Any) -> Tensor:
    from headwise.cache.huge_pages import reserve

    return filled(reserve(*arguments))


@contextmanager
def clean() -> Iterator[None]:
    """Caches that are made here begin with zeros."""
    from headwise.cache import storage as store

    with mock.patch.object(store, "reserve", lambda *arguments: _reserve(*arguments).zero_()):
        yield
