"""The numbers of all heads in the page: columns rather than records, rounded, and squeezed into a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headwise.look.records import HeadRecord
from headwise.look.scores import Score

from .catalogue import roles_met
from .escape import cut
from .squeeze import squeezed_json


class Statistic(NamedTuple):
    """A number that every head has, whatever roles were looked for."""

    label: str
    digits: int
    meaning: str
    value: Callable[[HeadRecord], float | None]


STATISTICS = (
    Statistic("entropy", 2, "mean entropy of a query's weights, in nats", lambda h: h.entropy),
    Statistic("largest", 2, "mean of a query's largest weight", lambda h: h.largest),
    Statistic("distance", 1, "mean distance between query and key, in tokens", lambda h: h.distance),
)

LIMITS = ((1, 3, True, True), (0, 3, True, True), (0, 1, True, True), (0, 0, True, False), (0, 0, False, False))
"""From full to bare: null, interval and count of every score (1) or of played ones alone (0); pieces of evidence;
masses by offset; scores of roles that no head plays. The first that fits the budget is taken."""


def rounded(value: float | None) -> float | None:
    """Four significant digits; None for what was not measured, or is no number."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def packed(heads: Sequence[HeadRecord], budget: int) -> dict[str, Any]:
    """What the numbers are called (``statistics``, ``roles``) and, squeezed, the numbers themselves.

    Raises:
        ValueError: so many heads that not even the barest set fits.
    """
    every = roles_met(heads)
    for full, pieces, offsets, unplayed in LIMITS:
        roles = every if unplayed else [role for role in every if role["played"]]
        text = squeezed_json(_columns(heads, [role["name"] for role in roles], bool(full), pieces, offsets), budget)
        if text is not None:
            break
    else:
        raise ValueError(f"a report shows up to about 10,000 heads, got {len(heads)}; look at a part of the model")
    return {
        "statistics": [_entry(s) for s in STATISTICS] + [_score_entry(i, role) for i, role in enumerate(roles)],
        "roles": [{key: value for key, value in role.items() if key != "name"} for role in roles],
        "complete": (full, pieces, offsets, unplayed) == LIMITS[0],
        "data": text,
    }


def _entry(statistic: Statistic) -> dict[str, Any]:
    return {"label": statistic.label, "digits": statistic.digits, "meaning": statistic.meaning, "role": None}


def _score_entry(index: int, role: dict[str, Any]) -> dict[str, Any]:
    return {"label": role["label"], "digits": 2, "meaning": role["formula"] or role["label"], "role": index}


def _columns(
    heads: Sequence[HeadRecord], names: Sequence[str], full: bool, pieces: int, offsets: bool
) -> dict[str, Any]:
    """A list a number, of one entry a head; of roles, a list a role."""
    index = {name: i for i, name in enumerate(names)}

    def column(name: str, take: Callable[[Score], float | int | None], always: bool) -> list[Any]:
        scores = [head.scores.get(name) for head in heads]
        return [None if s is None or not (always or full or s.plays) else _short(take(s)) for s in scores]

    return {
        "values": [
            *([rounded(s.value(head)) for head in heads] for s in STATISTICS),
            *(column(name, lambda s: s.value, True) for name in names),
        ],
        "nulls": [column(name, lambda s: s.null, False) for name in names],
        "lows": [column(name, lambda s: s.low, False) for name in names],
        "highs": [column(name, lambda s: s.high, False) for name in names],
        "counts": [column(name, lambda s: s.count, False) for name in names],
        "roles": [[index[s.name] for s in head.roles] for head in heads],
        "evidence": [
            [[[e.text, e.query, e.key, rounded(e.weight)] for e in s.evidence[:pieces]] for s in head.roles]
            for head in heads
        ],
        "details": [[cut(s.detail) for s in head.roles] for head in heads],
        "offsets": [[_short(mass) for mass in head.offsets] if offsets else [] for head in heads],
        "ahead": [[_short(mass) for mass in head.ahead] if offsets else [] for head in heads],
    }


def _short(value: float | int | None) -> float | int | None:
    """A share, to four digits and five decimals: below that nothing is shown; a whole number as it is."""
    if value is None or isinstance(value, int):
        return value
    return None if not math.isfinite(value) else rounded(round(value, 5))
