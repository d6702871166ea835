"""Tile maps of a rule: for each tile of 64 x 64 pairs none, all or some are allowed; built one row of tiles at a time.

With a tile map a kernel can support any rule: it skips empty tiles, needs no mask in full tiles, and loads packed bits
for the others. Memory: 8 bytes per tile, 512 more per mixed tile. A map is cached with its rule and used again while
the inputs of the rule are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from .indexing import count, rank4
from .reads import Reads, reads_of
from .rule import Rule

SIDE = 64
"""Queries and keys per tile; the bits of one query are one int64."""
NONE, ALL, BITS = 0, 1, 2
STRIP_PAIRS = 1 << 22  # pairs of one head per block
DEVICE_STRIP_PAIRS = 1 << 24  # the same on other devices, where each operator is a kernel launch
CPU = torch.device("cpu")
KEPT = 4  # sizes per rule with a cached map: the other layers of a forward pass use the same sizes


class TileMap(NamedTuple):
    """The tiles of a rule."""

    index: Tensor  # type: ignore[assignment]  # not the tuple's method
    """int64 (B|1, H|1, ceil(T / 64), ceil(S / 64)): NONE, ALL, or BITS + n for the n-th block of `bits`."""
    bits: Tensor
    """int64 (n, 64): bit c of row r is set if query r of the tile may attend to key c of the tile."""


def tile_map(rule: Rule, T: int, S: int) -> TileMap:
    """Return the tile map of a restricting rule, on the CPU. A cached map is used only if the inputs are unchanged.

    >>> from .rules import Band
    >>> tile_map(Band(None, 0), 100, 130).index[0, 0]  # causal: the first 64 queries see 31 keys more than their own
    tensor([[2, 3, 0],
            [1, 4, 5]])
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return _kept_or_built(rule, T, S)
    # Selective checkpointing saves results by the number of the operation, and a map that is kept is not built again.
    with _disable_current_modes():
        return _kept_or_built(rule, T, S)


def _kept_or_built(rule: Rule, T: int, S: int) -> TileMap:
    if 0 in (T, S):
        return built_map(rule, T, S, CPU)
    maps: dict[tuple[int, int], tuple[Reads, TileMap]] = rule.__dict__.setdefault("_maps", {})
    reads, kept = reads_of(rule, T, S), maps.get((T, S))
    if kept is not None and reads.equals(kept[0]):
        return kept[1]
    with torch.inference_mode(False):  # the cached map is also used in calls with a gradient
        before, made = reads.copied(), built_map(rule, T, S, CPU)
    maps.pop((T, S), None)
    again = reads_of(rule, T, S)
    if again.is_at(reads) and again.equals(before):  # else changes could be missed
        maps[T, S] = before, made
    for old in list(maps)[:-KEPT]:  # another thread may have removed it
        maps.pop(old, None)
    return made


def unpacked(tiles: TileMap, T: int, S: int) -> Tensor:
    """Return every pair that a map allows: bool (B|1, H|1, T, S)."""
    index, bits = tiles
    blocks = (bits[:, :, None] >> torch.arange(SIDE, device="cpu") & 1).bool()  # (n, 64, 64)
    whole = torch.tensor([False, True], device="cpu")[:, None, None].expand(2, SIDE, SIDE)  # NONE, ALL
    pairs = torch.cat([whole, blocks])[index]  # (B|1, H|1, rows, columns, 64, 64)
    return pairs.movedim(4, 3).flatten(4, 5).flatten(2, 3)[:, :, :T, :S]


def built_map(rule: Rule, T: int, S: int, device: torch.device) -> TileMap:
    """Return the tile map of a restricting rule on a device, without a look at kept maps; this waits for the device."""
    index: list[Tensor] = []
    bits: list[Tensor] = []
    blocks, columns = 0, -(-S // SIDE)
    if not T or not S:
        nothing = torch.zeros(1, 1, -(-T // SIDE), columns, dtype=torch.int64, device=device)
        return TileMap(nothing, torch.zeros(0, SIDE, dtype=torch.int64, device=device))
    pairs = STRIP_PAIRS if device.type == "cpu" else DEVICE_STRIP_PAIRS
    step = SIDE * max(1, pairs // (SIDE * SIDE * columns))
    every = torch.full((columns,), -1, dtype=torch.int64, device=device)  # all keys allowed
    if S % SIDE:
        every[-1] = (1 << S % SIDE) - 1
    with torch.no_grad():
        for first in range(0, T, step):
            rows = slice(first, min(first + step, T))
            seen = rank4(rule.grid(T, S, rows, None, device))
            words = _words(seen.expand(-1, -1, count(rows, T), S), columns)
            lacking = -words.shape[2] % SIDE
            queries = pad(words, (0, 0, 0, lacking)).unflatten(2, (-1, SIDE))
            of_rows = torch.full((queries.shape[2], 1), SIDE, device=device)
            of_rows[-1] = SIDE - lacking
            some, full = (queries != 0).any(3), (queries == every).sum(3) == of_rows
            mixed = some & ~full  # (B|1, H|1, rows of tiles, columns)
            n = int(mixed.sum())
            here = some.long()
            here[mixed] = torch.arange(BITS + blocks, BITS + blocks + n, dtype=torch.int64, device=device)
            index.append(here)
            bits.append(queries.movedim(3, 4)[mixed])
            blocks += n
    return TileMap(torch.cat(index, dim=2).contiguous(), torch.cat(bits).contiguous())


# The product with eight bytes b0 .. b7 of 0 or 1, as one int64, has b0 .. b7 as the bits of its highest byte: byte k
# times bit 56 - 7 k is at bit 56 + k, and no two other products are at the same bit, so there is no carry.
_GATHER = sum(1 << (56 - 7 * k) for k in range(8))


def _words(seen: Tensor, columns: int) -> Tensor:
    """Return bool (..., S) as int64 (..., columns); the first of each 64 keys is the lowest bit."""
    bytes_ = pad(seen.contiguous().view(torch.uint8), (0, columns * SIDE - seen.shape[-1]))
    of_eight = (bytes_.view(torch.int64) * _GATHER).view(torch.uint8)[..., 7::8]
    return of_eight.contiguous().view(torch.int64)


def kinds_of_intervals(lo: Tensor, hi: Tensor, S: int, tile: tuple[int, int]) -> Tensor:
    """Return EMPTY, MIXED or FULL for each tile of a mask whose row i may attend to lo[i] <= j < hi[i].

    lo and hi are (B|1, T); the result is int8 (B|1, 1, rows of tiles, columns). It needs no loop and no T x S tensor.
    """
    (_, T), (tile_q, tile_k) = lo.shape, tile
    starts = torch.arange(0, S, tile_k, device=lo.device)
    stops, (lo, hi) = (starts + tile_k).clamp(max=S), (lo[..., None], hi[..., None])
    some = (lo < stops) & (hi > starts) & (lo < hi)  # (B|1, T, columns)
    every = (lo <= starts) & (hi >= stops)
    return _kinds_of_rows(some[:, None], every[:, None], T, tile_q)


def kinds_of_pairs(
    seen: Callable[[slice], Tensor], T: int, S: int, tile: tuple[int, int], device: torch.device | None
) -> Tensor:
    """Return EMPTY, MIXED or FULL for each tile of a mask, from `seen`: the bool (B|1, H|1, R, S) of some rows."""
    tile_q, tile_k = tile
    columns = -(-S // tile_k)
    if not T:
        return torch.zeros(1, 1, 0, columns, dtype=torch.int8, device=device)
    on_cpu = device is None or device.type == "cpu"
    step = tile_q * max(1, (STRIP_PAIRS if on_cpu else DEVICE_STRIP_PAIRS) // (tile_q * max(S, 1)))
    strips = []
    for first in range(0, T, step):
        pairs = seen(slice(first, min(first + step, T)))
        lacking = (0, columns * tile_k - S)
        some = pad(pairs, lacking, value=False).unflatten(-1, (columns, tile_k)).any(-1)
        every = pad(pairs, lacking, value=True).unflatten(-1, (columns, tile_k)).all(-1)
        strips.append(_kinds_of_rows(some, every, pairs.shape[2], tile_q))
    return torch.cat(strips, dim=2)


def _kinds_of_rows(some: Tensor, every: Tensor, rows: int, tile_q: int) -> Tensor:
    """Join the rows of each tile: int8 (B|1, H|1, rows of tiles, columns) from bool (B|1, H|1, rows, columns)."""
    lacking = (0, 0, 0, -rows % tile_q)
    some = pad(some, lacking, value=False).unflatten(2, (-1, tile_q)).any(3)
    every = pad(every, lacking, value=True).unflatten(2, (-1, tile_q)).all(3)
    return some.to(torch.int8) + every.to(torch.int8)
