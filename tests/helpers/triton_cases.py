"""Where the Triton kernels run in tests: on a card where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import headwise

WITHOUT = "needs the package triton, which is in the extra `test` for Linux"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy warns of log(0), and of NaN, which kernels make on purpose where rows are empty or numbers bad."""
ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
HALVES = (torch.float16, torch.bfloat16) if ON_CARD else (torch.float16,)  # the interpreter has no bfloat16


def there(x: Any) -> Any:
    """Tensors, in tuples, dicts and masks too, where the kernels run."""

    def moved(leaf: Any) -> Any:
        return leaf.to(DEVICE) if isinstance(leaf, Tensor | headwise.Mask) else leaf

    return tree_map(moved, x, is_leaf=lambda leaf: isinstance(leaf, headwise.Mask))


def attend(*qkv: Any, **options: Any) -> Any:
    """`headwise.attention` by the kernels, with its result on the CPU."""
    with torch.no_grad():
        result = headwise.attention(*there(qkv), **there(options), backend="triton")
    return tree_map(Tensor.cpu, result)
