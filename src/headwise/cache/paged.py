"""A cache in pages that rows and other caches may share (as in vLLM: Kwon et al. 2023, arXiv 2309.06180)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ..ops.native.append import AppendSpan
from ..ops.native.decode_step import CacheStep
from ..ops.storage.paged import Paged, gathered
from ..shapes.arguments import check_counts, check_flags, shown
from .base import KVCache, Stored
from .checks import check_rows, check_truncate
from .page_pool import PagePool, Pages
from .storage import Store, taken

PagedT = TypeVar("PagedT", bound="PagedCache")


class PagedCache(KVCache):
    """Rows of different length in pages of a pool; pages with the same beginning are shared until written to.

    The pages go back to the pool when the cache is deleted; `release` returns them immediately.

    Args:
        pool: the pages; many caches may use one pool.
        batch: rows B.
        causal: False for cross-attention.

    Raises:
        TypeError, ValueError: not a pool, or an invalid number of rows. `append`: the pool has too few free pages.

    Example:
        >>> import torch, headwise
        >>> from headwise.cache import PagedCache, PagePool
        >>> pool = PagePool(8, 2, 16)
        >>> q, k, v = torch.randn(3, 1, 2, 200, 16)
        >>> prompt = PagedCache(pool, 1).append(k, v)
        >>> headwise.attention(q, prompt).shape, pool.free
        (torch.Size([1, 2, 200, 16]), 6)
        >>> three = prompt.fork().reorder([0, 0, 0])                     # three rows that share the prompt's pages
        >>> pool.free
        6
        >>> three = three.append(torch.randn(3, 2, 1, 16), torch.randn(3, 2, 1, 16))
        >>> pool.free, three.release().length, pool.free                 # each wrote to a page of its own
        (3, 0, 6)
    """

    def __init__(self, pool: PagePool, batch: int, *, causal: bool = True) -> None:
        if not isinstance(pool, PagePool):
            raise TypeError(f"pool is a headwise.cache.PagePool; got {shown(pool)}")
        check_counts(1, batch=batch)
        check_flags(causal=causal)
        super().__init__(
            batch, pool.num_kv_heads, pool.head_dim, pool.value_dim, pool.dtype, shared=pool.shared, causal=causal
        )
        self._pages = Pages(pool, [[] for _ in range(batch)])
        self._table: Tensor | None = None  # the tables in the form of the kernel, until one changes

    @property
    def pool(self) -> PagePool:
        """The pool that contains its pages."""
        return self._pages.pool

    @property
    def tables(self) -> list[list[int]]:
        """The page numbers of each row."""
        return self._pages.tables

    @property
    @override
    def nbytes(self) -> int:
        return len({page for table in self.tables for page in table}) * self.pool.page_nbytes

    @property
    @override
    def device(self) -> torch.device:
        return self.pool.store.key.device

    @override
    def _make_room(self, counts: list[int]) -> None:
        lacking = sum(self._lacking(b, n) for b, n in enumerate(counts))
        # If all rows that hold a page continue to write to it, the last one needs no copy after the others have theirs.
        at, size = self.columns, self.pool.page_size
        writers = Counter(table[at[b] // size] for b, table in enumerate(self.tables) if counts[b] and at[b] % size)
        self.pool.require(lacking - sum(n > 1 and self.pool.holders(page) == n for page, n in writers.items()))

    def _lacking(self, b: int, count: int) -> int:
        """Return the number of pages that row b must take before `count` more tokens can be written."""
        if count == 0:
            return 0
        at, size, table = self.columns[b], self.pool.page_size, self.tables[b]
        return -(-(at + count) // size) - len(table) + bool(at % size and self.pool.is_shared(table[at // size]))

    def _prepare(self, b: int, count: int) -> None:
        """Take the pages that row b lacks, and replace a shared page by a copy if the row continues to write to it."""
        at, size, table = self.columns[b], self.pool.page_size, self.tables[b]
        if count and at % size and self.pool.is_shared(table[at // size]):
            table[at // size], self._table = self.pool.copy(table[at // size]), None
        while len(table) * size < at + count:
            table.append(self.pool.take())
            self._table = None

    @override
    def _write(self, key: Tensor, value: Tensor | None, counts: list[int], starts: list[int]) -> None:
        for b, count in enumerate(counts):
            self._prepare(b, count)
        size, store, columns = self.pool.page_size, self.pool.store, self.columns
        if store.quantize(key, value, self._spans(counts, starts)):
            return
        if self.device.type == "cuda" and self._append_on_device(key, value, counts, starts):
            return
        if self.batch > 1 and key.shape[2] == 1 and all(n == 1 for n in counts):
            at = self._numbers_on("first columns", columns, self.device)
            pages = self._table_of_rows().gather(1, (at // size)[:, None])[:, 0]
            where = pages, slice(None), at % size
            store.put(where, key[:, :, 0], None if value is None else value[:, :, 0])
            return
        for b, start, page, first, n in self._spans(counts, starts):
            part = (b, slice(None), slice(start, start + n))
            store.put((page, slice(None), slice(first, first + n)), key[part], None if value is None else value[part])

    def _append_on_device(self, key: Tensor, value: Tensor | None, counts: list[int], starts: list[int]) -> bool:
        """Write the tokens in one launch, or with padding in one for each row; False if that is not possible."""
        store, columns, table = self.pool.store, self.columns, self._table_of_rows()
        if all(n == key.shape[2] for n in counts):
            return store.append(key, value, table=table, **self._columns_of_rows(columns, self.device))
        for b, (at, count, start) in enumerate(zip(columns, counts, starts, strict=True)):
            rows, tokens = slice(b, b + 1), slice(start, start + count)
            x, y = key[rows, :, tokens], None if value is None else value[rows, :, tokens]
            if not store.append(x, y, table=table, column=at, row=b):
                return False
        return True

    def _spans(self, counts: list[int], starts: list[int]) -> Iterator[AppendSpan]:
        """Yield the places of new tokens, page by page, at the end of each row."""
        size = self.pool.page_size
        for b, (at, count, start) in enumerate(zip(self.columns, counts, starts, strict=True)):
            done = 0
            while done < count:
                page, first = self.tables[b][(at + done) // size], (at + done) % size
                n = min(size - first, count - done)
                yield AppendSpan(b, start + done, page, first, n)
                done += n

    @override
    def _has_room(self) -> bool:
        return sum(self._lacking(b, 1) for b in range(self.batch)) <= self.pool.free

    @override
    def _reserve_step(self) -> CacheStep:
        for b in range(self.batch):
            self._prepare(b, 1)
        return self._storage()

    @override
    def _storage(self) -> CacheStep:
        columns = self.columns
        return self.pool.store.storage(self._table_of_rows(), columns[:1] if len(set(columns)) == 1 else columns)

    def _table_of_rows(self) -> Tensor:
        """Return the pages of each row, int64 (B, N) on the pages' device; the tensor is kept until a table changes."""
        if self._table is None:
            widest = max(len(table) for table in self.tables)
            rows = [table + [0] * (widest - len(table)) for table in self.tables]
            self._table = torch.tensor(rows, dtype=torch.int64, device=self.device)
        return self._table

    @override
    def view(self) -> tuple[Stored, Stored]:
        return self.view_on_demand()()

    def view_on_demand(self) -> Callable[[], tuple[Stored, Stored]]:
        """Return a function that makes what `view` returns now, after later tokens too."""
        return partial(_paged_view, self.pool.store, self._table_of_rows(), max(self.columns))

    @override
    def _compact(self, index: Tensor, counts: list[int]) -> None:
        size, pool, rows = self.pool.page_size, self.pool, range(self.batch)
        same = [_unmoved(index[b, :, : counts[b]]) // size for b in rows]  # pages that stay as they are
        needed = [-(-counts[b] // size) - same[b] for b in rows]
        given = Counter(page for b in rows for page in self.tables[b][same[b] :])
        pool.require(max(sum(needed) - sum(pool.holders(page) == n for page, n in given.items()), 0))
        moved = [self._taken(b, index[b : b + 1, :, same[b] * size : counts[b]]) for b in rows]
        for b in rows:
            while len(self.tables[b]) > same[b]:
                pool.give(self.tables[b].pop())
        for b in rows:
            for first in range(0, needed[b] * size, size):
                page = pool.take()
                self.tables[b].append(page)
                for x, part in moved[b]:
                    some = part[:, first : first + size]
                    x[page, :, : some.shape[1]] = some
        self._table = None

    def _taken(self, b: int, index: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor of the pool with a copy of the tokens of row b at columns `index` (1, K|1, n)."""
        table = torch.tensor(self.tables[b : b + 1], dtype=torch.int64, device=self.device)
        parts = [x for x in self.pool.parts if x is not None]
        return [(x, taken(gathered(x, table, self.columns[b]), index)[0]) for x in parts]

    @override
    def truncate(self: PagedT, lengths: int | Sequence[int]) -> PagedT:
        wanted = check_truncate(self.lengths, lengths)
        for table, left in zip(self.tables, self._columns_at(wanted), strict=True):
            while (len(table) - 1) * self.pool.page_size >= left and table:
                self.pool.give(table.pop())
                self._table = None
        self.set_lengths(wanted)
        return self

    @override
    def reorder(self: PagedT, rows: Tensor | Sequence[int]) -> PagedT:
        wanted = check_rows(rows, self.batch)
        tables = [[self.pool.hold(page) for page in self.tables[r]] for r in wanted]
        self._give_all()
        self._pages.tables = tables
        self.set_rows(wanted)
        return self

    @override
    def fork(self: PagedT) -> PagedT:
        new = copy(self)
        new._pages = Pages(self.pool, [[self.pool.hold(page) for page in table] for table in self.tables])
        return new

    def release(self: PagedT) -> PagedT:
        """Return all pages to the pool; every row is empty afterwards."""
        self._give_all()
        self.set_lengths([0] * self.batch)
        return self

    def _give_all(self) -> None:
        self._pages.give()
        self._table = None


def _unmoved(index: Tensor) -> int:
    """Return how many first tokens of a row stay in their places, for `index` (K|1, n)."""
    there = (index == torch.arange(index.shape[1], device=index.device)).all(0)
    return int(there.long().cumprod(0).sum())


def _paged_view(store: Store, table: Tensor, length: int) -> tuple[Stored, Stored]:
    key, value = store.view()
    return Paged(key, table, length), Paged(value, table, length)
