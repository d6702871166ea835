"""Spearman's rank correlation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Pearson's correlation of the ranks, ties at their mean rank; None if one side is constant."""
    x, y = (ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size > 0 else None


def ranks(values: Sequence[float]) -> Tensor:
    """Return the ranks (n,) float64, from 0; equal values share their mean rank."""
    column = torch.tensor(values, dtype=torch.float64, device="cpu")
    ordered = column.sort().values
    first, past = torch.searchsorted(ordered, column), torch.searchsorted(ordered, column, right=True)
    return (first + past - 1).double() / 2
