"""Every two rules of one small size, joined by `&`, `|` and `~`, against what they say of each pair.

What the joined mask answers about itself, and attention under it, is compared with that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draw import slow_except
from torch import Tensor

import headwise
from headwise import Mask
from headwise.ops.masks.tiles import ALL, tile_map, unpacked

pytestmark = pytest.mark.unchecked
B, H = 2, 2
SIZES = ((3, 5), (5, 3))
STARTS, STOPS, OFFSETS = torch.tensor([1, 0]), torch.tensor([3, 2]), torch.tensor([0, 2])
IDS = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])
QUERY, KEY = torch.randn(2, B, H, 5, 4, generator=torch.Generator().manual_seed(5))
SEEN = torch.rand(B, H, 5, 5, generator=torch.Generator().manual_seed(4)) > 0.4

Cell = Callable[[int, int, int, int, int], bool]
"""(row, head, query, key, S - T) -> whether the query may attend to the key."""


def _band(left: int | None, right: int | None, offset: Any = None, first: int = 0) -> tuple[Any, Cell]:
    def sees(b: int, h: int, i: int, j: int, end: int) -> bool:
        pos = i + (end if offset is None else int(offset[b]) if isinstance(offset, Tensor) else offset)
        return (left is None or j > pos - left or j < first) and (right is None or j <= pos + right)

    return lambda T, S: headwise.window(left, right, offset=offset, first=first), sees


RULES: dict[str, tuple[Callable[[int, int], Mask], Cell]] = {
    "causal": _band(None, 0),
    "causal from 0": _band(None, 0, 0),
    "causal from 2": _band(None, 0, 2),
    "causal by row": _band(None, 0, OFFSETS),
    "window": _band(2, 0),
    "window from 0": _band(2, 0, 0),
    "window both ways": _band(1, 1),
    "window and first": _band(2, 0, None, 1),
    "window by row": _band(2, 1, OFFSETS),
    "window by other rows": _band(3, 0, OFFSETS.flip(0)),
    "later": _band(1, None),
    "lengths": (lambda T, S: headwise.lengths(STOPS), lambda b, h, i, j, end: j < int(STOPS[b])),
    "lengths from": (
        lambda T, S: headwise.lengths(STOPS, STARTS),
        lambda b, h, i, j, end: int(STARTS[b]) <= j < int(STOPS[b]),
    ),
    "prefix": (lambda T, S: headwise.prefix(1), lambda b, h, i, j, end: j < 1),
    "segments": (
        lambda T, S: headwise.segments(IDS[:, :T], IDS[:, :S]),
        lambda b, h, i, j, end: bool(IDS[b, i] == IDS[b, j]),
    ),
    "dilated": (lambda T, S: headwise.dilated(2), lambda b, h, i, j, end: (i + end - j) % 2 == 0),
    "blocks": (lambda T, S: headwise.blocks(2), lambda b, h, i, j, end: (i + end) // 2 == j // 2),
    "keep": (lambda T, S: headwise.keep(SEEN[:, :, :T, :S]), lambda b, h, i, j, end: bool(SEEN[b, h, i, j])),
    "keep of keys": (lambda T, S: headwise.keep(SEEN[:, :, :1, :S]), lambda b, h, i, j, end: bool(SEEN[b, h, 0, j])),
    "rule": (
        lambda T, S: headwise.rule(lambda b, h, i, j: (b + h + i * j) % 3 != 1),
        lambda b, h, i, j, end: (b + h + i * j) % 3 != 1,
    ),
}


def _dense(sees: Cell, T: int, S: int) -> Tensor:
    cells = [sees(*cell, S - T) for cell in itertools.product(range(B), range(H), range(T), range(S))]
    return torch.tensor(cells).view(B, H, T, S)


def _whole(mask: Mask, T: int, S: int) -> Tensor:
    allowed = mask.allowed(T, S)
    return torch.ones(B, H, T, S, dtype=torch.bool) if allowed is None else allowed.expand(B, H, T, S)


def _faults(mask: Mask, wanted: Tensor, T: int, S: int) -> list[str]:
    """The answers of a mask about itself that its pairs contradict."""
    wrong, every = [], wanted.all(0).all(0)
    some, i, j = wanted.any(0).any(0), torch.arange(T)[:, None], torch.arange(S)
    if not torch.equal(_whole(mask, T, S), wanted):
        wrong.append("allowed")
    if not torch.equal(_whole(mask.trimmed(T, S), T, S), wanted):
        wrong.append("trimmed")
    band = mask.simple_band
    if band is not None:
        low, high = (None if end is None else end + (S - T if band[2] else 0) for end in band[:2])
        of_band = ((low is None) | (j >= i + (low or 0))) & ((high is None) | (j < i + (high or 0)))
        if not torch.equal(of_band.expand(B, H, T, S), wanted):
            wrong.append("simple_band")
    if mask.is_top_left and not torch.equal(some, j <= i):
        wrong.append("is_top_left")
    if mask.is_same_for_rows and not bool((wanted == wanted[:, :, :1]).all()):
        wrong.append("is_same_for_rows")
    if bool((wanted & ~_whole(mask.forbids(), T, S)).any()):
        wrong.append("forbids")
    for first, last in itertools.combinations(range(T + 1), 2):
        k0, k1 = mask.reach(first, last, T, S)
        if bool(some[first:last, :k0].any()) or bool(some[first:last, k1:].any()):
            wrong.append(f"reach {first} to {last}")
        for key in range(S):
            if bool(some[first:last, key].any()) and not mask.meets((first, last), (key, key + 1), T, S):
                wrong.append(f"meets {first} to {last}, {key}")
    part = mask.part((1, T), (1, S), T, S, heads=(1, 2), batch=(1, 2)).allowed(T - 1, S - 1)
    if part is not None and not torch.equal(part.expand(1, 1, T - 1, S - 1), wanted[1:, 1:, 1:, 1:]):
        wrong.append("part")
    if part is None and not bool(every[1:, 1:].all()):
        wrong.append("part of all")
    tiles = [unpacked(tile_map(rule, T, S), T, S) for rule in mask.parts]
    if not torch.equal(torch.stack([tile.expand(B, H, T, S) for tile in tiles]).all(0) if tiles else wanted, wanted):
        wrong.append("tiles")
    for rule in mask.parts:
        kinds, says = tile_map(rule, T, S).index.expand(B, H, 1, 1).flatten(2), _whole(Mask((rule,)), T, S).flatten(2)
        if not torch.equal((kinds == ALL)[..., 0], says.all(-1)) or not torch.equal(kinds[..., 0] > 0, says.any(-1)):
            wrong.append("kinds of tiles")
    return wrong


def _far(mask: Mask, wanted: Tensor, T: int, S: int) -> float:
    """How far attention under the mask is from attention under its pairs, in float64 and with nothing left out."""
    query, key = QUERY[:, :, :T], KEY[:, :, :S]
    scores = (query.double() @ key.double().mT / 2).masked_fill(~wanted, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~wanted.any(-1, keepdim=True), 0.0)
    return float((headwise.attention(query, key, key, mask=mask) - weights @ key.double()).abs().max())


@pytest.mark.parametrize(("T", "S"), slow_except(SIZES, SIZES[:1]))
@pytest.mark.parametrize("one", RULES)
def test_a_rule_joined_with_every_other(one: str, T: int, S: int) -> None:
    wrong = []
    for other in RULES:
        a, b = (RULES[name][0](T, S).sized(B, H) for name in (one, other))
        says, too = (_dense(RULES[name][1], T, S) for name in (one, other))
        assert torch.equal(_whole(a.forbids(), T, S).any(1), says.any(1)), "what no head may attend to"
        made = {"and": (a & b, says & too), "or": (a | b, says | too), "and not": (a & ~b, says & ~too)}
        for how, (mask, wanted) in made.items():
            wrong += [(one, how, other, fault) for fault in _faults(mask, wanted, T, S)]
            if not _far(mask, wanted, T, S) < 1e-5:
                wrong.append((one, how, other, "attention"))
    assert not wrong, wrong[:8]
