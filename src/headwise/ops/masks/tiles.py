"""What a rule says of tiles of 64 x 64 pairs: none, all, or which; built once, a row of tiles at a time.

So a kernel can honour any rule: it skips what is empty, asks nothing where all may be attended, and reads the packed
bits of the rest. Memory: eight bytes a tile, 512 a mixed one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .places import count, rank4
from .rules import Rule

SIDE = 64
"""Queries and keys of a tile; the bits of one query are one int64."""
NONE, ALL, BITS = 0, 1, 2
STRIP_PAIRS = 1 << 22  # of a head, looked at together
KEPT = 4  # sizes of a rule whose maps are kept: the other layers of the same forward ask for the same


class TileMap(NamedTuple):
    """A rule, tile by tile."""

    index: Tensor  # type: ignore[assignment]  # not the tuple's method
    """int64 (B|1, H|1, ceil(T / 64), ceil(S / 64)): NONE, ALL, or BITS + n where the n-th block of `bits` tells."""
    bits: Tensor
    """int64 (n, 64): bit c of row r is set where query r of the tile may attend its key c."""


def tile_map(rule: Rule, T: int, S: int) -> TileMap:
    """The map of a rule that restricts, on the CPU; kept with the rule, which says the same as long as it lives.

    >>> from .rules import Band
    >>> tile_map(Band(None, 0), 100, 130).index[0, 0]  # causal: the first 64 queries see 31 keys more than their own
    tensor([[2, 3, 0],
            [1, 4, 5]])
    """
    maps: dict[tuple[int, int], TileMap] = rule.__dict__.setdefault("_maps", {})
    if (T, S) not in maps:
        if len(maps) >= KEPT:
            del maps[next(iter(maps))]
        maps[T, S] = _built(rule, T, S)
    return maps[T, S]


def unpacked(tiles: TileMap, T: int, S: int) -> Tensor:
    """Every pair that a map lets through: bool (B|1, H|1, T, S)."""
    index, bits = tiles
    blocks = (bits[:, :, None] >> torch.arange(SIDE, device="cpu") & 1).bool()  # (n, 64, 64)
    whole = torch.tensor([False, True], device="cpu")[:, None, None].expand(2, SIDE, SIDE)  # NONE, ALL
    pairs = torch.cat([whole, blocks])[index]  # (B|1, H|1, rows, columns, 64, 64)
    return pairs.movedim(4, 3).flatten(4, 5).flatten(2, 3)[:, :, :T, :S]


def _built(rule: Rule, T: int, S: int) -> TileMap:
    index: list[Tensor] = []
    bits: list[Tensor] = []
    blocks, columns = 0, -(-S // SIDE)
    step = SIDE * max(1, STRIP_PAIRS // (SIDE * SIDE * columns))
    of_columns = torch.full((columns,), SIDE, device="cpu")
    of_columns[-1] = S - (columns - 1) * SIDE
    with torch.no_grad():
        for first in range(0, T, step):
            rows = slice(first, min(first + step, T))
            strips = -(-(rows.stop - first) // SIDE)
            seen = rank4(rule.grid(T, S, rows, None, torch.device("cpu")))
            seen = seen.expand(-1, -1, count(rows, T), S)
            lacking = (0, columns * SIDE - S, 0, strips * SIDE - seen.shape[2])
            bytes_ = torch.nn.functional.pad(seen.contiguous().view(torch.uint8), lacking)
            bytes_ = bytes_.unflatten(2, (strips, SIDE))  # (B|1, H|1, strips, 64, columns * 64)
            ones = _ones(bytes_, columns)
            of_rows = torch.full((strips,), SIDE, device="cpu")
            of_rows[-1] = rows.stop - first - (strips - 1) * SIDE
            mixed = (ones > 0) & (ones < of_rows[:, None] * of_columns)
            n = int(mixed.sum())
            here = (ones > 0).long()
            here[mixed] = torch.arange(BITS + blocks, BITS + blocks + n, dtype=torch.int64, device="cpu")
            index.append(here)
            tiles = bytes_.unflatten(-1, (columns, SIDE)).movedim(4, 3)[mixed]  # (n, 64, 64)
            bits.append(_packed(tiles))
            blocks += n
    if not index:
        return TileMap(torch.zeros(1, 1, 0, columns, dtype=torch.int64, device="cpu"), torch.zeros(0, SIDE).long())
    return TileMap(torch.cat(index, dim=2).contiguous(), torch.cat(bits))


def _ones(bytes_: Tensor, columns: int) -> Tensor:
    """How many pairs of each tile may attend: (..., columns). Eight bytes at a time: 64 rows of ones overflow none."""
    of_keys = bytes_.contiguous().view(torch.int64).sum(-2).view(torch.uint8)
    return of_keys.unflatten(-1, (columns, SIDE)).sum(-1, dtype=torch.int64)


def _packed(tiles: Tensor) -> Tensor:
    """(n, 64) int64 of n tiles of bytes 0 and 1, the first key in the lowest bit."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu")
    of_eight = (tiles.unflatten(-1, (8, 8)) * weights).sum(-1, dtype=torch.uint8)
    return of_eight.contiguous().view(torch.int64)[..., 0]
