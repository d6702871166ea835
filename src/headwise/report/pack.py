"""A look as the plain data of the page: numbers rounded, texts cut, large maps pooled and squeezed into a budget."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headwise.look.records import HeadMap, HeadRecord, Look
from headwise.look.roles import ROLES

MAPS_BUDGET = 1_700_000
"""Most characters the maps may take in the page; 144 incompressible maps of 128 x 128 cells take 1.6 million."""

MAX_TEXT = 200
"""Characters shown of one token, or of the tokens pooled into one cell."""

_STEPS = ((128, 256), (128, 128), (128, 64), (128, 32), (128, 16), (64, 256), (64, 16), (32, 256), (32, 16), (16, 16))
"""Cells a side and levels a weight, from fine to coarse: the first that fits the budget is taken."""


class Statistic(NamedTuple):
    """A number shown for every head."""

    key: str
    label: str
    digits: int
    meaning: str
    value: Callable[[HeadRecord], float | None]


STATISTICS = (
    Statistic("entropy", "entropy", 2, "mean entropy of a query's weights, in nats", lambda h: h.entropy),
    Statistic(
        "evenness", "evenness", 2, "mean of entropy / ln(number of keys): 1 is spread evenly", lambda h: h.evenness
    ),
    Statistic("largest", "largest", 2, "mean of a query's largest weight", lambda h: h.largest),
    Statistic("distance", "distance", 1, "mean distance between query and key, in tokens", lambda h: h.distance),
    Statistic("sink", "first token", 2, "mean mass on the first token, later queries only", lambda h: h.sink),
    Statistic("previous", "previous", 2, "mean mass on the token just before the query", lambda h: h.mass_at(-1)),
    Statistic("self", "self", 2, "mean mass on the query's own token", lambda h: h.self_mass),
    Statistic("next", "next", 2, "mean mass on the token just after the query", lambda h: h.mass_at(1)),
    Statistic("delimiter", "delimiter", 2, "mean mass on delimiters (the first token aside)", lambda h: h.delimiter),
    Statistic(
        "duplicate",
        "duplicate",
        2,
        "repeated random tokens: mean mass on earlier copies of the query's token",
        lambda h: h.duplicate,
    ),
    Statistic(
        "induction",
        "induction",
        2,
        "repeated random tokens: mean mass on what followed those copies",
        lambda h: h.induction,
    ),
)


def page_data(look: Look) -> dict[str, Any]:
    """Everything the page shows, JSON-able; columns rather than records, to keep it small."""
    heads = look.heads
    maps = look.maps or tuple(_coarse(head) for head in heads)
    packed = _pack(maps)
    roles, played = _roles(heads)
    return {
        "model": cut(look.model, 300),
        "kind": cut(look.kind, 100),
        "layers": look.num_layers,
        "width": look.num_heads,
        "length": look.length,
        "seconds": _rounded(look.seconds),
        "version": cut(look.version, 100),
        "cells": _cells(look.tokens, _side(heads, packed["columns"], len(look.tokens))),
        "statistics": [{"key": s.key, "label": s.label, "digits": s.digits, "meaning": s.meaning} for s in STATISTICS],
        "roles": roles,
        "heads": {
            "module": [cut(h.module, 300) for h in heads],
            **{name: [getattr(h, name) for h in heads] for name in ("call", "layer", "head", "queries", "keys")},
            "roles": played,
            **{name: [[_rounded(mass) for mass in getattr(h, name)] for h in heads] for name in ("offsets", "ahead")},
            **{s.key: [_rounded(s.value(h)) for h in heads] for s in STATISTICS},
        },
        "maps": packed,
    }


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """The text, or its beginning and an ellipsis: a hostile name must not fill the page."""
    return text if len(text) <= limit else text[:limit] + "\u2026"


def _rounded(value: float | None) -> float | None:
    """Four significant digits; None for what was not measured, or is no number."""
    return float(f"{value:.4g}") if value is not None and np.isfinite(value) else None


_COLOURS = (
    "previous-token",
    "induction",
    "duplicate-token",
    "first-token sink",
    "delimiter",
    "self",
    "broad",
    "next-token",
)
"""A role keeps its colour from report to report; all others share the ninth, grey."""

Played = tuple[int, float | None, float | None, float | None]
"""A role that a head plays: its number in the list of roles, score, threshold, and what uniform attention gets."""


def _roles(heads: Sequence[HeadRecord]) -> tuple[list[dict[str, Any]], list[list[Played]]]:
    """The roles met, most frequent first, and for each head what it plays."""
    formulas = {role.name: role.formula for role in ROLES}
    counts: dict[str, int] = {}
    sources: dict[str, str] = {}
    for head in heads:
        for role in head.roles:
            counts[role.name] = counts.get(role.name, 0) + 1
            sources.setdefault(role.name, role.source)
    names = sorted(counts, key=lambda name: (-counts[name], name))
    index = {name: i for i, name in enumerate(names)}
    listed = [
        {
            "name": cut(name),
            "colour": _COLOURS.index(name) if name in _COLOURS else len(_COLOURS),
            "formula": cut(formulas.get(name, ""), 500),
            "source": cut(sources[name], 500),
        }
        for name in names
    ]
    played = [
        [(index[r.name], _rounded(r.score), _rounded(r.threshold), _rounded(r.baseline)) for r in head.roles]
        for head in heads
    ]
    return listed, played


def _side(heads: Sequence[HeadRecord], columns: Sequence[int], tokens: int) -> int:
    """Cells of an axis that runs over the text: as many as the maps have over it."""
    return max((c for h, c in zip(heads, columns, strict=True) if h.keys in (0, tokens)), default=min(tokens, 128))


def _cells(tokens: Sequence[str], side: int) -> list[dict[str, Any]]:
    """What each cell of an axis stands for: its first token, how many, and their text (its full length if cut).

    Token t is in cell ``t * side // len(tokens)``, as in the pooled maps of the statistics.
    """
    edges = [-(-i * len(tokens) // side) for i in range(side + 1)] if side else []
    cells: list[dict[str, Any]] = []
    for start, stop in pairwise(edges):
        text = "".join(tokens[start:stop])
        cell: dict[str, Any] = {"start": start, "count": stop - start, "text": text[:MAX_TEXT]}
        if len(text) > MAX_TEXT:
            cell["full"] = len(text)
        cells.append(cell)
    return cells


def _coarse(head: HeadRecord) -> HeadMap:
    """The pooled map of the record as a large map, for a look that kept no large ones."""
    weights = np.array(head.map, dtype=np.float64).reshape(len(head.map), -1 if head.map else 0)
    return _encode(weights)


def _encode(weights: npt.NDArray[np.float64]) -> HeadMap:
    root = np.sqrt(np.clip(np.nan_to_num(weights), 0.0, 1.0))
    return HeadMap(weights.shape[0], weights.shape[1], np.rint(255 * root).astype(np.uint8).tobytes())


def _pack(maps: Sequence[HeadMap]) -> dict[str, Any]:
    """The maps, squeezed into the budget.

    Levels are not packed into bits: deflate codes 16 equally likely levels in 4 bits, and real maps in far fewer.
    """
    side, text = 0, None
    pooled: Sequence[HeadMap] = maps
    for step_side, levels in _STEPS:
        if step_side != side:
            side = step_side
            pooled = [_pool(m, side) for m in maps]
        text = _deflate([m.data for m in pooled], levels)
        if text is not None:
            break
    else:
        raise ValueError(f"a report shows up to about 10,000 heads, got {len(maps)}; look at a part of the model")
    return {"levels": levels, "rows": [m.rows for m in pooled], "columns": [m.columns for m in pooled], "data": text}


def _deflate(maps: Sequence[bytes], levels: int) -> str | None:
    """The maps in so many levels, deflated, as base64; None, and no time lost, where that exceeds the budget."""
    codes = bytes((2 * code * (levels - 1) + 255) // 510 for code in range(256))
    # Level 6 is ten times faster than 9 and 3 % larger. Z_FILTERED: no matches of three bytes, which cost more than
    # they save where few levels repeat by chance.
    squeezer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_FILTERED)
    packed = bytearray()
    for data in maps:
        packed += squeezer.compress(data.translate(codes))
        if len(packed) > MAPS_BUDGET * 3 // 4:
            return None
    packed += squeezer.flush()
    return base64.b64encode(packed).decode("ascii") if len(packed) <= MAPS_BUDGET * 3 // 4 else None


def _pool(large: HeadMap, side: int) -> HeadMap:
    """The map with at most ``side`` cells a side: mass summed over keys, averaged over queries."""
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
    return _encode(weights)
