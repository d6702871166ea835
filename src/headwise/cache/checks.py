"""Argument checks of caches and their error messages. Every check runs before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.sharding.heads import refuse_dtensors
from ..ops.storage.packed import BITS
from ..shapes import DTYPES, describe
from ..shapes.arguments import (
    check_counts,
    check_dense,
    check_device,
    check_dtype,
    check_flags,
    check_tensor,
    shown,
    whole_numbers,
)
from .quantize import check_bits, check_learns_nothing

OWN_HEADS = "; headwise.parallel.tensor_parallel(module, mesh) gives each process a cache of its own heads"
NO_GRADIENT_IN_INT8 = "decode within torch.no_grad(), append .detach(), or train with a cache of a float dtype"


def check_cache_sizes(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int | None,
    *,
    shared: bool,
    causal: bool = True,
    device: Any = None,
    **sizes: int,
) -> None:
    """Check that sizes are positive integers, and the dtype is supported."""
    check_counts(1, head_dim=head_dim, value_dim=head_dim if value_dim is None else value_dim, **sizes)
    check_flags(shared=shared, causal=causal)
    check_dtype(dtype, (*DTYPES, *BITS))
    check_device(device)
    if 0 < BITS.get(dtype, 0) < 8:
        check_bits(BITS[dtype], head_dim=head_dim, value_dim=head_dim if value_dim is None else value_dim)
        if shared:
            raise ValueError(
                f"shared values are columns of the keys, and {dtype} rotates keys as a whole; use torch.int8 or a "
                "float dtype"
            )
    if shared and value_dim is not None and value_dim > head_dim:
        raise ValueError(f"shared values are columns of the keys: value_dim <= head_dim; got {value_dim} > {head_dim}")


def check_rows(rows: Tensor | Sequence[int], batch: int) -> list[int]:
    """Return the row numbers as ints after a check that they are rows of the batch."""
    numbers = whole_numbers("rows", rows)
    if not numbers or any(not 0 <= r < batch for r in numbers):
        raise ValueError(f"rows are numbers from 0 to {batch - 1}, at least one; got {numbers}")
    return numbers


def check_truncate(before: list[int], lengths: int | Sequence[int]) -> list[int]:
    """Return the new length of each row after a check that it is at most the number of tokens `before`."""
    wanted = whole_numbers("lengths", [lengths] * len(before) if isinstance(lengths, int) else lengths)
    if len(wanted) != len(before) or any(not 0 <= n <= have for n, have in zip(wanted, before, strict=False)):
        raise ValueError(
            f"truncate keeps the first tokens of each row, at most what is there; got {wanted} for lengths {before}"
        )
    return wanted


def check_append(
    cache: Any, key: Tensor, value: Tensor | None, lengths: Sequence[int] | Tensor | None, side: str
) -> tuple[int, list[int]]:
    """Check an append, and return (T, real tokens of each row)."""
    B, K, device, stored = cache.batch, cache.num_kv_heads, cache.device, cache.dtype
    if (value is None) != cache.shared:
        rule = "shares its values with the keys: append(key)" if cache.shared else "takes append(key, value)"
        raise ValueError(f"this cache {rule}; got {'no value' if value is None else 'a value'}")
    T = -1
    both: tuple[tuple[str, Any, int], ...] = ("key", key, cache.head_dim), ("value", value, cache.value_dim)
    for name, x, width in both:
        if x is None and name == "value":
            break
        if type(x) is Tensor:
            check_dense(name, x)
        else:
            check_tensor(name, x, f"a tensor (B, K, T, n) of {stored}")
            refuse_dtensors("a cache stores plain tensors", OWN_HEADS, **{name: x})
        T = x.shape[2] if x.ndim == 4 and name == "key" else T
        if x.shape != (B, K, T, width):
            raise ValueError(
                f"this cache takes {name} (B, K, T, {'D' if name == 'key' else 'V'}) = ({B}, {K}, T, {width}); got "
                f"{tuple(x.shape)}"
            )
        if x.dtype != stored and not (stored in BITS and x.dtype in DTYPES):
            raise TypeError(
                f"this cache stores {stored}; got a {name} of {x.dtype}; convert it, or make the cache with that dtype"
            )
        if x.device != device:
            raise ValueError(f"this cache is on {device}; got a {name} {describe(x)}; move it with .to(cache.device)")
        if stored in BITS:
            check_learns_nothing(f"a {name}", x, NO_GRADIENT_IN_INT8)
    if not isinstance(side, str) or side not in ("right", "left"):
        raise ValueError(f'side is "right" or "left", the side of the padding; got {shown(side)}')
    if lengths is None:
        return T, [T] * B
    counts = whole_numbers("lengths", lengths)
    if len(counts) != B or any(not 0 <= n <= T for n in counts):
        raise ValueError(f"lengths are (B,) = ({B},) numbers from 0 to T = {T}; got {counts}")
    return T, counts
