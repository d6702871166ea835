"""Records of heads from sums over texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..records.axes import Axis
from ..records.head import NO_ROLE, HeadRecord
from ..records.scores import Evidence, Score
from ..roles.role import Role
from .sums import ON_PICTURE, Floats, LayerTally


def records(tallies: Sequence[LayerTally], roles: Iterable[Role], axes: Sequence[Axis] = ()) -> tuple[HeadRecord, ...]:
    """Return a record for each head, by layer, then head; `axes` describe the queries and keys, if not empty."""
    listed = tuple(roles)
    return tuple(record for layer, tally in enumerate(tallies) for record in _layer(layer, tally, listed, axes))


def _layer(layer: int, tally: LayerTally, roles: Sequence[Role], axes: Sequence[Axis]) -> list[HeadRecord]:
    count = np.maximum(tally.numbers["rows"], 1)
    means = {name: tally.numbers[name] / count for name in ("entropy", "largest", "distance")}
    able = tally.numbers["offset rows"]
    offsets = tally.numbers["offsets"] / np.maximum(able, 1)
    far = (offsets.shape[1] - 1) // 2
    cross = tally.place["part"] == "cross"  # positions of two texts have no distance or offset
    ahead = bool(tally.numbers["ahead"] > 0) and not cross
    maps = rounded(_maps(tally), 5)
    beside = rounded(offsets, 6)
    numbers = {name: rounded(values, 6) for name, values in means.items()}
    if cross:
        numbers["distance"] = [None] * tally.heads
    moved, on_picture = _mean(tally, "first moved"), _mean(tally, ON_PICTURE)
    scores: list[dict[str, Score]] = [{} for _ in range(tally.heads)]
    for role in roles:
        for h, score in _scores(role, tally):
            scores[h][role.name] = score
    played = [[name for name, score in own.items() if score.plays] for own in scores]
    states = {role.name for role in roles if role.state}
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
            extras={} if (mass := on_picture[h]) is None else {ON_PICTURE: mass},
            over=() if tally.over is None or not axes else tally.over,
            role=next((name for name in played[h] if name not in states), NO_ROLE),
            states=tuple(name for name in played[h] if name in states),
            first_moved=moved[h],
        )
        for h in range(tally.heads)
    ]


def rounded(numbers: Floats, digits: int) -> Any:
    """Round every number as Python's `round` does, a hundred times faster, and return lists.

    A number near the middle of two, where the last bit of a product could change the result, is passed to `round`
    itself.

    >>> rounded(np.array([[0.15, 2 / 3], [2.675, -1e-9]]), 2)
    [[0.15, 0.67], [2.67, -0.0]]
    """
    scaled = numbers * 10.0**digits
    out = np.rint(scaled) / 10.0**digits
    clear = (np.abs(scaled) < 1e9) & (np.abs(scaled - np.floor(scaled) - 0.5) > 1e-6)
    out[~clear] = [round(float(x), digits) for x in numbers[~clear]]
    return out.tolist()


def _scores(role: Role, tally: LayerTally) -> Iterable[tuple[int, Score]]:
    """Yield the score of each head in a role; heads without a scored query are left out."""
    sums = tally.roles.get(role.name)
    if sums is None:
        return
    values, nulls, weights, counts = sums.means()
    ends = sums.interval()
    tops = rounded(values, 6)
    chance = rounded(nulls, 6) if sums.has_null else [None] * tally.heads
    masses = [None] * tally.heads if role.mass is None else rounded(weights, 6)
    lows, highs = ([None] * tally.heads, [None] * tally.heads) if ends is None else (rounded(end, 6) for end in ends)
    for h, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        value, null, low, high, mass = tops[h], chance[h], lows[h], highs[h], masses[h]
        plays = role.plays(value, null, count, low, mass)
        evidence = [Evidence(t, i, j, -w) for w, t, i, j in tally.shown.get((role.name, h), ())] if plays else []
        free = tally.detail(role.name, h) if mass is None else f"{mass:.2f} of the weight"
        detail = free if plays else ""
        yield h, Score(role.name, value, null, role.threshold, count, low, high, plays, tuple(evidence), detail, mass)


def _mean(tally: LayerTally, name: str) -> list[float | None]:
    """Return the mean of a number that only some calls have, for each head; None where it was not measured."""
    if name not in tally.numbers:
        return [None] * tally.heads
    count = tally.numbers[f"{name}, rows"]
    means = rounded(tally.numbers[name] / np.maximum(count, 1), 6)
    return [one if rows else None for one, rows in zip(means, count.tolist(), strict=True)]


def _maps(tally: LayerTally) -> Floats:
    """Return the mean map (H, X, Y) of the size that most texts have; the larger size on ties."""
    sizes = [name.removeprefix("map rows ") for name in tally.numbers if name.startswith("map rows ")]
    size = max(sizes, key=lambda s: (int(tally.numbers[f"map rows {s}"].sum()), tuple(map(int, s.split()))))
    rows = tally.numbers[f"map rows {size}"]
    return tally.numbers[f"map {size}"] / np.maximum(rows, 1)
