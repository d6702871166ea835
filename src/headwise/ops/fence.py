"""What may not be attended cannot influence; what may be attended is honest.

Inside a fused kernel 0 * NaN is NaN, so a NaN in a key that is masked leaks; and a row whose scores are all NaN
is taken for an empty one and comes out 0 (both measured on torch 2.13, CPU). So NaN and Inf never enter a kernel:
they are taken out before it, and the rows that may attend one are made NaN after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .masks import Mask
from .scores import row_blocks


def surely_finite(*tensors: Tensor) -> bool:
    """True where one cheap pass shows that nothing is NaN or Inf, so that no fence is needed.

    Only where looking at data is free of harm: eager, on the CPU. (A sum that overflows only costs the fence.)
    """
    if torch.compiler.is_compiling() or any(
        t.device.type != "cpu" or type(t) not in (Tensor, torch.nn.Parameter) for t in tensors
    ):
        return False
    with torch.no_grad():
        return bool(torch.stack([t.sum(dtype=torch.float32) for t in tensors]).isfinite().all())


def fence(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value without their NaN and Inf, and the rows to show as NaN: bool (B, H, T)."""
    bad_BKS = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    bad_BHT = ~query.isfinite().all(-1)
    met_BHT, alive_BHT = _rows_that_meet(bad_BKS, mask, query.shape[1], query.shape[2])
    shown_BHT = met_BHT | (bad_BHT & alive_BHT)
    return clean(query, bad_BHT), clean(key, bad_BKS), clean(value, bad_BKS), shown_BHT


def _rows_that_meet(bad_BKS: Tensor, mask: Mask | None, H: int, T: int) -> tuple[Tensor, Tensor]:
    """The rows that may attend a bad key, and those that may attend anything; memory linear in S."""
    B, K, S = bad_BKS.shape
    device = bad_BKS.device
    bounds = None if mask is None else mask.bounds(T, S, device)
    if mask is None:
        met, alive = bad_BKS.any(-1, keepdim=True).expand(B, K, T), torch.ones((), dtype=torch.bool, device=device)
    elif bounds is not None:  # bad keys in lo <= j < hi, by counts from the left
        lo_BT, hi_BT = (x.expand(B, T) for x in bounds)
        count = torch.nn.functional.pad(bad_BKS.long().cumsum(-1), (1, 0))
        lo, hi = (x[:, None].expand(B, K, T) for x in (lo_BT, hi_BT))
        met, alive = count.gather(-1, hi) > count.gather(-1, lo), (hi_BT > lo_BT)[:, None]
    else:
        bad_BH1S = bad_BKS.repeat_interleave(H // K, dim=1)[:, :, None]
        pairs = []
        for rows in row_blocks(T, S):
            seen = mask.allowed(T, S, rows=rows, device=device)
            if seen is None:  # a mask of biases that forbid nothing
                return _rows_that_meet(bad_BKS, None, H, T)
            pairs.append(((seen & bad_BH1S).any(-1), seen.any(-1)))
        return torch.cat([p[0] for p in pairs], dim=2), torch.cat([p[1] for p in pairs], dim=2)
    return met.repeat_interleave(H // K, dim=1), alive


class _Clean(torch.autograd.Function):
    """0 in the rows given; the gradient passes, so that a NaN which comes back to such a row is not hidden."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.masked_fill(rows, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Show(torch.autograd.Function):
    """NaN in the rows shown; backward NaN there too where a gradient comes, and 0 where none does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.masked_fill(rows, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].masked_fill(rows & (grads[0] != 0), torch.nan), None


def clean(x: Tensor, rows: Tensor) -> Tensor:
    """x (..., n) with 0 in the rows (...) given."""
    if forward_ad._current_level >= 0:  # the Functions have no jvp: one that had could not be compiled
        return x.masked_fill(rows[..., None], 0.0)
    return _Clean.apply(x, rows[..., None])


def show(x: Tensor, rows: Tensor) -> Tensor:
    """x with NaN in the rows given, which broadcast to x. A row that the loss leaves out gets gradient 0."""
    if forward_ad._current_level >= 0:
        return x.masked_fill(rows, torch.nan)
    return _Show.apply(x, rows)
