"""Linear maps that merge a group of key-value heads into one, and that recover each head from the merged one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..layout.head_weights import HeadWeights


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """The maps of K key-value heads: a group shares ``m = sum_i write[i] v_i``, and ``read[i] m`` approximates ``v_i``.

    Attributes:
        write: (K, n, n) in float64, where n is the size of a key or of a value.
        read: (K, n, n).
    """

    write: Float[Tensor, "K n n"]
    read: Float[Tensor, "K n n"]

    @classmethod
    def zeros(cls, products: Float[Tensor, "K n K n"]) -> HeadMaps:
        """Return maps of zeros, with the sizes of the moments `products`."""
        made = torch.zeros_like(products[:, :, 0, :1].expand(-1, -1, products.shape[1]))
        return cls(made, made.clone())

    @classmethod
    def of_rotations(cls, rotations: Float[Tensor, "K n n"], groups: Sequence[Sequence[int]]) -> HeadMaps:
        """Return the maps of a mean after rotation: ``m`` is the mean of ``Q_i^T v_i`` with orthogonal ``Q_i``."""
        share = torch.empty(rotations.shape[0], 1, 1, dtype=rotations.dtype, device=rotations.device)
        for group in groups:
            share[list(group)] = 1 / len(group)
        return cls(rotations.transpose(1, 2) * share, rotations)

    @classmethod
    def of_first(cls, rotations: Float[Tensor, "K n n"], groups: Sequence[Sequence[int]]) -> HeadMaps:
        """Return the maps by which the first head of each group, after rotation, replaces the others."""
        first = torch.zeros(rotations.shape[0], 1, 1, dtype=rotations.dtype, device=rotations.device)
        first[[group[0] for group in groups]] = 1.0
        return cls(rotations.transpose(1, 2) * first, rotations)

    def missed(
        self, products: Float[Tensor, "K n K n"], uses: Float[Tensor, "K n n"], groups: Sequence[Sequence[int]]
    ) -> float:
        """Return the squared error of the recovered keys or values, weighted by `uses`, as a share of all.

        That is the sum of ``e_i^T uses_i e_i`` for ``e_i = v_i - read_i m``, divided by the sum for ``v_i`` itself.
        """
        apart = whole = 0.0
        for group in groups:
            members = list(group)
            own, weigh = products[members][:, :, members], uses[members]
            write, read = self.write[members], self.read[members]
            with_shared = torch.einsum("ixjy,jay->ixa", own, write)  # sums of v_i m^T
            square = torch.einsum("iax,ixb->ab", write, with_shared)
            weighed_read = weigh @ read
            whole += float(torch.einsum("ixy,iyix->", weigh, own))
            apart -= 2 * float(torch.einsum("ixa,ixa->", weighed_read, with_shared))
            apart += float(torch.einsum("ixa,ab,ixb->", weighed_read, square, read))
        return max(0.0, (whole + apart) / max(whole, torch.finfo(torch.float64).tiny))


def merged_heads(
    weights: HeadWeights, keys: HeadMaps, values: HeadMaps, groups: Sequence[Sequence[int]]
) -> HeadWeights:
    """Return the weights with one key-value head per group; the query heads are sorted by group."""
    wide = weights.to(torch.float64)
    order = torch.tensor([kv for group in groups for kv in group], device=weights.query.device)
    heads = (order[:, None] * weights.group + torch.arange(weights.group, device=order.device)).flatten()
    ordered = wide.select(heads.tolist(), order.tolist())
    K = len(groups)

    def merged(part: Tensor | None, write: Tensor) -> Tensor | None:
        if part is None:
            return None
        return torch.einsum("kab,kb...->ka...", write[order], part).unflatten(0, (K, -1)).sum(1)

    def read(part: Tensor | None, maps: HeadMaps) -> Tensor | None:
        by_query = maps.read[order].repeat_interleave(weights.group, 0)
        return None if part is None else torch.einsum("hba,hb...->ha...", by_query, part)

    norm = ordered.key_norm
    if norm is not None and norm.ndim == 2:
        enters = keys.write[order].flatten(1).any(1)  # a head that adds nothing to the key adds nothing to the norm
        groups_of = zip(norm.unflatten(0, (K, -1)), enters.unflatten(0, (K, -1)), strict=True)
        norm = torch.stack([some[those].mean(0) for some, those in groups_of])
    by_head = ordered.output.transpose(0, 1)  # (H, M, V)
    parts: dict[str, Any] = {
        "query": read(ordered.query, keys),
        "query_bias": read(ordered.query_bias, keys),
        "key": merged(ordered.key, keys.write),
        "key_bias": merged(ordered.key_bias, keys.write),
        "key_norm": norm,
        "value": merged(ordered.value, values.write),
        "value_bias": merged(ordered.value_bias, values.write),
        "output": (by_head @ values.read[order].repeat_interleave(weights.group, 0)).transpose(0, 1),
    }
    return replace(ordered, **parts).to(weights.query.dtype)
