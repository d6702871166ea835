"""The values that ranks compare before a joint attention call, as numbers and short texts."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...ops.masks.mask import Mask

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest(*tensors: Tensor | None) -> int:
    """Return a checksum of the numbers of tensors; broadcast dimensions are read only once."""
    total = 0
    for x in tensors:
        if x is None:
            continue
        x = x.detach()
        once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
        flat = once.contiguous().cpu().view(-1)
        numbers: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
        total = zlib.crc32(numbers, total)
        total = zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode(), total)
    return total


def mask_text(mask: Mask) -> str:
    """Return a short text for a mask: a checksum of all its numbers, then its rules. Functions count by name only.

    The checksum comes first because ranks compare only the beginning of a long text.
    """
    if not mask.parts:
        return "none"
    leaves, shape = pytree.tree_flatten(mask)
    said = zlib.crc32(_ADDRESS.sub("", str(shape)).encode(), digest(*leaves))
    return f"[{said:08x}] {' & '.join(_named(rule) for rule in mask.parts)}"


def _named(rule: Any) -> str:
    """Return the class name of a rule and its numbers."""
    numbers = {k: v for k, v in vars(rule).items() if isinstance(v, (int, float)) and not k.startswith("_")}
    return f"{type(rule).__name__}({', '.join(f'{k}={v}' for k, v in numbers.items())})"


def sinks_text(sinks: Tensor | None, own_heads: int | None = None) -> str | None:
    """Return the text by which ranks compare sinks; with `own_heads` each rank may have different sinks."""
    if sinks is None:
        return None
    return f"{digest(sinks):08x}" if own_heads is None else "own"
