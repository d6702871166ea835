"""The rules of a mask: each is a small frozen object that defines which (query, key) pairs are allowed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ...shapes import check_index_tensor, check_mask_tensor, describe
from ...shapes.arguments import fits
from ..tracing import statically_true
from .indexing import Region, RowIndex, Span, cut, per_batch, rank4, saturated
from .rule import Bounds, Rule


@dataclass(frozen=True, eq=False)
class Band(Rule):
    """A band of keys: query i at pos = i + offset may attend to the keys pos - left < j <= pos + right.

    It may also attend to the keys j < first at any distance behind it.
    """

    left: int | None
    right: int | None
    offset: int | Tensor | None = None
    first: int = 0

    def shift(self, T: int, S: int) -> int | Tensor:
        """Return the position of query 0 among the keys."""
        return S - T if self.offset is None else saturated(self.offset)

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        pos = i + per_batch(self.shift(T, S))
        if self.right is None and self.left is None:
            return torch.ones_like(pos + j, dtype=torch.bool)
        if self.left is None:
            return j <= pos + self.right
        near = j > pos - self.left
        near = near | (j < self.first) if self.first else near
        return near if self.right is None else near & (j <= pos + self.right)

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        if isinstance(self.offset, Tensor):
            check_index_tensor("offset of the mask", self.offset, [(B,), (1,)], device)

    @override
    def bounds(self, T: int, S: int, device: torch.device | None) -> Bounds | None:
        if self.kept:
            return None
        shift = self.shift(T, S)
        pos = torch.arange(T, device=device)[None] + (shift[:, None] if isinstance(shift, Tensor) else shift)
        return (
            None if self.left is None else pos - self.left + 1,
            None if self.right is None else pos + self.right + 1,
        )

    @override
    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        if isinstance(self.offset, Tensor):
            return 0, S
        shift = S - T if self.offset is None else self.offset
        k0 = 0 if self.left is None or self.kept else first + shift - self.left + 1
        return k0, S if self.right is None else last + shift + self.right

    @override
    def part(self, region: Region, T: int, S: int) -> Band:
        first = max(0, self.first - region.first[3])
        return replace(self, offset=region.offset(self.offset, T, S), first=first)

    @override
    def placed(self, offset: int | Tensor) -> Band:
        return replace(self, offset=offset) if self.offset is None else self

    def __and__(self, other: Band) -> Band | None:
        """Return both bands as one; None if no single band is equivalent."""
        if self.first or other.first or isinstance(self.offset, Tensor) or isinstance(other.offset, Tensor):
            return None
        if (self.offset is None) != (other.offset is None) or not statically_true(
            (self.offset or 0) == (other.offset or 0)
        ):
            return None
        lefts = [x for x in (self.left, other.left) if x is not None]
        rights = [x for x in (self.right, other.right) if x is not None]
        # torch.compile cannot trace min(..., default=...) of symbolic sizes.
        return Band(min(lefts) if lefts else None, min(rights) if rights else None, self.offset)

    def __invert__(self) -> Band | None:
        """Return the complement of the band; None if it is not a band."""
        if self.first or (self.left is None) == (self.right is None):
            return None
        if self.right is not None:
            return Band(-self.right, None, self.offset)  # j > pos + right
        assert self.left is not None
        return Band(None, -self.left, self.offset)  # j <= pos - left

    @override
    def trimmed(self, T: int, S: int) -> Band | None:
        """Return the rule without the sides that forbid nothing; None if it forbids nothing."""
        if isinstance(self.offset, Tensor) or T == 0 or S == 0:
            return self
        shift = S - T if self.offset is None else self.offset
        left = None if self.left is None or statically_true(T - 1 + shift - self.left < 0) else self.left
        right = None if self.right is None or statically_true(shift + self.right >= S - 1) else self.right
        return None if left is None and right is None else Band(left, right, shift, self.first)

    @property
    def kept(self) -> int:
        """The number of first keys that are allowed outside of the window; 0 if the window has no left limit."""
        return 0 if self.left is None else self.first


@dataclass(frozen=True, eq=False)
class Lengths(Rule):
    """The keys of each batch row: row b may attend to the keys start[b] <= j < stop[b]."""

    stop: Tensor | int
    start: Tensor | None = None

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        seen = j < per_batch(self.stop)
        return seen if self.start is None else seen & (j >= per_batch(self.start))

    @override
    def bounds(self, T: int, S: int, device: torch.device | None) -> Bounds | None:
        stop = self.stop.view(-1, 1) if isinstance(self.stop, Tensor) else torch.tensor([[self.stop]], device=device)
        return None if self.start is None else self.start.view(-1, 1), stop

    @override
    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        return 0, S if isinstance(self.stop, Tensor) else self.stop

    @override
    def part(self, region: Region, T: int, S: int) -> Lengths:
        stop, start = (None if end is None else _from(end, region) for end in (self.stop, self.start))
        assert stop is not None and not isinstance(start, int)
        return Lengths(stop, start)

    @override
    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        longest = self.stop if isinstance(self.stop, int) else int(self.stop.max())
        least = 0 if self.start is None else int(self.start.min())
        return longest > cols[0] and least < cols[1]

    @property
    @override
    def is_same_for_rows(self) -> bool:
        return True

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        for name, ends in (("lengths", self.stop), ("start of the lengths", self.start)):
            if isinstance(ends, Tensor):
                check_index_tensor(name, ends, [(B,), (1,)], device)


def _from(end: Tensor | int, region: Region) -> Tensor | int:
    """Return a limit counted from the region's first key."""
    first = region.first[3]
    if not isinstance(end, Tensor):
        return max(0, end - first)
    end = region.cut(end, batch=0)
    return end if region.cols is None else (end.long() - first).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Segments(Rule):
    """Segments, such as packed documents or chunks: a query may attend to the keys with its own id."""

    query_ids: Tensor
    key_ids: Tensor

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        for name, ids, length in (("query_ids", self.query_ids, T), ("key_ids", self.key_ids, S)):
            if ids.ndim not in (1, 2) or ids.shape[-1] != length:
                raise ValueError(f"{name} of the segments: one a position, {length} here; got {describe(ids)}")
        return _pick(self.query_ids, i) == _pick(self.key_ids, j)

    @override
    def part(self, region: Region, T: int, S: int) -> Segments:
        query_ids, key_ids = (region.cut(ids, batch=-2) for ids in (self.query_ids, self.key_ids))
        return Segments(_some(query_ids, region.rows), _some(key_ids, region.cols))

    @override
    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        sides = ((self.query_ids, rows), (self.key_ids, cols))
        ids = [x[..., slice(*ends)].reshape(-1) for x, ends in sides]
        if not all(x.numel() for x in ids):
            return False
        (low, high), (first, last) = (torch.stack(x.aminmax()).tolist() for x in ids)
        return bool(low <= last and first <= high)

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        check_index_tensor("query_ids of the segments", self.query_ids, [(T,), (1, T), (B, T)], device)
        check_index_tensor("key_ids of the segments", self.key_ids, [(S,), (1, S), (B, S)], device)


def _some(x: Tensor, span: Span | None) -> Tensor:
    """Return a span of the last axis, also if that has size 1."""
    return x if span is None else x[..., slice(*span)]


def _pick(ids: Tensor, index: Tensor) -> Tensor:
    """Return ids[b, index] for ids (n,) or (B, n) and an index that broadcasts to (B, H, R, C)."""
    if ids.ndim == 1 or ids.shape[0] == 1:
        return ids.reshape(-1)[index]
    batch = torch.arange(ids.shape[0], device=ids.device).view(-1, 1, 1, 1)
    return ids[batch, rank4(index)]


@dataclass(frozen=True, eq=False)
class _Dense(Rule):
    tensor: Tensor

    @property
    def full(self) -> Tensor:
        """The tensor with four axes, (B|1, H|1, T|1, S|1)."""
        return rank4(self.tensor)

    def _of_size(self, T: int, S: int) -> Tensor:
        full = self.full
        if not fits(full.shape[2], T) or not fits(full.shape[3], S):
            raise ValueError(
                f"a mask tensor broadcasts to (B, H, T, S) = (B, H, {T}, {S}); got {describe(self.tensor)}"
            )
        return full

    @override
    def grid(self, T: int, S: int, rows: RowIndex, cols: RowIndex, device: torch.device | None) -> Tensor:
        out = self._of_size(T, S)
        if rows is not None and out.shape[2] > 1:
            out = out[:, :, rows if isinstance(rows, slice) else rows.long()]
        if cols is not None and out.shape[3] > 1:
            out = out[..., cols if isinstance(cols, slice) else cols.long()]
        return out

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        full = self._of_size(T, S)
        b, h, t, s = full.shape
        batch = torch.arange(b, device=full.device).view(-1, 1, 1, 1)
        head = torch.arange(h, device=full.device).view(1, -1, 1, 1)
        return full[batch, head, i if t > 1 else torch.zeros_like(i), j if s > 1 else torch.zeros_like(j)]

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        check_mask_tensor(self.tensor, (B, H, T, S), device)

    @override
    def part(self, region: Region, T: int, S: int) -> _Dense:
        x = region.cut(self.tensor, batch=-4, heads=-3)
        return type(self)(cut(cut(x, region.rows, -2), region.cols, -1))

    @override
    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        seen = self.part(Region(rows, cols), T, S).tensor
        return bool((seen != -torch.inf if self.biases else seen).any())

    @override
    def forbids(self) -> Rule | None:
        seen = self.tensor != -torch.inf if self.biases else self.tensor
        if bool(seen.all()):
            return None
        return Keep(seen.any(dim=-3, keepdim=True) if seen.ndim > 2 else seen)

    @property
    @override
    def learns(self) -> bool:
        return self.biases and self.tensor.requires_grad

    @property
    @override
    def is_same_for_rows(self) -> bool:
        return self.full.shape[2] == 1


@dataclass(frozen=True, eq=False)
class Keep(_Dense):
    """A bool tensor, True = attend, that broadcasts to (B, H, T, S) from the right."""


@dataclass(frozen=True, eq=False)
class Bias(_Dense):
    """A float tensor that is added to the scores; -inf forbids."""

    biases: ClassVar[bool] = True

    @override
    def computed_in(self, dtype: torch.dtype) -> Bias:
        differ = self.tensor.dtype != dtype and torch.float64 in (self.tensor.dtype, dtype)
        return Bias(self.tensor.to(dtype)) if differ else self  # a narrower dtype is converted where it is added
