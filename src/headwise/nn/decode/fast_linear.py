"""Linear layers for decoding: at most eight rows go to the native kernel, whose time is that of reading the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...ops.native import library as native_library
from ...ops.native.backend import PLAIN
from ...ops.native.decode_step import runs_plain
from ...ops.native.library import raise_unless_refused

ROWS = 8  # the most rows that the kernel takes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHED = 2**18  # elements of a float32 weight that the CPU's cache can keep: PyTorch's product is faster there


class FastLinear(nn.Linear):
    """`torch.nn.Linear` whose calls with at most eight rows run in the native kernel, if no gradient is recorded.

    All other calls, and calls under autocast, `torch.compile` or a dispatch mode, are those of `torch.nn.Linear`. The
    kernel sums the products of a row in float32, in an order that depends only on the width: the result of a row does
    not depend on the other rows or on the number of threads.

    >>> layer = torch.nn.Linear(5, 3)
    >>> layer.__class__ = FastLinear
    >>> with torch.inference_mode():
    ...     layer(torch.ones(1, 5)).shape
    torch.Size([1, 3])
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return input (..., in_features) times the weight, plus the bias: (..., out_features)."""
        own: dict[str, Any] = self._parameters  # faster than attribute access, which calls nn.Module.__getattr__
        plain = "weight" in own and "bias" in own and runs_plain()  # pruning makes plain attributes of them
        out = few_rows(input, own["weight"], own["bias"]) if plain else None
        return super().forward(input) if out is None else out


def few_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the linear layer of an input (..., n), weight (m, n) and bias (m); None if the kernel does not take it."""
    if (
        type(input) is not Tensor
        or type(weight) not in PLAIN
        or not (input.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu))
        or not 0 < input.numel() <= ROWS * weight.shape[1]
        or (weight.dtype == torch.float32 and weight.numel() <= CACHED)
    ):
        return None
    try:
        out: Tensor = native_library.linear(input, weight, bias)
    except RuntimeError as error:
        raise_unless_refused(error)
        return None
    return out
