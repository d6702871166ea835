"""Handling of NaN, Inf and very large numbers around kernels that do not isolate them.

The rule: a key that a row may not attend to cannot change that row; a row that may attend to a NaN or Inf is NaN. In a
fused kernel 0 * NaN is NaN, so a NaN in a masked key leaks; and a row whose scores are all NaN is treated as empty and
returns 0 (both measured on torch 2.13, CPU). So NaN and Inf are set to 0 before the kernel, and the rows that may
attend to one are set to NaN after it. Very large numbers become NaN or Inf in the kernel if a product overflows, so
keys that no row may attend to, and rows that may attend to no key, are also set to 0. One case is left: a key that some
rows may attend to and that overflows in the product with a query that may not attend to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..shapes import compute_dtype
from .masks.mask import EVERYTHING, Mask
from .row_blocks import mask_blocks
from .tracing import without_numbers


def is_finite_hint(*tensors: Tensor) -> bool:
    """Return True if one fast pass shows that no number is NaN or Inf and no product overflows: no fence is needed.

    The data is read only in eager mode on the CPU, where this is safe. If the sum of squares is finite, so is the
    product of two rows, because it is at most the product of their norms.
    """
    if without_numbers() or torch._C._are_functorch_transforms_active():
        return False
    if any(x.device.type != "cpu" or type(x) not in (Tensor, torch.nn.Parameter) for x in tensors):
        return False
    with torch.no_grad():
        return all(math.isfinite(torch.linalg.vector_norm(x, dtype=compute_dtype(x))) for x in tensors)


def mask_nonfinite(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key and value without numbers that spoil a kernel, and the rows to set to NaN: bool (B, H, T)."""
    bad_BKS = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    bad_BHT = ~query.isfinite().all(-1)
    met_BHT, alive_BHT, seen_BKS = _meetings(bad_BKS, mask, query.shape[1], query.shape[2])
    shown_BHT = met_BHT | (bad_BHT & alive_BHT)
    out_BKS = bad_BKS | ~seen_BKS
    return clean(query, bad_BHT | ~alive_BHT), clean(key, out_BKS), clean(value, out_BKS), shown_BHT


def fence_pairs(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query and key without NaN and Inf, and the pairs (B, H, T, S) whose query or key had one."""
    bad_BHT, bad_BHS = ~query.isfinite().all(-1), ~key.isfinite().all(-1)
    return clean(query, bad_BHT), clean(key, bad_BHS), bad_BHT[..., None] | bad_BHS[:, :, None]


def _meetings(bad_BKS: Tensor, mask: Mask, H: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that may attend to a bad key, the rows that may attend to any key, and the keys that are used.

    Memory is linear in S. The last two broadcast to (B, H, T) and (B, K, S).
    """
    B, K, S = bad_BKS.shape
    device = bad_BKS.device
    every = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    if not mask.parts:
        return bad_BKS.any(-1, keepdim=True).expand(B, K, T).repeat_interleave(H // K, dim=1), every, every
    bounds = mask.bounds(T, S, device)
    if bounds is not None:  # count bad keys by a prefix sum, and used keys by steps at lo and hi
        lo_BT, hi_BT = (x.expand(B, T) for x in bounds)
        count = torch.nn.functional.pad(bad_BKS.long().cumsum(-1), (1, 0))
        lo, hi = (x[:, None].expand(B, K, T) for x in (lo_BT, hi_BT))
        met_BKT = count.gather(-1, hi) > count.gather(-1, lo)
        one = torch.ones_like(lo_BT)
        steps = torch.zeros(B, S + 1, dtype=torch.long, device=device).scatter_add(1, lo_BT, one)
        sights_BS = steps.scatter_add(1, hi_BT, -one).cumsum(1)[:, :S]
        return met_BKT.repeat_interleave(H // K, dim=1), (hi_BT > lo_BT)[:, None], (sights_BS > 0)[:, None]
    bad_BK1S = bad_BKS[:, :, None]
    met, alive, seen = [], [], torch.zeros((), dtype=torch.bool, device=device)
    for rows in mask_blocks(T, S, device.type):
        allowed = mask.allowed(T, S, rows=rows, device=device)
        if allowed is None:  # the mask has only biases, which forbid nothing
            return _meetings(bad_BKS, EVERYTHING, H, T)
        bad = bad_BK1S if allowed.shape[1] == 1 else bad_BK1S.repeat_interleave(H // K, dim=1)
        met.append((allowed & bad).any(-1))
        alive.append(allowed.any(-1))
        seen = seen | allowed.any(2)
    seen = seen if seen.shape[1] == 1 else seen.unflatten(1, (K, H // K)).any(2)
    met_BHT = torch.cat(met, dim=2)
    met_BHT = met_BHT if met_BHT.shape[1] == H else met_BHT.repeat_interleave(H // K, dim=1)
    return met_BHT, torch.cat(alive, dim=2), seen


def alive_rows(mask: Mask, T: int, S: int, device: torch.device) -> Tensor:
    """Return the rows that may attend to any key: bool (B|1, H|1, T); memory linear in S."""
    bounds = mask.bounds(T, S, device)
    if bounds is not None:
        return (bounds[1] > bounds[0])[:, None]
    blocks = [mask.allowed(T, S, rows=rows, device=device) for rows in mask_blocks(T, S, device.type)]
    alive = [x.any(-1) for x in blocks if x is not None]
    return torch.cat(alive, dim=2) if alive else torch.ones(1, 1, 1, dtype=torch.bool, device=device)


class _Clean(torch.autograd.Function):
    """A function that sets rows to 0; the gradient is unchanged, so that a NaN in such a row stays visible."""

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


class _Quiet(torch.autograd.Function):
    """A function that returns its input unchanged; the gradient of the given rows is 0 for any incoming gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].masked_fill(rows, 0.0), None


class _Show(torch.autograd.Function):
    """A function that sets rows to NaN; their gradient is NaN if the incoming gradient is not 0, and 0 otherwise."""

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


def _has_no_rule() -> bool:
    """Return whether autograd functions have no rule here.

    This is so in forward mode, whose rule could not be compiled, and in `torch.func.functionalize`, which needs none.
    """
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return False
    inner = torch._C._functorch.peek_interpreter_stack()
    return inner is not None and inner.key() == torch._C._functorch.TransformType.Functionalize


def clean(x: Tensor, rows: Tensor) -> Tensor:
    """Return x (..., n) with 0 in the given rows (...)."""
    if _has_no_rule():
        return x.masked_fill(rows[..., None], 0.0)
    return _Clean.apply(x, rows[..., None])


def quiet(x: Tensor, rows: Tensor) -> Tensor:
    """Return x without a gradient through the given rows, which broadcast to x."""
    return x if _has_no_rule() else _Quiet.apply(x, rows)


def show(x: Tensor, rows: Tensor) -> Tensor:
    """Return x with NaN in the given rows, which broadcast to x. A row that the loss does not use gets gradient 0."""
    if _has_no_rule():
        return x.masked_fill(rows, torch.nan)
    return _Show.apply(x, rows)
