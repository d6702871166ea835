"""Rules with a pattern of their own: every step-th key, blocks, relative biases, and any function of places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ...shapes import MASK_RULE, check_index_tensor, describe
from .places import per_batch, rank4, saturated, wide
from .pytrees import register
from .rules import Rule


@dataclass(frozen=True, eq=False)
class _Placed(Rule):
    """A rule of pos = i + offset, the query's place among the keys; S - T by default."""

    offset: int | Tensor | None = field(default=None, kw_only=True)

    def pos(self, i: Tensor, T: int, S: int) -> Tensor:
        """The place of query i among the keys."""
        return i + (S - T if self.offset is None else per_batch(saturated(self.offset)))

    @override
    def placed(self, offset: int | Tensor) -> Rule:
        return replace(self, offset=offset) if self.offset is None else self

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        if isinstance(self.offset, Tensor):
            check_index_tensor("offset of the mask", self.offset, [(B,), (1,)], device)


@register
@dataclass(frozen=True, eq=False)
class Dilated(_Placed):
    """Query at pos sees the keys j with (pos - j) divisible by `step`."""

    step: int

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return (self.pos(i, T, S) - j) % self.step == 0


@register
@dataclass(frozen=True, eq=False)
class Blocks(_Placed):
    """Query at pos sees the keys of its own block of `size`: pos // size == j // size, rounded down."""

    size: int

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return floor_divide(self.pos(i, T, S), self.size) == floor_divide(j, self.size)

    def ids(self, T: int, S: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
        """The block of each query, (T,) or (B, T), and of each key, (S,)."""
        offset = S - T if self.offset is None else saturated(self.offset)
        shift = offset.view(-1, 1) if isinstance(offset, Tensor) else offset
        pos = torch.arange(T, device=device) + shift
        return floor_divide(pos, self.size), floor_divide(torch.arange(S, device=device), self.size)


def floor_divide(x: Tensor, size: int) -> Tensor:
    """x // size, towards minus infinity."""
    return torch.div(x, size, rounding_mode="floor")


@register
@dataclass(frozen=True, eq=False)
class Relative(_Placed):
    """Adds table[h, R + clamp(j - pos, -R, R)] for a table (H, 2 R + 1)."""

    table: Tensor

    restricts: ClassVar[bool] = False
    biases: ClassVar[bool] = True

    @property
    def radius(self) -> int:
        """R: farther keys get the bias at R."""
        return self.table.shape[-1] // 2

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        R = self.radius
        apart = rank4((j - self.pos(i, T, S)).clamp(-R, R) + R)
        head = torch.arange(self.table.shape[0], device=self.table.device).view(1, -1, 1, 1)
        return wide(self.table)[head, apart]

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        super().check(B, H, T, S, device)
        if self.table.shape[0] != H:
            raise ValueError(
                f"relative() needs a row of its table for each query head: H = {H}; got {describe(self.table)}; "
                "share one row by table.expand(H, -1)"
            )
        if self.table.device != device:
            raise ValueError(
                f"the table of relative() lives on the query's device {device}; got {describe(self.table)}; "
                "use mask.to(device)"
            )

    @property
    @override
    def learns(self) -> bool:
        return self.table.requires_grad

    @override
    def computed_in(self, dtype: torch.dtype) -> Relative:
        return self if self.table.dtype == dtype else replace(self, table=self.table.to(dtype))


@register
@dataclass(frozen=True, eq=False)
class Function(Rule):
    """What `function(b, h, i, j)` says, called with index tensors that broadcast to (B, H, R, C)."""

    function: Callable[..., Any]
    batch: int = 1
    heads: int = 1
    of: Function | None = field(default=None, repr=False)
    """The rule as it was made; this one knows batch and heads."""

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        b = torch.arange(self.batch, device=i.device).view(-1, 1, 1, 1)
        h = torch.arange(self.heads, device=i.device).view(1, -1, 1, 1)
        seen = self.function(b, h, rank4(i), rank4(j))
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = describe(seen) if isinstance(seen, Tensor) else type(seen).__name__
            raise TypeError(
                f"{MASK_RULE}: the function of rule() gives a bool tensor, True = attend, for index tensors b, h, i, "
                f"j; got {got}; compare, or join by & and | instead of `and` and `or`"
            )
        full = torch.broadcast_shapes(b.shape, h.shape, rank4(i).shape, rank4(j).shape)
        if seen.ndim > 4 or any(n not in (1, m) for n, m in zip(reversed(seen.shape), reversed(full), strict=False)):
            raise ValueError(
                f"{MASK_RULE}: the function of rule() gives a tensor that broadcasts to those of b, h, i, j together, "
                f"{tuple(full)}; got {describe(seen)}"
            )
        return rank4(seen)

    @override
    def sized(self, B: int, H: int) -> Rule:
        made = self.of or self
        known = made.__dict__.setdefault("_sized", {})  # one for all calls of a size, and what is kept with it
        if (B, H) not in known:
            known[B, H] = replace(made, batch=B, heads=H, of=made)
        return known[B, H]
