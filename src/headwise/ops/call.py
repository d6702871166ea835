"""One checked call of the op, and what a backend says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .options import Scoring
from .storage.layout import StorageLayout


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments that have passed every check; the mask is trimmed to the rules that forbid something."""

    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring
    dropout: float = 0.0
    return_lse: bool = False
    gate: Tensor | None = None  # four axes, each 1 or the output's
    layout: StorageLayout | None = None  # where key and value are int8 or lie in pages
    seed: Tensor | None = None  # what dropout is drawn from where the call is a part of one: `seed_of_part`

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, H, K, T, S."""
        B, H, T, _ = self.query.shape
        paged = self.layout is not None and self.layout.table is not None
        return B, H, self.key.shape[1], T, self.layout.length if paged else self.key.shape[2]  # type: ignore[union-attr]

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
        tensors = (self.query, self.key, self.value, self.gate, *(self.layout or ())[:2])
        return any(t is not None and t.requires_grad for t in tensors) or self.scoring.learns

    @property
    def bias_needs_grad(self) -> bool:
        """A gradient will be asked of a bias or of ALiBi's slopes."""
        return torch.is_grad_enabled() and self.scoring.mask.learns

    def dense(self) -> Call:
        """The same call on keys and values in one piece and of floats, and a query as wide as they are."""
        if self.layout is None:
            return self
        wide = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        key, value = self.layout.plain(self.key, self.value, wide)
        return replace(self, query=self.query.to(key.dtype), key=key, value=value, layout=None)

    @property
    def is_transformed(self) -> bool:
        """Inside torch.func (vmap, grad, jvp) or forward-mode AD: only plain differentiable torch ops serve."""
        return _is_transformed()


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# A constant to torch.compile, which opens the transforms of a function while it traces it. This is all that
# torch.compiler.assume_constant_result does, but it imports torch._dynamo: a second and 70 MB in every process.
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


Result: TypeAlias = tuple[Tensor, Tensor | None]
"""out (B, H, T, V) and, where asked for, the lse (B, H, T)."""
Run: TypeAlias = Callable[[Call], Result]


class Limit(NamedTuple):
    """What a backend cannot honour: the case and, in words, why and what to do."""

    met: Callable[[Call], bool]
    why: str | Callable[[Call], str]


def refusal(limits: tuple[Limit, ...], call: Call) -> str | None:
    """The first limit that the call meets, in words; None where the backend can serve it."""
    why = next((limit.why for limit in limits if limit.met(call)), None)
    return why(call) if callable(why) else why
