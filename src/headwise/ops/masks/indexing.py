"""Places of queries and keys as rules are asked about them, and the axes on which a rule answers."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...shapes import describe
from ...shapes.arguments import FAR, check_counts, check_device, check_index

RowIndex: TypeAlias = "slice | Tensor | None"
"""Which of the queries, or of the keys: a slice or a 1-D index tensor; all where None."""


class Region(NamedTuple):
    """Some queries and keys of a call, and perhaps some heads: (start, stop) each."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    heads: tuple[int, int] | None = None

    @property
    def shift(self) -> int:
        """What is added to an offset: how far the queries' first place moves on against the keys' first."""
        return self.rows[0] - self.cols[0]

    def of_heads(self, x: Tensor, axis: int) -> Tensor:
        """The heads of a tensor's axis, unless it has one for all; a view."""
        if self.heads is None or x.shape[axis] == 1:
            return x
        return x.narrow(axis, self.heads[0], self.heads[1] - self.heads[0])


def index(pick: RowIndex, length: int, device: torch.device | None) -> Tensor:
    """The chosen indices of an axis as a 1-D integer tensor."""
    if isinstance(pick, Tensor):
        return pick.long()  # of a smaller type a sum would overflow, and uint8 would pick as bools do
    return torch.arange(*_ends(pick, length), device=device)


def _ends(pick: slice | None, length: int) -> tuple[int, int, int]:
    """start, stop, step of a slice of an axis."""
    pick = slice(None) if pick is None else pick
    if torch.compiler.is_compiling():  # `indices` would pin a symbolic length down
        return pick.start or 0, length if pick.stop is None else pick.stop, 1
    return pick.indices(length)


def count(pick: RowIndex, length: int) -> int:
    """How many of an axis are chosen."""
    if isinstance(pick, Tensor):
        return pick.shape[0]
    start, stop, step = _ends(pick, length)
    return stop - start if torch.compiler.is_compiling() else len(range(start, stop, step))


def check_asked(T: int, S: int, rows: RowIndex, cols: RowIndex, device: Any) -> None:
    """What a rule is asked for: sizes, which of its rows and columns, where; raises TypeError or ValueError."""
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
    """Places at which a rule is asked: integers on one device, of shapes that broadcast."""
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
    """Positions that are there; a look at the numbers, so only where it waits for nothing and nothing is traced."""
    if type(index) is not Tensor or index.device.type != "cpu" or not index.numel():
        return
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    low, high = (int(x) for x in index.aminmax())
    if low < 0 or high >= length:
        raise ValueError(f"{name} are positions 0 <= index < {length} here; got {low} to {high}")


def rank4(x: Tensor) -> Tensor:
    """The same with axes of 1 in front, (B, H, R, C) in all: how a mask broadcasts; a view."""
    return x.view((1,) * (4 - x.ndim) + tuple(x.shape))


def full_rank(rule: Tensor, T: int, S: int, rows: RowIndex, cols: RowIndex) -> Tensor:
    """A rule with four axes, its last two the rows and columns asked for; a view."""
    return rank4(rule).expand(-1, -1, count(rows, T), count(cols, S))


def wide(bias: Tensor) -> Tensor:
    """A bias of a half dtype, or of a smaller one, in float32: no sum and no product of biases is coarser."""
    return bias.float() if bias.itemsize < 4 else bias


def saturated(offset: int | Tensor) -> int | Tensor:
    """An offset that what is added to it does not carry past int64: numbers are checked, a tensor is cut off."""
    return offset.long().clamp(-FAR, FAR) if isinstance(offset, Tensor) else offset


def per_batch(value: Any) -> Any:
    """A (B,) tensor made to broadcast against (B, H, R, C); an int is left alone."""
    return value.view(-1, 1, 1, 1) if isinstance(value, Tensor) else value
