"""The base class of the rules of a mask, and the part of a rule that defines only `at`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from .indexing import Region, RowIndex, Span, cut, index, rank4
from .pytrees import register

Bounds: TypeAlias = tuple["Tensor | None", "Tensor | None"]
"""lo and hi, each (B|1, T) or (B|1, 1); None if that side has no limit."""


@dataclass(frozen=True, eq=False)
class Rule:
    """One rule of a mask: a frozen dataclass. A new rule must define only `at`.

    `restricts`: it can forbid keys; `biases`: it adds to the scores. Tensor fields are moved by `Mask.to`.
    """

    restricts: ClassVar[bool] = True
    biases: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Register every subclass as a pytree."""
        super().__init_subclass__(**options)
        register(cls)

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        """Return the rule at the given places: i, j are integer tensors that broadcast to (B, H, R, C)."""
        raise NotImplementedError

    def grid(self, T: int, S: int, rows: RowIndex, cols: RowIndex, device: torch.device | None) -> Tensor:
        """Return the rule on chosen rows and columns, (B|1, H|1, R, C)."""
        i, j = index(rows, T, device), index(cols, S, device)
        return self.at(i[:, None], j[None, :], T, S)

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        """Raise ValueError if the rule's tensors do not fit the call."""

    def computed_in(self, dtype: torch.dtype) -> Rule:
        """Return the rule for a computation in float32 or float64."""
        return self

    def bounds(self, T: int, S: int, device: torch.device | None) -> Bounds | None:
        """Return (lo, hi): row i may attend to exactly lo[i] <= j < hi[i]; None if a row's keys are no interval."""
        return None

    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        """Return an interval (k0, k1) with every key that the queries first <= i < last may attend to.

        These are plain integers, computed without reading tensors, so the interval may be too wide.
        """
        return 0, S

    def trimmed(self, T: int, S: int) -> Rule | None:
        """Return an equivalent rule for this size, simpler if possible; None if it forbids and adds nothing."""
        return self

    def placed(self, offset: int | Tensor) -> Rule:
        """Return the rule with query 0 at `offset` among the keys, if its own offset is not set."""
        return self

    def part(self, region: Region, T: int, S: int) -> Rule:
        """Return the rule for a call with only this region: the same pairs, with new indices.

        T and S are not used if the region has all queries and all keys.
        """
        return PartOf((self,), region, T, S)

    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        """Return whether a query in `rows` may attend to a key in `cols`; True also if that is not known."""
        low, high = self.reach(*rows, T, S)
        return low < cols[1] and high > cols[0]

    def sized(self, B: int, H: int) -> Rule:
        """Return the rule for B rows of H heads, if it needs these numbers."""
        return self

    def forbids(self) -> Rule | None:
        """Return the part of the rule that forbids keys to every head; None if there is none."""
        return self if self.restricts else None

    @property
    def learns(self) -> bool:
        """True if a tensor of the rule needs a gradient."""
        return False

    @property
    def is_same_for_rows(self) -> bool:
        """True if every query of a batch row may attend to the same keys with the same bias."""
        return False


@dataclass(frozen=True, eq=False)
class Reindexed(Rule):
    """Another rule, evaluated at other indices."""

    rules: tuple[Rule, ...]
    """The rule; in a tuple, because pytrees look into tuples."""

    def __post_init__(self) -> None:
        for name in ("restricts", "biases"):
            object.__setattr__(self, name, getattr(self.rules[0], name))

    @override
    def computed_in(self, dtype: torch.dtype) -> Reindexed:
        rule = self.rules[0].computed_in(dtype)
        return self if rule is self.rules[0] else replace(self, rules=(rule,))

    @property
    @override
    def learns(self) -> bool:
        return self.rules[0].learns

    @property
    @override
    def is_same_for_rows(self) -> bool:
        return self.rules[0].is_same_for_rows


@dataclass(frozen=True, eq=False)
class PartOf(Reindexed):
    """A part of a rule that defines only `at`: the rule is evaluated at the indices of the whole call."""

    region: Region
    T: int
    S: int

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        region, (_, _, query, key) = self.region, self.region.first
        if region.rows is not None or region.cols is not None:
            T, S = self.T, self.S

        def of_heads(i: Tensor, j: Tensor) -> Tensor:
            return _at_span(lambda i, j: self.rules[0].at(i, j, T, S), i, j, 1, region.heads)

        return _at_span(of_heads, i + query, j + key, 0, region.batch)

    @override
    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        if self.region.rows is None and self.region.cols is None:
            return self.rules[0].reach(first, last, T, S)
        _, _, query, key = self.region.first
        low, high = self.rules[0].reach(first + query, last + query, self.T, self.S)
        return low - key, high - key


def _at_span(at: Callable[[Tensor, Tensor], Tensor], i: Tensor, j: Tensor, axis: int, span: Span | None) -> Tensor:
    """Return `at` for a span of the batch (axis 0) or of the heads (axis 1), of which it gives all."""
    if span is None:
        return at(i, j)
    i, j = rank4(i), rank4(j)
    n = max(i.shape[axis], j.shape[axis])
    if n == 1:
        return cut(rank4(at(i, j)), span, axis)
    # The places differ along this axis: each index of it is looked up alone, and gives its own part.
    pieces = [(at(cut(i, (k, k + 1), axis), cut(j, (k, k + 1), axis)), span[0] + k) for k in range(n)]
    return torch.cat([cut(rank4(x), (k, k + 1), axis) for x, k in pieces], axis)
