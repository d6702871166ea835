"""Rules for mask functions that `mask_closures` cannot read: they are evaluated on strips of query rows.

A function `mask_function(batch, head, query, key) -> bool` decides for each pair of a query and a key independently. So
any strip of the T x S pairs can be evaluated separately, and the whole T x S tensor is never in memory.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...files.text import one_line
from ...ops.masks.constructors import rule
from ...ops.masks.mask import Mask
from ..errors import ModelError
from .mask_closures import Frame, MaskFunction

logger = logging.getLogger("headwise.hf")


def function_mask(function: MaskFunction, frame: Frame, *, use_vmap: bool = False) -> Mask | None:
    """Return the mask of any function of (batch, head, query, key) positions, or None if strips are impossible.

    This is so if the function fails on index tensors that broadcast, returns something other than a bool
    tensor of their shape, or gives a pair another result when other pairs are present. `use_vmap`: it takes one pair at
    a time.

    >>> mask = function_mask(lambda b, h, q, k: (k <= q) | (k < 2), Frame(B=1, T=3, S=5, q_offset=0))
    >>> print(mask.draw(3, 5))
    ■ ■ · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    """
    # The mask lives for one forward pass. transformers also evaluates its mask once for all layers.
    mask = rule(_in_frame(_of_pairs(function) if use_vmap else function, frame), keep=True).sized(frame.B, 1)
    reason = _why_not(mask, frame)
    if reason is None:
        return mask
    logger.info("a mask function is evaluated for all %d x %d pairs at once: %s", frame.T, frame.S, reason)
    return None


def _in_frame(function: MaskFunction, frame: Frame) -> MaskFunction:
    """Return the function of query and key indices; every head is head 0, as in transformers.

    Batch and head are index tensors (B, 1, 1, 1) and (1, H, 1, 1), or plain numbers of one pair (FlexAttention).
    """

    def of_indices(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if frame.B == 1:
            b = _first(b)
        elif b.ndim and b.shape[0] != frame.B:
            raise ModelError(
                f"attention of {b.shape[0]} batch rows under a mask made for {frame.B}; the model changes the batch on "
                'the way: run it with set_attn_implementation("eager")'
            )
        places = (b, _first(h), i + frame.q_offset, j + frame.kv_offset)
        allowed: Tensor = function(*(x.to(frame.device) for x in places))  # the device of its own tensors
        return allowed.to(i.device)

    return of_indices


def _first(index: Tensor) -> Tensor:
    return torch.zeros_like(index[:1, :1] if index.ndim else index)


def _of_pairs(function: MaskFunction) -> MaskFunction:
    """Return a function of index tensors that broadcast, by torch.vmap of the function of one pair over each axis."""

    def of_tensors(*places: Tensor) -> Tensor:
        sizes = torch.broadcast_shapes(*(x.shape for x in places))
        mapped = function
        for axis in reversed(range(len(sizes))):
            if sizes[axis] > 1:
                mapped = torch.vmap(mapped, in_dims=tuple(0 if x.shape[axis] > 1 else None for x in places))
        if mapped is function:
            return function(*(x.squeeze() for x in places)).reshape(sizes)
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # private API: tensor[batched]

        with TransformGetItemToIndex():
            return mapped(*(x.squeeze() for x in places)).reshape(sizes)

    return of_tensors


def _why_not(mask: Mask, frame: Frame) -> str | None:
    """Return the reason why the function cannot be evaluated by strips, tested on the corners, or None if it can."""
    T, S, device = frame.T, frame.S, torch.device(frame.device)
    rows, cols = (torch.tensor([0, max(n - 1, 0)], device=device) for n in (T, S))
    try:
        corners = mask.allowed(T, S, rows=rows, cols=cols, device=device)
        assert corners is not None
        for at in (0, 1):
            row, col = slice(at, at + 1), slice(1 - at, 2 - at)
            alone = mask.allowed(T, S, rows=rows[row], cols=cols[col], device=device)
            if not torch.equal(corners[..., row, col], alone):  # type: ignore[arg-type]
                return "its answer for a pair depends on the other pairs"
    except Exception as error:  # a foreign function may raise anything; then transformers' own evaluation is used
        return one_line(error)
    return None
