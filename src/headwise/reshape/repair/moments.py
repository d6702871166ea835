"""Second moments of a layer's queries, keys and values on calibration text, added up batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ...nn.hooks.probe import AttentionCall
from ...shapes import describe
from ...shapes.arguments import check_tensor
from ..layout.head_weights import HeadWeights


@dataclass(eq=False)
class Moments:
    """Sums over tokens of products of a layer's queries, keys and values; comparing its heads needs nothing else.

    Memory does not grow with the text. Queries and keys may be added after their rotary embedding: a rotation that two
    heads share does not change the products of a rotary pair with the same pair, and no other products of rotary
    numbers are used.

    Attributes:
        query: (H, D, D) in float64: the sum over tokens of ``q_h q_h^T``.
        key: (K, D, K, D); ``key[i, :, j]`` is the sum of ``k_i k_j^T``.
        value: (K, V, K, V), the same for values.
        tokens: The number of tokens that were added.
    """

    query: Float[Tensor, "H D D"]
    key: Float[Tensor, "K D K D"]
    value: Float[Tensor, "K V K V"]
    tokens: int = 0

    @classmethod
    def like(cls, weights: HeadWeights) -> Moments:
        """Return moments of no tokens, for a layer with these weights."""
        H, K, D, V = weights.num_heads, weights.num_kv_heads, weights.head_dim, weights.value_dim
        query, key, value = (
            torch.zeros(size, dtype=torch.float64, device=weights.query.device)
            for size in ((H, D, D), (K, D, K, D), (K, V, K, V))
        )
        return cls(query, key, value)

    @classmethod
    def of_weights(cls, weights: HeadWeights) -> Moments:
        """Return the moments for inputs of independent numbers with variance 1, computed from the weights alone."""
        wide = weights.to(torch.float64)
        made = cls.like(weights)
        made._count(*(part.permute(2, 0, 1) for part in (wide.query, wide.key, wide.value)))
        return made

    def add(
        self, query: Float[Tensor, "B H T D"], key: Float[Tensor, "B K S D"], value: Float[Tensor, "B K S V"]
    ) -> None:
        """Add the queries, keys and values of a batch of tokens.

        Raises:
            ValueError: another number of heads, or heads of another size.
        """
        parts = {"query": query, "key": key, "value": value}
        for name, part in parts.items():
            check_tensor(name, part, "a float tensor (B, heads, T, n)")
            heads, size = getattr(self, name).shape[:2]
            if part.ndim != 4 or (part.shape[1], part.shape[3]) != (heads, size):
                raise ValueError(f"{name} is (B, {heads}, T, {size}) for this layer; got {describe(part)}")
        rows = (part.detach().to(torch.float64).permute(0, 2, 1, 3).flatten(0, 1) for part in parts.values())
        self._count(*rows)
        self.tokens += key.shape[0] * key.shape[2]

    def watch(self, call: AttentionCall) -> None:
        """Add the queries, keys and values of an attention call from `headwise.nn.probe`."""
        if call.value is None:
            raise ValueError(f"module {call.module!r} attends without values; its heads cannot be compared")
        self.add(call.query, call.key, call.value)

    def check_finite(self, name: str) -> None:
        """Raise ValueError if the layer's queries, keys or values were NaN or infinite on the text."""
        for part, what in (("query", "queries"), ("key", "keys"), ("value", "values")):
            if not bool(getattr(self, part).isfinite().all()):
                raise ValueError(
                    f"{name}: its {what} on this text hold NaN or infinity, and heads are compared by finite numbers; "
                    "get the checkpoint anew"
                )

    def _count(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Add queries, keys and values, each (tokens, heads, n) in float64."""
        self.query += torch.einsum("thd,the->hde", query, query)
        for total, rows in ((self.key, key), (self.value, value)):
            flat = rows.flatten(1)
            total += (flat.T @ flat).view(total.shape)
