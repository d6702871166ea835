"""Every mask beside its definition, a Python predicate of (batch, head, query, key): one list for all tests."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

import headwise
from headwise import Mask

Sees = Callable[[int, int, int, int], bool]
Adds = Callable[[int, int, int, int], float]


class Sizes(NamedTuple):
    """The letters of the legend."""

    B: int
    H: int
    K: int
    T: int
    S: int
    D: int
    V: int


SHORT = Sizes(2, 6, 3, 5, 7, 11, 13)  # fewer queries than keys
LONG = Sizes(3, 4, 2, 7, 5, 13, 11)  # more queries than keys: bottom-right rows that see nothing
SQUARE = Sizes(2, 3, 1, 7, 7, 5, 7)
TILED = Sizes(1, 2, 1, 67, 131, 19, 17)  # across the edges of tiles of 16, 32, 64, 128
SIZES = (SHORT, LONG, SQUARE)
UNEQUAL = (Sizes(2, 6, 3, 4, 67, 5, 7), Sizes(1, 2, 1, 67, 5, 3, 7))  # many times more of the one than of the other


@dataclass(frozen=True)
class Built:
    """A mask for one shape and what it means, cell by cell."""

    mask: Mask
    sees: Sees
    adds: Adds | None = None
    interval: bool = True


def _random(n: Sizes, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(n) + len(shape)))


def _ids(n: Sizes, *shape: int) -> Tensor:
    return (_random(n, *shape) * 3).long()


def _stops(n: Sizes) -> Tensor:
    return torch.tensor([0, n.S, n.S - 2, 3])[[1, 2, 0, 3][: n.B]]


def _cells(x: Tensor) -> Callable[..., float]:
    """The entry of x at a cell (b, h, i, j), as it broadcasts from the right."""
    values, shape = x.tolist(), tuple(x.shape)

    def at(*index: int) -> float:
        entry = values
        for i, size in zip(index[len(index) - len(shape) :], shape, strict=True):
            entry = entry[0 if size == 1 else i]
        return entry  # type: ignore[no-any-return]

    return at


def _band(left: float, right: float, offset: Callable[[Sizes, int], int]) -> Callable[[Sizes], Sees]:
    def of(n: Sizes) -> Sees:
        return lambda b, h, i, j: i + offset(n, b) - left < j <= i + offset(n, b) + right

    return of


_END = lambda n, b: n.S - n.T  # noqa: E731
_BATCH = lambda n, b: (2, -1, 0)[b]  # noqa: E731


def _kept(*axes: str) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        x = _random(n, *(1 if a == "1" else getattr(n, a) for a in axes)) > 0.4
        at = _cells(x)
        return Built(headwise.keep(x), lambda *cell: bool(at(*cell)), interval=False)

    return build


def _biased(*axes: str, forbid: float) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        x = 3 * _random(n, *(1 if a == "1" else getattr(n, a) for a in axes)) - 1
        x = x.masked_fill(x < 3 * forbid - 1, -math.inf)
        at = _cells(x)
        return Built(headwise.bias(x), lambda *cell: at(*cell) != -math.inf, at, interval=False)

    return build


def _simple(make: Callable[[Sizes], Mask], sees: Callable[[Sizes], Sees]) -> Callable[[Sizes], Built]:
    return lambda n: Built(make(n), sees(n))


def _lengths(n: Sizes) -> Built:
    stop = _stops(n)
    return Built(headwise.lengths(stop), lambda b, h, i, j: bool(j < stop[b]))


def _between(n: Sizes) -> Built:
    stop, start = _stops(n), torch.tensor([2, 0, 4])[: n.B]
    return Built(headwise.lengths(stop, start), lambda b, h, i, j: bool(start[b] <= j < stop[b]))


def _first(left: int, first: int) -> Callable[[Sizes], Built]:
    """A window that keeps the first keys in sight."""

    def sees(n: Sizes) -> Sees:
        return lambda b, h, i, j: (j > i + n.S - n.T - left or j < first) and j <= i + n.S - n.T

    return lambda n: Built(headwise.window(left, first=first), sees(n), interval=False)


def _segments(n: Sizes) -> Built:
    q, k = _ids(n, n.T), _ids(n, 1, n.S)[0]
    return Built(headwise.segments(q, k), lambda b, h, i, j: bool(q[i] == k[j]), interval=False)


def _batch_segments(n: Sizes) -> Built:
    q, k = _ids(n, n.B, n.T), _ids(n, n.B, n.S).flip(1)
    return Built(headwise.segments(q, k), lambda b, h, i, j: bool(q[b, i] == k[b, j]), interval=False)


def _alibi(n: Sizes) -> Built:
    slopes = headwise.alibi_slopes(n.H)
    return Built(headwise.alibi(slopes), lambda *_: True, lambda b, h, i, j: -slopes[h].item() * abs(i + n.S - n.T - j))


def _batch_alibi(n: Sizes) -> Built:
    slopes = _random(n, n.B, n.H)
    return Built(
        headwise.alibi(slopes), lambda *_: True, lambda b, h, i, j: -slopes[b, h].item() * abs(i + n.S - n.T - j)
    )


def _joined(*names: str) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        parts = [MASKS[name](n) for name in names]
        mask = parts[0].mask
        for part in parts[1:]:
            mask = mask & part.mask
        adding = [part.adds for part in parts if part.adds]
        return Built(
            mask,
            lambda *cell: all(part.sees(*cell) for part in parts),
            (lambda *cell: sum(adds(*cell) for adds in adding)) if adding else None,
            interval=all(part.interval for part in parts),
        )

    return build


def _either(*names: str) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        parts = [MASKS[name](n) for name in names]
        mask = functools.reduce(operator.or_, [part.mask for part in parts])
        return Built(mask, lambda *cell: any(part.sees(*cell) for part in parts), interval=False)

    return build


def _not(name: str, *, interval: bool = False) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        part = MASKS[name](n)
        return Built(~part.mask, lambda *cell: not part.sees(*cell), interval=interval)

    return build


def _prefixes(n: Sizes) -> Built:
    stops = _stops(n)
    return Built(headwise.prefix(stops), lambda b, h, i, j: j < stops[b])


def _dilated(step: int, offset: int | None) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        shift = n.S - n.T if offset is None else offset
        mask = headwise.dilated(step, offset=offset)
        return Built(mask, lambda b, h, i, j: (i + shift - j) % step == 0, interval=False)

    return build


def _blocks(size: int, *, batch: bool = False) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        offset = torch.tensor([2, -1, 0])[: n.B] if batch else None
        shift = _BATCH if batch else _END
        mask = headwise.blocks(size, offset=offset)
        return Built(mask, lambda b, h, i, j: (i + shift(n, b)) // size == j // size, interval=False)

    return build


def _picked(*axes: str) -> Callable[[Sizes], Built]:
    """Up to four keys a query, some twice; none for some queries."""

    def build(n: Sizes) -> Built:
        x = (_random(n, *(1 if a == "1" else getattr(n, a) for a in axes), n.T, 4) * (n.S + 2)).long() - 2
        x = x.clamp(min=-1)
        x[:, :, n.T // 2 : n.T // 2 + 1] = -1
        x[..., 3] = x[..., 0]
        listed = x.expand(n.B, n.H, -1, -1).tolist()
        return Built(headwise.picked(x), lambda b, h, i, j: j in listed[b][h][i], interval=False)

    return build


def _relative(radius: int, *, batch: bool = False) -> Callable[[Sizes], Built]:
    def build(n: Sizes) -> Built:
        table = 3 * _random(n, n.H, 2 * radius + 1) - 1
        offset, shift = (torch.tensor([2, -1, 0])[: n.B], _BATCH) if batch else (None, _END)

        def adds(b: int, h: int, i: int, j: int) -> float:
            apart = j - i - shift(n, b)
            return table[h, max(-radius, min(radius, apart)) + radius].item()

        return Built(headwise.relative(table, offset=offset), lambda *_: True, adds)

    return build


@dataclass(frozen=True, eq=False)
class _Cells:
    """A function of places that reads a tensor; a class, for it is pickled."""

    x: Tensor

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.x[b, h, i, j] | (j == 0)


def _function(n: Sizes) -> Built:
    x = _random(n, n.B, n.H, n.T, n.S) > 0.5
    mask = headwise.rule(_Cells(x)).sized(n.B, n.H)
    return Built(mask, lambda b, h, i, j: bool(x[b, h, i, j]) or j == 0, interval=False)


def _third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + 2 * j) % 3 != 0


def _function_of_places(n: Sizes) -> Built:
    return Built(headwise.rule(_third), lambda b, h, i, j: (i + 2 * j) % 3 != 0, interval=False)


MASKS: dict[str, Callable[[Sizes], Built]] = {
    "causal": _simple(lambda n: headwise.causal(), _band(math.inf, 0, _END)),
    "causal_top_left": _simple(lambda n: headwise.causal_top_left(), _band(math.inf, 0, lambda n, b: 0)),
    "causal +2": _simple(lambda n: headwise.causal(offset=2), _band(math.inf, 0, lambda n, b: 2)),
    "causal -3": _simple(lambda n: headwise.causal(offset=-3), _band(math.inf, 0, lambda n, b: -3)),
    "causal (B,)": _simple(
        lambda n: headwise.causal(offset=torch.tensor([2, -1, 0])[: n.B]), _band(math.inf, 0, _BATCH)
    ),
    "window 1": _simple(lambda n: headwise.window(1), _band(1, 0, _END)),
    "window 3": _simple(lambda n: headwise.window(3), _band(3, 0, _END)),
    "window 3 2": _simple(lambda n: headwise.window(3, 2), _band(3, 2, _END)),
    "window 2 None": _simple(lambda n: headwise.window(2, None), _band(2, math.inf, _END)),
    "window None 1": _simple(lambda n: headwise.window(None, 1), _band(math.inf, 1, _END)),
    "window None None": _simple(lambda n: headwise.window(None, None), _band(math.inf, math.inf, _END)),
    "window 2 +1": _simple(lambda n: headwise.window(2, offset=1), _band(2, 0, lambda n, b: 1)),
    "window 2 (B,)": _simple(
        lambda n: headwise.window(2, 1, offset=torch.tensor([2, -1, 0])[: n.B]), _band(2, 1, _BATCH)
    ),
    "window 2 first 1": _first(2, 1),
    "window 1 first 3": _first(1, 3),
    "window far": _simple(lambda n: headwise.window(2, offset=1000), lambda n: lambda *_: False),
    "lengths": _lengths,
    "lengths start": _between,
    "segments": _segments,
    "segments (B,)": _batch_segments,
    "keep S": _kept("S"),
    "keep TS": _kept("T", "S"),
    "keep HTS": _kept("H", "T", "S"),
    "keep B11S": _kept("B", "1", "1", "S"),
    "keep B1T1": _kept("B", "1", "T", "1"),
    "keep BHTS": _kept("B", "H", "T", "S"),
    "bias TS": _biased("T", "S", forbid=0.0),
    "bias H1S": _biased("H", "1", "S", forbid=0.3),
    "bias BHTS": _biased("B", "H", "T", "S", forbid=0.6),
    "alibi": _alibi,
    "alibi (B,)": _batch_alibi,
    "prefix 3": _simple(lambda n: headwise.prefix(3), lambda n: lambda b, h, i, j: j < 3),
    "prefix (B,)": _prefixes,
    "dilated 2": _dilated(2, None),
    "dilated 3 +1": _dilated(3, 1),
    "blocks 3": _blocks(3),
    "blocks 2 (B,)": _blocks(2, batch=True),
    "relative 2": _relative(2),
    "relative 3 (B,)": _relative(3, batch=True),
    "relative 200": _relative(200),
    "picked B1": _picked("B", "1"),
    "picked 1H": _picked("1", "H"),
    "picked BH": _picked("B", "H"),
    "rule BHTS": _function,
    "rule": _function_of_places,
    "everything": _simple(lambda n: Mask(()), lambda n: lambda *_: True),
    "nothing": _simple(lambda n: ~Mask(()), lambda n: lambda *_: False),
}
MASKS |= {
    "causal & lengths": _joined("causal", "lengths"),
    "window & segments": _joined("window 3", "segments (B,)"),
    "causal & alibi": _joined("causal", "alibi"),
    "keep & bias": _joined("keep BHTS", "bias H1S"),
    "bias & bias": _joined("bias TS", "bias BHTS", "alibi"),
    "all kinds": _joined("window 3 2", "lengths", "segments", "keep HTS", "bias TS", "alibi"),
    "window first & lengths": _joined("window 2 first 1", "lengths start"),
    "window & window": _joined("window 3", "causal -3", "lengths start"),
    "causal | prefix": _either("causal", "prefix 3"),
    "window | segments": _either("window 3", "segments", "rule"),
    "not causal": _not("causal", interval=True),
    "not window": _not("window 3 2"),
    "not keep": _not("keep HTS"),
    "causal & dilated": _joined("causal +2", "dilated 2"),
    "picked & causal": _joined("picked B1", "causal"),
    "picked & keep & bias": _joined("picked B1", "keep HTS", "bias BHTS", "alibi"),
    "picked & picked": _joined("picked 1H", "picked B1", "lengths"),
    "picked | window": _either("picked BH", "window 1"),
    "not picked": _not("picked BH"),
    "blocks & relative": _joined("blocks 3", "relative 2", "lengths start"),
}
MASKS |= {
    "(causal | prefix) & rule & bias": _joined("causal | prefix", "rule BHTS", "bias TS"),
    "not (causal & segments)": _not("window & segments"),
    "causal | not window": _either("causal & dilated", "not window"),
}
# A few that between them hold every kind of rule, and rows that see nothing: for tests that cost more.
FEW = ("causal", "window 3", "lengths start", "segments (B,)", "keep BHTS", "bias BHTS", "all kinds")


@cache
def dense(name: str, n: Sizes) -> tuple[Tensor, Tensor]:
    """The brute-force matrix: allowed (bool) and added (float64; 0 where nothing may be attended), (B, H, T, S)."""
    built = MASKS[name](n)
    cells = list(itertools.product(range(n.B), range(n.H), range(n.T), range(n.S)))
    sees = [bool(built.sees(*cell)) for cell in cells]
    adds = built.adds or (lambda *cell: 0.0)
    added = [adds(*cell) if seen else 0.0 for cell, seen in zip(cells, sees, strict=True)]
    shape = (n.B, n.H, n.T, n.S)
    return torch.tensor(sees, dtype=torch.bool).view(shape), torch.tensor(added, dtype=torch.float64).view(shape)


def as_tensor(name: str, n: Sizes) -> Tensor:
    """The brute-force matrix as one mask tensor for `oracle` and `naive`: bool, or float64 with -inf."""
    allowed, added = dense(name, n)
    return added.masked_fill(~allowed, -math.inf) if MASKS[name](n).adds else allowed


# Masks that allow picked keys at most: these are gathered before the kernel runs, which has no form for the masks.
GATHERED = tuple(name for name in MASKS if name.startswith("picked") and "|" not in name)
