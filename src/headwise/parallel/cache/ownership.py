"""Tokens of a cache dealt out to ranks, block by block: which rank has a token, and where a rank's own lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenOwnership:
    """Blocks of `block` tokens go to ranks 0, 1, ... in turn; this is how `rank` of `ranks` sees it.

    A rank keeps its tokens in their order, so what is an interval of places is an interval of its own tokens.

    >>> one = Deal(rank=1, ranks=3, block=2)
    >>> [place for place in range(12) if one.owns(place)], one.place(torch.arange(4)).tolist(), one.count(9)
    ([2, 3, 8, 9], [2, 3, 8, 9], 3)
    """

    rank: int
    ranks: int
    block: int = 1

    def owns(self, place: int) -> bool:
        """Whether the token at a place is this rank's."""
        return place // self.block % self.ranks == self.rank

    def count(self, places: int) -> int:
        """How many of the first so many tokens are this rank's."""
        turns, rest = divmod(max(places, 0), self.ranks * self.block)
        return turns * self.block + min(max(rest - self.rank * self.block, 0), self.block)

    def counts(self, places: Tensor) -> Tensor:
        """`count`, of each number."""
        around = self.ranks * self.block
        turns = torch.div(places, around, rounding_mode="floor")
        return turns * self.block + (places - turns * around - self.rank * self.block).clamp(0, self.block)

    def place(self, own: Tensor) -> Tensor:
        """Where this rank's tokens of these numbers lie among all."""
        turns = torch.div(own, self.block, rounding_mode="floor")
        return (turns * self.ranks + self.rank) * self.block + own - turns * self.block

    def most(self, tokens: int) -> int:
        """The most tokens that a rank has of so many that follow each other, wherever they begin."""
        turns, rest = divmod(max(tokens, 0), self.ranks * self.block)
        return turns * self.block + min(rest, self.block)

    def of(self, rank: int) -> TokenOwnership:
        """The same as another rank sees it."""
        return TokenOwnership(rank, self.ranks, self.block)


RowSpans = Sequence[tuple[int, int, int]]
"""Of each batch row: the tokens that it has, those that come, and the first of these in what is passed."""


def owned(deal: TokenOwnership, rows: RowSpans) -> list[int]:
    """How many of the tokens that come are a rank's, row by row."""
    return [deal.count(have + come) - deal.count(have) for have, come, _ in rows]


def picks(deal: TokenOwnership, rows: RowSpans) -> list[list[int]]:
    """Which tokens of what is passed are a rank's, row by row; all as many as the most, filled up with the first."""
    chosen = [[start + k for k in range(come) if deal.owns(have + k)] for have, come, start in rows]
    most = max(map(len, chosen))
    return [row + [0] * (most - len(row)) for row in chosen]


def picked(x: Tensor, picks: list[list[int]]) -> Tensor:
    """(B, K, n, width): of each row the tokens picks[b]."""
    at = torch.tensor(picks, device=x.device)
    if all(row == picks[0] for row in picks):
        return x.index_select(2, at[0].long())
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
