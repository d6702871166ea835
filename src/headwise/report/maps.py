"""The maps of a look in the page, pooled and quantized to fit the budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headwise.look.records.head import HeadMap, HeadRecord

from .deflate import squeezed

STEPS = (
    *((128, levels) for levels in (256, 128, 64, 32, 16)),
    *((64, 256), (64, 16), (32, 256), (32, 16), (16, 16), (8, 16)),
)
"""(cells per side, levels per weight), from fine to coarse: the first that fits the budget is used."""

WHOLE = tuple((10_000, levels) for levels in (256, 64, 16, 8))
"""Steps before `STEPS` for maps over patches, which are larger: with all their cells."""


def packed(maps: Sequence[HeadMap], budget: int) -> dict[str, Any]:
    """Return the maps in at most `budget` characters; 144 incompressible ones of 128 x 128 cells take 1.6 million.

    Levels are not packed into bits: deflate encodes 16 equally likely levels in 4 bits, and real maps in far fewer.
    """
    side, text = 0, None
    small: Sequence[HeadMap] = maps
    large = max((max(m.rows, m.columns) for m in maps), default=0) > STEPS[0][0]
    for step_side, levels in (*WHOLE, *STEPS) if large else STEPS:
        if step_side != side:
            side = step_side
            small = [pooled(m, side) for m in maps]
        text = squeezed((in_levels(m.data, levels) for m in small), budget)
        if text is not None:
            break
    else:
        raise ValueError(f"a report shows up to about 10,000 heads, got {len(maps)}; look at a part of the model")
    return {"levels": levels, "rows": [m.rows for m in small], "columns": [m.columns for m in small], "data": text}


def packed_alike(maps: Sequence[HeadMap], like: dict[str, Any], budget: int) -> dict[str, Any]:
    """Return further maps with the cells of packed ones, `like`; those without cells are zeros and listed as lacking.

    No data if they do not fit.
    """
    shapes = list(zip(like["rows"], like["columns"], strict=True))
    side = max((max(shape) for shape in shapes), default=0)
    small = [pooled(m, side) for m in maps]
    lacking = [n for n, m in enumerate(small) if (m.rows, m.columns) != shapes[n]]
    empty = {n: bytes(shapes[n][0] * shapes[n][1]) for n in lacking}
    for levels in (levels for _, levels in STEPS[:5] if levels <= like["levels"]):
        if not small:
            break
        text = squeezed((in_levels(empty.get(n, m.data), levels) for n, m in enumerate(small)), budget)
        if text is not None:
            return {"levels": levels, "lacking": lacking, "data": text}
    return {"levels": 2, "lacking": [], "data": ""}


def in_levels(data: bytes, levels: int) -> bytes:
    """Return bytes of 256 levels in fewer levels."""
    return data.translate(_table(levels))


@cache
def _table(levels: int) -> bytes:
    return bytes((2 * code * (levels - 1) + 255) // 510 for code in range(256))


def coarse(head: HeadRecord) -> HeadMap:
    """Return the pooled map of the record as a large map, for a look without large maps."""
    weights = np.array(head.map, dtype=np.float64).reshape(len(head.map), -1 if head.map else 0)
    return encoded(weights)


def encoded(weights: npt.NDArray[np.float64]) -> HeadMap:
    """Return weights as bytes; NaN becomes 0."""
    root = np.sqrt(np.clip(np.nan_to_num(weights), 0.0, 1.0))
    return HeadMap(weights.shape[0], weights.shape[1], np.rint(255 * root).astype(np.uint8).tobytes())


def pooled(large: HeadMap, side: int) -> HeadMap:
    """Return the map with at most ``side`` cells per side: mass summed over keys, averaged over queries."""
    if large.rows <= side and large.columns <= side:
        return large
    weights = (np.frombuffer(large.data, dtype=np.uint8).astype(np.float64) / 255) ** 2
    weights = weights.reshape(large.rows, large.columns)
    for axis, mean in ((1, False), (0, True)):
        size = weights.shape[axis]
        if size > side:
            starts = -(-np.arange(side) * size // side)
            weights = np.add.reduceat(weights, starts, axis=axis)
            if mean:
                weights /= np.diff(np.append(starts, size))[:, None]
    return encoded(weights)
