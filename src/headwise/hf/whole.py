"""The whole sequence of which this process has some tokens: what masks and attention must know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor
from transformers import masking_utils


@dataclass(frozen=True, eq=False)
class Whole:
    """A batch before it was split.

    Attributes:
        tokens: T.
        padding: (B, T) bool, True where a token is real; None where all are.
    """

    tokens: int
    padding: Tensor | None = None


_whole: ContextVar[Whole | None] = ContextVar("headwise whole batch", default=None)


def whole() -> Whole | None:
    """Of the forward that runs; None where its tokens are all here."""
    return _whole.get()


@contextmanager
def of(batch: Whole, documents: Tensor | None) -> Iterator[None]:
    """Within, masks are those of that batch.

    transformers finds the documents (B, T) of a packed batch by gaps in positions, of which a part of them has others.
    So it is told those of the whole, while the forward runs: a model that does not look for them still does not.
    """
    token, found = _whole.set(batch), masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: documents
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found
        _whole.reset(token)
