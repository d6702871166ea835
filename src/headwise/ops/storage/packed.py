"""Keys and values in codes of 4 or 3 bits: rotated, with one scale per token and head.

A token is multiplied by a fixed rotation first, so that no channel is much larger than the others and one scale fits
all of them (Ashkboos et al. 2024, QuaRot, arXiv 2404.00456; Zandieh et al. 2025, TurboQuant, arXiv 2504.19874). Code c
of b bits stands for the level `2 c + 1 - 2**b`, and an element of the rotated token is level * scale. A rotation leaves
inner products as they are: scores are those of rotated queries with rotated keys, and outputs are rotated back.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch
from torch import Tensor

from ...shapes import compute_dtype

# The distance of two levels over the root mean square of a token for which a Gaussian has the smallest error
# (Max 1960, "Quantizing for minimum distortion", table II).
STEP = {4: 0.3352, 3: 0.5860}
# Below this root mean square of a token, squares of its elements lose digits in float32, and at last are all 0.
SMALLEST = 2.0**-60


# The bits of the dtypes in which caches store codes; torch's stubs lack two of them.
BITS: dict[torch.dtype, int] = {torch.int8: 8, torch.int4: 4, torch.int3: 3}  # type: ignore[attr-defined]


def packed_width(width: int, bits: int) -> int:
    """Return the bytes of a row of `width` codes."""
    return width * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes (..., n) into rows (..., n * bits / 8), in the order of csrc/simd/packed-inl.h."""
    if bits == 4:
        low, high = codes.unflatten(-1, (2, -1)).unbind(-2)
        return low | high << 4
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)[:, None]
    low = ((codes & 3).unflatten(-1, (4, -1)) << shifts).sum(-2, dtype=torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
    high = ((codes >> 2).unflatten(-1, (8, -1)) << shifts).sum(-2, dtype=torch.uint8)
    return torch.cat((low, high), -1)


def unpack(data: Tensor, bits: int) -> Tensor:
    """Return the uint8 codes (..., n) of packed rows."""
    if bits == 4:
        return torch.cat((data & 15, data >> 4), -1)
    low, high = data.split((data.shape[-1] // 3 * 2, data.shape[-1] // 3), -1)
    low = torch.cat([low >> shift & 3 for shift in range(0, 8, 2)], -1)
    return low | torch.cat([high >> shift & 1 for shift in range(8)], -1) << 2


def levels(data: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the levels (..., n) of packed rows as floats."""
    return unpack(data, bits).to(dtype) * 2 + (1 - 2**bits)


@lru_cache(maxsize=16)
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return R (n, n), with which rotated = x @ R and x = rotated @ R.T; the same in every process and version.

    It is a discrete cosine transform of the channels with fixed signs: no entry is larger than sqrt(2 / n), so a large
    channel is spread over all others. The signs keep equal channels from adding up in one place.
    """
    places = torch.arange(width, dtype=torch.float64, device="cpu")
    waves = torch.cos((pi / width) * (places + 0.5)[:, None] * places) * (2 / width) ** 0.5
    waves[:, 0] *= 0.5**0.5
    drawn = [1.0 if (i * 2654435761 >> 15) & 1 else -1.0 for i in range(width)]
    signs = torch.tensor(drawn, dtype=torch.float64, device="cpu")
    return (signs[:, None] * waves).to(device, dtype)


@lru_cache(maxsize=16)
def kernel_rotation(width: int, back: bool = False) -> Tensor:
    """Return the rotation, or its inverse, as the native kernel reads it: float32, its rows padded to vectors."""
    R = rotation(width, torch.float32, torch.device("cpu"))
    return torch.nn.functional.pad(R.T if back else R, (0, -width % 16)).contiguous()


def rotated(x: Tensor, *, back: bool = False) -> Tensor:
    """Return x (..., n) rotated, or rotated back, in its dtype; computed in float32 at least."""
    R = rotation(x.shape[-1], compute_dtype(x), x.device)
    return (x.to(R.dtype) @ (R.T if back else R)).to(x.dtype)


def encoded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the packed codes (..., n * bits / 8) and the scales (...) of tokens (..., n).

    The scale fits the largest element, or cuts elements off where the step of a Gaussian is smaller. A token with a NaN
    or Inf has the scale NaN, a token of zeros 0.
    """
    y = rotated(x.float())
    most = 2**bits - 1
    largest, size = y.abs().amax(-1), y.square().mean(-1).sqrt()
    scale = torch.minimum(largest / most, size * (STEP[bits] / 2))
    plain = (size > SMALLEST) & size.isfinite()  # squares overflow and underflow before the elements do
    scale = torch.where(plain, scale, largest / most)
    unit = torch.where(scale > 0, scale, 1.0)
    codes = (y / (2 * unit[..., None]) + most / 2).round().nan_to_num(0.0).clamp(0, most).to(torch.uint8)
    return pack(codes, bits), torch.where(x.isfinite().all(-1) & scale.isfinite(), scale, torch.nan)
