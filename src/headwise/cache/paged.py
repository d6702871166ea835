"""A cache in pages that rows and other caches may share (as in vLLM: Kwon et al. 2023, arXiv 2309.06180)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ..ops.compiled_calls import methods_outside_graphs
from ..ops.native.append import AppendSpan
from ..ops.native.decode_step import CacheStep
from ..ops.storage.layout import in_one_piece
from ..ops.storage.paged import PAGE, Paged
from ..shapes.arguments import check_counts, check_flags, shown
from .base import KVCache, Stored
from .checks import check_cache_sizes, check_rows, check_truncate
from .saved import Saved
from .storage import Store

PagedT = TypeVar("PagedT", bound="PagedCache")


class PagePool(Saved):
    """A pool of pages for keys and values, from which caches take pages and to which they return them.

    Args:
        num_pages: the number of pages.
        num_kv_heads: K.
        head_dim: D of a key.
        value_dim: V of a value; D by default.
        page_size: tokens of a page, a multiple of 128 (default), which is the tile size of the native kernel.
        dtype: float32 (default), bfloat16, float16, float64; or int8, with a scale for each token and head.
        shared: values are the first V columns of the keys (MLA's latent).
        device: of the pages.

    Attributes:
        free: the number of unused pages.
        page_nbytes: bytes of a page.

    Raises:
        TypeError, ValueError: invalid sizes or dtype, or a `page_size` that is not a multiple of 128.

    >>> PagePool(8, 2, 16)
    PagePool(num_pages=8, free=8, page_size=128, num_kv_heads=2, head_dim=16, value_dim=16, dtype=torch.float32)
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        page_size: int = PAGE,
        dtype: torch.dtype = torch.float32,
        shared: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        sizes: dict[str, Any] = {"num_pages": num_pages, "num_kv_heads": num_kv_heads, "page_size": page_size}
        check_cache_sizes(dtype, head_dim, value_dim, shared=shared, device=device, **sizes)
        if page_size % PAGE:
            raise ValueError(f"page_size is a multiple of {PAGE}; got {page_size}")
        self.num_kv_heads, self.head_dim, self.dtype, self.shared = num_kv_heads, head_dim, dtype, shared
        self.value_dim = head_dim if value_dim is None else value_dim
        self.page_size = page_size
        size = (num_pages, num_kv_heads, page_size)
        self.store = Store(size, head_dim, self.value_dim, dtype, shared, device).on_huge_pages()
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """The number of all pages."""
        return len(self._refs)

    @property
    def free(self) -> int:
        """The number of unused pages."""
        return len(self._free)

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page: keys, values and scales."""
        return self.store.nbytes // len(self._refs)

    def require(self, pages: int) -> None:
        """Raise ValueError if fewer than `pages` pages are free."""
        check_counts(pages=pages)
        if pages > self.free:
            raise ValueError(
                f"the pool of {len(self._refs)} pages has {self.free} free, and {pages} are needed: release() or "
                "truncate() caches, or make a larger pool"
            )

    def take(self) -> int:
        """Return a free page with one reference; raise ValueError if none is free."""
        if not self._free:
            self.require(1)
        if len(self._free) == len(self._refs) and self.store.requires_grad:
            self.store = self.store.detached()  # the tokens with gradients are gone, and their graph may be, too
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def hold(self, page: int) -> int:
        """Add one reference to a page and return the page; raise ValueError if it is free."""
        self._check_used(page)
        self._refs[page] += 1
        return page

    def give(self, page: int) -> None:
        """Remove one reference from a page; the page is free when none is left."""
        self._check_used(page)
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return True if a page has more than one reference."""
        return self.holders(page) > 1

    def holders(self, page: int) -> int:
        """Return the references to a page: the number of rows of caches whose table contains it."""
        if type(page) is not int or not 0 <= page < len(self._refs):
            raise ValueError(f"pages of this pool are ints from 0 to {len(self._refs) - 1}; got {shown(page)}")
        return self._refs[page]

    def _check_used(self, page: int) -> None:
        if not self.holders(page):
            raise ValueError(f"page {page} of this pool is free; take() returns a page for use")

    def copy(self, page: int) -> int:
        """Return a new page with the same content, and remove one reference from the shared page."""
        self._check_used(page)
        new = self.take()
        for x in (self.store.key, self.store.value, self.store.key_scale, self.store.value_scale):
            if x is not None:
                x[new] = x[page]
        self.give(page)
        return new

    def __repr__(self) -> str:
        return (
            f"PagePool(num_pages={self.num_pages}, free={self.free}, page_size={self.page_size}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, value_dim={self.value_dim}, "
            f"dtype={self.dtype})"
        )

    def clone(self) -> PagePool:
        """Return another pool with the same pages and references."""
        new = copy(self)
        new.store = self.store.copied()
        new._free, new._refs = list(self._free), list(self._refs)  # a page returned between the two is no harm
        return new

    def grow(self, pages: int) -> None:
        """Add `pages` pages; the existing pages are copied."""
        check_counts(pages=pages)
        have = len(self._refs)
        self.store = self.store.copied(more=pages)
        self._refs += [0] * pages
        self._free[:0] = range(have + pages - 1, have - 1, -1)  # in place: a cache may return pages at any time


methods_outside_graphs(PagePool)


class _Pages(Saved):
    """The pages of a cache's rows; they go back to the pool when no cache uses this object any more."""

    def __init__(self, pool: PagePool, tables: list[list[int]]) -> None:
        self.pool, self.tables = pool, tables

    def give(self) -> None:
        """Return all pages to the pool, each once."""
        tables, self.tables = self.tables, [[] for _ in self.tables]
        for table in tables:
            for page in table:
                self.pool.give(page)

    def clone(self) -> _Pages:
        """Return the same pages in a copy of the pool."""
        return _Pages(self.pool.clone(), [list(table) for table in self.tables])

    def __del__(self) -> None:
        if "tables" in vars(self):  # absent in a copy that failed halfway, such as a copy of keys with a gradient
            self.give()


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
        self._pages = _Pages(pool, [[] for _ in range(batch)])
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

    @property
    @override
    def keys(self) -> Tensor:
        """Keys (B, K, S, D) up to the longest row's end, gathered into a copy."""
        return in_one_piece(self.view()[0], self._input_dtype)

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
            at = self._numbers_on("columns", columns, self.device)
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
            even = len(set(columns)) == 1
            return store.append(key, value, table=table, **self._columns_of_rows(even))
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
        table = self._table_of_rows()
        key, value = self.pool.store.view()
        length = max(self.columns)
        return Paged(key, table, length), Paged(value, table, length)

    @override
    def truncate(self: PagedT, lengths: int | Sequence[int]) -> PagedT:
        wanted = check_truncate(self.lengths, lengths)
        gone = [have - keep for have, keep in zip(self.lengths, wanted, strict=True)]
        for table, at, n in zip(self.tables, self.columns, gone, strict=True):
            while (len(table) - 1) * self.pool.page_size >= at - n and table:
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
        new._pages = _Pages(self.pool, [[self.pool.hold(page) for page in table] for table in self.tables])
        return new

    def release(self: PagedT) -> PagedT:
        """Return all pages to the pool; every row is empty afterwards."""
        self._give_all()
        self.set_lengths([0] * self.batch)
        return self

    def _give_all(self) -> None:
        self._pages.give()
        self._table = None
