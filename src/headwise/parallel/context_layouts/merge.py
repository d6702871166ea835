"""The merge of partial results over parts of the keys: a sum weighted by each part's lse.

With m = max_c lse_c: lse = m + log sum_c exp(lse_c - m), out = sum_c exp(lse_c - lse) out_c (Rabe and Staats 2021,
arXiv 2112.05682). A row without keys in a part has lse -inf and weight 0; without keys in all parts it stays empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...shapes import compute_dtype
from .block import Partial


class Merged:
    """The running sum of partial results, in float32 (float64 for float64 queries), or the outputs in `out_dtype`."""

    def __init__(self, query: Tensor, value_dim: int, out_dtype: torch.dtype | None = None) -> None:
        B, H, T, _ = query.shape
        dtype = compute_dtype(query)
        self.out = query.new_zeros((B, T, H, value_dim), dtype=out_dtype or dtype).transpose(1, 2)
        self.lse = query.new_full((B, H, T), -torch.inf, dtype=dtype)
        self.ends = torch.stack([self.lse, torch.zeros_like(self.lse)])
        self.native = True
        self._untouched = torch.ones(H, T, dtype=torch.bool, device="cpu")

    def add(self, rows: slice, part: Partial, heads: slice = slice(None)) -> None:
        """Add the partial result of these queries and heads over further keys.

        Parts of one row may have different heads, because the number of heads in a message depends on its length.
        """
        out, lse, ends = self.out[:, heads, rows], self.lse[:, heads, rows], self.ends[:, :, heads, rows]
        if part.ends is None:
            self.native = False
        untouched = self._untouched[heads, rows]
        first = bool(untouched.all())  # The first part is copied, so its bits stay the same.
        untouched.fill_(False)
        if first:
            out.copy_(part.out)
            lse.copy_(part.lse)
            if part.ends is not None:
                ends.copy_(part.ends)
            return
        total = torch.logaddexp(lse, part.lse)
        old, new = (torch.exp(x - _finite(total)) for x in (lse, part.lse))
        out.mul_(old[..., None]).addcmul_(part.out.to(out.dtype), new[..., None])
        lse.copy_(total)
        if part.ends is not None:
            (top, weight), (other, its) = ends.unbind(0), part.ends.unbind(0)
            weight.copy_(torch.where(other > top, its * new, weight * old))
            top.copy_(torch.maximum(other, top))

    def finish(self, sinks: Tensor | None) -> None:
        """Add the sinks (H,) to the denominator; call it once, after all keys."""
        if sinks is None:
            return
        logits = sinks.detach().to(self.lse.dtype).view(1, -1, 1)
        total = torch.logaddexp(self.lse, logits).masked_fill(self.lse == -torch.inf, -torch.inf)
        kept = torch.exp(self.lse - _finite(total))
        self.out.mul_(kept[..., None])
        self.ends[1].mul_(kept)
        self.lse.copy_(total)

    def result(self, dtype: torch.dtype) -> Partial:
        """Return all rows, with the output in the given dtype."""
        return Partial(self.out.to(dtype), self.lse, self.ends if self.native else None)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0, so that differences of two -inf are -inf and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def sink_gradient(sinks: Tensor, whole: Partial, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Return the gradient (H,) of the sinks from these rows: with P = exp(sink - lse), the sum of P (dL - dO . O).

    Empty rows are left out.
    """
    dtype = whole.lse.dtype
    inner = -(grad_out.to(dtype) * whole.out.to(dtype)).sum(-1)
    inner = inner if grad_lse is None else inner + grad_lse
    weight = torch.exp(sinks.detach().to(dtype).view(1, -1, 1) - _finite(whole.lse))
    empty = whole.lse == -torch.inf
    return (weight * inner).masked_fill(empty, 0.0).double().sum((0, 2)).to(sinks.dtype)
