"""A mask in the form of the Triton kernels: an interval of keys a row or a map of tiles, a dense bias, a table.

Everything is made on the device of the call. Only a map of tiles waits for it, to learn how many tiles are mixed; the
map of a mask of numbers alone is kept with its rule.
"""

from __future__ import annotations

from collections.abc import Callable
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
LOW, HIGH = range(2)


class TileLists(NamedTuple):
    """A map of tiles of 64 x 64, and for each row of tiles those that are not empty, in the order of the keys."""

    order: Tensor  # int32 (B|1, H|1, rows, columns)
    counts: Tensor  # int32 (B|1, H|1, rows)
    kinds: Tensor  # int32 (B|1, H|1, rows, columns): 0 empty, 1 full, 2 + n for the n-th block of `bits`
    bits: Tensor  # int64 (n, 64)


class KernelMask(NamedTuple):
    """Row i attends the keys max(i + low, start) <= j < min(i + high, stop), of those the ones that a map allows.

    `low` and `high` are each a number, plus a number for each row of the batch if the tensor is there.
    """

    low: int
    high: int
    ends: list[Tensor | None]  # of low, high, start, stop: integers (B|1,)
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
    bands: tuple[list[tuple[Any, int]], ...] = ([], [])  # the limits on each side: the row's place, and steps from it
    starts: list[Tensor] = []
    stops: list[Tensor] = []
    for rule in rules:
        if isinstance(rule, Lengths):
            stops.append(rule.stop if isinstance(rule.stop, Tensor) else torch.full((1,), rule.stop, device=device))
            starts += [] if rule.start is None else [rule.start]
            continue
        shift = S - T if rule.offset is None else rule.offset
        bands[LOW].extend([] if rule.left is None else [(shift, 1 - rule.left)])
        bands[HIGH].extend([] if rule.right is None else [(shift, 1 + rule.right)])
    low, lows = _tightest(bands[LOW], -FARTHEST, torch.sym_max, torch.maximum, device)
    high, highs = _tightest(bands[HIGH], FARTHEST, torch.sym_min, torch.minimum, device)
    start, stop = (reduce(join, x) if x else None for join, x in ((torch.maximum, starts), (torch.minimum, stops)))
    return low, high, [lows, highs, start, stop]


def _tightest(
    limits: list[tuple[Any, int]],
    none: int,
    of_numbers: Callable[..., int],
    of_tensors: Callable[..., Tensor],
    device: torch.device,
) -> tuple[int, Tensor | None]:
    """Return the tightest of some limits as a number and, if they need one, a tensor (B|1,); the kernels add both.

    If all limits are steps from one tensor, as in a step of a cache, nothing is computed here.
    """
    if not any(isinstance(shift, Tensor) for shift, _ in limits):
        number, tensor = reduce(of_numbers, [shift + step for shift, step in limits], none), None
    elif len({id(shift) for shift, _ in limits}) == 1:
        number, tensor = reduce(of_numbers, [step for _, step in limits]), limits[0][0]
    else:
        sums = [
            shift.long() + step if isinstance(shift, Tensor) else torch.full((1,), shift + step, device=device)
            for shift, step in limits
        ]
        number, tensor = 0, reduce(of_tensors, sums)
    return torch.sym_max(torch.sym_min(number, FARTHEST), -FARTHEST), tensor


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
