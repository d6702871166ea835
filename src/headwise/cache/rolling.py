"""A cache of the last tokens only: its memory is constant for texts of any length."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ..ops.masks.constructors import window
from ..ops.masks.mask import Mask
from ..ops.native.decode_step import CacheStep
from ..ops.storage.paged import PAGE
from ..shapes.arguments import check_counts
from .checks import check_rows, check_truncate
from .page_pool import PagePool
from .paged import PagedCache

RollingT = TypeVar("RollingT", bound="RollingCache")


class RollingCache(PagedCache):
    """Keys and values of the last `window` tokens of each row, and of its `first` tokens.

    Queries attend at most `window` keys, including their own, and also the `first` keys of the row, as attention sinks
    (Xiao et al. 2023, arXiv 2309.17453). Pages whose tokens no later query attends are reused.

    Args:
        batch: rows B.
        num_kv_heads: K.
        head_dim: D of a key.
        value_dim: V of a value; D by default.
        window: the number of keys that a query attends, including its own.
        first: the number of tokens at the beginning that stay visible.
        chunk: the most tokens of one append; a longer prompt is appended in chunks.
        dtype: float32 (default), bfloat16, float16, float64; or torch.int8, int4 or int3,
            with a scale for each token and head.
        shared: values are the first V columns of the keys (MLA's latent).
        device: of its pages.

    Raises:
        TypeError, ValueError: invalid sizes or dtype. `append`: more than `chunk` tokens; `truncate`: a length whose
            window is no longer stored (see `remember`).

    Example:
        >>> import torch, headwise
        >>> from headwise.cache import RollingCache
        >>> cache = RollingCache(1, 2, 16, window=100, first=4)
        >>> before = cache.nbytes
        >>> for x in torch.randn(1, 2, 1000, 16).split(128, dim=2):
        ...     out = headwise.attention(x, cache.append(x, x))
        >>> cache.length, cache.nbytes == before
        (1000, True)
    """

    chunk: int
    keys = None  # not all tokens are stored, so column j is not position j

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        window: int,
        first: int = 0,
        chunk: int = PAGE,
        dtype: torch.dtype = torch.float32,
        shared: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        check_counts(1, batch=batch, window=window, chunk=chunk)
        check_counts(first=first)
        self.window, self.first, self.chunk, self._remembered = window, first, chunk, 0
        pages = batch * self._pages_of_row
        pool = PagePool(pages, num_kv_heads, head_dim, value_dim, dtype=dtype, shared=shared, device=device)
        super().__init__(pool, batch)
        self._dropped = [0] * batch  # number of pages that each row has returned

    @property
    @override
    def nbytes(self) -> int:
        return self.pool.store.nbytes

    @property
    def dropped(self) -> list[int]:
        """The number of tokens of each row that are gone, between the first tokens and the last ones."""
        return [pages * PAGE for pages in self._dropped]

    @property
    def _pages_of_row(self) -> int:
        """Pages for the first tokens, the keys of a chunk's first query, the chunk, and older tokens of a page."""
        return -(-self.first // PAGE) + -(-(self.window - 1 + self._remembered + self.chunk + PAGE - 1) // PAGE)

    def remember(self: RollingT, tokens: int) -> RollingT:
        """Keep `tokens` more tokens than a query attends: `truncate` can remove that many, over several appends.

        >>> x = torch.randn(1, 1, 50, 8)
        >>> cache = RollingCache(1, 1, 8, window=10).remember(200)
        >>> for _ in range(10):
        ...     cache = cache.append(x, x)
        >>> cache.truncate(300).length
        300

        Raises TypeError for a number that is not an int, and ValueError for a negative one.
        """
        check_counts(tokens=tokens)
        self._remembered = tokens
        self._grow(self.batch)
        return self

    def settle(self: RollingT) -> RollingT:
        """Release pages that no later token attends. `append` does this first; earlier queries become invalid."""
        for b in range(self.batch):
            self._drop(b)
        return self

    def _grow(self, batch: int) -> None:
        lacking = batch * self._pages_of_row - self.pool.num_pages
        if lacking > 0:
            self.pool.grow(lacking)

    @property
    @override
    def columns(self) -> list[int]:
        return [n - dropped * PAGE for n, dropped in zip(self._lengths, self._dropped, strict=True)]

    @override
    def _rule(self, offset: Tensor | None) -> Mask:
        return window(self.window, offset=offset, first=self.first)

    @override
    def _reserve_step(self) -> CacheStep:
        return super()._reserve_step()  # repeated here, because `takes_steps` looks for it only in the class itself

    @override
    def _has_room(self) -> bool:
        return True  # the pool has all pages that its rows can need

    @override
    def _sight(self) -> tuple[int | None, int]:
        return self.window, self.first

    @override
    def _make_room(self, counts: list[int]) -> None:
        if max(counts) > self.chunk:
            raise ValueError(
                f"this RollingCache takes at most chunk = {self.chunk} tokens at a time, because each may attend the "
                f"{self.window} before it; got {max(counts)}: append and attend in smaller pieces, or make it with a "
                "larger chunk"
            )

    @override
    def _prepare(self, b: int, count: int) -> None:
        if count:
            self._drop(b)
        super()._prepare(b, count)

    def _drop(self, b: int) -> None:
        table, kept = self.tables[b], -(-self.first // PAGE)
        # The next query, at position lengths[b], attends window - 1 tokens before it.
        last = self.lengths[b] - self.window + 1 - self._remembered
        while len(table) > kept and (self._dropped[b] + kept + 1) * PAGE <= last:
            self.pool.give(table.pop(kept))
            self._dropped[b] += 1
            self._table = None

    @override
    def column_positions(self) -> Tensor:
        here, kept = torch.arange(max(self.columns), device="cpu"), -(-self.first // PAGE) * PAGE
        positions = here + torch.tensor(self.dropped, device="cpu")[:, None] * (here >= kept)
        return positions[:, None].masked_fill(~self._present(), -1)

    @override
    def _compact(self, index: Tensor, counts: list[int]) -> None:
        raise ValueError(
            f"a RollingCache drops tokens by its window of {self.window} alone, and not by score: use a StaticCache or "
            "a PagedCache"
        )

    @override
    def _columns_at(self, lengths: Sequence[int]) -> list[int]:
        return [n - gone for n, gone in zip(lengths, self.dropped, strict=True)]

    @override
    def truncate(self: RollingT, lengths: int | Sequence[int]) -> RollingT:
        kept, wanted = -(-self.first // PAGE) * PAGE, check_truncate(self.lengths, lengths)
        for n, have, dropped in zip(wanted, self.lengths, self._dropped, strict=True):
            if dropped and n < have and n - self.window + 1 < kept + dropped * PAGE:
                raise ValueError(
                    f"a RollingCache cannot go back to {n} tokens: some of the {self.window} keys of the next query "
                    f"are gone; the shortest length left is {kept + dropped * PAGE + self.window - 1}"
                )
        return super().truncate(wanted)

    @override
    def reorder(self: RollingT, rows: Tensor | Sequence[int]) -> RollingT:
        wanted = check_rows(rows, self.batch)
        self._grow(len(wanted))
        self._dropped = [self._dropped[r] for r in wanted]
        return super().reorder(wanted)

    @override
    def fork(self: RollingT) -> RollingT:
        new = copy(self)
        new._dropped = list(self._dropped)
        new._pages = self._pages.clone()
        return new

    @override
    def release(self: RollingT) -> RollingT:
        self._dropped = [0] * self.batch
        return super().release()
