"""The whole sequence of which this process has some tokens: what masks and attention must know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import masking_utils


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """A batch before it was split.

    Attributes:
        tokens: T.
        padding: (B, T) bool, True where a token is real; None where all are.
    """

    tokens: int
    padding: Tensor | None = None


_whole: list[WholeBatch] = []  # no context variable, which torch.compile does not trace; a process is one rank


def whole_batch() -> WholeBatch | None:
    """Of the forward that runs; None where its tokens are all here."""
    return _whole[-1] if _whole else None


@contextmanager
def of(batch: WholeBatch, positions: Tensor, documents: Tensor | None) -> Iterator[None]:
    """Within, masks are those of that batch.

    transformers finds the documents (B, T) of a packed batch by gaps in positions (B, T), of which a part of the tokens
    has others. So it is told those of the whole, while the forward runs; a model that looks for none still does not.
    """
    theirs: dict[str, Any] = {"find_packed_sequence_indices": lambda _: documents}
    join = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if join is not None:  # newer transformers: what it wraps counts places within documents
        theirs["packed_sequence_compatibility_function"] = lambda function, *_: join(function, positions, documents)
    before = {name: getattr(masking_utils, name) for name in theirs}
    _whole.append(batch)
    for name, function in theirs.items():
        setattr(masking_utils, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(masking_utils, name, function)
        _whole.remove(batch)
