"""Keys or values in pages: each row of a batch is a list of pages, which may be shared."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .int8 import Quantized

PAGE = 128  # a page holds so many keys or a multiple: the tile of the native kernel, which then lies in one page


@dataclass(frozen=True, eq=False)
class Paged:
    """(B, K, S, n) keys or values: token j of row b lies in page `table[b, j // size]`, at place `j % size`.

    Attributes:
        pages: (P, K, size, n), a tensor or `Quantized`; size is a multiple of 128.
        table: int64 (B, N), N * size >= S.
        length: S.
    """

    pages: Tensor | Quantized
    table: Tensor
    length: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, K, S, n)."""
        _, K, _, n = self.pages.shape
        return self.table.shape[0], K, self.length, n

    def dense(self) -> Tensor | Quantized:
        """The same in one piece: a copy."""
        if isinstance(self.pages, Quantized):
            return Quantized(*(gathered(x, self.table, self.length) for x in (self.pages.data, self.pages.scale)))
        return gathered(self.pages, self.table, self.length)


def gathered(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """(B, K, S, ...) of pages (P, K, size, ...)."""
    return pages[table].transpose(1, 2).flatten(2, 3)[:, :, :length]
