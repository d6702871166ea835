"""The assignment of cache tokens to ranks, block by block: each token's owner and the positions of a rank's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenOwnership:
    """The tokens of one rank when blocks of `block` tokens go to ranks 0, 1, ... in turn.

    A rank keeps its tokens in order, so an interval of positions is also an interval of the rank's own tokens.

    >>> one = TokenOwnership(rank=1, ranks=3, block=2)
    >>> [place for place in range(12) if one.owns(place)], one.place(torch.arange(4)).tolist(), one.count(9)
    ([2, 3, 8, 9], [2, 3, 8, 9], 3)
    """

    rank: int
    ranks: int
    block: int = 1

    def owns(self, place: int) -> bool:
        """Return whether the token at a position belongs to this rank."""
        return place // self.block % self.ranks == self.rank

    def count(self, places: int) -> int:
        """Return the number of this rank's tokens among the first `places` tokens."""
        turns, rest = divmod(max(places, 0), self.ranks * self.block)
        return turns * self.block + min(max(rest - self.rank * self.block, 0), self.block)

    def counts(self, places: Tensor) -> Tensor:
        """Return `count` of each number of a tensor."""
        around = self.ranks * self.block
        turns = torch.div(places, around, rounding_mode="floor")
        return turns * self.block + (places - turns * around - self.rank * self.block).clamp(0, self.block)

    def place(self, own: Tensor) -> Tensor:
        """Return the positions in the whole sequence of this rank's tokens with these indices."""
        turns = torch.div(own, self.block, rounding_mode="floor")
        return (turns * self.ranks + self.rank) * self.block + own - turns * self.block

    def most(self, tokens: int) -> int:
        """Return the largest number of tokens that one rank can have among `tokens` consecutive tokens."""
        turns, rest = divmod(max(tokens, 0), self.ranks * self.block)
        return turns * self.block + min(rest, self.block)

    def of(self, rank: int) -> TokenOwnership:
        """Return the ownership of another rank."""
        return TokenOwnership(rank, self.ranks, self.block)


RowSpans = Sequence[tuple[int, int, int]]
"""For each batch row: the number of cached tokens, the number of new tokens, and the index of the first new token."""


def owned_counts(ownership: TokenOwnership, rows: RowSpans) -> list[int]:
    """Return the number of new tokens that belong to a rank, for each batch row."""
    return [ownership.count(have + come) - ownership.count(have) for have, come, _ in rows]


def owned_indices(ownership: TokenOwnership, rows: RowSpans) -> list[list[int]]:
    """Return the indices of the new tokens that belong to a rank, for each row; shorter rows are padded with 0."""
    chosen = [[start + k for k in range(come) if ownership.owns(have + k)] for have, come, start in rows]
    most = max(map(len, chosen))
    return [row + [0] * (most - len(row)) for row in chosen]


def select_tokens(x: Tensor, picks: list[list[int]]) -> Tensor:
    """Select the tokens picks[b] of each row b; returns (B, K, n, width)."""
    at = torch.tensor(picks, device=x.device)
    if all(row == picks[0] for row in picks):
        return x.index_select(2, at[0].long())
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
