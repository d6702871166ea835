r"""Attention of some queries to some keys: the partial result, and its share of a gradient over all keys.

For a row with scores s_j, lse L over *all* keys and output O, any part of the keys adds this share to the gradient:

$$P_j = e^{s_j - L}, \qquad dV_j = P_j\, dO, \qquad dS_j = P_j\, (dO \cdot V_j - dO \cdot O + dL)$$

(Dao et al. 2022, FlashAttention, arXiv 2205.14135, section B.4). The native kernel computes this from each row's
greatest score over all keys and the weight of that score. If the native kernel does not support the call, the part is
computed again and autograd gives the same result, from out = sum_c w_c out_c and w_c = exp(lse_c - L):
d out_c = w_c dO, d lse_c = w_c (dO . (out_c - O) + dL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.attention import attention, attention_of_part
from ...ops.masks.mask import Mask
from ...ops.native.gradient import Training, leaves_of
from ...ops.native.library import error_for
from ...ops.native.mask_arguments import lowered, trouble_with
from ...ops.native.picked_keys import is_picked
from ...ops.options import ScoreOptions
from ...ops.sharding.heads import seed_of_part
from ...plan.ranks.sharding import Stretch
from .call import ContextCall


class Partial(NamedTuple):
    """The result of some queries over some keys."""

    out: Tensor
    lse: Tensor
    ends: Tensor | None
    """(2, B, H, T): each row's greatest score and its weight, from the native kernel; None from other backends."""

    def of(self, rows: slice, heads: slice = slice(None)) -> Partial:
        """Return views of some rows and heads."""
        ends = None if self.ends is None else self.ends[:, :, heads, rows]
        return Partial(self.out[:, heads, rows], self.lse[:, heads, rows], ends)


class Block(NamedTuple):
    """A block of queries, keys and query heads of a call: (start, stop) of each, counted over the whole call."""

    rows: Stretch
    cols: Stretch
    heads: Stretch


class Gradient(NamedTuple):
    """The gradients of query, key, value and of the tensors of the mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    leaves: list[Tensor | None]


def is_native(query: Tensor, mask: Mask) -> bool:
    """Return whether the native kernel itself supports calls with this mask; picked keys are gathered before it."""
    serves = query.device.type == "cpu" and query.dtype != torch.float64 and type(query) is Tensor and len(query) > 0
    return serves and error_for() is None and trouble_with(mask) is None and not is_picked(mask)


def options_of(call: ContextCall, at: Block, sinks: Tensor | None = None) -> ScoreOptions:
    """Return the options of a call for a block, with its part of the mask and these sinks."""
    if at not in call.of_blocks:  # The backward pass uses it again: rules without a kernel form have their maps then.
        options = call.options._replace(mask=call.mask.part(at.rows, at.cols, call.T, call.S, heads=at.heads))
        call.of_blocks[at] = options.trimmed(at.rows[1] - at.rows[0], at.cols[1] - at.cols[0])
    return call.of_blocks[at]._replace(sinks=sinks)


def seed_of(call: ContextCall, at: Block) -> Tensor | None:
    """Return the dropout seed of a block, so that the kernel keeps the same weights as one process, or None."""
    if not call.options.dropout:
        return None
    total, first = call.some or (call.heads, 0)
    return seed_of_part(call.seed, total, first + at.heads[0], at.rows[0], at.cols[0])


def attend(
    call: ContextCall, at: Block, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Partial:
    """Compute the partial result of a block, without an autograd graph."""
    with torch.no_grad():
        options = options_of(call, at, sinks)
        if is_native(query, options.mask):
            rules = lowered(options, query.shape[2], key.shape[2])
            more = (call.options.dropout, seed_of(call, at))
            return Partial(*torch.ops.headwise.attend_kept.default(query, key, value, *rules, *more))
        out, lse = merge_blocks(call, at, options, query, key, value)
        return Partial(out, lse, None)


def merge_blocks(call: ContextCall, at: Block, options: ScoreOptions, query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Compute out and lse of a block by `headwise.attention`, with the dropout of the whole call."""
    return attention_of_part(query, key, value, seed=seed_of(call, at), return_lse=True, **options._asdict())


def gradient(
    call: ContextCall,
    at: Block,
    tensors: tuple[Tensor, Tensor, Tensor],
    whole: Partial,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    leaves: Sequence[Tensor],
    *,
    has_all: bool = False,
    sinks: Tensor | None = None,
) -> Gradient:
    """Compute the block's share of the gradient, where `whole` is the result of its queries over all keys.

    Args:
        call: the call over all ranks.
        at: the block.
        tensors: query, key and value of the block.
        whole: the result of these queries over all keys.
        grad_out: the gradient of out.
        grad_lse: the gradient of lse, or None.
        leaves: the tensors of the call's mask that get a gradient; the block's mask is computed from them.
        has_all: the block has all keys that its queries attend to, so the kernel can compute as in one process.
        sinks: the sinks of the forward pass, used only with `has_all`.
    """
    with torch.enable_grad():
        options = options_of(call, at)
    if whole.ends is None:
        return _by_autograd(options, tensors, whole, grad_out, grad_lse, leaves)
    query, key, value = tensors
    sinks = sinks if has_all else None
    with torch.enable_grad():
        rules = lowered(options._replace(sinks=sinks), query.shape[2], key.shape[2])
    more = (call.options.dropout, seed_of(call, at))
    wanted = bool(leaves)
    run = torch.ops.headwise.attend_backward if has_all else torch.ops.headwise.attend_part_backward
    with torch.no_grad():
        dq, dk, dv, *rest = run.default(
            grad_out, grad_lse, whole.out, whole.ends.contiguous(), wanted, query, key, value, *rules, *more
        )
    if not wanted:
        return Gradient(dq, dk, dv, [])
    first = 0 if sinks is None else 1
    terms = leaves_of(Training(query, key, value, rules, *more), True)[3:]
    pairs = [(x, grad) for x, grad in zip(terms[first:], rest[first:], strict=True) if x.requires_grad]
    return Gradient(dq, dk, dv, _of_leaves([x for x, _ in pairs], leaves, [grad for _, grad in pairs]))


def _by_autograd(
    options: ScoreOptions,
    tensors: tuple[Tensor, Tensor, Tensor],
    whole: Partial,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    leaves: Sequence[Tensor],
) -> Gradient:
    with torch.enable_grad():
        own = [x.detach().requires_grad_() for x in tensors]
        query, key, value = own
        out, lse = attention(query, key, value, return_lse=True, **options._asdict())
    with torch.no_grad():
        weight = torch.exp(lse - whole.lse.masked_fill(whole.lse == -torch.inf, 0.0))
        of_lse = (grad_out * (out - whole.out)).to(lse.dtype).sum(-1)
        of_lse = weight * (of_lse if grad_lse is None else of_lse + grad_lse)
        of_out = (weight[..., None] * grad_out).to(out.dtype)
    dq, dk, dv, *rest = torch.autograd.grad([out, lse], [*own, *leaves], [of_out, of_lse], allow_unused=True)
    return Gradient(dq, dk, dv, list(rest))


def _of_leaves(terms: list[Tensor], leaves: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    if not terms:
        return [None] * len(leaves)
    with torch.enable_grad():
        return list(torch.autograd.grad(terms, list(leaves), grads, allow_unused=True))
