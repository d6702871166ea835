"""A part of a mask, of some queries, keys and heads, is what the whole says of those pairs."""

import pytest
import torch
from mask_cases import MASKS, SHORT, SIZES, Sizes

from headwise import alibi, blocks, causal, dilated, keep, lengths, prefix, relative, segments, window
from headwise.ops.masks import Mask

PARTS = (((0, 3), (2, 5), None), ((2, 5), (1, 2), (1, 3)), ((1, 4), (0, 5), (0, 1)))


@pytest.mark.parametrize("name", MASKS)
def test_a_part_is_the_same_pairs_counted_from_there(name: str) -> None:
    for n in SIZES:
        mask = MASKS[name](n).mask.sized(n.B, n.H)
        whole = (mask.allowed(n.T, n.S), mask.added(n.T, n.S))
        for rows, cols, heads in PARTS:
            part = mask.part(rows, cols, n.T, n.S, heads=heads)
            T, S = rows[1] - rows[0], cols[1] - cols[0]
            for ours, all_of_it in zip((part.allowed(T, S), part.added(T, S)), whole, strict=True):
                if all_of_it is None:
                    assert ours is None
                    continue
                full = all_of_it.expand(n.B, n.H, -1, -1)[:, slice(*(heads or (0, n.H))), slice(*rows), slice(*cols)]
                assert torch.equal(ours.expand(full.shape), full), (n, rows, cols, heads)
            if whole[0] is not None and whole[0][:, :, slice(*rows), slice(*cols)].any():
                assert mask.meets(rows, cols, n.T, n.S)


def nothing_between(mask: Mask, n: Sizes = SHORT) -> int:
    """How many single pairs `meets` rules out."""
    return sum(not mask.meets((i, i + 1), (j, j + 1), n.T, n.S) for i in range(n.T) for j in range(n.S))


def test_meets_rules_out_what_the_rules_plainly_tell() -> None:
    n = SHORT
    for mask in (
        causal(),
        window(2),
        window(2, 1),
        causal() | prefix(2),
        causal() & segments(torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 2, 2])),
        MASKS["blocks 3"](n).mask,
        MASKS["keep TS"](n).mask,
        MASKS["lengths start"](Sizes(1, *n[1:])).mask,
    ):
        allowed = mask.allowed(n.T, n.S)
        assert allowed is not None and nothing_between(mask) == int((~allowed.any(0).any(0)).sum()), mask
    assert nothing_between(~window(2, 1)) == 0  # not told by its rule
    assert not causal().meets((2, 2), (0, 7), n.T, n.S)


@pytest.mark.parametrize("name", MASKS)
def test_placed_where_it_is_a_mask_says_the_same(name: str) -> None:
    for n in SIZES:
        mask, offset = MASKS[name](n).mask.sized(n.B, n.H), n.S - n.T
        for placed in (mask.placed(offset), mask.placed(torch.full((n.B,), offset))):
            for ours, wanted in zip(both(placed, n.T, n.S), both(mask, n.T, n.S), strict=True):
                assert (ours is None) == (wanted is None), n
                assert ours is None or torch.equal(*torch.broadcast_tensors(ours, wanted)), n


T, S, OFFSETS = 5, 7, (2, 4, 9)
PLACED = {
    "causal": causal(),
    "window": window(3, 1),
    "window first": window(2, first=1),
    "not a window": ~window(2),
    "dilated": dilated(3),
    "blocks": blocks(4),
    "alibi": alibi(torch.tensor([0.5, 0.25])),
    "relative": relative(torch.arange(10.0).view(2, 5)),
    "union": causal() & dilated(2) | blocks(3),
    "not": ~(causal() & blocks(3)),
    "many": (causal() | prefix(3)) & relative(torch.arange(6.0).view(2, 3)),
    "its own offset": causal(offset=1) & dilated(2, offset=torch.tensor([0, 1, 2])) & alibi(torch.ones(2), offset=3),
    "no offset": prefix(4) & lengths(torch.tensor([7, 3, 5])) & keep(torch.arange(T * S).view(T, S) % 3 > 0),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_mask_placed_by_row_is_that_of_so_many_more_keys(name: str) -> None:
    """What leaves its place to the lengths moves; what has an offset of its own, or none, stays."""
    mask = PLACED[name]
    stays = name in ("its own offset", "no offset")
    ours = both(mask.placed(torch.tensor(OFFSETS)), T, S)
    for b, offset in enumerate(OFFSETS):
        one = both(mask.placed(offset), T, S)
        longer = both(mask, T, S if stays else T + offset)
        for by_row, alone, wanted in zip(ours, one, longer, strict=True):
            assert (by_row is None) == (alone is None) == (wanted is None)
            if wanted is not None:
                row = b if by_row.shape[0] > 1 else 0
                wanted = wanted[b if wanted.shape[0] > 1 else 0, ..., :S]
                assert torch.equal(*torch.broadcast_tensors(by_row[row], wanted)), offset
                assert torch.equal(*torch.broadcast_tensors(alone[b if alone.shape[0] > 1 else 0], wanted)), offset


def both(mask: Mask, T: int, S: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What it allows and what it adds."""
    return mask.allowed(T, S), mask.added(T, S)
