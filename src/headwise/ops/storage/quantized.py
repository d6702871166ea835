"""Keys and values in int8, or in codes of 4 or 3 bits, with one scale per token and head.

`headwise.cache.quantize` creates them; `headwise.attention` accepts them as key and value. The result is attention on
the dequantised numbers in float32 (float64 for a float64 query).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from ...shapes import check_quantized
from ...shapes.arguments import check_dtype
from ..masks.pytrees import register
from .packed import levels, rotated


@dataclass(frozen=True, eq=False)
class Quantized:
    """Keys or values in int8: an element is `data * scale`, with one scale per token and head.

    Args:
        data: int8 (B, K, S, D), any strides; D is V for values.
        scale: float32 (B, K, S), any strides. A NaN makes the whole token NaN.

    >>> x = Quantized(torch.tensor([[[[127, -64]]]], dtype=torch.int8), torch.tensor([[[0.5]]]))
    >>> x.dequantize()
    tensor([[[[ 63.5000, -32.0000]]]])
    """

    data: Int8[Tensor, "B K S D"] | UInt8[Tensor, "B K S bytes"]
    scale: Float[Tensor, "B K S"]
    bits: int = 8

    def __reduce__(self) -> Any:
        return Quantized, (self.data, self.scale, self.bits)  # torch.load permits this call by default

    @property
    def shape(self) -> torch.Size:
        """The sizes (B, K, S, D)."""
        return torch.Size((*self.data.shape[:3], self.data.shape[3] * 8 // self.bits))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B K S D"]:
        """Return the numbers (B, K, S, D), multiplied in float32, or in float64 if that is the dtype."""
        check_quantized("tensor", self.data, self.scale, self.bits)
        check_dtype(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if self.bits == 8:
            return (self.data.to(wide) * self.scale.to(wide)[..., None]).to(dtype)
        return rotated(levels(self.data, self.bits, wide) * self.scale.to(wide)[..., None], back=True).to(dtype)


register(Quantized)
