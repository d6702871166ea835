"""Further rules: every step-th key, blocks, biases by distance, and any function of indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ...shapes import MASK_RULE, check_index_tensor, check_mask_tensor, describe
from ...shapes.arguments import fits
from ..tracing import is_symbol
from .indexing import Region, per_batch, rank4, saturated, wide
from .rule import Rule
from .rules import Segments


@dataclass(frozen=True, eq=False)
class _Placed(Rule):
    """A rule of pos = i + offset, the position of the query among the keys; the offset is S - T by default."""

    offset: int | Tensor | None = field(default=None, kw_only=True)

    def pos(self, i: Tensor, T: int, S: int) -> Tensor:
        """Return the position of query i among the keys."""
        return i + (S - T if self.offset is None else per_batch(saturated(self.offset)))

    @override
    def part(self, region: Region, T: int, S: int) -> Rule:
        return replace(self, offset=region.offset(self.offset, T, S))

    @override
    def placed(self, offset: int | Tensor) -> Rule:
        return replace(self, offset=offset) if self.offset is None else self

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        if isinstance(self.offset, Tensor):
            check_index_tensor("offset of the mask", self.offset, [(B,), (1,)], device)


@dataclass(frozen=True, eq=False)
class Dilated(_Placed):
    """A dilated pattern: the query at pos may attend to the keys j for which pos - j is divisible by `step`."""

    step: int

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return (self.pos(i, T, S) - j) % self.step == 0


@dataclass(frozen=True, eq=False)
class Blocks(_Placed):
    """Blocks of `size` keys: the query at pos may attend to the keys with pos // size == j // size, rounded down."""

    size: int

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return floor_divide(self.pos(i, T, S), self.size) == floor_divide(j, self.size)

    def ids(self, T: int, S: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
        """Return the block of each query, (T,) or (B, T), and of each key, (S,)."""
        offset = S - T if self.offset is None else saturated(self.offset)
        shift = offset.view(-1, 1) if isinstance(offset, Tensor) else offset
        pos = torch.arange(T, device=device) + shift
        return floor_divide(pos, self.size), floor_divide(torch.arange(S, device=device), self.size)

    @override
    def part(self, region: Region, T: int, S: int) -> Rule:
        if region.rows is None and region.cols is None:
            return super().part(region, T, S)
        device = self.offset.device if isinstance(self.offset, Tensor) else None  # blocks count from key 0 of the call
        return Segments(*self.ids(T, S, device)).part(region, T, S)

    @override
    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        shift = S - T if self.offset is None else self.offset
        if isinstance(shift, Tensor) or first >= last:
            return 0, S
        return (first + shift) // self.size * self.size, ((last - 1 + shift) // self.size + 1) * self.size


def floor_divide(x: Tensor, size: int) -> Tensor:
    """Return x // size, rounded towards minus infinity."""
    return torch.div(x, size, rounding_mode="floor")


@dataclass(frozen=True, eq=False)
class Alibi(_Placed):
    """The bias -slope * |pos - j|, pos = i + offset (Press et al. 2021, arXiv 2108.12409)."""

    slopes: Tensor

    restricts: ClassVar[bool] = False
    biases: ClassVar[bool] = True

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        slopes = wide(self.slopes).view(-1, self.slopes.shape[-1], 1, 1)
        return -slopes * (self.pos(i, T, S) - j).abs().to(slopes.dtype)

    @property
    @override
    def learns(self) -> bool:
        return self.slopes.requires_grad

    @override
    def part(self, region: Region, T: int, S: int) -> Alibi:
        return Alibi(region.cut(self.slopes, batch=-2, heads=-1), offset=region.offset(self.offset, T, S))

    @override
    def computed_in(self, dtype: torch.dtype) -> Alibi:
        return self if self.slopes.dtype == dtype else replace(self, slopes=self.slopes.to(dtype))

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        super().check(B, H, T, S, device)
        if self.slopes.shape[-1] != H:
            raise ValueError(
                f"alibi needs one slope a query head: H = {H}, slopes {tuple(self.slopes.shape)}; alibi_slopes({H}) "
                "has those of the paper"
            )
        check_mask_tensor(self.slopes[..., None, None], (B, H, T, S), device)


@dataclass(frozen=True, eq=False)
class Relative(_Placed):
    """The bias table[h, R + clamp(j - pos, -R, R)] for a table (H, 2 R + 1)."""

    table: Tensor

    restricts: ClassVar[bool] = False
    biases: ClassVar[bool] = True

    @property
    def radius(self) -> int:
        """R: keys at a greater distance have the bias at R."""
        return self.table.shape[-1] // 2

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        R = self.radius
        apart = rank4((j - self.pos(i, T, S)).clamp(-R, R) + R)
        head = torch.arange(self.table.shape[0], device=self.table.device).view(1, -1, 1, 1)
        return wide(self.table)[head, apart]

    @override
    def part(self, region: Region, T: int, S: int) -> Relative:
        return Relative(region.cut(self.table, heads=0), offset=region.offset(self.offset, T, S))

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
                f"the table of relative() must be on the query's device {device}; got {describe(self.table)}; "
                "use mask.to(device)"
            )

    @property
    @override
    def learns(self) -> bool:
        return self.table.requires_grad

    @override
    def computed_in(self, dtype: torch.dtype) -> Relative:
        return self if self.table.dtype == dtype else replace(self, table=self.table.to(dtype))


@dataclass(frozen=True, eq=False)
class Function(Rule):
    """The rule of a function `function(b, h, i, j)` of index tensors that broadcast to (B, H, R, C)."""

    function: Callable[..., Any]
    batch: int = 1
    heads: int = 1
    of: Function | None = field(default=None, repr=False)
    """The original rule, of which this one is a copy with batch and heads set."""
    keep: bool = False
    """True if the function's result never changes while the rule exists."""

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
        if seen.ndim > 4 or any(not fits(n, m) for n, m in zip(reversed(seen.shape), reversed(full), strict=False)):
            raise ValueError(
                f"{MASK_RULE}: the function of rule() gives a tensor that broadcasts to those of b, h, i, j together, "
                f"{tuple(full)}; got {describe(seen)}"
            )
        return rank4(seen)

    @override
    def part(self, region: Region, T: int, S: int) -> Function:
        batch, heads = region.batch or (0, self.batch), region.heads or (0, self.heads)
        function = _Elsewhere(self.function, *region.first)
        return Function(function, batch[1] - batch[0], heads[1] - heads[0], keep=self.keep)

    @override
    def sized(self, B: int, H: int) -> Rule:
        made = self.of or self
        if is_symbol(B) or is_symbol(H):  # to look one up would pin it down
            return replace(made, batch=B, heads=H, of=made)
        known = made.__dict__.setdefault("_sized", {})  # one for all calls of a size, and what is kept with it
        if (B, H) not in known:
            known[B, H] = replace(made, batch=B, heads=H, of=made)
        return known[B, H]


@dataclass(frozen=True, eq=False)
class _Elsewhere:
    """A function of indices, called with indices that start at another row of the batch, head, query and key."""

    function: Callable[..., Any]
    batch: int
    head: int
    query: int
    key: int

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        return self.function(b + self.batch, h + self.head, i + self.query, j + self.key)
