"""State of context parallelism: the object that attends over split tokens, and the positions of the local tokens.

`headwise.parallel.context` enters a `Sharded` object; without one, modules run as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...ops.sharding.heads import Group, drawn, seed_of_part
from ..rotary import Positions

Make = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""A function (vectors (B, 1, n, E), first, last) -> keys and values of the query heads first <= h < last."""


@runtime_checkable
class Sharded(Protocol):
    """Attention over tokens that are split over ranks."""

    def positions(self, tokens: int) -> Tensor:
        """Return the positions (T,) of this rank's tokens in the whole sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute `headwise.attention` over the tokens of all ranks, for the queries of this rank."""

    def attend_made(
        self, query: Tensor, vectors: Tensor, make: Make, tensors: tuple[Tensor, ...], value_dim: int, **options: Any
    ) -> Tensor:
        """Compute the same, with keys and values made from vectors (B, 1, T, E) by `make`, which reads `tensors`."""


_entered: list[Sharded] = []  # not a ContextVar, which torch.compile cannot trace


def current() -> Sharded | None:
    """Return the object entered last; None if tokens are not split."""
    return _entered[-1] if _entered else None


@contextmanager
def entered(sharded: Sharded) -> Iterator[None]:
    """Let modules attend with `sharded` inside the with block."""
    _entered.append(sharded)
    try:
        yield
    finally:
        _entered.remove(sharded)


def placed(positions: Positions, tokens: int, device: torch.device) -> Positions:
    """Return `positions` if given; else, with split tokens, the positions of this rank's tokens."""
    sharded = current()
    return sharded.positions(tokens).to(device) if positions is None and sharded is not None else positions


def check_uncached(cache: object) -> None:
    """Raise ValueError for a cache if tokens are split over ranks."""
    if cache is not None and current() is not None:
        raise ValueError(
            "within headwise.parallel.context a module takes no cache: each process would keep its own tokens alone; "
            "leave cache out, or the context"
        )


def check_splits(inner: nn.Module) -> None:
    """Check that the inner part supports split tokens, and that recomputation runs in the same context as the forward.

    Activation checkpointing recomputes a forward pass in the backward pass; outside the context that would attend only
    to the tokens of this rank, and gradients would be wrong. Raises ValueError.
    """
    split = current() is not None
    if split != getattr(inner, "ran_split", False):
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "a forward runs anew in a backward (activation checkpointing), and headwise.parallel.context is "
                "entered for one of them alone; call backward() where the forward ran: within the context, or outside"
            )
        inner.ran_split = split  # type: ignore[assignment]
    if split and not getattr(inner, "splits_tokens", False):
        raise ValueError(
            f"the inner part {type(inner).__name__} attends the tokens of this process alone; within "
            "headwise.parallel.context take headwise.nn.InnerAttention(...), or leave the context"
        )


class LocalHeads(NamedTuple):
    """The heads of a module on this rank.

    Attributes:
        total: Number of all query heads of the module.
        first: Index of the first head on this rank.
        group: The ranks over which the heads are split.
    """

    total: int
    first: int
    group: Group

    def seed(self) -> int:
        """Return the dropout seed of all heads, the same on all ranks of the group."""
        return self.group.first_of(drawn())

    def of_part(self) -> Tensor:
        """Return the dropout seed of the heads on this rank."""
        return seed_of_part(self.seed(), self.total, self.first)


_some: list[LocalHeads] = []


@contextmanager
def within_heads(some: LocalHeads) -> Iterator[None]:
    """Let inner parts attend with some heads of a module inside the with block."""
    _some.append(some)
    try:
        yield
    finally:
        _some.pop()


def heads_here() -> LocalHeads | None:
    """Return the heads that the inner part computes; None for all heads of its module."""
    return _some[-1] if _some else None
