"""The gradient of the native kernel, until it has one of its own.

Where the meaning is the same, torch's fused backward is fed with the kernel's out and lse, a strip of query rows at a
time; everywhere else the gradient is written out in plain torch ops, block by block. Memory is linear in either case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .masks import Mask
from .rules import Alibi, Band, Bias, Keep, Lengths, Part, Segments
from .scores import mask_scores, row_blocks, score_rows, softmax_rows, strip_of, strips

# Query rows that torch's backward is given at a time: their mask is (B|1, H|1, STRIP, S), linear in S.
STRIP = 256
# Few rows that are no multiple of 4 leave the scratch of torch's threads off 16 bytes, and MKL rounds by that.
ALIGNED_ROWS, TILE_ROWS = 4, 32


class Problem(NamedTuple):
    """The arguments of `attend_train`: one call of the kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float
    sinks: Tensor | None
    low: int
    high: int
    bounds: Tensor | None
    segments: list[Tensor] | None
    dense: list[Tensor] | None
    alibi: list[Tensor] | None
    dropout: float
    seed: Tensor | None

    @property
    def mask(self) -> Mask | None:
        """The mask again, from what the operator was given."""
        T, S = self.query.shape[2], self.key.shape[2]
        band = Band(1 - self.low, self.high - 1, 0).trimmed(T, S)
        parts: list[Part] = [] if band is None else [band]
        if self.bounds is not None:
            low, high, start, stop = self.bounds.unbind(1)
            parts += [Band(1, None, low), Band(None, -1, high)] if bool(((low > -T) | (high < S)).any()) else []
            parts += [Lengths(stop, start)]
        parts += [Segments(*pair) for pair in _pairs(self.segments)]
        parts += [Keep(x) if x.dtype == torch.bool else Bias(x) for x in self.dense or []]
        parts += [Alibi(*pair) for pair in _pairs(self.alibi)]
        return Mask(tuple(parts)) if parts else None


def _pairs(tensors: list[Tensor] | None) -> list[tuple[Tensor, Tensor]]:
    tensors = tensors or []
    return list(zip(tensors[::2], tensors[1::2], strict=True))


# -- by torch's fused kernel -------------------------------------------------------------------------------------------


def by_torch(p: Problem, mask: Mask | None, grad_out: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    """The gradients of query, key and value where there is no softcap and no dropout, from `out` alone.

    Sinks need no word: they are in the lse. Rows that attend nothing come with grad_out 0 and lse inf.
    """
    (T, D), (S, V) = p.query.shape[2:], p.value.shape[2:]
    query, key, value, out, grad_out = (_wide(x, max(D, V)) for x in (p.query, p.key, p.value, out, grad_out))

    def some(rows: slice, mask_rows: slice) -> tuple[slice, tuple[Tensor, Tensor, Tensor]]:
        cols, allowed, added = strip_of(mask, mask_rows, T, S, query.device)
        bias = lse.new_zeros(()) if added is None else added.float()
        bias = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
        pieces = (grad_out[:, :, rows], query[:, :, rows], out[:, :, rows], lse[:, :, rows])
        return cols, _torchs(*pieces, key[:, :, cols], value[:, :, cols], p.scale, bias=bias)

    if mask is None or mask.is_top_left:
        grads = _torchs(grad_out, query, out, lse, key, value, p.scale, causal=mask is not None)
    elif mask.is_same_for_rows:  # one row of the mask serves all
        grads = some(slice(None), slice(0, 1))[1]
    else:
        # As torch's own: heads inside of positions. Sums over strips are float32.
        (B, H), K, wide = query.shape[:2], key.shape[1], query.shape[3]
        grad_q = query.new_empty(B, T, H, wide).transpose(1, 2)
        grad_k, grad_v = (lse.new_zeros(B, S, K, wide).transpose(1, 2) for _ in range(2))
        for rows in strips(T, STRIP):
            cols, (grad_q[:, :, rows], its_k, its_v) = some(rows, rows)
            grad_k[:, :, cols] += its_k
            grad_v[:, :, cols] += its_v
        grads = grad_q, grad_k, grad_v
    return [x if x.shape[-1] == n else x[..., :n] for x, n in zip(grads, (D, D, V), strict=True)]


def _wide(x: Tensor, width: int) -> Tensor:
    """Zeros behind the last axis, which change nothing; torch's backward wants one width, and elements side by side."""
    x = pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _torchs(
    grad_out: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own fused backward for some rows, which need not be those of its own forward."""
    R = query.shape[2]
    if key.shape[2] == 0:  # rows out of reach of every key
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    lacking = -R % ALIGNED_ROWS if R < TILE_ROWS else 0
    if lacking:
        grad_out, query, out = (pad(x, (0, 0, 0, lacking)) for x in (grad_out, query, out))
        lse = pad(lse, (0, lacking), value=torch.inf)
        if bias is not None and bias.shape[2] > 1:
            bias = pad(bias, (0, 0, 0, lacking))
    if bias is not None:
        bias = bias.expand(-1, -1, R + lacking, -1)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return grads[0][:, :, :R] if lacking else grads[0], grads[1], grads[2]


# -- written out -------------------------------------------------------------------------------------------------------


def written_out(p: Problem, mask: Mask | None, grad_out: Tensor, grad_lse: Tensor | None, biases: bool) -> list[Tensor]:
    """The gradients of `leaves_of` the problem, by the formula and for every argument; it has a gradient itself.

    With weights P and dP = dO V^T, the scores get P * (dP - delta), where delta = sum(P * dP) - dlse.
    """
    (B, H, T, _), (K, S) = p.query.shape, p.key.shape[1:3]
    grad_out, key, value = grad_out.float(), p.key.float(), p.value.float()
    grads_q, grads_sinks = [], []
    grad_k, grad_v = torch.zeros_like(key), torch.zeros_like(value)
    learned = _Learned(p) if biases else None
    for rows in row_blocks(T, S):
        cols, allowed, added = strip_of(mask, rows, T, S, p.query.device)
        k_BKCD, v_BKCV, dout_BHRV = key[:, :, cols], value[:, :, cols], grad_out[:, :, rows]
        capped = score_rows(p.query[:, :, rows], k_BKCD, p.scale, p.softcap or None)
        weights, lse_BHR = softmax_rows(mask_scores(capped, allowed, added), allowed, p.sinks)
        dweights, dropped = score_rows(dout_BHRV, v_BKCV, 1.0), weights
        if p.dropout > 0:
            size = (rows.stop - rows.start, S)
            kept = torch.ops.headwise.dropout_keep(p.seed, p.dropout, B, H, rows.start, *size)[..., cols]
            drop = kept * (1 / (1 - p.dropout))
            dweights, dropped = dweights * drop, weights * drop
        dweights = dweights if allowed is None else dweights.masked_fill(~allowed, 0.0)
        delta_BHR = (weights * dweights).sum(-1)
        delta_BHR = delta_BHR if grad_lse is None else delta_BHR - grad_lse[:, :, rows]
        dscores = weights * (dweights - delta_BHR[..., None])
        if p.sinks is not None:
            grads_sinks.append(_of_sinks(p.sinks, lse_BHR, delta_BHR))
        if learned is not None:
            learned.add(dscores, rows, cols)
        if p.softcap > 0:
            dscores = dscores * (1 - (capped / p.softcap).square())
        dscores = _folded(dscores * p.scale, K)
        grads_q.append((dscores @ k_BKCD).unflatten(2, (H // K, -1)).flatten(1, 2))
        grad_k[:, :, cols] += dscores.mT @ _folded(p.query[:, :, rows].float(), K)
        grad_v[:, :, cols] += _folded(dropped, K).mT @ _folded(dout_BHRV, K)
    sinks = [torch.stack(grads_sinks).sum(0)] if grads_sinks else []
    return [torch.cat(grads_q, dim=2), grad_k, grad_v, *sinks, *(learned.grads if learned else ())]


def _of_sinks(sinks: Tensor, lse_BHR: Tensor, delta_BHR: Tensor) -> Tensor:
    """(H,): a sink is one more key, without a value; nothing where a row attends nothing."""
    weights_BHR = torch.exp(sinks[:, None] - lse_BHR).masked_fill(lse_BHR.isinf(), 0.0)
    return -(weights_BHR * delta_BHR).sum((0, 2))


def _folded(x_BHRn: Tensor, K: int) -> Tensor:
    """The rows of a group's query heads one behind the other, (B, K, G * R, n): a sum over rows is one over heads."""
    return x_BHRn.unflatten(1, (K, -1)).flatten(2, 3)


class _Learned:
    """The gradients of biases and slopes, gathered block by block: each gets the scores' own, summed to its shape."""

    def __init__(self, p: Problem) -> None:
        self.biases = [torch.zeros_like(x, dtype=torch.float32) for x in p.dense or [] if x.is_floating_point()]
        self.slopes = [torch.zeros_like(slopes) for slopes, _ in _pairs(p.alibi)]
        self.offsets = [offset for _, offset in _pairs(p.alibi)]

    @property
    def grads(self) -> list[Tensor]:
        return self.biases + self.slopes

    def add(self, dscores: Tensor, rows: slice, cols: slice) -> None:
        for grad in self.biases:
            place = grad[:, :, rows if grad.shape[2] > 1 else slice(None), cols if grad.shape[3] > 1 else slice(None)]
            place += dscores.sum_to_size(place.shape)
        i, j = (torch.arange(x.start, x.stop, device=dscores.device) for x in (rows, cols))
        for grad, offset in zip(self.slopes, self.offsets, strict=True):
            far = (i[:, None] + offset.view(-1, 1, 1, 1) - j).abs()
            grad -= (dscores * far).sum((2, 3)).sum_to_size(grad.shape)


# -- both --------------------------------------------------------------------------------------------------------------


def gradients(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, biases: bool, *args: Any
) -> list[Tensor]:
    """The gradients of `leaves_of` the problem that `args` are, in their dtypes."""
    p = Problem(*args)
    mask = p.mask
    if not (mask is None or mask.is_top_left):
        empty = lse == -torch.inf  # nothing comes back from a row that attends nothing, whatever comes in
        grad_out, lse = grad_out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, torch.inf)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(empty, 0.0)
    if p.softcap > 0 or p.dropout > 0 or grad_lse is not None or biases or torch.is_grad_enabled():
        with torch.autocast("cpu", enabled=False):  # it computes in float32, also where autocast is on
            grads = written_out(p, mask, grad_out, grad_lse, biases)
    else:
        grads = by_torch(p, mask, grad_out, out, lse)
        if p.sinks is not None:
            grads.append(_of_sinks(p.sinks, lse, (grad_out.float() * out.float()).sum(-1)))
    return [grad.to(x.dtype) for grad, x in zip(grads, leaves_of(p, biases), strict=True)]


def leaves_of(p: Problem, biases: bool) -> list[Tensor]:
    """query, key, value, the sinks and, where `biases` is set, float masks and then slopes: what there is of them."""
    sinks = [] if p.sinks is None else [p.sinks]
    learned = [x for x in p.dense or [] if x.is_floating_point()] + (p.alibi or [])[::2] if biases else []
    return [p.query, p.key, p.value, *sinks, *learned]
