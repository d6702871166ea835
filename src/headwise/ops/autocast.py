"""Under torch.autocast: which dtype attention is computed in, and what is kept out of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(device: str) -> AbstractContextManager[object]:
    """What is computed in float32 here is not autocast's to lower."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: str) -> bool:
    """Whether torch.autocast is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def in_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast tensors in its lower precision, as torch's own SDPA takes them; what else there is, as it is."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not autocasts(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast tensors of several dtypes in its lower one, as attention takes them; others as they are."""
    if not all(isinstance(x, Tensor) for x in tensors) or len({x.dtype for x in tensors}) == 1:
        return tensors
    return in_autocast_dtype(*tensors)
