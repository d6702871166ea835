"""What a cache refuses, and in which words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import KVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)


def check_made(dtype: torch.dtype, shared: bool, **sizes: int | None) -> None:
    """Sizes are positive integers, the dtype is one that is kept."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise TypeError(f"{name} is an int; got {type(size).__name__}")
        if size is not None and size < 1:
            raise ValueError(f"{name} is at least 1; got {size}")
    if dtype not in DTYPES:
        names = ", ".join(str(x).removeprefix("torch.") for x in DTYPES)
        raise ValueError(f"a cache keeps one of {names}; got {dtype}")
    head_dim, value_dim = sizes["head_dim"], sizes["value_dim"]
    if shared and value_dim is not None and head_dim is not None and value_dim > head_dim:
        raise ValueError(f"shared values are columns of the keys: value_dim <= head_dim; got {value_dim} > {head_dim}")


def check_append(
    cache: KVCache, key: Tensor, value: Tensor | None, lengths: Sequence[int] | Tensor | None, side: str
) -> tuple[int, list[int]]:
    """(T, real tokens of each row) of an append that fits."""
    B, K = cache.batch, cache.num_kv_heads
    if (value is None) != cache.shared:
        rule = "shares its values with the keys: append(key)" if cache.shared else "takes append(key, value)"
        raise ValueError(f"this cache {rule}; got {'no value' if value is None else 'a value'}")
    T = key.shape[2] if key.ndim == 4 else -1
    for name, x, width in (("key", key, cache.head_dim), ("value", value, cache.value_dim)):
        if x is None:
            continue
        if tuple(x.shape) != (B, K, T, width):
            raise ValueError(
                f"this cache takes {name} (B, K, T, {'D' if name == 'key' else 'V'}) = ({B}, {K}, T, {width}); got "
                f"{tuple(x.shape)}"
            )
        fits = x.is_floating_point() if cache.dtype == torch.int8 else x.dtype == cache.dtype
        if not fits:
            raise TypeError(
                f"this cache keeps {cache.dtype}; got a {name} of {x.dtype}; convert it, or make the cache with that "
                "dtype"
            )
    if side not in ("right", "left"):
        raise ValueError(f'side is "right" or "left", where the padding lies; got {side!r}')
    if lengths is None:
        return T, [T] * B
    counts = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if len(counts) != B or any(not 0 <= n <= T for n in counts):
        raise ValueError(f"lengths are (B,) = ({B},) numbers from 0 to T = {T}; got {counts}")
    return T, counts


def check_rows(rows: Tensor | Sequence[int], batch: int) -> list[int]:
    """Row numbers of a batch."""
    found = [int(r) for r in (rows.tolist() if isinstance(rows, Tensor) else rows)]
    if not found or any(not 0 <= r < batch for r in found):
        raise ValueError(f"rows are numbers from 0 to {batch - 1}, at least one; got {found}")
    return found


def check_truncate(cache: KVCache, lengths: int | Sequence[int]) -> list[int]:
    """The new length of each row; none may grow."""
    wanted = [lengths] * cache.batch if isinstance(lengths, int) else [int(n) for n in lengths]
    if len(wanted) != cache.batch or any(not 0 <= n <= have for n, have in zip(wanted, cache.lengths, strict=False)):
        raise ValueError(
            f"truncate keeps the first tokens of each row, at most what is there; got {wanted} for lengths "
            f"{cache.lengths}"
        )
    return wanted
