"""Importance by gradient: the slope of the loss along a gate on each head, and how stable its ranking is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ...nn.hooks.probe import AttentionCall, probe
from .gates import Survey, learning
from .losses import Reading


def gradients(
    model: nn.Module, texts: Sequence[Reading], base: Survey
) -> tuple[list[list[float]], list[list[float]], float | None]:
    """Return E |dL / dxi| as ``[layer][head]``, the same divided by the l2 norm of each layer, and its stability.

    The stability is the rank correlation of the second between every other text and the rest; of one text, between the
    halves of its tokens, if its loss is over two words or more; else None.
    """
    by_text: list[list[Tensor]] = []
    halves: list[list[Tensor]] = []
    split = len(texts) == 1 and texts[0].names_words and len(texts[0].counted) > 1
    for text in texts:
        gates: list[Tensor] = []

        def each(call: AttentionCall, gates: list[Tensor] = gates) -> Tensor:
            out = call.attend()
            gates.append(torch.ones(out.shape[1], 1, 1, device=out.device, requires_grad=True))
            return out * gates[-1].to(out.dtype)

        with learning(model), probe(model, each):
            scalars = text.halves(model) if split else text.scalars(model)
            last = len(scalars) - 1
            per_scalar = [
                torch.autograd.grad(scalar, gates, allow_unused=True, retain_graph=n < last)
                for n, scalar in enumerate(scalars)
            ]
        slopes = [
            _stacked(site.num_heads, some) for site, some in zip(base.sites, zip(*per_scalar, strict=True), strict=True)
        ]
        if split:
            halves = [[layer[half].abs() for layer in slopes] for half in (0, 1)]
            slopes = [layer.sum(0, keepdim=True) for layer in slopes]
        by_text.append([layer.norm(dim=0) for layer in slopes])
    if len(texts) > 1:
        halves = [_mean(by_text[::2]), _mean(by_text[1::2])]
    raw = _mean(by_text)
    stable = spearman(*(torch.cat(_divided(half)).tolist() for half in halves)) if halves else None
    return [layer.tolist() for layer in raw], [layer.tolist() for layer in _divided(raw)], stable


def _stacked(heads: int, slopes: Iterable[Tensor | None]) -> Tensor:
    """Return the slopes of some scalars, (scalars, H); 0 where a scalar does not depend on the gates."""
    return torch.stack([torch.zeros(heads, device="cpu") if x is None else x.flatten().cpu() for x in slopes])


def _mean(texts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean over the texts, for each layer (H,)."""
    return [torch.stack(layer).mean(0) for layer in zip(*texts, strict=True)]


def _divided(layers: Sequence[Tensor]) -> list[Tensor]:
    """Return each layer divided by its l2 norm; a layer of norm 0 as it is."""
    return [layer / layer.norm() if layer.norm() > 0 else layer for layer in layers]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Pearson's correlation of the ranks, ties at their mean rank; None if one side is constant."""
    x, y = (ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size > 0 else None


def ranks(values: Sequence[float]) -> Tensor:
    """Return the ranks (n,) float64, from 0; equal values share their mean rank."""
    column = torch.tensor(values, dtype=torch.float64, device="cpu")
    ordered = column.sort().values
    first, past = torch.searchsorted(ordered, column), torch.searchsorted(ordered, column, right=True)
    return (first + past - 1).double() / 2
