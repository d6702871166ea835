"""The rules a mask is made of: each a small frozen object that knows its own (query, key) pairs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from ..shapes import check_index_tensor, check_mask_tensor, describe
from ..shapes.kinds import check_counts, check_device, check_index
from .symbols import known

Rows: TypeAlias = "slice | Tensor | None"


def _index(pick: Rows, length: int, device: torch.device | None) -> Tensor:
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


def count(pick: Rows, length: int) -> int:
    """How many of an axis are chosen."""
    if isinstance(pick, Tensor):
        return pick.shape[0]
    start, stop, step = _ends(pick, length)
    return stop - start if torch.compiler.is_compiling() else len(range(start, stop, step))


def check_asked(T: int, S: int, rows: Rows, cols: Rows, device: Any) -> None:
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


def full_rank(rule: Tensor, T: int, S: int, rows: Rows, cols: Rows) -> Tensor:
    """A rule with four axes, its last two the rows and columns asked for; a view."""
    return rank4(rule).expand(-1, -1, count(rows, T), count(cols, S))


def _per_batch(value: Any) -> Any:
    """A (B,) tensor made to broadcast against (B, H, R, C); an int is left alone."""
    return value.view(-1, 1, 1, 1) if isinstance(value, Tensor) else value


@dataclass(frozen=True, eq=False)
class Part:
    """One rule. `restricts`: it can forbid keys; `biases`: it adds to the scores."""

    restricts: ClassVar[bool] = True
    biases: ClassVar[bool] = False

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        """The rule at gathered places: i, j integer tensors that broadcast to (B, H, R, C)."""
        raise NotImplementedError

    def grid(self, T: int, S: int, rows: Rows, cols: Rows, device: torch.device | None) -> Tensor:
        """The rule on chosen rows and columns, (B|1, H|1, R, C)."""
        i, j = _index(rows, T, device), _index(cols, S, device)
        return self.at(i[:, None], j[None, :], T, S)

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        """Raise ValueError where the rule's tensors do not fit the call."""


@dataclass(frozen=True, eq=False)
class Band(Part):
    """Query i stands at pos = i + offset and sees the keys pos - left < j <= pos + right.

    The keys j < first it sees however far back they lie.
    """

    left: int | None
    right: int | None
    offset: int | Tensor | None = None
    first: int = 0

    def shift(self, T: int, S: int) -> int | Tensor:
        """The position of query 0 among the keys."""
        return S - T if self.offset is None else self.offset

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        pos = i + _per_batch(self.shift(T, S))
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

    def trimmed(self, T: int, S: int) -> Band | None:
        """The same rule without the sides that cut nothing; None where nothing is cut at all."""
        shift = self.shift(T, S)
        if isinstance(shift, Tensor) or T == 0 or S == 0:
            return self
        left = None if self.left is None or known(T - 1 + shift - self.left < 0) else self.left
        right = None if self.right is None or known(shift + self.right >= S - 1) else self.right
        return None if left is None and right is None else Band(left, right, shift, self.first)

    @property
    def kept(self) -> int:
        """How many of the first keys are seen from beyond the window; 0 where it has no end on that side."""
        return 0 if self.left is None else self.first


@dataclass(frozen=True, eq=False)
class Lengths(Part):
    """Row b of the batch may attend the keys start[b] <= j < stop[b]."""

    stop: Tensor
    start: Tensor | None = None

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        seen = j < _per_batch(self.stop)
        return seen if self.start is None else seen & (j >= _per_batch(self.start))

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        for name, ends in (("lengths", self.stop), ("start of the lengths", self.start)):
            if ends is not None:
                check_index_tensor(name, ends, [(B,), (1,)], device)


@dataclass(frozen=True, eq=False)
class Segments(Part):
    """A query attends the keys that carry its own id: packed documents, chunks."""

    query_ids: Tensor
    key_ids: Tensor

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        for name, ids, length in (("query_ids", self.query_ids, T), ("key_ids", self.key_ids, S)):
            if ids.ndim not in (1, 2) or ids.shape[-1] != length:
                raise ValueError(f"{name} of the segments: one a position, {length} here; got {describe(ids)}")
        return _pick(self.query_ids, i) == _pick(self.key_ids, j)

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        check_index_tensor("query_ids of the segments", self.query_ids, [(T,), (1, T), (B, T)], device)
        check_index_tensor("key_ids of the segments", self.key_ids, [(S,), (1, S), (B, S)], device)


def _pick(ids: Tensor, index: Tensor) -> Tensor:
    """ids[b, index] for ids (n,) or (B, n) and an index that broadcasts to (B, H, R, C)."""
    if ids.ndim == 1 or ids.shape[0] == 1:
        return ids.reshape(-1)[index]
    batch = torch.arange(ids.shape[0], device=ids.device).view(-1, 1, 1, 1)
    return ids[batch, rank4(index)]


@dataclass(frozen=True, eq=False)
class _Dense(Part):
    tensor: Tensor

    @property
    def full(self) -> Tensor:
        """(B|1, H|1, T|1, S|1)."""
        return rank4(self.tensor)

    def _of_size(self, T: int, S: int) -> Tensor:
        full = self.full
        if full.shape[2] not in (1, T) or full.shape[3] not in (1, S):
            raise ValueError(
                f"a mask tensor broadcasts to (B, H, T, S) = (B, H, {T}, {S}); got {describe(self.tensor)}"
            )
        return full

    @override
    def grid(self, T: int, S: int, rows: Rows, cols: Rows, device: torch.device | None) -> Tensor:
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


@dataclass(frozen=True, eq=False)
class Keep(_Dense):
    """A boolean tensor, True = attend, that broadcasts to (B, H, T, S) from the right."""


@dataclass(frozen=True, eq=False)
class Bias(_Dense):
    """A float tensor added to the scores; -inf forbids."""

    biases: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Alibi(Part):
    """Adds -slope * |pos - j|, pos = i + offset (Press et al. 2021, arXiv 2108.12409)."""

    slopes: Tensor
    offset: int | Tensor | None = None

    restricts: ClassVar[bool] = False
    biases: ClassVar[bool] = True

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        shift = S - T if self.offset is None else _per_batch(self.offset)
        slopes = self.slopes.view(-1, self.slopes.shape[-1], 1, 1)
        return -slopes * (i + shift - j).abs().to(slopes.dtype)

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        check_mask_tensor(self.slopes[..., None, None], (B, H, T, S), device)
        if self.slopes.shape[-1] != H:
            raise ValueError(f"alibi needs one slope a query head: H = {H}, slopes {tuple(self.slopes.shape)}")
        if isinstance(self.offset, Tensor):
            check_index_tensor("offset of alibi", self.offset, [(B,), (1,)], device)


def register(cls: type) -> None:
    """Make a frozen dataclass of rules a pytree: tensors (and rules) are leaves, the rest is its shape."""

    def split(rule: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        values = {f.name: getattr(rule, f.name) for f in fields(cls)}
        leaves = {k: v for k, v in values.items() if isinstance(v, (Tensor, tuple))}
        return leaves, (tuple(leaves), tuple((k, v) for k, v in values.items() if k not in leaves))

    def flatten(rule: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, context = split(rule)
        return list(leaves.values()), context

    def flatten_with_keys(rule: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, context = split(rule)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in leaves.items()], context

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(context[0], leaves, strict=True)), **dict(context[1]))

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"headwise.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


for _cls in (Band, Lengths, Segments, Keep, Bias, Alibi):
    register(_cls)
