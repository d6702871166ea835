"""The indexer of sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .parts import Part, linear, vector


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse attention: it scores all earlier keys with small heads, and attention reads the best ones.

    Attributes:
        heads: The number of its heads.
        dim: Their size; one index key of this size per token is cached, shared by all heads.
        top_k: The number of keys that a query attends to.
        shared: True if the layer attends to the keys that an earlier layer chose, so it has no indexer of its own.
    """

    heads: int
    dim: int
    top_k: int
    shared: bool = False

    def parts(self, width: int, q_rank: int, stream: str) -> Iterator[Part]:
        """Yield its matrices: queries from the latent of the queries, one key, and a weight for each head."""
        if self.shared:
            return
        yield linear("index_q_proj", "attention", q_rank, self.heads * self.dim, stream=stream)
        yield linear("index_k_proj", "attention", width, self.dim, stream=stream)
        yield vector("index_norm", "attention", 2 * self.dim, stream=stream)
        yield linear("index_weights", "attention", width, self.heads, stream=stream)

    def cached_numbers(self) -> int:
        """Return the numbers that one token adds to the cache."""
        return 0 if self.shared else self.dim

    def pair_macs(self) -> int:
        """Return the multiply-adds of one (query, key) pair: a score in each head, and their weighted sum."""
        return 0 if self.shared else self.heads * self.dim + self.heads
