"""Advice for errors about NaN or infinite numbers of a model."""

from __future__ import annotations

import torch
from torch import nn


def spoilt(model: nn.Module) -> str | None:
    """Return words about the first weight that contains NaN or infinity; None if all are finite."""
    for name, weight in model.named_parameters():
        here = weight.to_local() if hasattr(weight, "to_local") else weight  # of a sharded model: no communication
        if here.is_floating_point() and here.itemsize > 1 and not bool(here.isfinite().all()):
            return f"its weight {name!r} holds NaN or infinity: download the checkpoint anew"
    return None


def remedy(model: nn.Module, dtype: torch.dtype) -> str:
    """Return advice for an error text: the faulty weight, or a wider dtype."""
    wider = {torch.float64: "float64 is the widest there is", torch.float32: "load the model in float64"}
    return spoilt(model) or wider.get(dtype, "load the model in a wider dtype, such as float32")
