"""What a cache refuses, and in which words. Every check comes before the first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..shapes import DTYPES
from ..shapes.kinds import check_counts, check_device, check_dtype, check_flags, whole_numbers


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
    """Sizes are positive integers, the dtype is one that is kept."""
    check_counts(1, head_dim=head_dim, value_dim=head_dim if value_dim is None else value_dim, **sizes)
    check_flags(shared=shared, causal=causal)
    check_dtype(dtype, (*DTYPES, torch.int8))
    check_device(device)
    if shared and value_dim is not None and value_dim > head_dim:
        raise ValueError(f"shared values are columns of the keys: value_dim <= head_dim; got {value_dim} > {head_dim}")


def check_rows(rows: Tensor | Sequence[int], batch: int) -> list[int]:
    """Row numbers of a batch."""
    numbers = whole_numbers("rows", rows)
    if not numbers or any(not 0 <= r < batch for r in numbers):
        raise ValueError(f"rows are numbers from 0 to {batch - 1}, at least one; got {numbers}")
    return numbers


def check_truncate(before: list[int], lengths: int | Sequence[int]) -> list[int]:
    """The new length of each row, of the `before` tokens that it has; none may grow."""
    wanted = whole_numbers("lengths", [lengths] * len(before) if isinstance(lengths, int) else lengths)
    if len(wanted) != len(before) or any(not 0 <= n <= have for n, have in zip(wanted, before, strict=False)):
        raise ValueError(
            f"truncate keeps the first tokens of each row, at most what is there; got {wanted} for lengths {before}"
        )
    return wanted
