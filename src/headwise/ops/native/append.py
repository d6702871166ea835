"""New tokens into a cache in int8: one call of the native library quantises keys and values where they will lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import library as native_library
from .library import error_for, raise_unless_refused


class Span(NamedTuple):
    """So many tokens of a batch row from a place on, and the row (or page) and the place of the cache where they go."""

    row: int
    place: int
    to_row: int
    to_place: int
    tokens: int


def append_int8(
    key: Tensor,
    value: Tensor | None,
    storage: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    spans: Iterable[Span],
) -> bool:
    """Writes spans of key (B, K, T, D) and value (B, K, T, V) as `cache.quantize` makes them. False: writes nothing.

    It is for the CPU's plain tensors and where there is a native library; else the caller quantises in Python.

    Args:
        key: in any float dtype.
        value: None where values are columns of the keys.
        storage: int8 keys (N, K, L, D), their scales (N, K, L), values and their scales, which are written to.
        spans: no place twice.
    """
    if (
        error_for() is not None
        or not all(x is None or (isinstance(x, Tensor) and x.is_cpu) for x in (key, value, *storage))
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    numbers = [number for span in spans for number in span]
    try:
        with torch.no_grad():
            native_library.append_int8(key, value, *storage, numbers)
    except RuntimeError as error:  # it refuses before it writes: memory that lies oddly, a subclass of tensors
        raise_unless_refused(error)
        return False
    return True
