"""What to do where the numbers of a model are NaN or infinite."""

from __future__ import annotations

import torch
from torch import nn


def spoilt(model: nn.Module) -> str | None:
    """Of the first weight that holds NaN or infinity, the words that say so; None where all are finite."""
    for name, weight in model.named_parameters():
        here = weight.to_local() if hasattr(weight, "to_local") else weight  # of a model that is split: no message
        if here.is_floating_point() and here.itemsize > 1 and not bool(here.isfinite().all()):
            return f"its weight {name!r} holds NaN or infinity: download the checkpoint anew"
    return None


def remedy(model: nn.Module, dtype: torch.dtype) -> str:
    """For an error text: which weight is to blame, or which dtype is wider."""
    wider = {torch.float64: "float64 is the widest there is", torch.float32: "load the model in float64"}
    return spoilt(model) or wider.get(dtype, "load the model in a wider dtype, such as float32")
