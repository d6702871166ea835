"""The rows of a cache: the padding of an append, the columns at which queries begin, and numbers kept on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

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


class RowNumbers:
    """A cache that keeps numbers of its rows (lengths, columns) as tensors on a device other than the CPU.

    A kept tensor is used only if it agrees with the list of the call, so nothing has to be cleared.
    """

    _kept_numbers: Mapping[str, tuple[list[int], Tensor]] = {}

    def _numbers_on(self, name: str, numbers: list[int], device: torch.device) -> Tensor:
        """Return the numbers as int64 (B,); `name` tells which tensor of an earlier call to begin with.

        If all numbers grew by the same amount, as in a decode step, it is added on the device.
        """
        if device.type == "cpu":
            return torch.tensor(numbers, dtype=torch.int64, device=device)
        before, kept = self._kept_numbers.get(name, ([], None))
        grown = {n - old for n, old in zip(numbers, before, strict=False)}
        with torch.inference_mode(False):  # the tensor also serves steps with a gradient
            if kept is None or kept.device.type != device.type or len(before) != len(numbers) or len(grown) != 1:
                kept = torch.tensor(numbers, dtype=torch.int64, device=device)
            elif grown != {0}:
                kept = kept + grown.pop()
        self._kept_numbers = {**self._kept_numbers, name: (list(numbers), kept)}
        return kept

    def _columns_of_rows(self, columns: list[int], device: torch.device) -> dict[str, Any]:
        """Return the column of each row's next token: a number where rows are even, else a tensor on the device."""
        if len(set(columns)) == 1:
            return {"column": columns[0]}
        return {"columns": self._numbers_on("first columns", columns, device)}
