"""Append tokens to a cache on an NVIDIA GPU in one kernel launch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernel_operators  # noqa: F401
from .launch import trouble_on

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def append_on_device(
    key: Tensor,
    value: Tensor | None,
    storage: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    *,
    table: Tensor | None = None,
    columns: Tensor | None = None,
    column: int = 0,
    row: int = 0,
) -> bool:
    """Write key (B, K, T, D) and value (B, K, T, V), to int8 as `cache.quantize` would; return False if not possible.

    Args:
        key: float32, bfloat16 or float16.
        value: None if the values are columns of the keys.
        storage: keys (N, K, L, D), values, and for int8 their scales (N, K, L); they are written to.
        table: int64 (rows, pages), if N are pages.
        columns: (B,) the column of the first token of each row; None if it is `column` for all.
        column: see `columns`.
        row: the row of the cache, or of the table, of the first row of the batch.
    """
    given = [x for x in (key, value, *storage) if x is not None]
    if (
        key.device.type != "cuda"
        or trouble_on(key.device) is not None
        or any(x.dtype not in DTYPES for x in given[: 1 if value is None else 2])
        or (torch.is_grad_enabled() and any(x.requires_grad for x in given))
        or any(torch._is_functional_tensor(x) for x in given)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    torch.ops.headwise.triton_append(key, value, *storage, table, columns, column, row)
    return True
