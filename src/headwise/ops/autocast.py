"""The dtype of attention under torch.autocast, and the computations that autocast must not change."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context that disables autocast, so that float32 computations stay in float32."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: str) -> bool:
    """Return whether torch.autocast is on for this device type."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def in_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors in autocast's dtype if it is on, as torch's SDPA does; other arguments are unchanged."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not autocasts(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of different dtypes in autocast's dtype if it is on; otherwise return them unchanged."""
    if not all(isinstance(x, Tensor) for x in tensors) or len({x.dtype for x in tensors}) == 1:
        return tensors
    return in_autocast_dtype(*tensors)
