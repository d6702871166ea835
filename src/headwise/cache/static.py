"""A cache of fixed capacity: one tensor for keys and one for values, allocated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ..ops.masks.mask import Mask
from ..ops.native.append import AppendSpan
from ..ops.native.decode_step import CacheStep
from ..ops.storage.packed import BITS
from .base import KVCache, Stored
from .checks import check_cache_sizes, check_rows, check_truncate
from .huge_pages import HUGE
from .storage import Store

StaticT = TypeVar("StaticT", bound="StaticCache")


class StaticCache(KVCache):
    """Keys and values of up to `capacity` tokens for each row, in tensors that are allocated once.

    Args:
        batch: rows B.
        num_kv_heads: K.
        head_dim: D of a key.
        value_dim: V of a value; D by default.
        capacity: the number of tokens for which a row has room.
        dtype: float32 (default), bfloat16, float16, float64; or torch.int8, int4 or int3,
            with a scale for each token and head.
        shared: values are the first V columns of the keys (MLA's latent).
        causal: False for cross-attention, whose keys and values are appended once.
        device: of its tensors.

    Raises:
        TypeError, ValueError: invalid sizes or dtype.

    Example:
        >>> import torch, headwise
        >>> from headwise.cache import StaticCache
        >>> cache = StaticCache(1, 2, 16, capacity=100)
        >>> prompt = torch.randn(3, 1, 2, 5, 16)                                  # query, key, value of 5 tokens
        >>> headwise.attention(prompt[0], cache.append(prompt[1], prompt[2])).shape
        torch.Size([1, 2, 5, 16])
        >>> step = torch.randn(3, 1, 2, 1, 16)
        >>> headwise.attention(step[0], cache.append(step[1], step[2])).shape
        torch.Size([1, 2, 1, 16])
        >>> cache.length, cache.truncate(5).length, cache.nbytes                  # 2 x 2 heads x 100 x 16 x 4 bytes
        (6, 5, 25600)
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        shared: bool = False,
        causal: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        sizes: dict[str, Any] = {"batch": batch, "num_kv_heads": num_kv_heads, "capacity": capacity}
        check_cache_sizes(dtype, head_dim, value_dim, shared=shared, causal=causal, device=device, **sizes)
        super().__init__(batch, num_kv_heads, head_dim, value_dim, dtype, shared=shared, causal=causal)
        self.capacity = capacity
        self._store = Store((batch, num_kv_heads, capacity), head_dim, self.value_dim, dtype, shared, device)
        # Each head has its own part of the store, which may never be filled. So huge pages are requested when its keys
        # fill half of this part, or half of a huge page.
        self._small: int | None = min(capacity, HUGE // (head_dim * dtype.itemsize)) // 2
        self._is_saved = False  # True if a gradient may need the tensors; then the next append writes to a copy

    @property
    @override
    def nbytes(self) -> int:
        return self._store.nbytes

    @property
    @override
    def device(self) -> torch.device:
        return self._store.key.device

    @override
    def _attend(self, query: Tensor, mask: Mask | Tensor | None, options: dict[str, Any]) -> Any:
        saved = self._is_saved
        result = super()._attend(query, mask, options)
        out = result[0] if isinstance(result, tuple) else result
        self._is_saved = saved or (out.requires_grad and self.dtype not in BITS)  # codes are dequantised to a copy
        return result

    def _spare_saved(self) -> None:
        """Continue with a copy if a gradient needs the tensors; an empty cache gets new tensors."""
        longest = max(self.columns)
        if self._is_saved or (longest == 0 and self._store.requires_grad):
            self._store, self._is_saved = self._store.continued(longest), False

    @override
    def _make_room(self, counts: list[int]) -> None:
        ends = [have + n for have, n in zip(self.columns, counts, strict=True)]
        if max(ends) > self.capacity:
            raise ValueError(
                f"a StaticCache of capacity {self.capacity} has no room for {max(ends)} tokens: make it larger, "
                "truncate() it, drop() tokens, or take a RollingCache (window) or a PagedCache"
            )
        self._widen(max(ends))

    def _widen(self, length: int) -> None:
        """Request huge pages for the store if `length` tokens are enough to use them."""
        if self._small is not None and length >= self._small:
            self._store.on_huge_pages()
            self._small = None

    @override
    def _write(self, key: Tensor, value: Tensor | None, counts: list[int], starts: list[int]) -> None:
        self._spare_saved()
        columns = self.columns
        spans = (
            AppendSpan(b, start, b, at, n) for b, (at, n, start) in enumerate(zip(columns, counts, starts, strict=True))
        )
        if self._store.quantize(key, value, spans):
            return
        whole, on_gpu = all(n == key.shape[2] for n in counts), self.device.type == "cuda"
        if whole and on_gpu and self._store.append(key, value, **self._columns_of_rows(columns, self.device)):
            return
        if whole and len(set(columns)) == 1:
            self._store.put((slice(None), slice(None), slice(columns[0], columns[0] + counts[0])), key, value)
            return
        for b, (at, n, start) in enumerate(zip(columns, counts, starts, strict=True)):
            rows, tokens = slice(b, b + 1), slice(start, start + n)
            x, y = key[rows, :, tokens], None if value is None else value[rows, :, tokens]
            if not self._store.append(x, y, column=at, row=b):
                self._store.put((rows, slice(None), slice(at, at + n)), x, y)

    @override
    def _has_room(self) -> bool:
        return max(self.columns) < self.capacity

    @override
    def _reserve_step(self) -> CacheStep:
        self._widen(max(self.columns) + 1)
        self._spare_saved()
        return self._storage()

    @override
    def _storage(self) -> CacheStep:
        columns = self.columns
        return self._store.storage(None, columns[:1] if min(columns) == max(columns) else columns)

    @override
    def view(self) -> tuple[Stored, Stored]:
        self._is_saved = self._is_saved or (torch.is_grad_enabled() and self._store.requires_grad)
        return self._store.view(max(self.columns))

    def view_on_demand(self) -> Callable[[], tuple[Stored, Stored]]:
        """Return a function that makes what `view` returns now, after later tokens too."""
        return partial(self._store.view, max(self.columns))

    @override
    def _compact(self, index: Tensor, counts: list[int]) -> None:
        self._spare_saved()
        self._store.compact(index)

    @override
    def truncate(self: StaticT, lengths: int | Sequence[int]) -> StaticT:
        self.set_lengths(check_truncate(self.lengths, lengths))
        return self

    @override
    def reorder(self: StaticT, rows: Tensor | Sequence[int]) -> StaticT:
        wanted = check_rows(rows, self.batch)
        if wanted != list(range(self.batch)):
            self._store = self._store.copied(wanted)
        self.set_rows(wanted)
        return self

    @override
    def fork(self: StaticT) -> StaticT:
        new = copy(self)
        new._store = self._store.copied()
        return new
