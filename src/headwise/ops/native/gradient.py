"""The call of the native kernel as autograd keeps it, and the gradient of its gradient.

The gradient itself is the library's own (csrc/kernels/backward.h). Where that is to be differentiated again, the
definition takes its place: `by_definition` is differentiable as often as one likes, and builds the T x S matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..masks.compose import Mask
from ..masks.rules import Alibi, Band, Bias, Keep, Lengths, Rule, Segments
from ..masks.tiles import TileMap, unpacked
from ..reference import reference


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
    maps: list[Tensor] | None
    relative: list[Tensor] | None
    dropout: float
    seed: Tensor | None

    @property
    def mask(self) -> Mask | None:
        """The mask again, from what the operator was given."""
        T, S = self.query.shape[2], self.key.shape[2]
        # `bounds` says what the two numbers say, and more.
        band = Band(1 - self.low, self.high - 1, 0).trimmed(T, S) if self.bounds is None else None
        parts: list[Rule] = [] if band is None else [band]
        if self.bounds is not None:
            low, high, start, stop, *always = self.bounds.unbind(1)
            first = int(always[0][0]) if always else 0
            parts += [Band(1, None, low, first), Band(None, -1, high)] if bool(((low > -T) | (high < S)).any()) else []
            parts += [Lengths(stop, start)]
        parts += [Segments(*pair) for pair in _pairs(self.segments)]
        parts += [Keep(x) if x.dtype == torch.bool else Bias(x) for x in self.dense or []]
        parts += [Alibi(*pair) for pair in _pairs(self.alibi)]
        parts += [Keep(unpacked(TileMap(*pair), T, S)) for pair in _pairs(self.maps)]
        apart = torch.arange(S, device="cpu") - torch.arange(T, device="cpu")[:, None] + T - 1
        parts += [Bias(diagonals[..., apart]) for diagonals in self.relative or []]
        return Mask(tuple(parts)) if parts else None


def _pairs(tensors: list[Tensor] | None) -> list[tuple[Tensor, Tensor]]:
    tensors = tensors or []
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def leaves_of(p: Problem, biases: bool) -> list[Tensor]:
    """query, key, value, the sinks and, where `biases` is set, float masks and then slopes: what there is of them."""
    sinks = [] if p.sinks is None else [p.sinks]
    learned = [x for x in p.dense or [] if x.is_floating_point()] + (p.alibi or [])[::2] + (p.relative or [])
    return [p.query, p.key, p.value, *sinks, *(learned if biases else [])]


def by_definition(p: Problem, biases: bool, grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    """The gradients of `leaves_of` the problem as functions of them and of `grad_out` and `grad_lse`."""
    (B, H, T, _), S = p.query.shape, p.key.shape[2]
    kept = torch.ops.headwise.dropout_keep(p.seed, p.dropout, B, H, 0, T, S) if p.dropout > 0 else None
    # Leaves of which the graph holds nothing yet: a leaf that needs no gradient must be one for a moment.
    leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in leaves_of(p, biases)]
    query, key, value, *others = leaves
    p = p._replace(query=query, key=key, value=value)
    if p.sinks is not None:
        p = p._replace(sinks=others.pop(0))
    if biases:
        dense = [others.pop(0) if x.is_floating_point() else x for x in p.dense or []]
        alibi = [others.pop(0) if n % 2 == 0 else x for n, x in enumerate(p.alibi or [])]
        p = p._replace(dense=dense, alibi=alibi, relative=[others.pop(0) for _ in p.relative or []])
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        out, lse = reference(
            p.query,
            p.key,
            p.value,
            mask=p.mask,
            scale=p.scale,
            softcap=p.softcap or None,
            sinks=p.sinks,
            dropout=p.dropout,
            kept=kept,
        )
        results = [out] if grad_lse is None else [out, lse]
        grads = [grad_out] if grad_lse is None else [grad_out, grad_lse]
        found = torch.autograd.grad(results, leaves, grads, create_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, leaves, strict=True)]
