"""Random expressions of masks beside their meaning, cell by cell, by what the public functions promise.

Nothing here asks headwise what a mask means: a cell (b, h, i, j) is True where the sentence in the documentation of
each constructor says so. `T` and `S` are those of the call; `pos` is i + offset, S - T where no offset is given.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import torch
from mask_cases import Sizes
from torch import Tensor

import headwise
from headwise import Mask

Cell = Callable[[int, int, int, int], bool]
Added = Callable[[int, int, int, int], float]


@dataclass(eq=False)
class Expression:
    """A mask, what it means, and how it is written."""

    mask: Mask
    sees: Cell
    text: str
    adds: list[Added] = field(default_factory=list)

    @cache  # noqa: B019  # as long as the test
    def dense(self, n: Sizes) -> Tensor:
        """bool (B, H, T, S), by the meaning alone."""
        cells = [self.sees(*cell) for cell in product(range(n.B), range(n.H), range(n.T), range(n.S))]
        return torch.tensor(cells, dtype=torch.bool).view(n.B, n.H, n.T, n.S)

    def added(self, n: Sizes) -> Tensor:
        """float64 (B, H, T, S): the biases, -inf where nothing may be attended."""
        cells = [sum(f(*cell) for f in self.adds) for cell in product(range(n.B), range(n.H), range(n.T), range(n.S))]
        return torch.tensor(cells, dtype=torch.float64).view(n.B, n.H, n.T, n.S).masked_fill(~self.dense(n), -torch.inf)


LEAVES = (
    *("window", "window", "window", "keep", "keep", "none", "none"),
    *("causal", "prefix", "lengths", "segments", "dilated", "blocks", "rule", "all"),
)


class Drawn:
    """Expressions for one shape, from a seed."""

    def __init__(self, seed: int, n: Sizes) -> None:
        self.make, self.n = random.Random(f"{seed} {n}"), n

    def numbers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.tensor([self.make.randint(low, high) for _ in range(torch.Size(shape).numel())]).view(shape)

    def offset(self) -> tuple[int | Tensor | None, Callable[[int], int], str]:
        """An offset as it is passed, as a function of the row, and in words."""
        n = self.n
        kind = self.make.choice(["none", "none", "int", "rows", "one"])
        if kind == "none":
            return None, lambda b: n.S - n.T, ""
        if kind == "int":
            shift = self.make.randint(-n.T, n.S)
            return shift, lambda b: shift, f"offset={shift}"
        shifts = self.numbers(-n.T, n.S, n.B if kind == "rows" else 1)
        values = shifts.tolist() * (1 if kind == "rows" else n.B)
        return shifts, lambda b: int(values[b]), f"offset={values}"

    def leaf(self) -> Expression:
        """One rule, or what is left out by one."""
        name = self.make.choice(LEAVES)
        built: Expression = getattr(self, f"_{name}")()
        if self.make.random() < 0.25:
            return Expression(~built.mask, lambda *cell: not built.sees(*cell), f"~{built.text}")
        return built

    def _causal(self) -> Expression:
        offset, shift, text = self.offset()
        return Expression(headwise.causal(offset=offset), lambda b, h, i, j: j <= i + shift(b), f"causal({text})")

    def _window(self) -> Expression:
        offset, shift, text = self.offset()
        left = self.make.choice([None, 1, 2, 3, 5])
        right = self.make.choice([None, None, None, 0, 0, 1, 3])
        first = self.make.choice([0, 0, 1, 3])
        mask = headwise.window(left, right, offset=offset, first=first)

        def sees(b: int, h: int, i: int, j: int) -> bool:
            pos = i + shift(b)
            return (left is None or j > pos - left or j < first) and (right is None or j <= pos + right)

        return Expression(mask, sees, f"window({left}, {right}, {text}, first={first})")

    def _prefix(self) -> Expression:
        if self.make.random() < 0.5:
            k = self.make.randint(0, self.n.S + 1)
            return Expression(headwise.prefix(k), lambda b, h, i, j: j < k, f"prefix({k})")
        stops = self.numbers(0, self.n.S, self.n.B)
        values = stops.tolist()
        return Expression(headwise.prefix(stops), lambda b, h, i, j: j < values[b], f"prefix({values})")

    def _lengths(self) -> Expression:
        stop = self.numbers(0, self.n.S, self.n.B)
        start = self.numbers(0, self.n.S, self.n.B) if self.make.random() < 0.5 else None
        to, since = stop.tolist(), [0] * self.n.B if start is None else start.tolist()
        return Expression(
            headwise.lengths(stop, start), lambda b, h, i, j: since[b] <= j < to[b], f"lengths({to}, {since})"
        )

    def _segments(self) -> Expression:
        ids = []
        for length in (self.n.T, self.n.S):
            rows = self.make.choice([0, 1, self.n.B])
            ids.append(self.numbers(0, 2, *([rows] if rows else []), length))
        query, key = (x.expand(self.n.B, -1).tolist() for x in ids)
        return Expression(headwise.segments(*ids), lambda b, h, i, j: query[b][i] == key[b][j], f"segments({ids})")

    def _dilated(self) -> Expression:
        offset, shift, text = self.offset()
        step = self.make.randint(1, 4)
        mask = headwise.dilated(step, offset=offset)
        return Expression(mask, lambda b, h, i, j: (i + shift(b) - j) % step == 0, f"dilated({step}, {text})")

    def _blocks(self) -> Expression:
        offset, shift, text = self.offset()
        size = self.make.randint(1, 4)
        mask = headwise.blocks(size, offset=offset)
        return Expression(mask, lambda b, h, i, j: (i + shift(b)) // size == j // size, f"blocks({size}, {text})")

    def _keep(self) -> Expression:
        """Rows that are all True, all False or mixed, on any of the axes."""
        n = self.n
        sizes = [self.make.choice([1, size]) for size in (n.B, n.H, n.T, n.S)]
        rows = [self.make.choice([(True,), (False,), (True, False)]) for _ in range(torch.Size(sizes[:3]).numel())]
        x = torch.tensor([[self.make.choice(row) for _ in range(sizes[3])] for row in rows]).view(sizes)
        cells = x.expand(n.B, n.H, n.T, n.S).tolist()
        return Expression(headwise.keep(x), lambda b, h, i, j: bool(cells[b][h][i][j]), f"keep({tuple(sizes)})")

    def _rule(self) -> Expression:
        a, c, d = (self.make.randint(1, 3) for _ in range(3))
        mask = headwise.rule(lambda b, h, i, j: (a * i + c * j + d * h + b) % 3 != 0)
        return Expression(mask, lambda b, h, i, j: (a * i + c * j + d * h + b) % 3 != 0, f"rule({a}, {c}, {d})")

    def _all(self) -> Expression:
        return Expression(Mask(()), lambda *cell: True, "everything")

    def _none(self) -> Expression:
        return Expression(~Mask(()), lambda *cell: False, "nothing")

    def restricting(self, depth: int) -> Expression:
        """Rules joined by &, | and ~."""
        what = self.make.random()
        if depth == 0 or what < 0.1:
            return self.leaf()
        one = self.restricting(depth - 1)
        if what < 0.25:
            return Expression(~one.mask, lambda *cell: not one.sees(*cell), f"~{one.text}")
        other = self._none() if self.make.random() < 0.15 else self.restricting(depth - 1)
        if what < 0.6:
            both = one.mask & other.mask
            return Expression(both, lambda *cell: one.sees(*cell) and other.sees(*cell), f"({one.text} & {other.text})")
        either = one.mask | other.mask
        return Expression(either, lambda *cell: one.sees(*cell) or other.sees(*cell), f"({one.text} | {other.text})")

    def biased(self, depth: int) -> Expression:
        """The same, often with biases beside them."""
        whole = self.restricting(self.make.randint(0, depth))
        for name in ("bias", "alibi", "relative"):
            if self.make.random() < 0.2:
                mask, sees, adds = getattr(self, f"_with_{name}")()
                seen = whole.sees
                whole = Expression(
                    whole.mask & mask,
                    lambda *cell, seen=seen, sees=sees: seen(*cell) and sees(*cell),
                    f"{whole.text} & {name}",
                    [*whole.adds, adds],
                )
        return whole

    def _with_bias(self) -> tuple[Mask, Cell, Added]:
        n = self.n
        sizes = [self.make.choice([1, size]) for size in (n.B, n.H, n.T, n.S)]
        x = self.numbers(-3, 3, *sizes).float()
        x = x.masked_fill(x == -3, -torch.inf)
        cells = x.expand(n.B, n.H, n.T, n.S).tolist()
        return (
            headwise.bias(x),
            lambda b, h, i, j: cells[b][h][i][j] != -torch.inf,
            lambda b, h, i, j: cells[b][h][i][j],
        )

    def _with_alibi(self) -> tuple[Mask, Cell, Added]:
        offset, shift, _ = self.offset()
        rows = self.make.random() < 0.5
        slopes = self.numbers(1, 7, *([self.n.B] if rows else []), self.n.H) / 8
        values = slopes.expand(self.n.B, self.n.H).tolist()
        return (
            headwise.alibi(slopes, offset=offset),
            lambda *cell: True,
            lambda b, h, i, j: -values[b][h] * abs(i + shift(b) - j),
        )

    def _with_relative(self) -> tuple[Mask, Cell, Added]:
        offset, shift, _ = self.offset()
        R = self.make.randint(0, 4)
        table = self.numbers(-16, 16, self.n.H, 2 * R + 1) / 8
        values = table.tolist()

        def adds(b: int, h: int, i: int, j: int) -> float:
            return float(values[h][R + max(-R, min(R, j - i - shift(b)))])

        return headwise.relative(table, offset=offset), lambda *cell: True, adds
