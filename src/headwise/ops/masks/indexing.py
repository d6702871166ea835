"""Indices of queries and keys for the rules, and the axes of a rule's result."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...shapes import describe
from ...shapes.arguments import FAR, check_counts, check_device, check_index

RowIndex: TypeAlias = "slice | Tensor | None"
"""A selection of queries or keys: a slice or a 1-D index tensor; None selects all."""


Span: TypeAlias = tuple[int, int]
"""(start, stop) of an axis."""


class Region(NamedTuple):
    """Some queries, keys, heads and rows of the batch of a call; None is all of them."""

    rows: Span | None = None
    cols: Span | None = None
    heads: Span | None = None
    batch: Span | None = None

    @property
    def first(self) -> tuple[int, int, int, int]:
        """The indices in the call of the region's first row of the batch, head, query and key."""
        batch, head, query, key = (span[0] if span else 0 for span in (self.batch, self.heads, self.rows, self.cols))
        return batch, head, query, key

    def cut(self, x: Tensor, *, batch: int | None = None, heads: int | None = None) -> Tensor:
        """Return a view of a tensor with the region's part of its axes of the batch and of the heads."""
        return cut(cut(x, self.batch, batch), self.heads, heads)

    def offset(self, offset: int | Tensor | None, T: int, S: int) -> int | Tensor | None:
        """Return the position of the region's first query among its keys, from a rule's offset in the whole call."""
        offset = self.cut(offset, batch=0) if isinstance(offset, Tensor) else offset
        if self.rows is None and self.cols is None:
            return offset
        _, _, query, key = self.first
        return (S - T if offset is None else saturated(offset)) + query - key


def cut(x: Tensor, span: Span | None, axis: int | None) -> Tensor:
    """Return a view of some indices of an axis; the tensor itself if it has no such axis, or one of size 1."""
    if span is None or axis is None or x.ndim < (-axis if axis < 0 else axis + 1) or x.shape[axis] == 1:
        return x
    return x.narrow(axis, span[0], span[1] - span[0])


def index(pick: RowIndex, length: int, device: torch.device | None) -> Tensor:
    """Return the selected indices of an axis as a 1-D integer tensor."""
    if isinstance(pick, Tensor):
        return pick.long()  # a sum in a smaller dtype would overflow, and uint8 would select like a bool mask
    return torch.arange(*_ends(pick, length), device=device)


def _ends(pick: slice | None, length: int) -> tuple[int, int, int]:
    """Return start, stop, step of a slice of an axis."""
    pick = slice(None) if pick is None else pick
    if torch.compiler.is_compiling():  # `indices` would specialize on a symbolic length
        return pick.start or 0, length if pick.stop is None else pick.stop, 1
    return pick.indices(length)


def count(pick: RowIndex, length: int) -> int:
    """Return how many indices of an axis are selected."""
    if isinstance(pick, Tensor):
        return pick.shape[0]
    start, stop, step = _ends(pick, length)
    return stop - start if torch.compiler.is_compiling() else len(range(start, stop, step))


def check_asked(T: int, S: int, rows: RowIndex, cols: RowIndex, device: Any) -> None:
    """Check the arguments of a rule: sizes, selected rows and columns, device; raise TypeError or ValueError."""
    check_counts(T=T, S=S)
    check_device(device)
    for name, pick, length in (("rows", rows, T), ("cols", cols, S)):
        if pick is None or isinstance(pick, slice):
            continue
        check_index("a slice or a 1-D index tensor", **{name: pick})
        where = torch.get_default_device() if device is None else torch.device(device)
        if pick.ndim != 1 or pick.device.type != where.type:
            raise ValueError(f"{name} is a slice or a 1-D index tensor on {where}; got {describe(pick)}")
        _check_within(name, pick, length)


def checked_at(i: Tensor, j: Tensor, T: int, S: int) -> tuple[Tensor, Tensor]:
    """Check the places for a rule (integers on one device whose shapes broadcast); return them as int64."""
    check_counts(T=T, S=S)
    check_index("an integer tensor that broadcasts to (B, H, R, C)", i=i, j=j)
    try:
        fits = len(torch.broadcast_shapes(i.shape, j.shape)) <= 4 and i.device == j.device
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"i and j broadcast to (B, H, R, C), on one device; got i {describe(i)}, j {describe(j)}; "
            "i[:, None] and j[None] are rows and columns"
        )
    _check_within("i", i, T)
    _check_within("j", j, S)
    return i.long(), j.long()


def _check_within(name: str, index: Tensor, length: int) -> None:
    """Check that positions exist; only on the CPU and without tracing, because the numbers must be known."""
    if type(index) is not Tensor or index.device.type != "cpu" or not index.numel():
        return
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    low, high = (int(x) for x in index.aminmax())
    if low < 0 or high >= length:
        raise ValueError(f"{name} are positions 0 <= index < {length} here; got {low} to {high}")


def rank4(x: Tensor) -> Tensor:
    """Return a view with leading axes of size 1, four axes in total: the way a mask broadcasts to (B, H, R, C)."""
    return x.view((1,) * (4 - x.ndim) + tuple(x.shape))


def full_rank(rule: Tensor, T: int, S: int, rows: RowIndex, cols: RowIndex) -> Tensor:
    """Return a view of a rule with four axes; the last two have the selected rows and columns."""
    return rank4(rule).expand(-1, -1, count(rows, T), count(cols, S))


def wide(bias: Tensor) -> Tensor:
    """Return a bias in float32 if its dtype has fewer than 4 bytes, so that sums and products are not less precise."""
    return bias.float() if bias.itemsize < 4 else bias


def saturated(offset: int | Tensor) -> int | Tensor:
    """Return an offset that cannot overflow int64 in a sum: a tensor is clamped; an int was checked before."""
    return offset.long().clamp(-FAR, FAR) if isinstance(offset, Tensor) else offset


def per_batch(value: Any) -> Any:
    """Return a (B,) tensor as a view that broadcasts against (B, H, R, C); an int is returned unchanged."""
    return value.view(-1, 1, 1, 1) if isinstance(value, Tensor) else value
