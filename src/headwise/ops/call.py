"""One checked call of the operator, and the limits of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..shapes import compute_dtype
from .options import ScoreOptions
from .storage.layout import StorageLayout


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a call after every check; the mask has only the rules that forbid something."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: ScoreOptions
    return_lse: bool = False
    layout: StorageLayout | None = None  # set if key and value are int8 or in pages
    seed: Tensor | None = None  # the dropout seed from `seed_of_part` if this is a part of a call

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The sizes B, H, K, T and S."""
        B, H, T, _ = self.query.shape
        paged = self.layout is not None and self.layout.table is not None
        return B, H, self.key.shape[1], T, self.layout.length if paged else self.key.shape[2]  # type: ignore[union-attr]

    @property
    def device_type(self) -> str:
        """The device type: `cpu`, `cuda`, ..."""
        return self.query.device.type

    @property
    def is_empty(self) -> bool:
        """True if the batch, the queries or the keys are empty."""
        B, _, _, T, S = self.sizes
        return B == 0 or T == 0 or S == 0

    @property
    def needs_grad(self) -> bool:
        """True if query, key, value, sinks, gate or a bias of the mask needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        tensors = (self.query, self.key, self.value, *(self.layout or ())[:2])
        return any(t is not None and t.requires_grad for t in tensors) or self.options.learns

    @property
    def bias_needs_grad(self) -> bool:
        """True if a bias or the slopes of ALiBi need a gradient."""
        return torch.is_grad_enabled() and self.options.mask.learns

    def dense(self) -> Call:
        """Return the call with plain float keys and values, and the query in their dtype."""
        if self.layout is None:
            return self
        key, value = self.layout.plain(self.key, self.value, compute_dtype(self.query))
        return replace(self, query=self.query.to(key.dtype), key=key, value=value, layout=None)

    @property
    def is_transformed(self) -> bool:
        """True inside torch.func (vmap, grad, jvp) or forward-mode AD, which need plain differentiable torch ops."""
        return _is_transformed()


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# torch.compile must treat the result as a constant, because it starts the transforms itself while it traces. This is
# what torch.compiler.assume_constant_result does, but that imports torch._dynamo: 1 s and 70 MB in every process.
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


Result: TypeAlias = tuple[Tensor, Tensor | None]
"""out (B, H, T, V) and the lse (B, H, T), or None if it was not requested."""
Run: TypeAlias = Callable[[Call], Result]


class Limit(NamedTuple):
    """A case that a backend does not support: the condition, and a message with the reason and the remedy."""

    met: Callable[[Call], bool]
    why: str | Callable[[Call], str]


def refusal(limits: tuple[Limit, ...], call: Call) -> str | None:
    """Return the message of the first limit that applies to the call; None if the backend supports the call."""
    why = next((limit.why for limit in limits if limit.met(call)), None)
    return why(call) if callable(why) else why
