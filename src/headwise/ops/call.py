"""One checked call of the op, and what a backend says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .masks import Mask


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments that have passed every check; `mask` is trimmed to the rules that forbid something."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    return_lse: bool
    gate: Tensor | None = None  # four axes, each 1 or the output's
    scales: tuple[Tensor, Tensor] | None = None  # of key and value where they are int8

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, H, K, T, S."""
        B, H, T, _ = self.query.shape
        return B, H, self.key.shape[1], T, self.key.shape[2]

    @property
    def device_type(self) -> str:
        """`cpu`, `cuda`, ..."""
        return self.query.device.type

    @property
    def is_empty(self) -> bool:
        """No batch, no query or no key."""
        B, _, _, T, S = self.sizes
        return B == 0 or T == 0 or S == 0

    @property
    def needs_grad(self) -> bool:
        """A gradient will be asked of query, key, value, sinks, gate or the mask's biases."""
        if not torch.is_grad_enabled():
            return False
        tensors = (self.query, self.key, self.value, self.sinks, self.gate, *(self.scales or ()))
        return any(t is not None and t.requires_grad for t in tensors) or self.bias_needs_grad

    @property
    def bias_needs_grad(self) -> bool:
        """A gradient will be asked of a bias or of ALiBi's slopes."""
        return self.mask is not None and torch.is_grad_enabled() and self.mask.learns

    def dequantized(self) -> Call:
        """The same call on float keys and values, and a query as wide as they are."""
        if self.scales is None:
            return self
        wide = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        key, value = (
            x.to(wide) * scale.to(wide)[..., None] for x, scale in zip((self.key, self.value), self.scales, strict=True)
        )
        return replace(self, query=self.query.to(wide), key=key, value=value, scales=None)

    @property
    def is_transformed(self) -> bool:
        """Inside torch.func (vmap, grad, jvp) or forward-mode AD: only plain differentiable torch ops serve."""
        if torch.compiler.is_compiling():
            return False
        return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class Limit(NamedTuple):
    """What a backend cannot honour: the case and, in words, why and what to do."""

    met: Callable[[Call], bool]
    why: str | Callable[[], str]


def refusal(limits: tuple[Limit, ...], call: Call) -> str | None:
    """The first limit that the call meets, in words; None where the backend can serve it."""
    why = next((limit.why for limit in limits if limit.met(call)), None)
    return why() if callable(why) else why
