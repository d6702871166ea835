"""Where the tokens of a sequence are split over processes, attention modules ask here who attends and where they are.

`headwise.parallel.context` enters a `Sharded`; without one nothing changes.
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
"""(vectors (B, 1, n, E), first, last) -> keys and values of the query heads first <= h < last."""


@runtime_checkable
class Sharded(Protocol):
    """Attention of tokens of which this process has some."""

    def positions(self, tokens: int) -> Tensor:
        """(T,) the places in the whole sequence of this process's tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """`headwise.attention` over the tokens of all processes, for the queries of this one."""

    def attend_made(
        self, query: Tensor, vectors: Tensor, make: Make, tensors: tuple[Tensor, ...], value_dim: int, **options: Any
    ) -> Tensor:
        """The same where keys and values are made of vectors (B, 1, T, E) by `make`, which reads `tensors`."""


_entered: list[Sharded] = []  # no context variable, which torch.compile does not trace; a process is one rank


def current() -> Sharded | None:
    """The one that was entered last; None where tokens are all here."""
    return _entered[-1] if _entered else None


@contextmanager
def entered(sharded: Sharded) -> Iterator[None]:
    """Within, modules attend by `sharded`."""
    _entered.append(sharded)
    try:
        yield
    finally:
        _entered.remove(sharded)


def placed(positions: Positions, tokens: int, device: torch.device) -> Positions:
    """The positions of a module's own tokens: as passed, else where those lie that this process has."""
    sharded = current()
    return sharded.positions(tokens).to(device) if positions is None and sharded is not None else positions


def check_uncached(cache: object) -> None:
    """ValueError for a cache where tokens are split over processes."""
    if cache is not None and current() is not None:
        raise ValueError(
            "within headwise.parallel.context a module takes no cache: each process would keep its own tokens alone; "
            "leave cache out, or the context"
        )


def check_splits(inner: nn.Module) -> None:
    """ValueError for an inner part that knows nothing of split tokens, or whose forward runs anew as it did not run.

    Activation checkpointing runs a forward anew within the backward; outside of the context it would attend the tokens
    of this process alone, and gradients would be wrong.
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
    """Some of a module's heads: those that this process has.

    Attributes:
        total: all query heads of the module.
        first: the first that is here.
        group: the processes that have the others.
    """

    total: int
    first: int
    group: Group

    def seed(self) -> int:
        """What dropout of all heads is drawn from, the same on all of those processes."""
        return self.group.first_of(drawn())

    def of_part(self) -> Tensor:
        """What dropout of these heads is drawn from."""
        return seed_of_part(self.seed(), self.total, self.first)


_some: list[LocalHeads] = []


@contextmanager
def within_heads(some: LocalHeads) -> Iterator[None]:
    """Within, inner parts attend some heads of a module."""
    _some.append(some)
    try:
        yield
    finally:
        _some.pop()


def heads_here() -> LocalHeads | None:
    """The heads that an inner part attends; None for all of its module's."""
    return _some[-1] if _some else None
