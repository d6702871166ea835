"""One attention call over ranks: the queries and keys of each rank, the mask, and the options for the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...distributed.comm import Comm
from ...nn.attention_mode import Expand
from ...ops.masks.mask import Mask
from ...ops.options import ScoreOptions
from ...plan.ranks.sharding import Stretch
from ...shapes import compute_dtype


@dataclass(frozen=True)
class Expansion:
    """A function by which every rank computes keys and values from the vectors that ranks send instead.

    Attributes:
        function: maps (vectors (B, 1, n, E), first, last) to keys (B, k, n, D) and values (B, k, n, V) of the query
            heads first <= h < last; each group of query heads shares one key-value head as usual.
        tensors: the other tensors that the function reads and that get a gradient.
        value_dim: V.
        width: E.
    """

    function: Expand
    tensors: tuple[Tensor, ...]
    value_dim: int
    width: int


@dataclass(frozen=True, eq=False)
class ContextCall:
    """A call over all ranks; every rank has the same information.

    Attributes:
        comm: the ranks.
        queries: the stretches of queries of each rank, in the order in which it holds them.
        keys: the stretches of keys of each rank, likewise.
        options: mask, scale, softcap and dropout of the whole call; the sinks are an argument, for their gradient.
        heads: query heads H.
        kv_heads: key-value heads K of the tensors that ranks send.
        value_dim: V.
        seed: the dropout seed of the whole call.
        some: if the heads of the module are split as well: its total number of heads, and the first of these heads.
        expansion: the `Expansion`, if keys and values are computed from the tensors that ranks send.
        name: the name of the call in errors of its backward pass.
    """

    comm: Comm
    queries: tuple[tuple[Stretch, ...], ...]
    keys: tuple[tuple[Stretch, ...], ...]
    options: ScoreOptions
    heads: int
    kv_heads: int
    value_dim: int
    seed: int = 0
    some: tuple[int, int] | None = None
    expansion: Expansion | None = None
    name: str = "attention"
    of_blocks: dict[object, ScoreOptions] = field(default_factory=dict)

    @property
    def mask(self) -> Mask:
        """The mask of the whole call."""
        return self.options.mask

    @property
    def T(self) -> int:
        """The number of queries of all ranks."""
        return sum(b - a for own in self.queries for a, b in own)

    @property
    def S(self) -> int:
        """The number of keys of all ranks."""
        return sum(b - a for own in self.keys for a, b in own)

    def needed(self, rank: int, owner: int) -> list[Stretch]:
        """Return the keys of `owner` that queries of `rank` may attend to: at most one part of each stretch."""
        needs = []
        for first, last in self.keys[owner]:
            ends = [self.reach(rows, (first, last)) for rows in self.queries[rank]]
            met = [end for end in ends if end is not None]
            if met:
                needs.append((min(a for a, _ in met), max(b for _, b in met)))
        return needs

    def reach(self, rows: Stretch, cols: Stretch) -> Stretch | None:
        """Return the part of `cols` that the queries `rows` may attend to; None if it is empty."""
        if not self.mask.meets(rows, cols, self.T, self.S):
            return None
        low, high = self.mask.reach(*rows, self.T, self.S)
        low, high = max(low, cols[0]), min(high, cols[1])
        return (low, high) if low < high else None

    def mine(self, stretches: Sequence[Stretch], part: Stretch) -> slice:
        """Return the slice in the rank's local tensor for a part of one of its stretches."""
        for (a, b), at in local_slices(stretches):
            if a <= part[0] and part[1] <= b:
                return slice(at.start + part[0] - a, at.start + part[1] - a)
        raise ValueError(f"{part} is no part of {stretches}")

    def with_leaves(self, query: Tensor, leaves: Sequence[Tensor]) -> ContextCall:
        """Return the call with other tensors in its mask, in the order of `leaves_of` and the query's compute dtype."""
        mask = self.mask
        if leaves:
            mask = pytree.tree_unflatten(list(leaves), pytree.tree_flatten(mask)[1])
        mask = mask.computed_in(compute_dtype(query))
        return self if mask is self.mask else replace(self, options=self.options._replace(mask=mask), of_blocks={})

    @property
    def read(self) -> tuple[Tensor, ...]:
        """The tensors that an expansion reads in addition to those that ranks send."""
        return self.expansion.tensors if self.expansion is not None else ()


def local_slices(stretches: Sequence[Stretch]) -> list[tuple[Stretch, slice]]:
    """Return each stretch that a rank holds, and its slice in the rank's local tensor."""
    places, at = [], 0
    for a, b in stretches:
        places.append(((a, b), slice(at, at + b - a)))
        at += b - a
    return places


def leaves_of(mask: Mask) -> list[Tensor]:
    """Return the tensors of a mask if any of them gets a gradient; otherwise an empty list."""
    return list(pytree.tree_leaves(mask)) if mask.learns and torch.is_grad_enabled() else []
