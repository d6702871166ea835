"""One call of attention over ranks: who holds which queries and keys, what each sees, and what is done with scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...distributed.comm import Comm
from ...ops.masks.mask import Mask
from ...ops.options import Scoring
from ...plan.ranks.sharding import Stretch
from ...shapes import compute_dtype

Expand = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Expansion:
    """How keys and values are made, on every rank, of the vectors that travel in their place.

    Attributes:
        function: (vectors (B, 1, n, E), first, last) -> keys and values of the query heads first <= h < last, of which
            a group shares one as always: (B, k, n, D) and (B, k, n, V).
        tensors: what it reads beside the vectors and is to get a gradient.
        value_dim: V.
        width: E.
    """

    function: Expand
    tensors: tuple[Tensor, ...]
    value_dim: int
    width: int


class CallOptions(NamedTuple):
    """What happens to scores beside the mask."""

    scale: float
    softcap: float | None
    dropout: float
    seed: int
    some: tuple[int, int] | None = None
    """Of a module whose heads are dealt out as well: all of its heads, and the first of these."""


@dataclass(frozen=True, eq=False)
class ContextCall:
    """A call over all ranks, as each of them knows it.

    Attributes:
        comm: the ranks.
        queries: the stretches of queries of each rank, in the order in which it holds them.
        keys: likewise the keys.
        mask: of the whole call, sized.
        numbers: scale, softcap, dropout.
        heads: query heads H.
        kv_heads: key-value heads K of what travels.
        value_dim: V.
        expansion: where keys and values are made of what travels.
        name: of the call, for errors of its backward.
    """

    comm: Comm
    queries: tuple[tuple[Stretch, ...], ...]
    keys: tuple[tuple[Stretch, ...], ...]
    mask: Mask
    numbers: CallOptions
    heads: int
    kv_heads: int
    value_dim: int
    expansion: Expansion | None = None
    name: str = "attention"
    scorings: dict[object, Scoring] = field(default_factory=dict)

    @property
    def T(self) -> int:
        """Queries of all ranks."""
        return sum(b - a for own in self.queries for a, b in own)

    @property
    def S(self) -> int:
        """Keys of all ranks."""
        return sum(b - a for own in self.keys for a, b in own)

    def needed(self, rank: int, owner: int) -> list[Stretch]:
        """The keys of a rank that the queries of another may see: at most one stretch of each that it holds."""
        needs = []
        for first, last in self.keys[owner]:
            ends = [self.reach(rows, (first, last)) for rows in self.queries[rank]]
            met = [end for end in ends if end is not None]
            if met:
                needs.append((min(a for a, _ in met), max(b for _, b in met)))
        return needs

    def reach(self, rows: Stretch, cols: Stretch) -> Stretch | None:
        """The keys of a stretch that these queries may see; None where they see none."""
        if not self.mask.meets(rows, cols, self.T, self.S):
            return None
        low, high = self.mask.reach(*rows, self.T, self.S)
        low, high = max(low, cols[0]), min(high, cols[1])
        return (low, high) if low < high else None

    def local(self, stretches: Sequence[Stretch]) -> list[tuple[Stretch, slice]]:
        """Each stretch that a rank holds, and where it lies in what it holds."""
        places, at = [], 0
        for a, b in stretches:
            places.append(((a, b), slice(at, at + b - a)))
            at += b - a
        return places

    def mine(self, stretches: Sequence[Stretch], part: Stretch) -> slice:
        """Where a part of one of the stretches that a rank holds lies in what it holds."""
        for (a, b), at in self.local(stretches):
            if a <= part[0] and part[1] <= b:
                return slice(at.start + part[0] - a, at.start + part[1] - a)
        raise ValueError(f"{part} is no part of {stretches}")

    def with_leaves(self, query: Tensor, leaves: Sequence[Tensor]) -> ContextCall:
        """The job with other tensors in its mask, in the order of `leaves_of`, in the precision of the query."""
        mask = self.mask
        if leaves:
            mask = pytree.tree_unflatten(list(leaves), pytree.tree_flatten(mask)[1])
        mask = mask.computed_in(compute_dtype(query))
        return self if mask is self.mask else replace(self, mask=mask, scorings={})

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What an expansion reads beside what travels."""
        return self.expansion.tensors if self.expansion is not None else ()


def leaves_of(mask: Mask) -> list[Tensor]:
    """The tensors of a mask of which some get a gradient; none where none does."""
    return list(pytree.tree_leaves(mask)) if mask.learns and torch.is_grad_enabled() else []
