"""One attention call, reduced to numbers as it happens: those of its heads, and those of uniform attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..nn.probe import AttentionCall
from ..ops.statistics.api import RowStatistics, row_statistics
from .records import HeadMap, HeadRecord
from .roles import CLARK_KEYS, FEW_KEYS

FAR = 8
"""How many places before the query, and after it, have a mass of their own."""

OFFSETS = (*range(0, -FAR - 1, -1), *range(1, FAR + 1))

Map = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Measured:
    """A call's numbers: a record a head (without roles), the record of uniform attention, the large maps."""

    heads: tuple[HeadRecord, ...]
    uniform: HeadRecord
    maps: tuple[HeadMap, ...]
    ahead: bool | None  # whether a query may attend what comes after it; None in cross-attention


@dataclass(frozen=True)
class Sizes:
    """Cells a side of the two maps; the large one is a multiple of the small one, so the one pools into the other."""

    small: int
    large: int


@dataclass
class Uniform:
    """What uniform attention would get under a mask: measured once for each mask that holds no tensor.

    One instance serves one text, so features and targets are the same wherever lengths are.
    """

    made: dict[tuple[str, int, int, int], RowStatistics] = field(default_factory=dict)

    def of(self, call: AttentionCall, features: dict[str, Tensor], targets: dict[str, Tensor]) -> RowStatistics:
        """Statistics of zero queries and keys, one head, under what the call's mask forbids."""
        (B, _, T, _), S = call.query.shape, call.key.shape[2]
        mask = None if call.mask is None else call.mask.sized(B, call.query.shape[1]).forbids()
        constant = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(mask))
        about = (repr(mask), B, T, S)
        if about in self.made:
            return self.made[about]
        zero = torch.zeros(B, 1, max(T, S), 1, device=call.query.device)
        statistics = row_statistics(
            zero[:, :, :T], zero[:, :, :S], mask=mask, offsets=OFFSETS, features=features, targets=targets, pool=1
        )
        if constant:
            self.made[about] = statistics
        return statistics


def looks_ahead(call: AttentionCall) -> bool | None:
    """Whether some query may attend a later position, asked of two rows; None in cross-attention (T != S)."""
    T, S = call.query.shape[2], call.key.shape[2]
    if T != S:
        return None
    for i in {0, T // 2}:
        rows, later = slice(i, i + 1), slice(i + 1, S)
        seen = None if call.mask is None else call.mask.allowed(T, S, rows=rows, cols=later, device=call.query.device)
        if i + 1 < S and (seen is None or bool(seen.any())):
            return True
    return False


def of_call(call: AttentionCall, features: dict[str, Tensor], targets: dict[str, Tensor], pool: int) -> RowStatistics:
    """The statistics of a call as it was made."""
    return row_statistics(
        call.query,
        call.key,
        **call.scoring,
        offsets=OFFSETS,
        features=features,
        targets=targets,
        pool=pool,
    )


def summary(call: AttentionCall, again: int, delimiters: Tensor, sizes: Sizes, uniform: Uniform) -> Measured:
    """The numbers of one call on the text.

    Args:
        call: the call, of one text.
        again: how often its module had been called before.
        delimiters: (S,) bool, the keys that count as delimiters.
        sizes: of the maps; a large one of 0 cells makes none.
        uniform: the statistics of uniform attention.

    Raises:
        ValueError: a batch of several rows, or numbers that are not finite.
    """
    (B, _, T, _), S = call.query.shape, call.key.shape[2]
    if B != 1:
        raise ValueError(
            f"module {call.module!r} made {B} rows of one text; look reads models that keep a text in one row"
        )
    features = {"delimiter": delimiters}
    targets = {"first": torch.zeros(T, 1, dtype=torch.long, device=call.query.device)}
    targets["first"][0] = -1
    statistics = of_call(call, features, targets, max(sizes.small, sizes.large))
    if not bool(statistics.entropy.isfinite().all()):
        raise ValueError(
            f"layer {call.order} ({call.module!r}) has scores that are NaN or infinite in "
            f"{str(call.query.dtype).removeprefix('torch.')}; load the model in a wider dtype, such as float32"
        )
    place = partial(HeadRecord, module=call.module, call=again, layer=call.order, queries=T, keys=S)
    level = uniform.of(call, features, targets)
    ahead = bool(level.offsets[..., FAR + 1 :].any())
    heads = records(statistics, pooled(statistics, sizes.small), place, sinks=call.sinks is not None, ahead=ahead)
    [null] = records(level, pooled(level, 1), place, sinks=False, ahead=ahead)
    maps = tuple(quantised(m) for m in statistics.pooled[0]) if sizes.large else ()
    return Measured(tuple(heads), null, maps, looks_ahead(call))


def records(
    statistics: RowStatistics, maps: list[Map], place: Callable[..., HeadRecord], *, sinks: bool, ahead: bool
) -> list[HeadRecord]:
    """A record a head of the first row of the batch; `place` makes one from its numbers, `ahead` keeps those ahead."""
    count = statistics.rows.clamp(min=1)
    means = {
        "entropy": statistics.entropy.sum(-1) / count,
        "largest": statistics.largest.sum(-1) / count,
        "distance": statistics.distance.sum(-1) / count,
        "sink": statistics.targets["first"],
        "delimiter": statistics.features["delimiter"],
        "self_mass": statistics.offsets[..., 0],
        "evenness": evenness(statistics, sinks=sinks),
    }
    columns = {name: _numbers(values[0]) for name, values in means.items()}
    offsets = [tuple(_numbers(row)) for row in statistics.offsets[0]]
    return [
        place(
            head=h,
            **{name: values[h] for name, values in columns.items()},
            offsets=offsets[h][: FAR + 1],
            ahead=offsets[h][FAR + 1 :] if ahead else (),
            duplicate=None,
            induction=None,
            roles=(),
            map=maps[h],
        )
        for h in range(len(maps))
    ]


def evenness(statistics: RowStatistics, *, sinks: bool) -> Tensor:
    """(B, H): mean of entropy / ln(number of choices, at most 128) over rows of 8 keys and more, at most 1."""
    choices = (statistics.keys + int(sinks)).clamp(max=CLARK_KEYS)
    enough = statistics.keys >= FEW_KEYS
    ratio = (statistics.entropy / choices.log()).clamp(max=1.0)
    return torch.where(enough, ratio, 0.0).sum(-1) / enough.sum(-1).clamp(min=1)


def pooled(statistics: RowStatistics, size: int) -> list[Map]:
    """The map of each head at `size` cells a side, pooled from the statistics' own."""
    large, weight = statistics.pooled[0].double(), statistics.pooled_rows[0, :, :, None].double()
    _, R, C = large.shape
    rows, columns = (_bins(n, min(n, size), large.device) for n in (R, C))
    sums = rows.mT @ (weight * large) @ columns
    means = sums / (rows.mT @ weight).clamp(min=1)
    return [tuple(tuple(round(x, 5) for x in row) for row in head) for head in means.tolist()]


def quantised(weights: Tensor) -> HeadMap:
    """A byte a cell, as `HeadMap` defines it."""
    levels = (255 * weights.clamp(0, 1).sqrt()).round().to(torch.uint8)
    return HeadMap(levels.shape[0], levels.shape[1], bytes(levels.flatten().tolist()))


def _bins(n: int, size: int, device: torch.device) -> Tensor:
    """(n, size) one-hot: index i falls into bin i * size // n."""
    bins = torch.arange(n, device=device) * size // max(n, 1)
    return (bins[:, None] == torch.arange(size, device=device)).double()


def _numbers(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.double().tolist()]
