"""Means over rows, which every implementation computes from its sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .request import Request


def mean(total: Tensor, count: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return sums divided by their counts; 0 where nothing was counted."""
    return (total / count.clamp(min=1)).to(dtype)


def feature_mass(x_BS: Tensor, mass_BHS: Tensor, seen_BHS: Tensor) -> Tensor:
    """Return sum_ij P_ij f_j: the mass that each key received over all rows, times its feature."""
    product = mass_BHS * x_BS[:, None].to(mass_BHS.dtype)
    return product.masked_fill(seen_BHS == 0, 0.0).sum(-1)  # 0 * NaN for a key that no row may attend to


def of_second_pass(request: Request, mass: Tensor, seen: Tensor, rows: Tensor, *, received: bool) -> dict[str, Any]:
    """Return `features` and, if it is requested, `received`, from the mass and the number of rows of each key."""
    wide = mass.double()
    features = {name: mean(feature_mass(x, wide, seen), rows) for name, x in request.features.items()}
    return {"features": features} | ({"received": mean(mass, seen)} if received else {})
