"""The mode in which attention modules run inside a with block: what computes the attention between their projections.

`headwise.parallel.context` enters one. Without a mode, modules attend to the keys that they project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .rotary import Positions

Expand = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""A function (vectors (B, 1, n, E), first, last) -> keys and values of the query heads first <= h < last."""


@runtime_checkable
class AttentionMode(Protocol):
    """What attention modules use in place of `headwise.attention` inside a with block."""

    def check(self, inner: nn.Module, cache: object) -> None:
        """Raise ValueError for a call of a module with this inner part and cache that the mode does not support."""

    def positions(self, tokens: int) -> Tensor:
        """Return the default positions (T,) of the tokens of a call."""

    def attend(self, query: Tensor, key: Any, value: Tensor | None, **options: Any) -> Tensor:
        """Compute the heads; arguments and options are those of `headwise.attention`."""

    def attend_expanded(
        self,
        query: Tensor,
        vectors: Tensor,
        expand: Expand,
        tensors: tuple[Tensor, ...],
        value_dim: int,
        **options: Any,
    ) -> Tensor:
        """Compute the same with keys and values that `expand` makes from vectors (B, 1, T, E); it reads `tensors`."""


# Not a ContextVar: torch.compile cannot trace one, and on a GPU autograd recomputes checkpointed parts in threads of
# its own, which would not have its value.
_entered: list[AttentionMode] = []


def current_mode() -> AttentionMode | None:
    """Return the mode entered last; None outside of all."""
    return _entered[-1] if _entered else None


@contextmanager
def attention_mode(mode: AttentionMode) -> Iterator[None]:
    """Let attention modules run in `mode` inside the with block."""
    _entered.append(mode)
    try:
        yield
    finally:
        _entered.remove(mode)


def check_mode(inner: nn.Module, cache: object = None) -> None:
    """Raise ValueError if the current mode does not support a call."""
    if (mode := current_mode()) is not None:
        mode.check(inner, cache)


def positions_for(positions: Positions, tokens: int, device: torch.device) -> Positions:
    """Return `positions` if given; else the default positions of the current mode, if there is one."""
    mode = current_mode()
    return mode.positions(tokens).to(device) if positions is None and mode is not None else positions
