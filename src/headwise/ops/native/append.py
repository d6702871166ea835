"""Append tokens to a cache of codes: one call of the native library quantises keys and values into the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..storage.packed import kernel_rotation
from . import library as native_library
from .library import error_for, raise_unless_refused


class AppendSpan(NamedTuple):
    """A span of tokens of a batch row, and its target in the cache: a row (or page) and a place."""

    row: int
    place: int
    to_row: int
    to_place: int
    tokens: int


def append_codes(
    key: Tensor,
    value: Tensor | None,
    storage: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    spans: Iterable[AppendSpan],
) -> bool:
    """Write spans of key (B, K, T, D) and value (B, K, T, V) as `cache.quantize` would; return False if not possible.

    This needs plain CPU tensors and the native library; otherwise nothing is written; the caller quantises in Python.

    Args:
        key: any float dtype.
        value: None if the values are columns of the keys.
        storage: keys (N, K, L, D) in int8 or packed codes, their scales (N, K, L), values and their scales; they are
            written to.
        spans: no place may occur twice.
    """
    if (
        error_for() is not None
        or not all(x is None or (isinstance(x, Tensor) and x.is_cpu) for x in (key, value, *storage))
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    numbers = [number for span in spans for number in span]
    packed = storage[0].dtype != torch.int8
    rotations = [kernel_rotation(x.shape[3]) if packed and x is not None else None for x in (key, value)]
    try:
        with torch.no_grad():
            native_library.append_codes(key, value, *storage, numbers, *rotations)
    except RuntimeError as error:  # raised before anything is written: unsupported strides, or a tensor subclass
        raise_unless_refused(error)
        return False
    return True
