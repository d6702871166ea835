"""Keys or values in pages: each batch row has a list of pages, which rows may share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...shapes import DTYPES, check_quantized, describe
from ...shapes.arguments import check_counts, check_index, check_tensor
from ..tracing import without_numbers
from .quantized import Quantized

PAGE = 128  # a page has a multiple of this many keys: the tile of the native kernel, so a tile is within one page


@dataclass(frozen=True, eq=False)
class Paged:
    """Keys or values (B, K, S, n): token j of row b is in page `table[b, j // size]` at position `j % size`.

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
        """The sizes (B, K, S, n)."""
        _, K, _, n = self.pages.shape
        return self.table.shape[0], K, self.length, n

    def dense(self) -> Tensor | Quantized:
        """Return a copy as one plain or quantised tensor."""
        if isinstance(self.pages, Quantized):
            check_quantized("page", self.pages.data, self.pages.scale, self.pages.bits)
            check_pages("keys or values", self.pages.data, self.table, self.length)
            data, scale = (gathered(x, self.table, self.length) for x in (self.pages.data, self.pages.scale))
            return Quantized(data, scale, self.pages.bits)
        check_tensor("pages", self.pages)
        check_pages("keys or values", self.pages, self.table, self.length)
        return gathered(self.pages, self.table, self.length)


def check_pages(name: str, pages: Tensor, table: Tensor, length: int) -> None:
    """Check pages (P, K, size, n) and a table that lists enough pages for the tokens of every row.

    The table's numbers are checked only on the CPU, so that the check never waits for another device.
    """
    rule = f"the {name} in pages: pages (P, K, size, n), size a multiple of {PAGE}, and table, int64 (B, N)"
    check_index(f"of {rule}", table=table)
    check_counts(length=length)
    fits = (
        pages.ndim == 4
        and pages.dtype in (*DTYPES, torch.int8, torch.uint8)
        and pages.shape[2]
        and pages.shape[2] % PAGE == 0
    )
    if not fits or table.ndim != 2 or table.dtype != torch.int64 or table.device.type not in ("cpu", pages.device.type):
        raise ValueError(f"{rule}; {_got(pages, table, length)}")
    used = -(-length // pages.shape[2])
    if table.shape[1] < used:
        got = _got(pages, table, length)
        raise ValueError(f"{rule}, N * size >= length; {got}; list a page for each {pages.shape[2]} tokens")
    if table.device.type == "cpu" and not without_numbers() and table[:, :used].numel():
        low, high = (int(x) for x in table[:, :used].aminmax())
        if low < 0 or high >= pages.shape[0]:
            got = f"got {low} to {high}; {_got(pages, table, length)}"
            raise ValueError(f"a table names pages 0 to P - 1 = {pages.shape[0] - 1}; {got}")


def _got(pages: Tensor, table: Tensor, length: int) -> str:
    return f"got pages {describe(pages)}, table {describe(table)}, length {length}"


def gathered(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """Return (B, K, S, ...) from pages (P, K, size, ...)."""
    return pages[table].transpose(1, 2).flatten(2, 3)[:, :, :length]
