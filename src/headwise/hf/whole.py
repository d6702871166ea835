"""The whole sequence of which this process has some tokens: what masks and attention must know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Whole:
    """A batch before it was split.

    Attributes:
        tokens: T.
        padding: (B, T) bool, True where a token is real; None where all are.
        documents: (B, T) the number of the document of each token; None where there is one.
    """

    tokens: int
    padding: Tensor | None = None
    documents: Tensor | None = None


_whole: ContextVar[Whole | None] = ContextVar("headwise whole batch", default=None)


def whole() -> Whole | None:
    """Of the forward that runs; None where its tokens are all here."""
    return _whole.get()


@contextmanager
def of(batch: Whole | None) -> Iterator[None]:
    """Within, masks are those of that batch."""
    token = _whole.set(batch)
    try:
        yield
    finally:
        _whole.reset(token)
