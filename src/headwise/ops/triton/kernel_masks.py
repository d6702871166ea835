"""A mask in the form of the Triton kernels: an interval of keys a row or a map of tiles, a dense bias, a table.

Everything is made on the device of the call. Only a map of tiles waits for it, to learn how many tiles are mixed; the
map of a mask of numbers alone is kept with its rule.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks.algebra import AllOf
from ..masks.mask import Mask
from ..masks.positional_rules import Alibi, Relative
from ..masks.reads import kept_for_rules
from ..masks.rule import Rule
from ..masks.rules import Band, Bias, Lengths
from ..masks.tiles import NONE, built_map
from ..tracing import without_numbers

FARTHEST = 1 << 30
"""Greater than every key position that a kernel takes, whose positions are int32."""
LOW, HIGH, START, STOP = range(4)


class TileLists(NamedTuple):
    """A map of tiles of 64 x 64, and for each row of tiles those that are not empty, in the order of the keys."""

    order: Tensor  # int32 (B|1, H|1, rows, columns)
    counts: Tensor  # int32 (B|1, H|1, rows)
    kinds: Tensor  # int32 (B|1, H|1, rows, columns): 0 empty, 1 full, 2 + n for the n-th block of `bits`
    bits: Tensor  # int64 (n, 64)


class KernelMask(NamedTuple):
    """Row i attends the keys max(i + low, start) <= j < min(i + high, stop), of those the ones that a map allows."""

    low: int
    high: int
    ends: list[Tensor | None]  # low, high, start, stop: integers (B|1,)
    tiles: list[Tensor]  # a `TileLists`, or nothing; then the interval is not used
    dense: Tensor | None  # added to the scores, (B|1, H|1, T|1, S|1)
    diagonals: Tensor | None  # added to the scores: float32 (B|1, H, T + S - 1), of query i and key j at T - 1 + j - i


def is_interval(rule: Rule) -> bool:
    """Return True for a rule whose numbers `interval` takes."""
    return (isinstance(rule, Band) and not rule.kept) or isinstance(rule, Lengths)


def trouble_with(mask: Mask) -> str | None:
    """Return the reason why the kernels do not support a mask; None if they do."""
    biases = [rule for rule in mask.parts if rule.biases]
    for rule in biases:
        if not isinstance(rule, Bias | Alibi | Relative):
            return f"the Triton kernels have no form for {type(rule).__name__}, which adds to the scores"
    if sum(isinstance(rule, Bias) for rule in biases) > 1:
        return "the Triton kernels take at most one bias tensor; add them to one"
    if without_numbers() and any(rule.restricts and not rule.biases and not is_interval(rule) for rule in mask.parts):
        return "the Triton kernels take such a mask by a map of tiles, which is not made while tracing"
    return None


def lowered(mask: Mask, T: int, S: int, device: torch.device, *, kept: bool = False) -> KernelMask:
    """Return a mask that `trouble_with` allows in the form of the kernels.

    With `kept`, the first keys that a window keeps in sight are left to the caller, and every band is an interval.
    """
    restricting = [rule for rule in mask.parts if rule.restricts and not rule.biases]
    low, high = -FARTHEST, FARTHEST
    ends: list[Tensor | None] = [None] * 4
    tiles: list[Tensor] = []
    if all(is_interval(rule) or (kept and isinstance(rule, Band)) for rule in restricting):
        low, high, ends = _interval(restricting, T, S, device)
    else:
        tiles = list(kept_for_rules(tuple(restricting), T, S, device, _tile_lists))
    dense = next((rule.full for rule in mask.parts if isinstance(rule, Bias)), None)
    tables = [_diagonals(rule, T, S, device) for rule in mask.parts if isinstance(rule, Alibi | Relative)]
    return KernelMask(low, high, ends, tiles, dense, reduce(torch.add, tables).contiguous() if tables else None)


def _interval(rules: list[Any], T: int, S: int, device: torch.device) -> tuple[int, int, list[Tensor | None]]:
    numbers: tuple[list[Any], ...] = ([-FARTHEST], [FARTHEST])
    tensors: list[list[Tensor]] = [[], [], [], []]
    for rule in rules:
        if isinstance(rule, Lengths):
            tensors[STOP].append(
                rule.stop if isinstance(rule.stop, Tensor) else torch.full((1,), rule.stop, device=device)
            )
            if rule.start is not None:
                tensors[START].append(rule.start)
            continue
        shift = S - T if rule.offset is None else rule.offset
        for side, end in ((LOW, rule.left), (HIGH, rule.right)):
            if end is None:
                continue
            step = 1 - end if side == LOW else 1 + end
            if isinstance(shift, Tensor):
                tensors[side].append(shift.long() + step)
            else:
                numbers[side].append(shift + step)
    low = torch.sym_min(reduce(torch.sym_max, numbers[LOW]), FARTHEST)
    high = torch.sym_max(reduce(torch.sym_min, numbers[HIGH]), -FARTHEST)
    joins = (torch.maximum, torch.minimum, torch.maximum, torch.minimum)
    return low, high, [reduce(join, x) if x else None for join, x in zip(joins, tensors, strict=True)]


def _diagonals(rule: Alibi | Relative, T: int, S: int, device: torch.device) -> Tensor:
    """Return a bias that depends on j - i as a table: float32 (B|1, H, T + S - 1)."""
    # As one query at the place T - 1 with all keys from 0 to T + S - 2: their distances are those of all pairs.
    i, j = torch.full((1, 1), T - 1, device=device), torch.arange(T + S - 1, device=device)[None]
    table = rule.at(i, j, T, S)
    return table.float().flatten(0, -3).flatten(1) if table.ndim < 4 else table.float()[:, :, 0]


def _tile_lists(rules: tuple[Rule, ...], T: int, S: int, device: torch.device) -> TileLists:
    rule = rules[0] if len(rules) == 1 else AllOf(rules)
    index, bits = built_map(rule, T, S, device)
    empty = index == NONE
    order = torch.argsort(empty, dim=-1, stable=True)
    counts = (~empty).sum(-1)
    if not len(bits):
        bits = torch.zeros(1, 64, dtype=torch.int64, device=device)
    return TileLists(order.int().contiguous(), counts.int().contiguous(), index.int().contiguous(), bits)
