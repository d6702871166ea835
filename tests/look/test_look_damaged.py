"""Files of looks and curves with one thing wrong: refused with one error, or read, written and drawn as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draw import SHARE, drawn
from planted import DELIMITERS, Planted, text

from headwise import look
from headwise.look import Axis, Curve, HeadRecord, Look, Point, files
from headwise.look.records.schema import Damaged, under
from headwise.report import write

pytestmark = pytest.mark.unchecked  # error texts; and the checker takes no whole number for a float

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


def _leads(error: ValueError, at: tuple[Any, ...]) -> bool:
    """Whether the place that an error names is where the damage is, around it or in it; of scores, the score."""
    fault = error.__context__
    assert type(error) is ValueError and isinstance(fault, Damaged), error
    assert str(error).endswith(f" read from what to_dict() wrote; {fault.place} {fault.what}"), error
    place = "".join(under(int(one) if str(one).isdigit() else one) for one in at).removeprefix(".")
    if at[:1] + at[2:3] == ("points", "scores") and ".plays" in fault.place:
        return True  # a head that plays and has lost its score
    if at == ("heads",) and fault.place == "maps":
        return True  # one map a head
    if at[:1] + at[2:] == ("heads", "scores") and any(name in fault.place for name in (".role", ".states")):
        return True  # a head that has lost the scores of the roles that it plays
    if at[0] == "heads" and "scores" in at:
        return fault.place.startswith("".join(map(under, at[:4])).removeprefix("."))
    return bool(fault.place) and (place.startswith(fault.place) or fault.place.startswith(place))


def _look() -> str:
    seen = look.at(Planted(("self", "induction")), text(41), delimiters=DELIMITERS, map_size=3, name="planted")
    data = json.loads(seen.to_json())
    data["axes"] = [Axis("text", 2, names=("a", "b"), apart={"[CLS]": (0,)}).to_dict()]
    data["excerpts"] = {"copies 0": {"1": "a"}}
    return json.dumps(data)


def _curve() -> Curve:
    score = {"self": ((0.5, 0.25),), "induction": ((0.125, None),)}
    return Curve("m", {"self": 0.4, "induction": 0.4}, (Point(7, 0.5, {"loss": 2.5}, score, {"self": ((0, 0),)}),))


@pytest.mark.slow
def test_a_look_with_anything_wrong_is_refused_or_drawn(tmp_path: Path) -> None:
    plain, refused, read = LOOK, 0, 0
    failed: list[str] = []
    assert json.loads(Look.from_dict(json.loads(plain)).to_json()) == json.loads(plain)
    for at in drawn([*_places(json.loads(plain))], most=4):
        for value in WRONG:
            try:
                seen = Look.from_dict(_damaged(plain, at, value))
            except ValueError as error:
                refused += 1
                assert str(error).startswith("a look is read from "), (at, value)
                if at != ("format",) and not _leads(error, at):
                    failed.append(f"{at} = {value!r}: {error}")
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
    assert SHARE > 1 or (refused > 1000 and read > 30)


def test_a_curve_with_anything_wrong_is_refused_or_drawn() -> None:
    plain = _curve().to_json()
    assert Curve.from_dict(json.loads(plain)).to_json() == plain
    for at in _places(json.loads(plain)):
        for value in WRONG:
            try:
                seen = Curve.from_dict(_damaged(plain, at, value))
            except ValueError as error:
                assert str(error).startswith("a curve is read from "), (at, value)
                assert at == ("format",) or _leads(error, at), (at, value, str(error))
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
    with pytest.raises(ValueError, match=r"^a look is read from ") as caught:
        Look.from_dict(_damaged(LOOK, at, value))
    whole = (("heads", 0, "map"), ("axes", 0, "apart", "[CLS]"), ("neurons", 0, "query", "data"))
    exact = (*at, *(n for n, one in enumerate(value) if not 0 <= one <= 1)) if at[-1] == "offsets" else at
    if at != ("format",) and at not in whole:
        assert f"wrote; {''.join(map(under, exact)).removeprefix('.')} " in str(caught.value)


PLACES: list[tuple[tuple[Any, ...], Any, str]] = [
    ((*HEAD, "entropy"), "abc", "heads[0].entropy is a finite number; got 'abc'"),
    ((*HEAD, "offsets", 1), float("nan"), "heads[0].offsets[1] is a finite number; got nan"),
    ((*HEAD, "ahead"), 3, "heads[0].ahead is of another kind; got 3"),
    ((*HEAD, "call"), True, "heads[0].call is a whole number; got True"),
    ((*HEAD, "part"), "coder", "heads[0].part is one of encoder, decoder, cross; got 'coder'"),
    ((*HEAD, "extras"), {"a": None}, "heads[0].extras.a is a finite number; got None"),
    ((*HEAD, "scores", "self", 1), "x", "heads[0].scores.self.null is a finite number or null; got 'x'"),
    ((*HEAD, "scores", "first-token sink", 6), 1, "heads[0].scores['first-token sink'].plays is true or false; got 1"),
    ((*HEAD, "scores", "self"), [1], "heads[0].scores.self.null is missing"),
    ((*HEAD, "scores", "self", 7), [[0, 1]], "heads[0].scores.self.evidence[0].key is missing"),
    ((*HEAD, "scores", "self", 7), [[0, 1, -2, 0]], "heads[0].scores.self.evidence[0].key is at least 0; got -2"),
    (MAP, [[0.5], [0.5, 0.25]], "heads[0].map has rows of one length; got [1, 2]"),
    ((*MAP, 0), 3, "heads[0].map[0] is of another kind; got 3"),
    ((*MAP, 1, 0), -0.5, "heads[0].map[1][0] is at least 0; got -0.5"),
    (("maps", 1, "data"), "?", "maps[1].data does not fit: "),
    (("maps", 0), {}, "maps[0].rows is missing"),
    (("maps", 0, "columns"), 2, "maps[0] does not fit: a map of "),
    (("neurons", 0, "query", "shape"), [1, 2], "neurons[0].query.shape is a list of 3; got (1, 2)"),
    (("neurons", 0, "key", "shape", 2), 1.5, "neurons[0].key.shape[2] is a whole number; got 1.5"),
    (("neurons", 0, "weights"), "?", "neurons[0].weights does not fit: "),
    (
        ("axes", 0, "grids"),
        [[0, 3]],
        "axes[0] does not fit: an axis's grids have a row and a column at least; got (0, 3)",
    ),
    (("excerpts", "copies 0"), {"a": "b"}, "excerpts['copies 0'] does not fit: invalid literal for int()"),
    (("tokens", 2), 5, "tokens[2] is a string; got 5"),
    (("num_heads",), None, "num_heads is a whole number; got None"),
]


def test_the_place_and_what_stands_there() -> None:
    failed = []
    for at, value, message in PLACES:
        try:
            Look.from_dict(_damaged(LOOK, at, value))
        except ValueError as error:
            if f"a look is read from what to_dict() wrote; {message}" not in str(error):
                failed.append(f"{message!r}: {error}")
        else:
            failed.append(f"{message!r}: read")
    assert not failed, "\n".join(failed)
    plain = json.loads(LOOK)
    del plain["heads"][1]["largest"]
    with pytest.raises(ValueError, match=r"wrote; heads\[1\]\.largest is missing$"):
        Look.from_dict(plain)
    with pytest.raises(ValueError, match=r"^a head's record is read from what to_dict\(\) wrote; largest is missing$"):
        HeadRecord.from_dict(plain["heads"][1])
    with pytest.raises(ValueError, match=r"^a head's record is read from what .* wrote; it is of another kind; got 3$"):
        HeadRecord.from_dict(3)  # type: ignore[arg-type]
    plain = json.loads(LOOK) | {"maps": json.loads(LOOK)["maps"][:1]}
    with pytest.raises(ValueError, match=r"wrote; maps run parallel to heads: got 1 maps for 2"):
        Look.from_dict(plain)


def test_a_file_tells_the_place_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(_damaged(LOOK, (*HEAD, "entropy"), "\x1b[2J" * 99)))
    with pytest.raises(
        ValueError, match=r"a.json is no look: .* heads\[0\]\.entropy is a finite number; got a value of"
    ):
        look.read(tmp_path / "a.json")
    lines = [json.loads(_curve().to_json())]
    lines.append(lines[0].pop("points")[0] | {"plays": {"self": [[0, 0], [0, 2]]}})
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        ValueError, match=r"points\[0\]\.plays\.self\[1\] names a head without a score; got head 2; giv"
    ):
        look.read_curve(tmp_path / "c.jsonl")


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
