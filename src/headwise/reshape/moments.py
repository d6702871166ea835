"""What a layer's keys and values are alike in on calibration text: their second moments, added up batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..nn.probe import AttentionCall
from ..shapes import describe
from ..shapes.kinds import check_tensor
from .heads import HeadWeights


@dataclass(eq=False)
class Moments:
    """Sums over tokens of the products of a layer's keys, and of its values: all that comparing heads needs.

    Memory does not grow with the text. Keys may be added as attention sees them, turned by their positions: a turn that
    two heads share leaves the products of a pair of numbers with the same pair as they were, and no others are used.

    Attributes:
        key: (K, D, K, D) in float64; ``key[i, :, j]`` is the sum over tokens of ``k_i k_j^T``.
        value: (K, V, K, V), alike.
        tokens: How many tokens were added.
    """

    key: Float[Tensor, "K D K D"]
    value: Float[Tensor, "K V K V"]
    tokens: int = 0

    @classmethod
    def like(cls, weights: HeadWeights) -> Moments:
        """No tokens yet, for a layer of these weights."""
        K, D, V = weights.num_kv_heads, weights.head_dim, weights.value_dim
        device = weights.query.device
        return cls(*(torch.zeros(K, n, K, n, dtype=torch.float64, device=device) for n in (D, V)))

    @classmethod
    def of_weights(cls, weights: HeadWeights) -> Moments:
        """Those of inputs whose numbers are independent and of size 1: for want of text."""
        wide = weights.to(torch.float64)
        made = cls.like(weights)
        for total, part in ((made.key, wide.key), (made.value, wide.value)):
            flat = part.flatten(0, 1)
            total += (flat @ flat.T).view(total.shape)
        return made

    def add(self, key: Float[Tensor, "B K S D"], value: Float[Tensor, "B K S V"]) -> None:
        """Count in the keys and values of a batch of tokens.

        Raises:
            ValueError: another number of heads, or heads of another size.
        """
        for name, part, total in (("key", key, self.key), ("value", value, self.value)):
            check_tensor(name, part, "a float tensor (B, K, S, n)")
            if part.ndim != 4 or (part.shape[1], part.shape[3]) != tuple(total.shape[:2]):
                K, size = total.shape[:2]
                raise ValueError(f"{name} is (B, {K}, S, {size}) for this layer; got {describe(part)}")
            flat = part.detach().to(torch.float64).permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
            total += (flat.T @ flat).view(total.shape)
        self.tokens += key.shape[0] * key.shape[2]

    def watch(self, call: AttentionCall) -> None:
        """Count in the keys and values of an attention call that a probe saw."""
        if call.value is None:
            raise ValueError(f"module {call.module!r} attends without values; its heads cannot be compared")
        self.add(call.key, call.value)
