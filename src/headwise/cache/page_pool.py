"""The pages of caches: a pool of them, and those that the rows of one cache hold."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..ops.compiled_calls import methods_outside_graphs
from ..ops.storage.paged import PAGE
from ..shapes.arguments import check_counts, shown
from .checks import check_cache_sizes
from .saved import Saved
from .storage import Store


class PagePool(Saved):
    """A pool of pages for keys and values, from which caches take pages and to which they return them.

    Args:
        num_pages: the number of pages.
        num_kv_heads: K.
        head_dim: D of a key.
        value_dim: V of a value; D by default.
        page_size: tokens of a page, a multiple of 128 (default), which is the tile size of the native kernel.
        dtype: float32 (default), bfloat16, float16, float64; or torch.int8, int4 or int3,
            with a scale for each token and head.
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

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """The tensors of keys, values and their scales; None for those that there are not."""
        return self.store.key, self.store.value, self.store.key_scale, self.store.value_scale

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
        for x in self.parts:
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


class Pages(Saved):
    """The pages of a cache's rows; they go back to the pool when no cache uses this object any more."""

    def __init__(self, pool: PagePool, tables: list[list[int]]) -> None:
        self.pool, self.tables = pool, tables

    def give(self) -> None:
        """Return all pages to the pool, each once."""
        tables, self.tables = self.tables, [[] for _ in self.tables]
        for table in tables:
            for page in table:
                self.pool.give(page)

    def clone(self) -> Pages:
        """Return the same pages in a copy of the pool."""
        return Pages(self.pool.clone(), [list(table) for table in self.tables])

    def __del__(self) -> None:
        if "tables" in vars(self):  # absent in a copy that failed halfway, such as a copy of keys with a gradient
            self.give()
