"""Keys and values that are more than two tensors: quantised, in pages, or in a cache object."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...shapes import check_quantized
from ...shapes.arguments import check_tensor
from .paged import Paged, check_pages, gathered
from .quantized import Quantized


@runtime_checkable
class Cache(Protocol):
    """A cache that is passed as key: it has the keys and values of all tokens so far, as in `headwise.cache`."""

    def attend(self, query: Tensor, *, mask: Any = None, **options: Any) -> Any:
        """Return attention (B, H, T, V) of query (B, H, T, D), which belongs to the last T appended tokens."""


class StorageLayout(NamedTuple):
    """The storage of key and value if they are not plain (B, K, S, n) tensors in the query's dtype."""

    key_scale: Tensor | None  # float32 (B, K, S) if quantised; in pages (P, K, size)
    value_scale: Tensor | None
    table: Tensor | None  # int64 (B, N), the pages of each row
    length: int  # S, if there is a table
    bits: int = 8  # of a quantised element

    def check(self, key: Any, value: Any) -> None:
        """Raise TypeError or ValueError if the tensors of key and value do not fit one another."""
        for name, x, scale in (("key", key, self.key_scale), ("value", value, self.value_scale)):
            if scale is not None:
                check_quantized(name, x, scale, self.bits)
            elif self.table is not None:
                check_tensor(f"the pages of the {name}", x)
            if self.table is not None:
                check_pages(name, x, self.table, self.length)
        if self.table is not None and key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"key and value have the same pages (P, K, size): key {tuple(key.shape)}, value {tuple(value.shape)}"
            )

    def shown(self, x: Tensor) -> Tensor:
        """Return a tensor with the sizes (B, K, S, n) that x represents; its data has no meaning."""
        if self.table is None and self.bits == 8:
            return x
        B, S = (x.shape[0], x.shape[2]) if self.table is None else (self.table.shape[0], self.length)
        return x.detach().as_strided((B, x.shape[1], S, self.width(x)), (0, 0, 0, 0))

    def width(self, x: Tensor) -> int:
        """Return n of the keys or values (B, K, S, n) that x represents."""
        return x.shape[3] * 8 // self.bits

    def plain(self, key: Tensor, value: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return copies of key and value (B, K, S, n), in the dtype `wide` if they were quantised."""
        out = []
        for x, scale in ((key, self.key_scale), (value, self.value_scale)):
            x = self._laid_out(x)
            out.append(x if scale is None else Quantized(x, self._laid_out(scale), self.bits).dequantize(wide))
        return out[0], out[1]

    def _laid_out(self, x: Tensor) -> Tensor:
        return x if self.table is None else gathered(x, self.table, self.length)


def parts_of(key: Any, value: Any) -> tuple[Any, Any, StorageLayout | None]:
    """Return key and value as tensors, and their layout if they are quantised or in pages.

    Raises TypeError if only one of them is quantised or in pages.
    """
    if type(key) is type(value) is Tensor:
        return key, value, None
    table, length = None, 0
    if isinstance(key, Paged) and isinstance(value, Paged):
        same = key.length is value.length or key.length == value.length
        if key.table is not value.table or not same:
            raise ValueError("key and value in pages share their table and length; give both the same")
        table, length = key.table, key.length
        key, value = key.pages, value.pages
    if isinstance(key, Quantized) and isinstance(value, Quantized):
        if key.bits != value.bits:
            raise ValueError(f"key and value have one number of bits; got {key.bits!r} and {value.bits!r}")
        return key.data, value.data, StorageLayout(key.scale, value.scale, table, length, key.bits)
    for x, name, others in ((key, "key", "value"), (value, "value", "key")):
        if isinstance(x, Quantized):
            raise TypeError(
                f"key and value are both quantised or neither; {name} is Quantized, {others} is not: "
                f"use headwise.cache.quantize({others}), or {name}.dequantize()"
            )
    if isinstance(key, Paged) or isinstance(value, Paged):
        raise TypeError("key and value are both in pages or neither; call .dense() of the one in pages")
    return key, value, None if table is None else StorageLayout(None, None, table, length)


def in_one_piece(x: Tensor | Quantized | Paged, dtype: torch.dtype) -> Tensor:
    """Return keys or values (B, K, S, n) as a tensor; quantised or paged ones are copied, quantised to this dtype."""
    x = x.dense() if isinstance(x, Paged) else x
    return x.dequantize(dtype) if isinstance(x, Quantized) else x
