"""A mask over keys that lie in another order or with gaps, as in a cache that has dropped some of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...shapes import compute_dtype
from .constructors import bias, keep, lengths
from .indexing import rank4
from .mask import EVERYTHING, Mask
from .rule import Reindexed


@dataclass(frozen=True, eq=False)
class AtPositions(Reindexed):
    """A rule of a call with S keys, for a call in which column j holds the key at positions[b, h, j]."""

    positions: Tensor
    """int64 (B, H|1, columns)."""
    S: int

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        batch, head = (torch.arange(n, device=self.positions.device) for n in self.positions.shape[:2])
        return self.rules[0].at(i, self.positions[batch.view(-1, 1, 1, 1), head.view(1, -1, 1, 1), rank4(j)], T, self.S)


def mask_at_positions(mask: Mask, positions: Tensor, S: int, query: Tensor) -> Mask:
    """Return the mask over columns that hold some of the S keys for which `mask` was made.

    Args:
        mask: of T queries and S keys.
        positions: int64 (B, K or 1, columns), the position of each column's key; -1 at a row's end for none.
        S: the number of keys for which the mask was made.
        query: (B, H, T, D), of the call.
    """
    B, H, T, _ = query.shape
    mask = mask.sized(B, H)
    mask.check(B, H, T, S, query.device)
    mask, present = mask.trimmed(T, S).computed_in(compute_dtype(query)), positions >= 0
    ends = EVERYTHING if bool(present.all()) else lengths(present[:, 0].sum(-1).to(query.device))
    if not mask.parts or not positions.shape[2]:
        return ends
    if positions.shape[1] > 1:
        positions = positions.repeat_interleave(H // positions.shape[1], dim=1)
    positions = positions.clamp(min=0).to(query.device)
    if T > 1:
        return ends & Mask(tuple(AtPositions((rule,), positions, S) for rule in mask.parts))
    # The tensors of a single query are no longer than its keys, and all kernels take them.
    allowed, added = mask.at(torch.zeros_like(positions)[:, :, None], positions[:, :, None], T, S)
    rules = ends if allowed is None else ends & keep(allowed)
    return rules if added is None else rules & bias(added)
