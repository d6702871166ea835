"""The rule of keys that were chosen for each query, as by an indexer: a list, and never a T x S matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...shapes import describe
from ...shapes.arguments import fits
from ..tracing import without_numbers
from .indexing import Region, RowIndex, Span, count, index, rank4
from .rule import Rule


@dataclass(frozen=True, eq=False)
class Picked(Rule):
    """Query i may attend to the keys indices[b, h, i]; -1 is none, and a key that is listed twice counts once."""

    indices: Tensor
    """Integers (B|1, H|1, T, n)."""

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        # Each pair is one number, so that a search in the sorted list of all pairs finds it; -1 is before key 0.
        b, h = self.indices.shape[:2]
        codes = self.indices.long() + 1 + torch.arange(T, device=self.indices.device)[:, None] * (S + 1)
        codes = codes.flatten(2).sort(-1).values
        wanted = rank4(i) * (S + 1) + rank4(j) + 1
        wanted = wanted.expand(max(b, wanted.shape[0]), max(h, wanted.shape[1]), -1, -1)
        codes = codes.expand(*wanted.shape[:2], -1)
        if not codes.shape[-1]:
            return torch.zeros_like(wanted, dtype=torch.bool)
        flat = wanted.flatten(2).contiguous()
        places = torch.searchsorted(codes.contiguous(), flat).clamp(max=codes.shape[-1] - 1)
        return (codes.gather(-1, places) == flat).view(wanted.shape)

    @override
    def grid(self, T: int, S: int, rows: RowIndex, cols: RowIndex, device: torch.device | None) -> Tensor:
        some = self.indices if rows is None else self.indices[:, :, rows if isinstance(rows, slice) else rows.long()]
        if cols is not None and isinstance(cols, Tensor):
            return self.at(index(rows, T, device)[:, None], index(cols, S, device), T, S)
        first = 0 if cols is None else cols.indices(S)[0] if not torch.compiler.is_compiling() else cols.start or 0
        C = count(cols, S)
        inside = (some >= first) & (some < first + C)
        seen = torch.zeros(*some.shape[:3], C + 1, dtype=torch.bool, device=some.device)
        return seen.scatter_(3, (some.long() - first).masked_fill(~inside, C), True)[..., :C]

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        b, h, t, _ = self.indices.shape
        if t != T or not fits(b, B) or not fits(h, H) or self.indices.device != device:
            raise ValueError(
                f"indices of picked() are (B, H or 1, T, n), on the query's device: B = {B}, H = {H}, T = {T}, on "
                f"{device}; got {describe(self.indices)}"
            )
        if device.type == "cpu" and not without_numbers() and self.indices.numel():
            low, high = (int(x) for x in self.indices.aminmax())
            if low < -1 or high >= S:
                raise ValueError(f"indices of picked() are keys 0 <= j < S = {S}, or -1 for none; got {low} to {high}")

    @override
    def part(self, region: Region, T: int, S: int) -> Picked:
        x = region.cut(self.indices, batch=0, heads=1)
        x = x if region.rows is None else x[:, :, slice(*region.rows)]
        if region.cols is None:
            return Picked(x)
        first, last = region.cols
        return Picked((x - first).masked_fill((x < first) | (x >= last), -1))

    @override
    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        some = self.indices[:, :, slice(*rows)]
        return bool(((some >= cols[0]) & (some < cols[1])).any())
