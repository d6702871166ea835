"""The padding of an append, and the columns of a cache at which its queries begin."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..ops.masks.constructors import keep
from ..ops.masks.mask import Mask

Side: TypeAlias = Literal["right", "left"]
"""The side of the padding."""


class Append(NamedTuple):
    """The last append: its tokens T, the number of real tokens in each row, and the side of the padding."""

    tokens: int
    counts: list[int]
    side: Side


def first_columns(T: int, columns: list[int], counts: list[int], side: Side) -> list[int] | None:
    """Return the column of each row's first query; None if the last query of every row has the last column."""
    padded_right = side == "right" and any(n != T for n in counts)
    if len(set(columns)) == 1 and not padded_right:
        return None
    return [n - (T if side == "left" else count) for n, count in zip(columns, counts, strict=True)]


def real_queries(T: int, counts: Tensor, side: Side) -> Mask:
    """Return the mask of real queries: the first `counts` (B,) of each row, or the last for padding on the left."""
    i, n = torch.arange(T, device=counts.device), counts[:, None]
    real = i >= T - n if side == "left" else i < n
    return keep(real[:, None, :, None])
