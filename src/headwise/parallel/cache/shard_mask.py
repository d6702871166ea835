"""The mask of a call for the tokens of one rank: the same query-key pairs, in the columns of that rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...ops.masks.constructors import bias, keep, lengths
from ...ops.masks.indexing import rank4
from ...ops.masks.mask import EVERYTHING, Mask
from ...ops.masks.rule import Bounds, Rule
from .ownership import TokenOwnership

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class KeyIntervals(Rule):
    """The rule by which query i of row b attends to keys low[b, i] <= j < high[b, i]; both are (B|1, T)."""

    low: Tensor
    high: Tensor

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        row = torch.arange(self.low.shape[0], device=self.low.device).view(-1, 1, 1, 1)
        i = rank4(i)
        return (self.low[row, i] <= j) & (j < self.high[row, i])

    @override
    def bounds(self, T: int, S: int, device: torch.device | None) -> Bounds | None:
        return self.low, self.high


def shard_mask(ownership: TokenOwnership, mask: Mask, T: int, S: int, columns: list[int]) -> Mask:
    """Return the mask for the tokens of one rank: row b has columns[b] of them, in the order of positions.

    `mask` is the mask of T queries and the S tokens of all ranks, on the CPU. Most rules allow an interval of keys,
    given by two numbers per query; other rules are evaluated at the rank's positions, column by column.
    """
    C = max(columns)
    ends = mask.bounds(T, S, CPU)
    places = ownership.place(torch.arange(C, device="cpu")).clamp(max=max(S - 1, 0))
    added = mask.added(T, S, cols=places, device=CPU)
    weights = EVERYTHING if added is None else bias(added)
    if ends is None:
        allowed = mask.allowed(T, S, cols=places, device=CPU)
        assert allowed is not None  # a mask that restricts nothing has bounds
        return keep(allowed) & lengths(torch.tensor(columns, device="cpu")) & weights
    most = torch.tensor(columns, device="cpu")[:, None]
    low, high = (torch.minimum(ownership.counts(end), most) for end in ends)
    if T == 1:
        if not bool(low.any()) and bool((high == C).all()):
            return weights
        start = low[:, 0] if bool(low.any()) else None
        return lengths(high[:, 0], start) & weights
    return Mask((KeyIntervals(low, high),)) & weights


def mask_at(places: Tensor, mask: Mask, T: int, S: int, columns: list[int]) -> Mask:
    """Return the mask if each row has its tokens at its own positions (B, C); the first columns[b] are valid."""
    real = torch.arange(places.shape[1], device="cpu") < torch.tensor(columns, device="cpu")[:, None]
    i, j = torch.arange(T, device="cpu").view(1, 1, T, 1), places.clamp(0, S - 1)[:, None, None, :]
    allowed, added = mask.at(i, j, T, S)
    seen = real[:, None, None, :].expand(-1, -1, T, -1)
    seen = seen if allowed is None else seen & allowed
    return keep(seen) & (EVERYTHING if added is None else bias(added))


def spans(mask: Mask, T: int, S: int) -> list[tuple[int, int]]:
    """Return intervals of positions that contain every token that a query attends to."""
    ends = mask.bounds(T, S, CPU)
    if ends is not None and T > 0:
        seen = ends[0] < ends[1]
        if not bool(seen.any()):
            return []
        return [(int(ends[0].expand_as(seen)[seen].min()), int(ends[1].expand_as(seen)[seen].max()))]
    return [mask.reach(0, T, T, S)]
