"""A part of a mask, of some queries, keys and heads, is what the whole says of those pairs."""

import pytest
import torch
from mask_cases import MASKS, SHORT, SIZES, Sizes

from headwise import causal, prefix, segments, window
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
