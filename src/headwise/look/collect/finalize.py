"""From sums over texts to the records of heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..records.axes import Axis
from ..records.head import HeadRecord
from ..records.scores import Evidence, Score
from ..roles.catalog import Role
from .sums import ON_PICTURE, Floats, LayerTally


def records(tallies: Sequence[LayerTally], roles: Iterable[Role], axes: Sequence[Axis] = ()) -> tuple[HeadRecord, ...]:
    """A record a head, by layer, then head; `axes` are what queries and keys ran over, where a look tells them."""
    listed = tuple(roles)
    return tuple(record for layer, tally in enumerate(tallies) for record in _layer(layer, tally, listed, axes))


def _layer(layer: int, tally: LayerTally, roles: Sequence[Role], axes: Sequence[Axis]) -> list[HeadRecord]:
    count = np.maximum(tally.numbers["rows"], 1)
    means = {name: tally.numbers[name] / count for name in ("entropy", "largest", "distance")}
    able = tally.numbers["offset rows"]
    offsets = tally.numbers["offsets"] / np.maximum(able, 1)
    far = (offsets.shape[1] - 1) // 2
    cross = tally.place["part"] == "cross"  # positions of two texts have neither distance nor offset
    ahead = bool(tally.numbers["ahead"] > 0) and not cross
    maps = rounded(_maps(tally), 5)
    beside = rounded(offsets, 6)
    numbers = {name: rounded(values, 6) for name, values in means.items()}
    if cross:
        numbers["distance"] = [None] * tally.heads
    scores: list[dict[str, Score]] = [{} for _ in range(tally.heads)]
    for role in roles:
        for h, score in _scores(role, tally):
            scores[h][role.name] = score
    queries, keys = tally.widest
    return [
        HeadRecord(
            **tally.place,
            layer=layer,
            head=h,
            **{name: values[h] for name, values in numbers.items()},
            offsets=() if cross else tuple(beside[h][: far + 1]),
            ahead=tuple(beside[h][far + 1 :]) if ahead else (),
            scores=scores[h],
            map=tuple(map(tuple, maps[h])),
            queries=queries,
            keys=keys,
            extras=_extras(tally, h),
            over=() if tally.over is None or not axes else tally.over,
        )
        for h in range(tally.heads)
    ]


def rounded(numbers: Floats, digits: int) -> Any:
    """Lists of Python's `round` of every number, a hundred times as fast.

    A number that lies near the middle of two, where the last bit of a product could turn it, is left to `round` itself.

    >>> rounded(np.array([[0.15, 2 / 3], [2.675, -1e-9]]), 2)
    [[0.15, 0.67], [2.67, -0.0]]
    """
    scaled = numbers * 10.0**digits
    out = np.rint(scaled) / 10.0**digits
    clear = (np.abs(scaled) < 1e9) & (np.abs(scaled - np.floor(scaled) - 0.5) > 1e-6)
    out[~clear] = [round(float(x), digits) for x in numbers[~clear]]
    return out.tolist()


def _scores(role: Role, tally: LayerTally) -> Iterable[tuple[int, Score]]:
    """Return the score of each head in a role; nothing where no query was scored."""
    sums = tally.roles.get(role.name)
    if sums is None:
        return
    values, nulls, counts = sums.means()
    ends = sums.interval()
    tops = rounded(values, 6)
    chance = rounded(nulls, 6) if sums.has_null else [None] * tally.heads
    lows, highs = ([None] * tally.heads, [None] * tally.heads) if ends is None else (rounded(end, 6) for end in ends)
    for h, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        value, null, low, high = tops[h], chance[h], lows[h], highs[h]
        plays = role.plays(value, null, count, low)
        evidence = [Evidence(t, i, j, -w) for w, t, i, j in tally.shown.get((role.name, h), ())] if plays else []
        detail = tally.detail(role.name, h) if plays else ""
        yield h, Score(role.name, value, null, role.threshold, count, low, high, plays, tuple(evidence), detail)


def _extras(tally: LayerTally, h: int) -> dict[str, float]:
    """Return numbers that not every call has."""
    if ON_PICTURE not in tally.numbers:
        return {}
    rows = tally.numbers[f"{ON_PICTURE}, rows"]
    return {ON_PICTURE: round(float(tally.numbers[ON_PICTURE][h] / max(int(rows[h]), 1)), 6)}


def _maps(tally: LayerTally) -> Floats:
    """(H, X, Y): the mean map, of those of most texts' size; of equals the larger."""
    sizes = [name.removeprefix("map rows ") for name in tally.numbers if name.startswith("map rows ")]
    size = max(sizes, key=lambda s: (int(tally.numbers[f"map rows {s}"].sum()), tuple(map(int, s.split()))))
    rows = tally.numbers[f"map rows {size}"]
    means: Floats = tally.numbers[f"map {size}"] / np.maximum(rows, 1)
    return means
