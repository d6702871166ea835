"""An inner part that also has the largest logit of each head, for training with QK-clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from ..ops.masks.mask import Mask
from ..ops.max_logits import attention_max_logits
from ..ops.storage.layout import Cache
from .inner_attention import InnerAttention


class MaxLogitAttention(InnerAttention):
    """`InnerAttention` that keeps the largest logit of each head in its last call; see `headwise.attention_max_logits`.

    It costs no further pass where the native kernel runs, changes no bit of the output or of a gradient, and works
    under `torch.compile`. The logits are no part of the state dict. If a step has several calls (micro-batches, ranks),
    take the maximum over them.

    Args:
        options: scale, softcap, sinks, dropout and backend, as for `InnerAttention`.

    Attributes:
        max_logits: (H,) float32 (float64 for float64), without a gradient; None before the first call. A call on a
            cache leaves it as it is.

    Example:
        >>> import torch, headwise
        >>> mha = headwise.MultiHeadAttention(12, 3, inner=MaxLogitAttention())
        >>> out = mha(torch.randn(2, 5, 12), mask=headwise.causal())
        >>> mha.inner.max_logits.shape
        torch.Size([3])
    """

    follows_mode = False
    max_logits: Tensor | None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("max_logits", None, persistent=False)

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor | Cache,
        value: Tensor | None,
        *,
        mask: Mask | Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Return (B, H, T, V), as `InnerAttention`, and set `max_logits`."""
        if not isinstance(key, Tensor) or value is None:
            return super().forward(query, key, value, mask=mask, gate=gate)
        options = self.options()
        out, self.max_logits = attention_max_logits(
            query, key, value, mask=mask, gate=gate, backend=self.backend, **options
        )
        return out
