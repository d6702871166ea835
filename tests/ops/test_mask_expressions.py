"""Random expressions of masks, compared cell by cell with their meaning, in every path that takes a mask."""

from __future__ import annotations

import random

import pytest
import torch
from backends import attend
from loops import inside
from mask_cases import Sizes
from mask_expressions import Drawn, Expression
from torch import Tensor

import headwise
from headwise import Mask, attention, keep
from headwise.ops.masks import EMPTY, FULL
from headwise.ops.masks.tiles import tile_map, unpacked
from headwise.ops.sharding.masks import share_of_mask
from headwise.testing import make_qkv

SHAPES = (
    Sizes(2, 4, 2, 3, 7, 8, 8),
    Sizes(3, 2, 1, 5, 3, 8, 8),
    Sizes(2, 3, 3, 1, 6, 8, 8),
    Sizes(2, 6, 1, 2, 5, 8, 8),
    Sizes(2, 2, 1, 4, 4, 8, 8),
)
SEEDS = range(64)


def _dense(mask: Mask, n: Sizes) -> Tensor:
    allowed = mask.sized(n.B, n.H).allowed(n.T, n.S)
    return torch.ones(n.B, n.H, n.T, n.S, dtype=torch.bool) if allowed is None else allowed.expand(n.B, n.H, n.T, n.S)


def _check_questions(made: Expression, n: Sizes, seed: int) -> None:
    """What a mask answers about itself."""
    mask, wanted, make = made.mask.sized(n.B, n.H), made.dense(n), random.Random(seed)
    assert torch.equal(_dense(mask, n), wanted), "allowed"
    b, h = make.randrange(n.B), make.randrange(n.H)
    if not made.adds:
        picture = "\n".join(" ".join("■" if cell else "·" for cell in row) for row in wanted[b, h].tolist())
        assert mask.draw(n.T, n.S, batch=b, head=h) == picture, "draw"
    assert torch.equal(_dense(mask.trimmed(n.T, n.S), n), wanted), "trimmed"
    assert torch.equal(_dense(mask.placed(n.S - n.T), n), wanted), "placed"
    assert torch.equal(_dense(mask.to("cpu"), n), wanted), "to"
    i, j = torch.randint(n.T, (n.B, n.H, 5, 1)), torch.randint(n.S, (n.B, n.H, 1, 4))
    at = mask.at(i, j, n.T, n.S)[0]
    cells = wanted.gather(2, i.expand(-1, -1, -1, n.S)).gather(3, j.expand(-1, -1, 5, -1))
    assert torch.equal(torch.ones_like(cells) if at is None else at.expand(cells.shape), cells), "at"
    if (ends := mask.bounds(n.T, n.S)) is not None:
        columns = torch.arange(n.S)
        inside = (columns >= ends[0][..., None]) & (columns < ends[1][..., None])
        assert torch.equal(inside[:, None].expand(wanted.shape), wanted), "bounds"
    tiles = mask.tiles(n.T, n.S, tile_q=2, tile_k=3)
    for row in range(tiles.shape[2]):
        for column in range(tiles.shape[3]):
            seen = wanted[:, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3].flatten(2)
            kind = torch.where(seen.all(-1), FULL, torch.where(seen.any(-1), 1, EMPTY))
            assert torch.equal(tiles[:, :, row, column].expand(n.B, n.H).long(), kind), "tiles"
    for part in mask.parts:
        if part.restricts and not part.biases:
            alone = torch.broadcast_to(unpacked(tile_map(part, n.T, n.S), n.T, n.S), wanted.shape)
            assert torch.equal(alone, _dense(Mask((part,)), n)), "map"


def _check_parts(made: Expression, n: Sizes, seed: int) -> None:
    """What a mask says of some of its queries, keys, heads and rows of the batch."""
    mask, wanted, make = made.mask.sized(n.B, n.H), made.dense(n), random.Random(seed)
    rows, cols, heads, batch = (
        sorted(make.sample(range(size + 1), 2)) if size else [0, 0] for size in (n.T, n.S, n.H, n.B)
    )
    some = wanted[:, heads[0] : heads[1], rows[0] : rows[1], cols[0] : cols[1]]
    size = n._replace(H=heads[1] - heads[0], T=rows[1] - rows[0], S=cols[1] - cols[0])
    part = mask.part((rows[0], rows[1]), (cols[0], cols[1]), n.T, n.S, heads=(heads[0], heads[1]))
    assert torch.equal(_dense(part, size), some), "part"
    low, high = mask.reach(rows[0], rows[1], n.T, n.S)
    seen = wanted[:, :, rows[0] : rows[1]].flatten(0, 2).any(0)
    assert not seen[: max(low, 0)].any() and not seen[max(high, 0) :].any(), "reach"
    assert (
        mask.meets((rows[0], rows[1]), (cols[0], cols[1]), n.T, n.S)
        or not wanted[:, :, rows[0] : rows[1], cols[0] : cols[1]].any()
    ), "meets"
    share = share_of_mask(mask, (batch[0], batch[1]), (heads[0], heads[1]))
    own = n._replace(B=batch[1] - batch[0], H=heads[1] - heads[0])
    assert torch.equal(_dense(share, own), wanted[batch[0] : batch[1], heads[0] : heads[1]]), "share"
    hidden = mask.forbids().sized(n.B, n.H).allowed(n.T, n.S)
    assert hidden is None or not (wanted.any(1) & ~hidden.expand(wanted.shape).any(1)).any(), "forbids"


def _check_attention(backend: str, made: Expression, n: Sizes) -> None:
    """The weights that a kernel gives, by values that are the unit vectors of the keys; few rows and many."""
    query, key, _ = make_qkv(n.B, n.H, n.K, n.T, n.S, n.D, n.V)
    value = torch.eye(n.S).expand(n.B, n.K, n.S, n.S)
    scores = query.double() @ key.double().repeat_interleave(n.H // n.K, 1).mT * n.D**-0.5 + made.added(n)
    weights = scores.softmax(-1).nan_to_num(0.0)
    for mask in (made.mask, keep(made.dense(n)) & made.mask):
        out = attend(backend, query, key, value, mask=mask) if backend else attention(query, key, value, mask=mask)
        torch.testing.assert_close(out.double(), weights, rtol=0, atol=2e-6)
    statistics = headwise.statistics(query, key, mask=made.mask)
    assert torch.equal(statistics.keys, made.dense(n).sum(-1)), "keys"
    torch.testing.assert_close(statistics.largest.double(), weights.amax(-1), rtol=0, atol=2e-6)


def _drawn(seed: int, n: Sizes) -> Expression:
    return Drawn(seed, n).biased(3)


@pytest.mark.parametrize("n", SHAPES, ids=str)
@inside("seed", SEEDS)
def test_questions(n: Sizes, seed: int) -> None:
    _check_questions(_drawn(seed, n), n, seed)


@pytest.mark.parametrize("n", SHAPES, ids=str)
@inside("seed", SEEDS)
def test_parts(n: Sizes, seed: int) -> None:
    _check_parts(_drawn(seed, n), n, seed)


@pytest.mark.parametrize("backend", ["", "blocks"])
@pytest.mark.parametrize("n", SHAPES, ids=str)
@inside("seed", SEEDS)
def test_attention(backend: str, n: Sizes, seed: int) -> None:
    _check_attention(backend, _drawn(seed, n), n)
