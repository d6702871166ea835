"""The decode step of one layer in one call of the native kernel: rotate, append to the cache, attend.

Output and cache have the same bits as separate calls of `Rotary` (or a model's own rotation), `append` and `attend`;
with codes of 4 or 3 bits the output is the same within rounding, because the kernel rotates in another order of sums
and rounds outputs once, after they are rotated back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ...shapes.arguments import FAR
from ..options import ScoreOptions
from . import library as native_library
from .library import raise_unless_refused
from .mask_arguments import UnsupportedMask, lowered


class RotaryStep(NamedTuple):
    """The rotary position embedding of queries and keys in a decode step.

    Attributes:
        cos: (n,), (B, n) or (B, 1, n) with n = `size` (one angle per number) or half of it (one per pair). In float32
            a product is rounded once, at the end; in the query's dtype each operation is rounded, as in torch.
        sin: as `cos`.
        size: how many numbers of a head are rotated, even.
        first: the first rotated number.
        interleaved: True if pairs are neighbours, False if they are n and n + size / 2.
    """

    cos: Tensor
    sin: Tensor
    size: int
    first: int = 0
    interleaved: bool = False


class CacheStep(NamedTuple):
    """The tensors in which a cache stores keys and values, and the places of the new tokens."""

    key: Tensor  # (B, K, capacity, D), or in pages (P, K, size, D)
    value: Tensor | None  # None: the values are the first `value_dim` columns of the keys
    key_scale: Tensor | None  # set if the keys are codes
    value_scale: Tensor | None
    table: Tensor | None  # int64 (B, N)
    places: list[int]  # the column of each row's new key; one number if all rows have the same
    value_dim: int
    rotations: tuple[Tensor, ...] = ()  # of packed codes: of keys, of values, and of outputs, which is back


class VisibleKeys(NamedTuple):
    """The keys for the queries if no mask is needed: columns low <= j < high; or `bounds`, one row per batch row."""

    low: int = -FAR
    high: int = FAR
    bounds: Tensor | None = None


def runs_plain() -> bool:
    """Return whether no gradient, autocast, tracing, transform or dispatch mode is active."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or native_library.decode_step is None
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    turn: RotaryStep | None,
    storage: CacheStep,
    options: ScoreOptions,
    seen: VisibleKeys | None,
) -> Tensor | None:
    """Attend with query (B, H, 1, D) and append key (B, K, 1, D) and value (B, K, 1, V); return (B, H, 1, V).

    With `seen`, the mask of the options is not used. Returns None, without any change, if the kernel does not support
    the call. The kernel checks sizes and dtypes.
    """
    rules: tuple[Any, ...]
    if seen is not None:
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        rules = (options.scale, float(options.softcap or 0.0), sinks, *seen, None, None, None, None, None)
    else:
        options = options._replace(mask=options.mask.sized(query.shape[0], query.shape[1]))
        try:
            rules = lowered(options, 1, max(storage.places) + 1)
        except (UnsupportedMask, RuntimeError):
            return None
    turned = (
        (None, None, 0, 0, False) if turn is None else (turn.cos, turn.sin, turn.first, turn.size, turn.interleaved)
    )
    rules = (*rules, options.gate, *storage.rotations)
    try:
        out = native_library.decode_step(query, key, value, *turned, *storage[:7], *rules)
    except RuntimeError as error:
        raise_unless_refused(error)
        return None
    increment_version([x for x in storage[:4] if x is not None])
    return out


def attend_stored(query: Tensor, storage: CacheStep, length: int, scale: float, low: int, high: int) -> Tensor | None:
    """Attend with query (B, H, T, D) to the first `length` tokens of a store, in one native call.

    Query i may attend to keys i + low <= j < i + high. Returns (B, H, T, V), or None if the kernel does not support the
    call.
    """
    key, value, key_scale, value_scale, table, *_ = storage
    if value is None:
        value, value_scale = key[..., : storage.value_dim], key_scale
    stored = (query, key, key_scale, value, value_scale, table, length)
    try:
        out: Tensor = native_library.attend_stored(*stored, scale, low, high)
    except RuntimeError as error:
        raise_unless_refused(error)
        return None
    return out
