"""Mask functions that `closures` cannot read, as headwise rules: evaluated a strip of query rows at a time.

A function `mask_function(batch, head, query, key) -> bool` says for each pair of a query and a key, by itself, whether
the key may be attended. Then any strip of the T x S pairs may be evaluated alone, and the whole is never there at once.
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
    """The mask of any function of (batch, head, query, key) positions; None where strips of rows would not do.

    That is so where the function fails on index tensors that broadcast, gives something other than their bool tensor,
    or answers for a pair otherwise when it is asked about others beside it. `use_vmap`: it takes one pair at a time.

    >>> mask = function_mask(lambda b, h, q, k: (k <= q) | (k < 2), Frame(B=1, T=3, S=5, q_offset=0))
    >>> print(mask.draw(3, 5))
    ■ ■ · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    """
    # The mask lives as long as one forward: transformers' own is evaluated once for all its layers, too.
    mask = rule(_in_frame(_of_pairs(function) if use_vmap else function, frame), keep=True).sized(frame.B, 1)
    reason = _why_not(mask, frame)
    if reason is None:
        return mask
    logger.info("a mask function is evaluated for all %d x %d pairs at once: %s", frame.T, frame.S, reason)
    return None


def _in_frame(function: MaskFunction, frame: Frame) -> MaskFunction:
    """The function of positions, for indices of queries and keys; every head is head 0, as transformers has it.

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
        allowed: Tensor = function(*(x.to(frame.device) for x in places))  # where its own tensors are
        return allowed.to(i.device)

    return of_indices


def _first(index: Tensor) -> Tensor:
    return torch.zeros_like(index[:1, :1] if index.ndim else index)


def _of_pairs(function: MaskFunction) -> MaskFunction:
    """The function of one pair, for index tensors that broadcast: torch.vmap over each axis that has a length."""

    def of_tensors(*places: Tensor) -> Tensor:
        sizes = torch.broadcast_shapes(*(x.shape for x in places))
        mapped = function
        for axis in reversed(range(len(sizes))):
            if sizes[axis] > 1:
                mapped = torch.vmap(mapped, in_dims=tuple(0 if x.shape[axis] > 1 else None for x in places))
        if mapped is function:
            return function(*(x.squeeze() for x in places)).reshape(sizes)
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # private: tensor[batched]

        with TransformGetItemToIndex():
            return mapped(*(x.squeeze() for x in places)).reshape(sizes)

    return of_tensors


def _why_not(mask: Mask, frame: Frame) -> str | None:
    """Why the function cannot be evaluated strip by strip, by what it says of the corners; None where it can."""
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
    except Exception as error:  # whatever another's function raises: transformers' own evaluation decides
        return one_line(error)
    return None
