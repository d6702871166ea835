"""A part of a mask, of some queries, keys, heads and rows of the batch, is what the whole says of those pairs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from mask_cases import MASKS, SHORT, SIZES, Sizes
from torch import Tensor
from torch.utils import _pytree as pytree

import headwise
from headwise import alibi, blocks, causal, dilated, keep, lengths, prefix, relative, segments, window
from headwise.ops.masks import Mask, Rule

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


@pytest.mark.parametrize("offset", [None, 3, (1, 4, 2)], ids=str)
def test_rows_of_a_batch_keep_their_own_slopes_and_offsets(offset: Any) -> None:
    """Of a bias with a slope for each row of the batch and head, the part of some rows has those of these rows."""
    B, H, T, S = 3, 2, 5, 7
    slopes = torch.rand(B, H) + torch.arange(B)[:, None]
    shift = torch.tensor(offset) if isinstance(offset, tuple) else offset
    mask = alibi(slopes, offset=shift)
    offsets = list(offset) if isinstance(offset, tuple) else [S - T if offset is None else offset] * B
    i, j = torch.arange(T)[:, None], torch.arange(S)
    whole = torch.stack([-slopes[b, :, None, None] * (i + offsets[b] - j).abs() for b in range(B)])
    for batch, heads in (((1, 3), None), ((2, 3), (1, 2)), ((0, 2), (0, 1))):
        added = mask.part(batch=batch, heads=heads, T=T, S=S).added(T, S)
        assert added is not None
        wanted = whole[slice(*batch), slice(*(heads or (0, H)))]
        torch.testing.assert_close(added.expand(wanted.shape), wanted)


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


@dataclass(frozen=True, eq=False)
class Steps(Rule):
    """A user's rule, as docs/masks.md has it, with an offset for each row of the batch: it defines `at` alone."""

    offset: Tensor

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return (i + 2 * j + self.offset.view(-1, 1, 1, 1) + T) % 3 != 0


@dataclass(frozen=True, eq=False)
class Slopes(Rule):
    """A user's bias, with a slope for each row and head."""

    slopes: Tensor

    restricts: ClassVar[bool] = False
    biases: ClassVar[bool] = True

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return self.slopes[..., None, None] * (i - j + S)

    @property
    def learns(self) -> bool:
        return self.slopes.requires_grad


def own(n: Sizes) -> dict[str, Mask]:
    steps, slopes = Mask((Steps(torch.arange(n.B) + 1),)), torch.arange(1.0, 1 + n.B * n.H).view(n.B, n.H)
    return {
        "rule": steps,
        "with others": ~steps & causal() | prefix(2),
        "bias": steps & Mask((Slopes(slopes),)),
    }


def of_a_loop(n: Sizes, name: str) -> tuple[Tensor, Tensor]:
    """What the masks of `own` allow and add, pair by pair."""
    allowed, added = torch.zeros(n.B, n.H, n.T, n.S, dtype=torch.bool), torch.zeros(n.B, n.H, n.T, n.S)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, allowed.shape)).tolist():
        step = (i + 2 * j + b + 1 + n.T) % 3 != 0
        allowed[b, h, i, j] = (not step and j <= i + n.S - n.T) or j < 2 if name == "with others" else step
        added[b, h, i, j] = (1 + b * n.H + h) * (i - j + n.S) if name == "bias" else 0.0
    return allowed, added


@pytest.mark.parametrize("name", ["rule", "with others", "bias"])
def test_a_part_of_a_rule_of_ones_own(name: str) -> None:
    for n in SIZES:
        mask, (allowed, added) = own(n)[name], of_a_loop(n, name)
        batch, heads, rows, cols = (1, n.B), (1, n.H - 1), (2, 5), (1, 4)
        part, small = mask.part(rows, cols, n.T, n.S, heads=heads, batch=batch), mask.part(heads=heads, batch=batch)
        for ours, T, S, places in (
            (part, 3, 3, (slice(*batch), slice(*heads), slice(*rows), slice(*cols))),
            (small, n.T, n.S, (slice(*batch), slice(*heads))),
            (small.part((0, 3), (0, 3), n.T, n.S), 3, 3, (slice(*batch), slice(*heads), slice(3), slice(3))),
        ):
            seen, plus = ours.allowed(T, S), ours.added(T, S)
            assert seen is not None and (plus is not None) == (name == "bias")
            assert torch.equal(seen.expand(allowed[places].shape), allowed[places]), n
            assert plus is None or torch.equal(plus, added[places])
            low, high = ours.reach(0, 2, T, S)
            assert not allowed[places][:, :, :2, :low].any() and not allowed[places][:, :, :2, high:].any()
        assert mask.meets(rows, cols, n.T, n.S) and part.learns is False
        # Other places for each row of the batch and each head, as statistics of targets have them.
        B, H = n.B - 1, n.H - 2
        i, j = torch.randint(3, (B, H, 4, 1)), torch.randint(3, (B, H, 1, 2))
        wanted = (
            allowed[1:, 1 : n.H - 1, 2:5, 1:4].gather(2, i.expand(-1, -1, -1, 3)).gather(3, j.expand(-1, -1, 4, -1))
        )
        at = part.at(i, j, 3, 3)[0]
        assert at is not None and torch.equal(at.expand(wanted.shape), wanted)


def test_a_rule_of_ones_own_is_drawn_moved_and_attended_to() -> None:
    n = Sizes(2, 6, 3, 5, 7, 11, 13)
    for name, mask in own(n).items():
        allowed, added = of_a_loop(n, name)
        if name != "bias":
            lines = [" ".join("■" if cell else "·" for cell in row) for row in allowed[1, 0].tolist()]
            assert mask.draw(n.T, n.S, batch=1) == "\n".join(lines)
        moved = [x for made in (mask, mask.part(batch=(1, 2))) for x in pytree.tree_leaves(made.to("meta"))]
        assert moved and all(x.is_meta for x in moved), "a part keeps its tensors where Mask.to finds them"
        query, key, value = (torch.randn(n.B, h, t, d) for h, t, d in ((6, 5, 11), (3, 7, 11), (3, 7, 13)))
        logits = query.double() @ key.double().repeat_interleave(2, 1).mT * n.D**-0.5 + added
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
        wanted = weights @ value.double().repeat_interleave(2, 1)
        for backend in ("auto", "blocks", "reference"):
            out = headwise.attention(query, key, value, mask=mask, backend=backend)
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=4e-6)
        part = mask.part(heads=(2, 4), batch=(1, 2))
        out = headwise.attention(query[1:, 2:4], key[1:, 1:2], value[1:, 1:2], mask=part)
        torch.testing.assert_close(out.double(), wanted[1:, 2:4], rtol=0, atol=4e-6)
