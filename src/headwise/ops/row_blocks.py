"""Scores of a block of query rows against all their keys, shared by `blocks`, `weights` and the statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes import compute_dtype
from .masks.mask import Mask
from .masks.tiles import DEVICE_STRIP_PAIRS
from .options import ScoreOptions
from .tracing import is_symbol

# Elements of one head's R x S block of scores: 1 MiB of float32, about the L2 cache of one core. On other devices each
# operator is a kernel launch, so blocks are larger and fewer: 8 MiB a head.
BLOCK_ELEMENTS = 1 << 18
DEVICE_BLOCK_ELEMENTS = 1 << 21
MIN_ROWS = 16


def whole_axis(n: int) -> slice:
    """All indices of an axis of n; without the number where it is a symbol, which a slice that holds it pins down."""
    return slice(None) if is_symbol(n) else slice(0, n)


def strips(T: int, rows: int) -> Iterator[slice]:
    """Yield slices of T query rows, `rows` at a time.

    Yield one slice if T is a symbol of torch.compile or torch.export, because a loop over it could not be traced.
    """
    if is_symbol(T):
        yield whole_axis(T)
        return
    for first in range(0, T, rows):
        yield slice(first, min(first + rows, T))


def row_blocks(T: int, S: int, device_type: str = "cpu") -> Iterator[slice]:
    """Yield blocks of query rows whose R x S scores stay within the device's budget: memory is linear in S.

    R depends only on S and the device, not on the batch, so a row has the same bits in every batch.
    """
    if torch.compiler.is_compiling():
        return strips(T, 512)
    elements = BLOCK_ELEMENTS if device_type == "cpu" else DEVICE_BLOCK_ELEMENTS
    return strips(T, max(MIN_ROWS, elements // max(S, 1) // MIN_ROWS * MIN_ROWS))


def mask_blocks(T: int, S: int, device_type: str) -> Iterator[slice]:
    """Yield blocks of query rows for a mask alone, which has few heads: larger than `row_blocks` off the CPU."""
    if device_type == "cpu" or torch.compiler.is_compiling():
        return row_blocks(T, S, device_type)
    return strips(T, max(1, DEVICE_STRIP_PAIRS // max(S, 1)))


def strip_of(
    mask: Mask, rows: slice, T: int, S: int, device: torch.device
) -> tuple[slice, Tensor | None, Tensor | None]:
    """Return the keys that these query rows can reach, and `allowed` and `added` of the mask (`Mask`) on those keys."""
    if not mask.parts:
        return whole_axis(S), None, None
    symbolic = is_symbol(T) or is_symbol(S)
    keys = slice(None) if symbolic else slice(*mask.reach(rows.start, rows.stop, T, S))
    allowed = mask.allowed(T, S, rows=rows, cols=keys, device=device)
    return keys, allowed, mask.added(T, S, rows=rows, cols=keys, device=device)


@dataclass(frozen=True, eq=False)
class ScoreBlock:
    """Scores of some query rows against the keys that they can reach; -inf where a row may not attend."""

    rows: slice
    keys: slice
    scores_BHRC: Tensor
    allowed_BHRC: Tensor | None


def score_block(query: Tensor, key: Tensor, options: ScoreOptions, rows: slice) -> ScoreBlock:
    """Compute the masked scores of these rows."""
    keys, allowed, added = strip_of(options.mask, rows, query.shape[2], key.shape[2], query.device)
    scores_BHRC = softcapped(score_rows(query[:, :, rows], key[:, :, keys], options.scale), options.softcap, allowed)
    return ScoreBlock(rows, keys, mask_scores(scores_BHRC, allowed, added), allowed)


def score_rows(q_BHRD: Tensor, k_BKCD: Tensor, scale: float) -> Tensor:
    """Compute scaled scores (B, H, R, C). The keys are used once per group, without a repeated copy."""
    (H, R), K = q_BHRD.shape[1:3], k_BKCD.shape[1]
    dtype = compute_dtype(q_BHRD)
    q_BKGRD = (q_BHRD.to(dtype) * scale).unflatten(1, (K, H // K)).flatten(2, 3)
    return (q_BKGRD @ k_BKCD.to(dtype).mT).unflatten(2, (H // K, R)).flatten(1, 2)


def softcapped(scores_BHRC: Tensor, softcap: float | None, allowed: Tensor | None = None) -> Tensor:
    """Return scores bounded by `softcap`, with 0 in masked places.

    If the product of a masked place overflows, the gradient of tanh would be 0 * NaN.
    """
    if softcap is None:
        return scores_BHRC
    scores_BHRC = scores_BHRC if allowed is None else scores_BHRC.masked_fill(~allowed, 0.0)
    return softcap * torch.tanh(scores_BHRC / softcap)


def mask_scores(scores_BHRC: Tensor, allowed: Tensor | None, added: Tensor | None) -> Tensor:
    """Return the scores with the bias added and -inf in masked places."""
    if added is not None:
        scores_BHRC = scores_BHRC + added.to(scores_BHRC.dtype)
    return scores_BHRC if allowed is None else scores_BHRC.masked_fill(~allowed, -torch.inf)


def softmax_rows(scores_BHRC: Tensor, allowed: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights (B, H, R, C) of masked scores and the log of their denominator (B, H, R).

    `sinks` (H,) is added to the denominator. A row that may attend to no key has weights 0 and lse -inf.
    The bits of the backward pass of torch.softmax depend on the thread count (torch 2.13, CPU), so it is not used.
    """
    B, H, R, C = scores_BHRC.shape
    if C == 0:
        return scores_BHRC, scores_BHRC.new_full((B, H, R), -torch.inf)
    empty = None if allowed is None else ~allowed.any(-1, keepdim=True)
    if empty is not None:
        # An empty row gets finite scores so that no NaN appears; its weights are zeroed below.
        scores_BHRC = scores_BHRC.masked_fill(empty, 0.0)
    top = scores_BHRC.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(scores_BHRC.dtype).view(1, H, 1, 1)
        top = torch.maximum(top, sinks.detach())
    weights_BHRC = torch.exp(scores_BHRC - top)
    total = weights_BHRC.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    weights_BHRC = weights_BHRC / total
    lse_BHR = (top + total.log())[..., 0]
    if empty is None:
        return weights_BHRC, lse_BHR
    return weights_BHRC.masked_fill(~allowed, 0.0), lse_BHR.masked_fill(empty[..., 0], -torch.inf)  # type: ignore[operator]
