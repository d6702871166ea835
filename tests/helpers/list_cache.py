"""A key-value cache as plain Python lists, in float64: what every cache of headwise must agree with.

No page, block, rank, window of pages or tensor of bounds: a row is a list of tokens, and a query asks each of them in
turn whether it may see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Allowed = Callable[[int, int, int, int], bool]
"""(row, head, place of the query, place of the key) -> whether the query sees the key."""


class ListCache:
    """Rows of tokens (key (K, D), value (K, V)), none of which is ever forgotten.

    Args:
        batch: rows B.
        window: keys that a query sees, self included; None for all.
        first: tokens at the beginning that stay in sight.
        causal: queries see no later key.
    """

    def __init__(self, batch: int, window: int | None = None, first: int = 0, causal: bool = True) -> None:
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(batch)]
        self.window, self.first, self.causal = window, first, causal
        self.padded: tuple[int, list[int], str] = (0, [], "right")

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.rows]

    def append(self, key: Tensor, value: Tensor, lengths: list[int] | None = None, side: str = "right") -> ListCache:
        """Adds T tokens (B, K, T, n) to each row, or the real ones of them."""
        T = key.shape[2]
        counts = [T] * len(self.rows) if lengths is None else lengths
        for b, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            first = T - count if side == "left" else 0
            row += [(key[b, :, t].double(), value[b, :, t].double()) for t in range(first, first + count)]
        self.padded = (T, list(counts), side)
        return self

    def truncate(self, lengths: list[int]) -> ListCache:
        """Row b keeps its first lengths[b] tokens."""
        if lengths != self.lengths:
            self.rows = [row[:n] for row, n in zip(self.rows, lengths, strict=True)]
            self.padded = (0, [], "right")
        return self

    def reorder(self, rows: list[int]) -> ListCache:
        """Row r becomes what row rows[r] was."""
        self.rows = [list(self.rows[r]) for r in rows]
        T, counts, side = self.padded
        self.padded = (T, [counts[r] for r in rows] if counts else counts, side)
        return self

    def attend(
        self,
        query: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        allowed: Allowed | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(B, H, T, V) and lse (B, H, T) of the queries of the last T tokens; those of padding get 0 and -inf."""
        B, H, T, D = query.shape
        scale = D**-0.5 if scale is None else scale
        width = next(value.shape[-1] for row in self.rows for _, value in row)
        out = torch.zeros(B, H, T, width, dtype=torch.float64)
        lse = torch.full((B, H, T), -math.inf, dtype=torch.float64)
        passed, counts, side = self.padded
        for b, row in enumerate(self.rows):
            count = counts[b] if passed == T else T
            for t in range(T):
                place = t - T + count if side == "left" or passed != T else t
                if place < 0 or place >= count:
                    continue  # padding
                i = len(row) - count + place
                seen = [j for j in range(len(row)) if self._sees(i, j)]
                for h in range(H):
                    its = seen if allowed is None else [j for j in seen if allowed(b, h, i, j)]
                    if its:
                        kv = h // (H // row[0][0].shape[0])
                        products = torch.stack([row[j][0][kv] for j in its]) @ query[b, h, t].double()
                        values = torch.stack([row[j][1][kv] for j in its])
                        out[b, h, t], lse[b, h, t] = _softmax(products, values, scale, softcap, sinks, h)
        return out, lse

    def _sees(self, i: int, j: int) -> bool:
        if self.causal and j > i:
            return False
        return self.window is None or j > i - self.window or j < self.first


def _softmax(
    products: Tensor, values: Tensor, scale: float, softcap: float | None, sinks: Tensor | None, h: int
) -> tuple[Tensor, Tensor]:
    scores = products * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    logits = scores if sinks is None else torch.cat([scores, sinks[h].double().view(1)])
    weights = torch.softmax(logits, 0)[: len(values)]
    return weights @ values, torch.logsumexp(logits, 0)
