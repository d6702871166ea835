"""The mask of a call as it falls on the tokens of one rank: the same pairs, at that rank's columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...ops.masks.constructors import bias, keep, lengths
from ...ops.masks.indexing import rank4
from ...ops.masks.mask import EVERYTHING, Mask
from ...ops.masks.rules import Bounds, Rule
from .ownership import TokenOwnership

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Between(Rule):
    """Query i of row b sees the keys low[b, i] <= j < high[b, i]; (B|1, T) each."""

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


def shard_mask(deal: TokenOwnership, mask: Mask, T: int, S: int, columns: list[int]) -> Mask:
    """The mask on the tokens that a rank keeps: row b has columns[b] of them, its first in the order of places.

    `mask` is that of T queries and S tokens of all ranks, on the CPU. What rows may see is an interval for most rules,
    and then two numbers a query say it; other rules are asked at the rank's places, column by column.
    """
    C = max(columns)
    ends = mask.bounds(T, S, CPU)
    places = deal.place(torch.arange(C, device="cpu")).clamp(max=max(S - 1, 0))
    added = mask.added(T, S, cols=places, device=CPU)
    weights = EVERYTHING if added is None else bias(added)
    if ends is None:
        allowed = mask.allowed(T, S, cols=places, device=CPU)
        assert allowed is not None  # a mask that restricts nothing has bounds
        return keep(allowed) & lengths(torch.tensor(columns, device="cpu")) & weights
    most = torch.tensor(columns, device="cpu")[:, None]
    low, high = (torch.minimum(deal.counts(end), most) for end in ends)
    if T == 1:
        if not bool(low.any()) and bool((high == C).all()):
            return weights
        start = low[:, 0] if bool(low.any()) else None
        return lengths(high[:, 0], start) & weights
    return Mask((Between(low, high),)) & weights


def fallen_at(places: Tensor, mask: Mask, T: int, S: int, columns: list[int]) -> Mask:
    """The same where each row has its tokens at places (B, C) of its own, of which columns[b] count."""
    real = torch.arange(places.shape[1], device="cpu") < torch.tensor(columns, device="cpu")[:, None]
    i, j = torch.arange(T, device="cpu").view(1, 1, T, 1), places.clamp(0, S - 1)[:, None, None, :]
    allowed, added = mask.at(i, j, T, S)
    seen = real[:, None, None, :].expand(-1, -1, T, -1)
    seen = seen if allowed is None else seen & allowed
    return keep(seen) & (EVERYTHING if added is None else bias(added))


def spans(mask: Mask, T: int, S: int) -> list[tuple[int, int]]:
    """The places outside of which no query sees a token."""
    ends = mask.bounds(T, S, CPU)
    if ends is not None and T > 0:
        seen = ends[0] < ends[1]
        if not bool(seen.any()):
            return []
        return [(int(ends[0].expand_as(seen)[seen].min()), int(ends[1].expand_as(seen)[seen].max()))]
    return [mask.reach(0, T, T, S)]
