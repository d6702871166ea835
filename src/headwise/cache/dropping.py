"""Dropping tokens of a cache by score: which tokens a row still has, and what a query may attend then.

A dropped token is one that no query may attend any more; nothing else changes. `lengths` still counts it, the next
token has the position that follows it, and a mask has its place among all tokens. What is left lies in columns without
gaps, so a column is no longer a position: `column_positions` has the position of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ops.compiled_calls import methods_outside_graphs
from ..ops.masks.key_positions import mask_at_positions
from ..ops.masks.mask import Mask
from ..shapes import describe
from ..shapes.arguments import check_index, whole_numbers

DroppingT = TypeVar("DroppingT", bound="Dropping")
RULE = "an integer tensor (n,), (B, n) or (B, K, n) of columns, -1 = none"


class Dropping:
    """A cache whose tokens can be dropped, for each head on its own or for all heads; a part of `KVCache`."""

    batch: int
    num_kv_heads: int
    lengths: list[int]
    _gone: Sequence[int] = ()  # dropped tokens of each row; empty if there are none
    _kept: Tensor | None = None  # int64 (B, K|1, n): positions of the first columns; later ones follow `lengths`

    @property
    def dropped(self) -> list[int]:
        """The number of tokens of each row that are gone: columns + dropped = lengths."""
        return list(self._gone) or [0] * self.batch

    @property
    def columns(self) -> list[int]:
        """The number of keys in `view` that each row attends: its tokens without those that were dropped."""
        return [n - gone for n, gone in zip(self.lengths, self._gone, strict=True)] if self._gone else self.lengths

    def keep(self: DroppingT, indices: Tensor | Sequence[int]) -> DroppingT:
        """Drop all tokens except these; what is left keeps its order, its position, and its rotation.

        Args:
            indices: columns of the cache, as `headwise.statistics` of `view()` counts its keys: (n,) for all rows and
                heads, (B, n) for each row, (B, K, n) for each key-value head. -1 is none, and a column listed twice
                counts once. All heads of a row keep the same number of tokens.

        Raises:
            TypeError: not integers.
            ValueError: a column that a row does not have, heads of a row that keep different numbers, or a cache that
                cannot drop tokens (`RollingCache`, `ShardedCache`); a pool without room for the pages that rows no
                longer share. The cache is unchanged.

        Example:
            >>> import headwise
            >>> from headwise.cache import StaticCache
            >>> q, k, v = torch.randn(3, 1, 2, 9, 4)
            >>> cache = StaticCache(1, 2, 4, capacity=20).append(k, v)
            >>> scores = headwise.statistics(q, k, mask=headwise.causal()).received      # (B, K, S)
            >>> cache = cache.keep(scores.topk(3).indices)                               # each head its own three
            >>> cache.columns, cache.lengths, cache.positions(1).tolist()
            ([3], [9], [9])
        """
        return self._retain(self._listed(indices))

    def drop(self: DroppingT, indices: Tensor | Sequence[int]) -> DroppingT:
        """Drop these tokens and keep all others; see `keep` for the arguments and errors.

        Example:
            >>> from headwise.cache import StaticCache
            >>> cache = StaticCache(1, 2, 4, capacity=20).append(*torch.randn(2, 1, 2, 6, 4)).drop([1, 2])
            >>> cache.column_positions().tolist()
            [[[0, 3, 4, 5]]]
        """
        return self._retain(self._present() & ~self._listed(indices))

    def column_positions(self) -> Tensor:
        """Return the position of each column's token: int64 (B, K or 1, columns) on the CPU, -1 past a row's end.

        The axis of heads is 1 while all heads have the same tokens.
        """
        columns = self.columns
        C = max(columns)
        here = torch.arange(C, device="cpu")
        positions = (here + torch.tensor(self.dropped, device="cpu")[:, None])[:, None]
        if self._kept is not None:
            n = min(C, self._kept.shape[2])
            positions = positions.expand(-1, self._kept.shape[1], -1).clone()
            positions[:, :, :n] = self._kept[:, :, :n]
        return positions.masked_fill(~self._present(), -1)

    # -- for the classes of caches -------------------------------------------------------------------------------------

    def rules(self, T: int, columns: list[int], mask: Mask, device: torch.device) -> Mask:
        """Return the mask of T queries over rows that have so many tokens; see `KVCache`."""
        raise NotImplementedError

    def _compact(self, index: Tensor, counts: list[int]) -> None:
        """Move the tokens at columns `index` (B, K|1, n), ascending, to the front; row b has counts[b] of them."""
        raise ValueError(f"a {type(self).__name__} does not drop tokens by score: use a StaticCache or a PagedCache")

    def _columns_at(self, lengths: Sequence[int]) -> list[int]:
        """Return how many columns are left if the rows are truncated to `lengths`.

        Raises ValueError if the heads of a row would have different numbers.
        """
        if self._kept is None:
            return [have - (n - new) for have, n, new in zip(self.columns, self.lengths, lengths, strict=True)]
        positions = self.column_positions()
        left = ((positions >= 0) & (positions < torch.tensor(lengths, device="cpu")[:, None, None])).sum(-1)
        uneven = (left != left[:, :1]).any(-1).nonzero().flatten().tolist()
        if uneven:
            raise ValueError(
                f"truncate leaves every head of a row the same number of tokens; heads dropped different ones, and row "
                f"{uneven[0]} would have {left[uneven[0]].tolist()} at length {lengths[uneven[0]]}: fork() the "
                "cache before tokens are dropped, and go back to the fork"
            )
        return [int(n) for n in left[:, 0]]

    def _forget_after(self, lengths: Sequence[int]) -> None:
        """Adapt the record of dropped tokens to rows that are truncated to `lengths`."""
        if self._kept is not None:
            self._record(self.column_positions(), self._columns_at(lengths), lengths)

    def _select_rows(self, rows: Sequence[int]) -> None:
        """Adapt the record of dropped tokens to another choice of rows."""
        if self._kept is not None:
            self._gone, self._kept = [self._gone[r] for r in rows], self._kept[list(rows)]

    def _rules_at_columns(self, query: Tensor, T: int, mask: Mask) -> Mask:
        """Return the mask of T queries over the columns, from rules that have their places among all tokens."""
        columns, lengths = self.columns, self.lengths
        # Without a further mask, queries after the last drop attend all earlier columns, and so does a last query.
        if self._kept is None or (not mask.parts and (T == 1 or min(columns) - self._kept.shape[2] >= T)):
            return self.rules(T, columns, mask, query.device)
        rules = self.rules(T, lengths, mask, query.device)
        return mask_at_positions(rules, self.column_positions(), max(lengths), query)

    # -- the record ----------------------------------------------------------------------------------------------------

    def _present(self) -> Tensor:
        """Return which columns are tokens of their row, bool (B, 1, columns)."""
        columns = torch.tensor(self.columns, device="cpu")
        return (torch.arange(int(columns.max()), device="cpu") < columns[:, None])[:, None]

    def _listed(self, indices: Any) -> Tensor:
        """Return which columns are listed, bool (B, K|1, columns)."""
        if not isinstance(indices, Tensor):
            indices = torch.tensor(whole_numbers("indices", indices), dtype=torch.int64, device="cpu")
        check_index(RULE, indices=indices)
        B, K, columns = self.batch, self.num_kv_heads, self.columns
        sizes = tuple(indices.shape[:-1])
        if sizes not in ((), (B,), (B, K), (B, 1), (1, K), (1, 1), (1,)) or indices.ndim == 0 or indices.is_meta:
            raise ValueError(f"indices are {RULE}, with B = {B}, K = {K}; got {describe(indices)}")
        index = indices.to("cpu", torch.int64)
        index = index[None, None] if index.ndim == 1 else index[:, None] if index.ndim == 2 else index
        index = index.expand(B, -1, -1)
        ends = torch.tensor(columns, device="cpu")[:, None, None]
        if index.numel() and bool(((index < -1) | (index >= ends)).any()):
            raise ValueError(
                f"indices are columns 0 <= j < {columns} of each row, or -1 for none; got {int(index.min())} to "
                f"{int(index.max())}"
            )
        listed = torch.zeros(B, index.shape[1], max(columns) + 1, dtype=torch.bool, device="cpu")
        return listed.scatter_(2, index.masked_fill(index < 0, max(columns)), True)[..., :-1]

    def _retain(self: DroppingT, kept: Tensor) -> DroppingT:
        """Keep the columns where `kept` (B, K|1, columns) is True."""
        counts = kept.sum(-1)
        uneven = (counts != counts[:, :1]).any(-1).nonzero().flatten().tolist()
        if uneven:
            raise ValueError(
                f"every head of a row keeps the same number of tokens; row {uneven[0]} would have "
                f"{counts[uneven[0]].tolist()}: list as many columns for each head"
            )
        left = [int(n) for n in counts[:, 0]]
        if left == self.columns:
            return self
        index = (~kept).to(torch.int8).argsort(dim=-1, stable=True)[..., : max(left)]
        positions = self.column_positions()
        if positions.shape[1] != index.shape[1]:
            positions, index = positions.expand(-1, self.num_kv_heads, -1), index.expand(-1, self.num_kv_heads, -1)
        self._compact(index, left)
        self._record(positions.gather(2, index), left, self.lengths)
        return self

    def _record(self, positions: Tensor, columns: list[int], lengths: Sequence[int]) -> None:
        """Set which tokens the first columns are; `positions` (B, K|1, n) is valid up to a row's number of columns."""
        self._gone = [n - have for n, have in zip(lengths, columns, strict=True)]
        if not any(self._gone):
            self._gone, self._kept = (), None
            return
        ends, gone = (torch.tensor(x, device="cpu")[:, None, None] for x in (columns, self._gone))
        here = torch.arange(max(columns), device="cpu")
        self._kept = torch.where(here < ends, positions[:, :, : max(columns)], here + gone)


methods_outside_graphs(Dropping)
