"""One number for each row of a cache, as a tensor on its device: in steady decoding nothing is copied from the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
