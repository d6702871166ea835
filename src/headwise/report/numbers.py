"""The numbers of all heads in the page: columns rather than records, rounded, and squeezed into a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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

MOST_EXTRAS = 40
"""Most numbers by name that the page takes from the heads' own."""


class Limits(NamedTuple):
    """How much of the numbers is kept.

    Attributes:
        full: null, interval and count of every score, not of played ones alone.
        pieces: pieces of evidence a role.
        offsets: the masses by offset.
        unplayed: the scores of roles that no head plays.
        digits: decimals of the scores that do not suffice; None drops these scores.
    """

    full: bool
    pieces: int
    offsets: bool
    unplayed: bool
    digits: int | None = 5


LIMITS = (
    Limits(full=True, pieces=3, offsets=True, unplayed=True),
    Limits(full=False, pieces=3, offsets=True, unplayed=True),
    Limits(full=False, pieces=1, offsets=True, unplayed=True),
    Limits(full=False, pieces=0, offsets=True, unplayed=False),
    Limits(full=False, pieces=0, offsets=False, unplayed=False),
    Limits(full=False, pieces=0, offsets=False, unplayed=False, digits=2),
    Limits(full=False, pieces=0, offsets=False, unplayed=False, digits=None),
)
"""From full to bare: the first that fits the budget is taken."""


def rounded(value: float | None) -> float | None:
    """Four significant digits; None for what was not measured, or is no number."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def packed(heads: Sequence[HeadRecord], budget: int) -> dict[str, Any]:
    """What the numbers are called (``statistics``, ``roles``) and, squeezed, the numbers themselves.

    Raises:
        ValueError: so many heads that not even the barest set fits.
    """
    every = roles_met(heads)
    extras = list(dict.fromkeys(name for head in heads for name in _extras(head)))[:MOST_EXTRAS]
    for limits in LIMITS:
        roles = every if limits.unplayed else [role for role in every if role["played"]]
        text = squeezed_json(_columns(heads, [role["name"] for role in roles], extras, limits), budget)
        if text is not None:
            break
    else:
        raise ValueError(f"a report shows up to about 10,000 heads, got {len(heads)}; look at a part of the model")
    return {
        "statistics": [
            *(_entry(s.label, s.digits, s.meaning) for s in STATISTICS),
            *(_entry(role["label"], 2, role["formula"] or role["label"], i) for i, role in enumerate(roles)),
            *(_entry(cut(name, 100), None, "as the look carries it") for name in extras),
        ],
        "roles": [{key: value for key, value in role.items() if key != "name"} for role in roles],
        "own": len(STATISTICS),
        "complete": limits == LIMITS[0],
        "data": text,
    }


def _extras(head: HeadRecord) -> Mapping[str, float]:
    """Numbers by name that a head carries beside those of its record: its importance, say."""
    extras: Mapping[str, float] = getattr(head, "extras", {})
    return extras


def _entry(label: str, digits: int | None, meaning: str, role: int | None = None) -> dict[str, Any]:
    return {"label": label, "digits": digits, "meaning": meaning, "role": role}


def _columns(
    heads: Sequence[HeadRecord], names: Sequence[str], extras: Sequence[str], limits: Limits
) -> dict[str, Any]:
    """A list a number, of one entry a head; of roles, a list a role."""
    index = {name: i for i, name in enumerate(names)}

    def column(name: str, take: Callable[[Score], float | int | None]) -> list[Any]:
        scores = [head.scores.get(name) for head in heads]
        return [None if s is None or not (limits.full or s.plays) else _short(take(s)) for s in scores]

    def values(name: str) -> list[float | int | None]:
        scores = [head.scores.get(name) for head in heads]
        return [None if s is None else _short(s.value, 5 if s.plays else limits.digits) for s in scores]

    return {
        "values": [
            *([rounded(s.value(head)) for head in heads] for s in STATISTICS),
            *map(values, names),
            *([rounded(_extras(head).get(name)) for head in heads] for name in extras),
        ],
        "nulls": [column(name, lambda s: s.null) for name in names],
        "lows": [column(name, lambda s: s.low) for name in names],
        "highs": [column(name, lambda s: s.high) for name in names],
        "counts": [column(name, lambda s: s.count) for name in names],
        "roles": [[index[s.name] for s in head.roles] for head in heads],
        "evidence": [
            [[[e.text, e.query, e.key, rounded(e.weight)] for e in s.evidence[: limits.pieces]] for s in head.roles]
            for head in heads
        ],
        "details": [[cut(s.detail) for s in head.roles] for head in heads],
        "offsets": [[_short(mass) for mass in head.offsets] if limits.offsets else [] for head in heads],
        "ahead": [[_short(mass) for mass in head.ahead] if limits.offsets else [] for head in heads],
    }


def _short(value: float | int | None, digits: int | None = 5) -> float | int | None:
    """A share, to four digits and so many decimals: below that nothing is shown; a whole number as it is."""
    if value is None or isinstance(value, int):
        return value
    return None if digits is None or not math.isfinite(value) else rounded(round(value, digits))
