"""Where tests of CUDA run: on pretend CUDA everywhere, and on a card where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pretend_cuda import Counts, pretend_cuda
from torch import Tensor
from torch.utils._pytree import tree_map


@contextmanager
def card() -> Iterator[Counts]:
    """Run on the card; nothing is counted."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the budgets are float32's: TF32 rounds products to ten bits
    with torch.no_grad():
        yield Counts()
    torch.set_float32_matmul_precision(before)


on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
everywhere = pytest.mark.parametrize(
    "cuda", [pretend_cuda, pytest.param(card, marks=on_a_card)], ids=["pretend", "card"]
)
"""Runs a test twice; `cuda` makes a context in which `device="cuda"` works and whose value counts."""


def on_cuda(x: Any) -> Any:
    """The same tuples, lists and dicts with every tensor on CUDA."""
    return tree_map(lambda leaf: leaf.to("cuda") if isinstance(leaf, Tensor) else leaf, x)


def assert_close(ours: Tensor, expected: Tensor, atol: float = 2e-5) -> None:
    """A result on CUDA that is what the CPU gives, up to the other order of sums."""
    assert ours.device.type == "cuda" and ours.dtype == expected.dtype
    torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=atol)
