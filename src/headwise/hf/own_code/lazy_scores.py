"""Lazy scores for a model's own attention code: tensors with only a size and a record of the operations on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.masks.constructors import bias
from ...ops.masks.mask import EVERYTHING, Mask
from ..attention.call_mask import without_lowest
from ..attention.lazy_tensors import Lazy


@dataclass(frozen=True, eq=False)
class RecordedScores:
    """The operations on a product of query (B, H, T, D) and key (B, K, S, D) so far, as options of `attention`."""

    query: Tensor
    key: Tensor
    scale: float = 1.0
    mask: Mask = EVERYTHING
    biases: tuple[Tensor, ...] = ()
    weighted: bool = False
    dropout: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, T, S)."""
        return (*self.query.shape[:3], self.key.shape[2])

    def options(self) -> dict[str, Any]:
        """Return the keywords for `attention` and `weights`."""
        mask = self.mask
        for added in self.biases:
            mask = mask & bias(without_lowest(added))
        return {"mask": mask, "scale": self.scale}


class LazyScores(Lazy):
    """Scores, or weights after the softmax: (B, H, T, S) or (B * H, T, S), as in the model's code."""

    chain: RecordedScores
    replay: Callable[[], Tensor]
    """The function that computes them by the model's own operations, with gradients."""

    def __new__(cls, chain: RecordedScores, shape: Any, dtype: torch.dtype, replay: Callable[[], Tensor]) -> LazyScores:
        """Make lazy scores; `shape` is (B, H, T, S) or (B * H, T, S)."""
        scores: LazyScores = cls._of(replay, shape, dtype, chain.query.device)
        scores.chain, scores.replay = chain, replay
        return scores

    def next(self, op: Callable[[Tensor], Tensor], chain: RecordedScores | None = None, **changes: Any) -> LazyScores:
        """Return the scores after an operation; `op` is that operation on plain scores."""
        before = self.replay  # read now, because an operation in place makes this object the next scores
        shape, dtype = changes.get("shape", self.shape), changes.get("dtype", self.dtype)
        return LazyScores(chain or self.chain, shape, dtype, lambda: op(before()))

    def become(self, other: LazyScores) -> LazyScores:
        """Take over the result of an operation in place."""
        vars(self).update(vars(other))
        return self

    def spread(self, x: Tensor) -> Tensor:
        """Return a tensor that the code adds to the scores in a shape that broadcasts to (B, H, T, S)."""
        if self.ndim == 3 and x.ndim == 3 and x.shape[0] != 1:
            return x.unflatten(0, self.chain.sizes[:2])
        return x.reshape((1,) * (4 - x.ndim) + x.shape)


class Added(Lazy):
    """A bias of rules that takes the place of the tensor that the model's code adds to its scores."""

    mask: Mask

    def __new__(cls, mask: Mask, shape: Any, dtype: torch.dtype, device: torch.device) -> Added:
        """Make the bias; `shape` is (B, H, T, S) or (B * H, T, S)."""
        added: Added = cls._of(partial(_dense, mask, shape, dtype, device), shape, dtype, device)
        added.mask = mask
        return added


def _dense(mask: Mask, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = mask.added(shape[-2], shape[-1], device=device)
    assert whole is not None
    return whole.to(dtype).reshape(-1, *shape[1:]).expand(shape)
