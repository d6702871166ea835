"""The map of a rule's tiles: every pair of it, against the rule itself."""

from __future__ import annotations

import pytest
import torch
from loops import inside
from mask_cases import MASKS, SHORT, TILED, Sizes
from torch import Tensor

import headwise
from headwise.ops.masks import tiles
from headwise.ops.masks.reads import Reads
from headwise.ops.masks.rules import Band
from headwise.ops.masks.tiles import ALL, BITS, SIDE, TileMap, tile_map, unpacked

WIDE = Sizes(2, 3, 1, 67, 193, 5, 7)  # a last tile of one key, and of three rows
LONG = Sizes(1, 2, 1, 193, 65, 5, 7)


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("everything",)])
@inside("n", [SHORT, TILED, WIDE, LONG])
def test_every_pair(name: str, n: Sizes) -> None:
    for rule in MASKS[name](n).mask.sized(n.B, n.H).parts:
        if rule.restricts and not rule.biases:
            tiles = tile_map(rule, n.T, n.S)
            seen = unpacked(tiles, n.T, n.S)
            expected = rule.grid(n.T, n.S, None, None, None)
            assert torch.equal(*torch.broadcast_tensors(seen, expected))
            assert tiles.bits.dtype == torch.int64 and tiles.index.dtype == torch.int64


@inside("sizes", [(3, 0), (0, 3), (0, 0), (130, 0)])
def test_without_queries_or_keys_there_is_nothing_to_see(sizes: tuple[int, int]) -> None:
    T, S = sizes
    mask = headwise.causal() | headwise.dilated(2)
    [rule] = mask.parts
    assert unpacked(tile_map(rule, T, S), T, S).shape == (1, 1, T, S)
    headwise.attention(*torch.randn(3, 1, 1, 1, 4))  # from the second call on the native kernel is asked at once
    q, k, v = torch.randn(2, 4, T, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 7)
    assert torch.equal(headwise.attention(q, k, v, mask=mask), torch.zeros(2, 4, T, 7))


def test_what_is_full_or_empty_needs_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last tile is cut short by the lengths; strip by strip the same."""
    T, S = 3 * SIDE, 5 * SIDE - 7
    [rule] = (headwise.causal(offset=SIDE) | headwise.prefix(SIDE)).parts
    tiling = tile_map(rule, T, S)
    assert tiling.index[0, 0].tolist() == [[1, 2, 0, 0, 0], [1, 1, 3, 0, 0], [1, 1, 1, 4, 0]]
    assert tiling.bits.shape == (3, SIDE)
    monkeypatch.setattr(tiles, "STRIP_PAIRS", 1)
    [again] = (headwise.causal(offset=SIDE) | headwise.prefix(SIDE)).parts
    assert all(torch.equal(a, b) for a, b in zip(tile_map(again, T, S), tiling, strict=True))
    [all_of_it] = headwise.prefix(S).parts
    assert set(tile_map(all_of_it, T, S).index.flatten().tolist()) == {ALL}
    assert BITS not in tile_map(all_of_it, T, S).index


@pytest.mark.parametrize("keep", [False, True])
def test_a_map_is_made_once_for_a_size(keep: bool) -> None:
    pairs = []

    def every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        pairs.append(i.numel() * j.numel())
        return (i + j) % 3 == 0

    mask = headwise.rule(every_third, keep=keep)
    for _ in range(3):
        [rule] = mask.sized(2, 3).parts
        tile_map(rule, 70, 80)
    assert [n for n in pairs if n > 1] == [70 * 80], "evaluated once"
    assert len(pairs) == (1 if keep else 5), "asked about one pair a call, and twice when the map is made"
    for S in range(80, 90):
        tile_map(rule, 70, S)
    assert len(rule.__dict__["_maps"]) == tiles.KEPT


def test_a_map_that_was_made_in_inference_mode_serves_training() -> None:
    """A mask that a validation met first: what is kept of it is no inference tensor, which autograd refuses."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    mask = headwise.causal() | headwise.prefix(2)
    with torch.inference_mode():
        expected = headwise.attention(q, q, q, mask=mask)
    out = headwise.attention(q, q, q, mask=mask)
    out.sum().backward()
    assert q.grad is not None and torch.equal(out, expected)
    assert not any(x.is_inference() for rule in mask.parts for x in tile_map(rule, 5, 5))


def test_a_map_that_another_thread_drops_at_once_is_still_given() -> None:
    class Dropped(dict[tuple[int, int], tuple[Reads, TileMap]]):
        """Other sizes of the rule, asked for elsewhere, push out what was kept just now."""

        def __setitem__(self, size: tuple[int, int], made: tuple[Reads, TileMap]) -> None:
            super().__setitem__(size, made)
            self.clear()

    rule, same = Band(None, 0), Band(None, 0)
    rule.__dict__["_maps"] = Dropped()
    for ours, wanted in zip(tile_map(rule, 70, 130), tile_map(same, 70, 130), strict=True):
        assert torch.equal(ours, wanted)
