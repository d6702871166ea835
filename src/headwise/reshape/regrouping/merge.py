"""Merge groups of key-value heads into one each, as they are, aligned, or fitted by least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...shapes import check_head_counts
from ...shapes.arguments import check_counts, shown
from ..layout.head_weights import HeadWeights
from ..repair.moments import Moments
from .alignment import KeyBasis, aligned, aligned_differences, orthogonal_rotations
from .grouping import Groups, check_groups, contiguous, grouped
from .head_maps import HeadMaps, merged_heads
from .least_squares import fitted_differences, fitted_maps, output_uses, query_uses

Method = Literal["first", "mean", "aligned", "fitted"]
METHODS: dict[str, str] = {
    "first": "the first head of each group stands for all of it",
    "mean": "the mean of each group's keys and values",
    "aligned": "the mean of each group's keys and values, turned to agree",
    "fitted": "keys and values fitted to each group in least squares",
}
"""The methods, with a description of each for the user."""


def check_method(method: object) -> None:
    """Check that `method` is one of METHODS; raise ValueError otherwise."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method is one of {', '.join(METHODS)}; got {shown(method)}")


@dataclass(frozen=True, eq=False)
class Merge:
    """The decision how a layer's key-value heads are merged; `apply` merges them.

    Attributes:
        groups: The former key-value heads of each group.
        keys: Maps from the former keys to the shared ones, and back.
        values: The same for values.
        lost: The loss of keys, weighted by the queries, and of values, weighted by the output projection: shares of the
            squares over the tokens of the moments.
    """

    groups: Groups
    keys: HeadMaps
    values: HeadMaps
    lost: tuple[float, float]

    def heads(self, group: int) -> tuple[int, ...]:
        """Return the former indices of the query heads in their new order, with `group` of them per key-value head."""
        return tuple(kv * group + n for some in self.groups for kv in some for n in range(group))

    def apply(self, weights: HeadWeights) -> HeadWeights:
        """Return the layer with fewer key-value heads; its query heads are sorted by group."""
        if all(len(group) == 1 for group in self.groups):
            return weights
        return merged_heads(weights, self.keys, self.values, self.groups)


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
    """Choose how groups of key-value heads share one: multi-head attention becomes grouped-query or multi-query.

    Args:
        weights: The layer, with any number K of key-value heads.
        num_kv_heads: The number of key-value heads that are left, a divisor of K.
        method: The keys and values of a group: those of its "first" head; their "mean" (Ainslie et al. 2023, arXiv
            2305.13245); the mean after they were "aligned" (arXiv 2412.20677, see `alignment`); or "fitted" to all of
            them by least squares (see `least_squares`).
        moments: Moments of the layer's heads on calibration text, for "aligned", "fitted" and `Merge.lost`; without
            them the moments are computed from the weights alone.
        groups: The heads that share; by default neighbours, with "aligned" and "fitted" the groups that lose least.
        seed: Seed of the search for groups, if there are too many to try all.
        name: Name of the layer, for the error if its weights are not finite.

    Raises:
        TypeError, ValueError: `num_kv_heads` does not divide K, an unknown method, invalid groups, or weights that are
            not finite.

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
    """Raise ValueError if a layer's projections hold NaN or infinity, because such heads cannot be compared."""
    for part in ("query", "key", "value", "output"):
        bias = getattr(weights, f"{part}_bias")
        if not all(bool(some.isfinite().all()) for some in (getattr(weights, part), bias) if some is not None):
            raise ValueError(
                f"{name}: the {part} projection holds NaN or infinity, and heads are compared by finite numbers; get "
                "the checkpoint anew"
            )


def _maps(weights: HeadWeights, moments: Moments, groups: Groups, method: Method) -> tuple[HeadMaps, HeadMaps]:
    if method == "fitted":
        return fitted_maps(weights, moments, groups)
    if method == "aligned":
        keys = aligned(moments.key, groups, KeyBasis(weights).rotations)
        return keys, aligned(moments.value, groups, orthogonal_rotations)
    make = HeadMaps.of_first if method == "first" else HeadMaps.of_rotations
    K, device = weights.num_kv_heads, weights.query.device
    sizes = (weights.head_dim, weights.value_dim)
    keys, values = (make(torch.eye(n, dtype=torch.float64, device=device).repeat(K, 1, 1), groups) for n in sizes)
    return keys, values
