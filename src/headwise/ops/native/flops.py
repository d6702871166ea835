"""FLOP counts of the operators for `torch.utils.flop_counter.FlopCounterMode`: 2 for a multiply and an add.

The count is that of the matrix products over the (query, key) pairs that the kernel computes: the pairs within bands,
lengths and segments, as in `headwise.plan`, and the non-empty tiles of tile maps. A mask that is a tensor excludes no
pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..masks.tiles import NONE, SIDE
from ..row_blocks import strips
from ..tracing import without_numbers
from .gradient import mask_of
from .mask_arguments import LoweredOptions

ROWS = 1024
"""The number of queries per block when pairs are counted one by one."""


def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None) -> int:
    """Count the forward pass of `attend`, whose only mask is a band."""
    scale, low, high = rest
    return _of(query, key.shape[2], query.shape[3] + value.shape[3], _band(scale, low, high))


def attend_full(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None) -> int:
    """Count the forward pass of `attend_full`, `attend_kept` and `attend_train`."""
    return _of(query, key.shape[2], query.shape[3] + value.shape[3], _rules(rest))


def attend_held(
    query: Tensor, key: Tensor, key_scale: Any, value: Tensor, value_scale: Any, table: Any, length: int, *rest: Any,
    out_val: Any = None,
) -> int:  # fmt: skip
    """Count the forward pass over keys and values that are quantised or in pages."""
    S = length or key.shape[2]
    return _of(query, S, query.shape[3] + value.shape[3] * query.shape[3] // key.shape[3], _rules(rest))


def attend_stored(*args: Any, out_val: Any = None) -> int:
    """Count the same for `attend_stored`, whose only mask is a band."""
    *stored, scale, low, high = args
    return attend_held(*stored, *_band(scale, low, high))


def attend_backward(*args: Any, out_val: Any = None) -> int:
    """Count the gradient: the weights again, and two gradients for each of the two products."""
    query, key, value, *rest = args[5:]
    return _of(query, key.shape[2], 3 * query.shape[3] + 2 * value.shape[3], _rules(rest))


def attend_statistics(query: Tensor, key: Tensor, value: Tensor | None, *rest: Any, out_val: Any = None) -> int:
    """Count the output and the sums of a statistics pass, one column of values per sum."""
    columns = 0 if value is None else value.shape[3]
    features = rest[-3]
    columns += 0 if features is None else features.shape[-1]
    return _of(query, key.shape[2], query.shape[3] + columns, _rules(rest))


def attend_received(query: Tensor, key: Tensor, top: Tensor, largest: Tensor, *rest: Any, out_val: Any = None) -> int:
    """Count the second pass of the statistics, which computes only scores."""
    return _of(query, key.shape[2], query.shape[3], _rules(rest))


def flash_for_cpu(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None, **options: Any) -> int:
    """Count torch's own fused attention for the CPU, for which torch has no formula."""
    causal = bool(rest[1] if len(rest) > 1 else options.get("is_causal", False))
    return _of(query, key.shape[2], query.shape[3] + value.shape[3], _band(1.0, None, 1 if causal else None))


def flash_for_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None, **options: Any
) -> int:
    """Count the backward pass of torch's own fused attention for the CPU."""
    causal = bool(rest[3] if len(rest) > 3 else options.get("is_causal", False))
    return _of(query, key.shape[2], 3 * query.shape[3] + 2 * value.shape[3], _band(1.0, None, 1 if causal else None))


def _rules(args: Sequence[Any]) -> LoweredOptions:
    return LoweredOptions(*args[: len(LoweredOptions._fields)])


def _band(scale: float, low: int | None, high: int | None) -> LoweredOptions:
    far = 1 << 62
    return LoweredOptions(scale, 0.0, None, -far if low is None else low, far if high is None else high, *[None] * 6)


def _of(query: Tensor, S: int, width: int, rules: LoweredOptions) -> int:
    B, H, T, _ = query.shape
    return 2 * width * _pairs(rules, B, H, T, S)


def _pairs(rules: LoweredOptions, B: int, H: int, T: int, S: int) -> int:
    """Return the number of computed (query, key) pairs over all rows and heads; all pairs if tensors have no data."""
    tensors = [rules.bounds, *(rules.segments or ()), *(rules.maps or ())]
    if any(x is not None and x.is_meta for x in tensors) or (without_numbers() and any(x is not None for x in tensors)):
        return B * H * T * S
    device, tiles = torch.device("cpu"), (rules.maps or [])[::2]
    mask = mask_of(rules._replace(dense=None, alibi=None, maps=None, relative=None), T, S)
    bounds = mask.bounds(T, S, device)
    if bounds is not None and not tiles:
        low, high = bounds
        return int((high - low).sum()) * (B // low.shape[0]) * H
    total, j = 0, torch.arange(S, device=device)
    for rows in strips(T, ROWS):
        allowed = mask.allowed(T, S, rows=rows, device=device)
        i = torch.arange(T, device=device)[rows]
        seen = torch.ones(1, 1, len(i), S, dtype=torch.bool, device=device) if allowed is None else allowed
        for index in tiles:
            seen = seen & (index != NONE)[:, :, i // SIDE][..., j // SIDE]
        total += int(seen.sum()) * (B // seen.shape[0]) * (H // seen.shape[1])
    return total
