"""The whole batch whose tokens are split over processes, for masks and attention."""

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
        tokens: The number of tokens T of a sequence.
        padding: (B, T) bool, True for a real token; None if all are real.
    """

    tokens: int
    padding: Tensor | None = None


_whole: list[WholeBatch] = []  # no context variable, because torch.compile does not trace them; a process is one rank


def whole_batch() -> WholeBatch | None:
    """Return the whole batch of the running forward pass, or None if its tokens are not split."""
    return _whole[-1] if _whole else None


@contextmanager
def masks_of_whole_batch(batch: WholeBatch, positions: Tensor, documents: Tensor | None) -> Iterator[None]:
    """Make masks for the whole batch inside of the with block.

    transformers finds the documents (B, T) of a packed batch by gaps in the positions (B, T), and a part of the tokens
    has other gaps. So transformers gets the documents and positions of the whole batch during the forward pass. A model
    that does not look for documents still ignores them.
    """
    theirs: dict[str, Any] = {"find_packed_sequence_indices": lambda _: documents}
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # does not exist in 5.20
    if remap is not None:
        theirs["remap_positions_for_packed_sequence"] = lambda function, _: remap(function, positions)
    before = {name: getattr(masking_utils, name) for name in theirs}
    _whole.append(batch)
    vars(masking_utils).update(theirs)
    try:
        yield
    finally:
        vars(masking_utils).update(before)
        _whole.remove(batch)
