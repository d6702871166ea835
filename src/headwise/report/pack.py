"""A look as the plain data of the page: numbers rounded, texts cut, large maps pooled, all within a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from headwise.look.records.axes import TEXT as WORDS
from headwise.look.records.axes import Axis
from headwise.look.records.head import HeadRecord
from headwise.look.result import Look
from headwise.look.roles.catalog import ROLES, TEXT

from . import maps, numbers, vectors
from .escape import cut

BUDGET = 1_700_000
"""The most characters of numbers, maps and vectors together in the page."""

NUMBERS_BUDGET = 700_000
"""The most characters of the numbers."""

MOST_PICTURES = 4
"""The most pictures in the page."""

AROUND = 6
"""The number of tokens shown before and after a piece of evidence."""

MOST_TOKENS = 3000
"""The most single tokens of a long text in the page."""

MAX_TEXT = 200
"""The most characters shown of one token, or of the tokens pooled into one cell."""


def page_data(look: Look) -> dict[str, Any]:
    """Return all data of the page for JSON; large parts are compressed: see `numbers.packed` and `maps.packed`."""
    heads = look.heads
    figures = numbers.packed(heads, NUMBERS_BUDGET)
    left = BUDGET - len(figures["data"]) - sum(len(one.data) * 4 // 3 for one in look.pictures[:MOST_PICTURES])
    pictures, moved = _maps(look, left)
    left -= len(pictures["data"]) + len(moved["data"])
    axes, over = _axes(look)
    main = next((n for n, axis in enumerate(axes) if axis.names and axis.names == look.tokens), -1)
    cells = _cells(look.tokens, _side(heads, pictures["columns"], [pair[1] == main for pair in over], look))
    pooled = any(cell["count"] > 1 for cell in cells)
    inner = vectors.packed(look.neurons, heads, left, weights=pooled or not look.maps)
    each = [_place(head, pair) for head, pair in zip(heads, over, strict=True)]
    places = list(dict.fromkeys(each))
    index = {place: i for i, place in enumerate(places)}
    return {
        "model": cut(look.model, 300),
        "kind": cut(look.kind, 100),
        "layers": look.num_layers,
        "width": look.num_heads,
        "length": look.length,
        "texts": look.texts,
        "seconds": numbers.rounded(look.seconds),
        "version": cut(look.version, 100),
        "cells": cells,
        "axes": [_axis(axis, n == main) for n, axis in enumerate(axes)],
        "pictures": [{**one.to_dict(), "kind": cut(one.kind, 20)} for one in look.pictures[:MOST_PICTURES]],
        "excerpts": _excerpts(look),
        "tokens": _tokens(look, inner["tokens"] if inner["data"] else 0) if pooled else [],
        "places": [
            dict(zip(("module", "call", "layer", "part", "queries", "keys", "over"), p, strict=True)) for p in places
        ],
        "heads": {"place": [index[place] for place in each], "head": [h.head for h in heads]},
        "numbers": figures,
        "maps": pictures,
        "moved": moved,
        "vectors": inner,
    }


def _maps(look: Look, budget: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the maps of the weights, and of what they move.

    The weights take at most half of the budget if there are both, but never lose cells for it.
    """
    weights = look.maps or tuple(maps.coarse(head) for head in look.heads)
    pictures = maps.packed(weights, budget)
    if look.moved and len(pictures["data"]) > budget // 2:
        with contextlib.suppress(ValueError):  # too many heads for half of the budget
            half = maps.packed(weights, budget // 2)
            pictures = half if half["columns"] == pictures["columns"] else pictures
    return pictures, maps.packed_alike(look.moved, pictures, budget - len(pictures["data"]))


def _place(head: HeadRecord, over: tuple[int, int]) -> tuple[Any, ...]:
    """Return the fields that the heads of a layer share."""
    return cut(head.module, 300), head.call, head.layer, cut(head.part), head.queries, head.keys, over


def _axes(look: Look) -> tuple[list[Axis], list[tuple[int, int]]]:
    """Return the axes of a look, and for each head the numbers of its query and key axes; -1 if unknown.

    In a look at one text they follow from their lengths: the text, and in an encoder-decoder also the text after a
    start token.
    """
    if look.axes:
        return list(look.axes), [(h.over[0], h.over[1]) if len(h.over) == 2 else (-1, -1) for h in look.heads]
    if not look.tokens:
        return [], [(-1, -1)] * len(look.heads)
    axes = [Axis(WORDS, len(look.tokens), names=look.tokens)]
    by_length = {0: 0, len(look.tokens): 0}
    if look.kind == "encoder-decoder":
        names = ("(start)", *look.tokens)[: len(look.tokens) - 1]
        axes.append(Axis(WORDS, len(names), names=names))
        by_length.setdefault(len(names), 1)
    return axes, [(by_length.get(h.queries, -1), by_length.get(h.keys, -1)) for h in look.heads]


def _axis(axis: Axis, main: bool) -> dict[str, Any]:
    """Return an axis for the page; the tokens of the main text are in its cells."""
    names = [] if main else [cut(name, 60) for name in axis.names[:MOST_TOKENS]]
    at = [number for cell in axis.cells for number in cell]
    apart = {cut(name, 60): list(places) for name, places in axis.apart.items()}
    about = {"kind": axis.kind, "total": axis.length, "main": main, "names": names}
    return {**about, "at": at, "grids": [list(grid) for grid in axis.grids], "apart": apart}


def _tokens(look: Look, first: int) -> list[tuple[int, str]]:
    """Return single tokens of a pooled text: the first ones, and those around evidence."""
    wanted = set(range(min(first, len(look.tokens))))
    reads = {role.name: role.reads for role in ROLES}
    for head in look.heads:
        for score in head.roles:
            for one in score.evidence if reads.get(score.name) == TEXT else ():
                for place in (one.query, one.key):
                    wanted.update(range(max(place - AROUND, 0), min(place + AROUND + 1, len(look.tokens))))
        if len(wanted) > MOST_TOKENS:
            break
    return [(place, cut(look.tokens[place], 60)) for place in sorted(wanted)[:MOST_TOKENS]]


def _excerpts(look: Look) -> list[tuple[str, list[tuple[int, str]]]]:
    """Return tokens of the additional texts by position, if the look has them, for display of evidence."""
    listed, left = [], MOST_TOKENS
    for name, tokens in look.excerpts.items():
        kept = [(place, cut(text, 60)) for place, text in sorted(tokens.items())[:left]]
        left -= len(kept)
        listed.append((cut(name, 60), kept))
    return [one for one in listed if one[1]]


def _side(heads: Sequence[HeadRecord], columns: Sequence[int], over_text: Sequence[bool], look: Look) -> int:
    """Return the number of cells of the text axis: as many as the maps have over it."""
    sides = [c for _, c, there in zip(heads, columns, over_text, strict=True) if there]
    return max(sides, default=min(len(look.tokens), 128))


def _cells(tokens: Sequence[str], side: int) -> list[dict[str, Any]]:
    """Return the cells of an axis: first token, number of tokens, and their text (with its full length if cut).

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
