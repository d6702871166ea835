"""Fewer key-value heads: groups of them become one, as they stand or after turning them into one frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...shapes import check_head_counts
from ...shapes.arguments import check_counts, shown
from ..layout.head_weights import HeadWeights
from ..maps import Maps, shared
from ..repair.moments import Moments
from .alignment import KeyBasis, aligned_differences, aligned_keys, aligned_values
from .grouping import Groups, check_groups, contiguous, grouped
from .least_squares import fitted_differences, fitted_maps, output_uses, query_uses

Method = Literal["first", "mean", "aligned", "fitted"]
METHODS: dict[str, str] = {
    "first": "the first head of each group stands for all of it",
    "mean": "the mean of each group's keys and values",
    "aligned": "the mean of each group's keys and values, turned to agree",
    "fitted": "keys and values fitted to each group in least squares",
}
"""How heads come to share, in words."""


def check_method(method: object) -> None:
    """One of METHODS; raises ValueError."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method is one of {', '.join(METHODS)}; got {shown(method)}")


@dataclass(frozen=True, eq=False)
class Merge:
    """How a layer gets fewer key-value heads; `apply` does it.

    Attributes:
        groups: Which of the former key-value heads each one stands for.
        keys: How the former keys enter the shared ones, and are read from them.
        values: The same for values.
        lost: The share that the shared ones miss of what queries see of the keys, and outputs of the values: in squares
            over the tokens of the moments.
    """

    groups: Groups
    keys: Maps
    values: Maps
    lost: tuple[float, float]

    def heads(self, group: int) -> tuple[int, ...]:
        """The former numbers of the query heads in their new order, where `group` of them read a key-value head."""
        return tuple(kv * group + n for some in self.groups for kv in some for n in range(group))

    def apply(self, weights: HeadWeights) -> HeadWeights:
        """Return the layer with fewer key-value heads; its query heads stand in the order in which groups read them."""
        if all(len(group) == 1 for group in self.groups):
            return weights
        return shared(weights, self.keys, self.values, self.groups)


def merge(
    weights: HeadWeights,
    num_kv_heads: int,
    *,
    method: Method = "fitted",
    moments: Moments | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    name: str = "these weights",
) -> Merge:
    """How groups of key-value heads come to share one: multi-head attention becomes grouped-query or multi-query.

    Args:
        weights: The layer, with any number K of key-value heads.
        num_kv_heads: How many are left, a divisor of K.
        method: What a group shares: its "first" head's keys and values; their "mean" (Ainslie et al. 2023, arXiv
            2305.13245); the mean of heads that were "aligned" (arXiv 2412.20677, see `align`); or what is "fitted" to
            all of them in least squares (see `fit`).
        moments: Of the layer's heads on calibration text, for "aligned", "fitted" and `Merge.lost`; without them the
            weights alone tell how alike heads are.
        groups: Which heads share; by default neighbours, with "aligned" and "fitted" those that lose least.
        seed: Of the search for groups, where there are too many to try them all.
        name: Of the layer, for the error where its weights are not finite.

    Raises:
        TypeError, ValueError: `num_kv_heads` does not divide K, an unknown method, groups that are none, or weights
            that are not finite.

    Example:
        >>> weights = HeadWeights(*(torch.randn(6, 3, 7) for _ in range(3)), torch.randn(7, 6, 3))
        >>> merge(weights, 2, method="mean").groups
        ((0, 1, 2), (3, 4, 5))
    """
    check_counts(1, num_kv_heads=num_kv_heads)
    check_head_counts(weights.num_kv_heads, num_kv_heads)
    check_method(method)
    _check_finite(weights, name)
    known = Moments.of_weights(weights) if moments is None else moments
    if groups is not None:
        chosen = check_groups(groups, weights.num_kv_heads)
        if len(chosen) != num_kv_heads:
            raise ValueError(f"groups are num_kv_heads = {num_kv_heads} in number; got {len(chosen)}")
    elif method in ("aligned", "fitted") and 1 < num_kv_heads < weights.num_kv_heads:
        differ = aligned_differences if method == "aligned" else fitted_differences
        chosen = grouped(differ(weights, known), num_kv_heads, seed)
    else:
        chosen = contiguous(weights.num_kv_heads, num_kv_heads)
    keys, values = _maps(weights, known, chosen, method)
    uses = query_uses(weights, known), output_uses(weights)
    lost = keys.missed(known.key, uses[0], chosen), values.missed(known.value, uses[1], chosen)
    return Merge(chosen, keys, values, lost)


def _check_finite(weights: HeadWeights, name: str) -> None:
    """Raise ValueError where a layer's projections hold NaN or infinity: heads cannot be compared by them."""
    for part in ("query", "key", "value", "output"):
        bias = getattr(weights, f"{part}_bias")
        if not all(bool(some.isfinite().all()) for some in (getattr(weights, part), bias) if some is not None):
            raise ValueError(
                f"{name}: the {part} projection holds NaN or infinity, and heads are compared by finite numbers; get "
                "the checkpoint anew"
            )


def _maps(weights: HeadWeights, moments: Moments, groups: Groups, method: Method) -> tuple[Maps, Maps]:
    """Return how keys, and values, become shared ones."""
    if method == "fitted":
        return fitted_maps(weights, moments, groups)
    if method == "aligned":
        return aligned_keys(KeyBasis(weights), moments, groups), aligned_values(moments, groups)
    make = Maps.of_first if method == "first" else Maps.of_rotations
    K, device = weights.num_kv_heads, weights.query.device
    sizes = (weights.head_dim, weights.value_dim)
    keys, values = (make(torch.eye(n, dtype=torch.float64, device=device).repeat(K, 1, 1), groups) for n in sizes)
    return keys, values
