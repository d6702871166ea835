"""The numbers of all heads in the page: columns instead of records, rounded, and compressed to a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headwise.look.records.head import HeadRecord

from .deflate import squeezed_json
from .escape import cut
from .role_catalog import roles_met


class Statistic(NamedTuple):
    """A number that every head has, independent of roles."""

    label: str
    digits: int
    unit: str
    meaning: str
    value: Callable[[HeadRecord], float | None]


STATISTICS = (
    Statistic("entropy", 2, "nats", "mean entropy of a query's weights, in nats", lambda h: h.entropy),
    Statistic("largest", 2, "", "mean of a query's largest weight", lambda h: h.largest),
    Statistic("distance", 1, "tokens", "mean distance between query and key, in tokens", lambda h: h.distance),
    Statistic(
        "first token moves",
        2,
        "",
        "the first token's share of what the head moves: weight times length of what it writes from a key; mean over "
        "queries after the first",
        lambda h: h.first_moved,
    ),
)

MOST_EXTRAS = 40
"""The most numbers by name that the page takes from the heads' extras."""


class Limits(NamedTuple):
    """The part of the numbers that is kept.

    Attributes:
        full: null, interval and count of every score, not only of played ones.
        pieces: pieces of evidence per role.
        offsets: the masses by offset.
        unplayed: the scores of roles that no head plays.
        digits: decimals of the scores of roles that a head does not play; None drops these scores.
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
"""The limits from full to minimal: the first that fits the budget is used."""


def rounded(value: float | None) -> float | None:
    """Return four significant digits; None for a number that was not measured or is not finite."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def packed(heads: Sequence[HeadRecord], budget: int) -> dict[str, Any]:
    """Return the descriptions of the numbers (``statistics``, ``roles``) and the compressed numbers themselves.

    Raises:
        ValueError: too many heads even for the last limits.
    """
    every = roles_met(heads)
    extras = list(dict.fromkeys(name for head in heads for name in head.extras))[:MOST_EXTRAS]
    by_role = [_of_role(heads, role["name"]) for role in every]
    by_head = _of_heads(heads, {role["name"]: i for i, role in enumerate(every)}, extras)
    for limits in LIMITS:
        roles = every if limits.unplayed else [role for role in every if role["played"]]
        text = squeezed_json(_limited(by_head, by_role[: len(roles)], limits), budget)
        if text is not None:
            break
    else:
        raise ValueError(f"a report shows up to about 10,000 heads, got {len(heads)}; look at a part of the model")
    return {
        "statistics": [
            *({**_entry(s.label, s.digits, s.meaning), "unit": s.unit} for s in STATISTICS),
            *(_entry(role["label"], 2, role["formula"] or role["label"], i) for i, role in enumerate(roles)),
            *(_entry(cut(name, 100), None, "as the look carries it") for name in extras),
        ],
        "roles": [{key: value for key, value in role.items() if key != "name"} for role in roles],
        "own": len(STATISTICS),
        "complete": limits == LIMITS[0],
        "data": text,
    }


def _entry(label: str, digits: int | None, meaning: str, role: int | None = None) -> dict[str, Any]:
    return {"label": label, "digits": digits, "meaning": meaning, "role": role}


class OfRole(NamedTuple):
    """The scores of all heads in one role, one entry per head in each list; `plays` is true for heads that play it."""

    plays: list[bool]
    values: list[float | int | None]
    nulls: list[float | int | None]
    lows: list[float | int | None]
    highs: list[float | int | None]
    counts: list[float | int | None]


def _of_role(heads: Sequence[HeadRecord], name: str) -> OfRole:
    scores = [head.scores.get(name) for head in heads]
    plays = [s is not None and s.plays for s in scores]
    taken = ("value", "null", "low", "high", "count")
    return OfRole(plays, *([None if s is None else _short(getattr(s, part)) for s in scores] for part in taken))


def _of_heads(heads: Sequence[HeadRecord], index: Mapping[str, int], extras: Sequence[str]) -> dict[str, list[Any]]:
    """Return the data of each head except its scores; only played roles, by index, the head's role first."""
    played = [head.roles for head in heads]
    return {
        "own": [[rounded(s.value(head)) for head in heads] for s in STATISTICS],
        "extras": [[rounded(head.extras.get(name)) for head in heads] for name in extras],
        "roles": [[index[s.name] for s in scores] for scores in played],
        "evidence": [
            [[[e.text, e.query, e.key, rounded(e.weight)] for e in s.evidence] for s in scores] for scores in played
        ],
        "details": [[cut(s.detail) for s in scores] for scores in played],
        "offsets": [[_short(mass) for mass in head.offsets] for head in heads],
        "ahead": [[_short(mass) for mass in head.ahead] for head in heads],
    }


def _limited(heads: dict[str, list[Any]], roles: Sequence[OfRole], limits: Limits) -> dict[str, list[Any]]:
    """Return one list per number, with one entry per head; for roles, one list per role."""

    def values(role: OfRole) -> list[float | int | None]:
        if limits.digits == LIMITS[0].digits:
            return role.values
        pairs = zip(role.values, role.plays, strict=True)
        return [value if plays else _short(value, limits.digits) for value, plays in pairs]

    def details(column: list[float | int | None], plays: list[bool]) -> list[float | int | None]:
        return column if limits.full else [x if p else None for x, p in zip(column, plays, strict=True)]

    return {
        "values": [*heads["own"], *map(values, roles), *heads["extras"]],
        **{n: [details(getattr(role, n), role.plays) for role in roles] for n in ("nulls", "lows", "highs", "counts")},
        "roles": heads["roles"],
        "evidence": [[shown[: limits.pieces] for shown in one] for one in heads["evidence"]],
        "details": heads["details"],
        **{name: heads[name] if limits.offsets else [[] for _ in heads[name]] for name in ("offsets", "ahead")},
    }


def _short(value: float | int | None, digits: int | None = 5) -> float | int | None:
    """Return a share with four digits and at most so many decimals; an int is unchanged."""
    if value is None or isinstance(value, int):
        return value
    return None if digits is None or not math.isfinite(value) else rounded(round(value, digits))
