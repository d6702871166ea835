"""Files of looks and curves with one thing wrong: refused with one error, or read, written and drawn as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planted import DELIMITERS, Planted, text

from headwise import look
from headwise.look import Axis, Curve, Look, Point, files
from headwise.report import write

WRONG: tuple[Any, ...] = (
    None, True, -1, 1.5, 3, 1e20, 10**30, float("nan"), float("inf"), "", "3", "abc", [], [1], ["a"], [[1], [2, 3]], {},
    {"a": 1},
)  # fmt: skip


def _places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands, the first and the last of a list."""
    if at:
        yield at
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _places(value, (*at, name))
    elif isinstance(data, (list, tuple)):
        for n in sorted({0, len(data) - 1} if data else ()):
            yield from _places(data[n], (*at, n))


def _damaged(plain: str, at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(plain)
    place: Any = data
    for step in at[:-1]:
        place = place[step]
    place[at[-1]] = value
    return data


def _look() -> str:
    seen = look.at(Planted(("self", "induction")), text(41), delimiters=DELIMITERS, map_size=3, name="planted")
    data = json.loads(seen.to_json())
    data["axes"] = [Axis("text", 2, names=("a", "b"), apart={"[CLS]": (0,)}).to_dict()]
    data["excerpts"] = {"copies 0": {"1": "a"}}
    return json.dumps(data)


def _curve() -> Curve:
    score = {"self": ((0.5, 0.25),), "induction": ((0.125, None),)}
    return Curve("m", {"self": 0.4, "induction": 0.4}, (Point(7, 0.5, {"loss": 2.5}, score, {"self": ((0, 0),)}),))


def test_a_look_with_anything_wrong_is_refused_or_drawn(tmp_path: Path) -> None:
    plain, refused, read = LOOK, 0, 0
    failed: list[str] = []
    assert json.loads(Look.from_dict(json.loads(plain)).to_json()) == json.loads(plain)
    for at in _places(json.loads(plain)):
        for value in WRONG:
            try:
                seen = Look.from_dict(_damaged(plain, at, value))
            except ValueError as error:
                refused += 1
                assert str(error).startswith("a look is read from "), (at, value)
                continue
            except Exception as error:
                failed.append(f"{at} = {value!r}: not one error: {type(error).__name__}: {error}")
                continue
            read += 1
            try:
                assert Look.from_dict(json.loads(seen.to_json())) == seen
                assert str(seen) and seen._repr_html_() and files._csv(seen, ".csv")
                write(seen, tmp_path / "page.html")
            except Exception as error:
                failed.append(f"{at} = {value!r}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed[:40])
    assert refused > 1000 and read > 30


def test_a_curve_with_anything_wrong_is_refused_or_drawn() -> None:
    plain = _curve().to_json()
    assert Curve.from_dict(json.loads(plain)).to_json() == plain
    for at in _places(json.loads(plain)):
        for value in WRONG:
            try:
                seen = Curve.from_dict(_damaged(plain, at, value))
            except ValueError as error:
                assert str(error).startswith("a curve is read from "), (at, value)
                continue
            try:
                assert Curve.from_dict(json.loads(seen.to_json())) == seen
                assert files._csv(seen, ".csv") is not None
            except Exception as error:
                raise AssertionError(f"{at} = {value!r}: {type(error).__name__}: {error}") from error


LOOK = _look()
HEAD, MAP = ("heads", 0), ("heads", 0, "map")
REFUSED_LOOKS: list[tuple[tuple[Any, ...], Any]] = [
    (("tokens",), "abc"),
    (("tokens",), {"a": 1}),
    (("num_layers",), -1),
    (("num_heads",), -1),
    (("length",), -1),
    (("texts",), -1),
    (("kind",), "coder"),
    (("format",), True),
    ((*HEAD, "layer"), -1),
    ((*HEAD, "head"), -1),
    ((*HEAD, "queries"), -1),
    ((*HEAD, "keys"), -1),
    ((*HEAD, "part"), "coder"),
    ((*HEAD, "entropy"), -0.5),
    ((*HEAD, "offsets"), [-0.5]),
    ((*HEAD, "offsets"), [1e20]),
    ((*HEAD, "offsets"), [0.5, float("nan")]),
    ((*HEAD, "offsets"), [-1e20]),
    (MAP, [[0.5], [0.5, 0.25]]),
    (MAP, "abc"),
    ((*MAP, 0, 0), -0.5),
    (("neurons", 0, "layer"), 1.5),
    (("neurons", 0, "scale"), "3"),
    (("neurons", 0, "gated"), 1),
    (("neurons", 0, "query", "shape", 0), True),
    (("neurons", 0, "query", "data"), "?"),
    (("axes", 0, "apart", "[CLS]"), "a"),
]
REFUSED_CURVES: list[tuple[tuple[Any, ...], Any]] = [
    (("format",), True),
    (("model",), ["m"]),
    (("points",), {}),
    (("thresholds", "self"), float("nan")),
    (("thresholds", "self"), "0.5"),
    (("points", 0, "step"), 1.5),
    (("points", 0, "step"), "3"),
    (("points", 0, "step"), -1),
    (("points", 0, "step"), float("inf")),
    (("points", 0, "numbers", "loss"), float("nan")),
    (("points", 0, "scores", "self"), "ab"),
    (("points", 0, "scores", "self", 0), "ab"),
    (("points", 0, "scores", "self", 0, 0), "0.5"),
    (("points", 0, "scores", "self", 0, 0), [0.5]),
    (("points", 0, "scores", "self", 0, 0), float("nan")),
    (("points", 0, "plays", "self", 0), [0]),
    (("points", 0, "plays", "self", 0), [0, 2]),
    (("points", 0, "plays", "self", 0), [0, -1]),
]


@pytest.mark.parametrize("at, value", REFUSED_LOOKS, ids=str)
def test_a_damaged_look_is_refused(at: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(ValueError, match=r"^a look is read from "):
        Look.from_dict(_damaged(LOOK, at, value))


@pytest.mark.parametrize("at, value", REFUSED_CURVES, ids=str)
def test_a_damaged_curve_is_refused(at: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(ValueError, match=r"^a curve is read from "):
        Curve.from_dict(_damaged(_curve().to_json(), at, value))


def test_a_curve_without_points_is_refused() -> None:
    plain = json.loads(_curve().to_json())
    with pytest.raises(ValueError, match=r"^a curve is read from "):
        Curve.from_dict({name: value for name, value in plain.items() if name != "points"})


def test_what_rounding_does_and_a_layer_beyond_its_row_are_read() -> None:
    seen = Look.from_dict(_damaged(LOOK, (*HEAD, "entropy"), -1e-6))
    assert seen.heads[0].entropy == -1e-6
    curve = Curve.from_dict(_damaged(_curve().to_json(), ("points", 0, "plays", "self", 0), [5, 1]))
    assert curve.points[0].plays["self"] == ((5, 1),)
