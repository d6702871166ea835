"""Fewer key-value heads: groups of them become one, as they stand or after turning them into one frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..shapes import check_head_counts
from ..shapes.kinds import check_counts, shown
from .align import aligned_turns, turned
from .grouping import Groups, check_groups, contiguous, differences, grouped
from .heads import HeadWeights
from .moments import Moments

Method = Literal["first", "mean", "aligned"]
METHODS = ("first", "mean", "aligned")


@dataclass(frozen=True, eq=False)
class Merged:
    """A layer with fewer key-value heads.

    Attributes:
        weights: The layer; its query heads stand in the order in which groups read them.
        groups: Which of the former key-value heads each one stands for.
        heads: The former numbers of the query heads, in their new order.
        lost: The share of the keys', and of the values', squares that the shared ones miss, by the moments.
    """

    weights: HeadWeights
    groups: Groups
    heads: tuple[int, ...]
    lost: tuple[float, float]


def merge(
    weights: HeadWeights,
    num_kv_heads: int,
    *,
    method: Method = "aligned",
    moments: Moments | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> Merged:
    """Let groups of key-value heads share one: multi-head attention becomes grouped-query or multi-query.

    Args:
        weights: The layer, with any number K of key-value heads.
        num_kv_heads: How many are left, a divisor of K.
        method: What a group shares: its "first" head's keys and values; their "mean" (Ainslie et al. 2023, arXiv
            2305.13245); or the mean of heads that were "aligned" (arXiv 2412.20677, see `align`), those most alike
            put together.
        moments: Of the layer's keys and values on calibration text, for "aligned" and for `Merged.lost`; without them
            the weights alone tell how alike heads are.
        groups: Which heads share; by default neighbours, with "aligned" those that differ least.
        seed: Of the search for groups, where there are too many to try them all.

    Raises:
        TypeError, ValueError: `num_kv_heads` does not divide K, an unknown method, or groups that are none.

    Example:
        >>> weights = HeadWeights(*(torch.randn(6, 3, 7) for _ in range(3)), torch.randn(7, 6, 3))
        >>> merge(weights, 2, method="mean").groups
        ((0, 1, 2), (3, 4, 5))
    """
    check_counts(1, num_kv_heads=num_kv_heads)
    check_head_counts(weights.num_kv_heads, num_kv_heads)
    if method not in METHODS:
        raise ValueError(f"method is one of {', '.join(METHODS)}; got {shown(method)}")
    known = Moments.of_weights(weights) if moments is None else moments
    if groups is not None:
        chosen = check_groups(groups, weights.num_kv_heads)
        if len(chosen) != num_kv_heads:
            raise ValueError(f"groups are num_kv_heads = {num_kv_heads} in number; got {len(chosen)}")
    elif method == "aligned":
        chosen = grouped(differences(weights, known), num_kv_heads, seed)
    else:
        chosen = contiguous(weights.num_kv_heads, num_kv_heads)
    wide = weights.to(torch.float64)
    turns = aligned_turns(wide, known, chosen) if method == "aligned" else None
    if turns is not None:
        wide = turned(wide, *turns)
    heads = [kv * weights.group + n for group in chosen for kv in group for n in range(weights.group)]
    ordered = wide.select(heads, [kv for group in chosen for kv in group])
    return Merged(
        weights=_share(ordered, num_kv_heads, method).to(weights.query.dtype),
        groups=chosen,
        heads=tuple(heads),
        lost=(
            missed(known.key, turns and turns[0], chosen, method),
            missed(known.value, turns and turns[1], chosen, method),
        ),
    )


def _share(weights: HeadWeights, num_kv_heads: int, method: Method) -> HeadWeights:
    """One key-value head in place of each run of neighbours."""

    def one(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        run = part.unflatten(0, (num_kv_heads, -1))
        return run[:, 0] if method == "first" else run.mean(1)

    names = ["key", "value", "key_bias", "value_bias"]
    if weights.key_norm is not None and weights.key_norm.ndim == 2:
        names.append("key_norm")
    return replace(weights, **{name: one(getattr(weights, name)) for name in names})


def missed(products: Tensor, turns: Tensor | None, groups: Groups, method: Method) -> float:
    """The share of the squares of keys or values (K, n, K, n) that the one a group shares misses."""
    plain = products if turns is None else torch.einsum("idje,idx,jey->ixjy", products, turns, turns)
    inner = torch.einsum("idjd->ij", plain)
    apart = 0.0
    for group in groups:
        own = inner[list(group)][:, list(group)]
        weigh = torch.zeros(len(group), dtype=own.dtype, device=own.device)
        weigh[0] = 1.0
        weigh = weigh if method == "first" else torch.full_like(weigh, 1 / len(group))
        apart += float(own.diagonal().sum() - 2 * (own @ weigh).sum() + len(group) * (weigh @ own @ weigh))
    return max(0.0, apart / max(float(inner.diagonal().sum()), torch.finfo(torch.float64).tiny))
