"""`Look` and its records: JSON, tables, frames."""

from __future__ import annotations

import html.parser
import io
import json
import math
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planted import DELIMITERS, NAMES, Planted, numbers, played, text

from headwise import look
from headwise.look import HeadMap, Look, Score
from headwise.look.collect.finalize import rounded
from headwise.look.views.tables import rich_table


@pytest.fixture(scope="module")
def planted() -> Look:
    return look.at(Planted(), text(), delimiters=DELIMITERS)


def test_a_look_survives_the_trip_through_json(planted: Look) -> None:
    assert Look.from_dict(json.loads(planted.to_json(maps=True))) == planted
    assert Look.from_dict(json.loads(planted.to_json())) == planted
    assert json.loads(planted.to_json()) == json.loads(json.dumps(planted.to_dict())), "maps come by default in both"
    without = json.loads(planted.to_json(maps=False))
    assert "maps" not in without and Look.from_dict(without) == replace(planted, maps=(), moved=(), neurons=())
    assert Look.from_dict(planted.to_dict()) == planted
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(planted, seconds=math.nan).to_json()
    with pytest.raises(ValueError, match=re.escape("a look is read from format 4, got 99; write it again")):
        Look.from_dict(planted.to_dict() | {"format": 99})


@pytest.mark.parametrize("name", ["entropy", "role", "offset_3", "broad", "broad.null", "layer"])
def test_the_numbers_of_another_are_no_column_of_a_look(planted: Look, name: str) -> None:
    numbers = [[0.25] * planted.num_heads]
    with pytest.raises(
        ValueError, match=f"^{re.escape(name)} is a column of every look; give the numbers another name"
    ):
        planted.with_extras(**{name: numbers})
    with pytest.raises(ValueError, match=rf"of {planted.num_heads}; got \[{planted.num_heads - 1}\]"):
        planted.with_extras(worth=[numbers[0][1:]])
    some = planted.with_extras(worth=[[None, *numbers[0][1:]]])
    assert [head.extras.get("worth") for head in some.heads] == [None, *numbers[0][1:]]
    once = planted.with_extras(worth=numbers)
    assert once.with_extras(worth=[[0.5] * planted.num_heads]).heads[0].extras == {"worth": 0.5}


def test_a_field_of_another_kind_is_refused_wherever_it_stands(planted: Look) -> None:
    """A look's file may come from anyone; what is not found here would fail while it is drawn."""
    wrong: list[tuple[tuple[Any, ...], Any]] = [
        (("model",), [1]),
        (("version",), 7),
        (("length",), 10**30),
        (("length",), True),
        (("seconds",), math.nan),
        (("tokens", 0), 5),
        (("heads", 0, "layer"), [[1]]),
        (("heads", 0, "largest"), []),
        (("heads", 0, "entropy"), 10**400),
        (("heads", 0, "map", 0, 0), {"a": 1}),
        (("heads", 0, "map", 0, 0), math.inf),
        (("heads", 0, "offsets", 0), "x"),
        (("heads", 0, "extras"), 2**63),
        (("heads", 0, "extras"), {"worth": "much"}),
        (("heads", 0, "scores", "broad", 0), "0.5"),
        (("heads", 0, "scores", "broad", 6), 2),
        (("excerpts",), {"copies 0": {"45": 3}}),
    ]
    for path, value in wrong:
        data = json.loads(planted.to_json(maps=True))
        place = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        with pytest.raises(ValueError, match="what to_dict\\(\\) wrote"):
            Look.from_dict(data)
            pytest.fail(f"{path} = {value}")


def test_records_are_plain_numbers(planted: Look) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(plain(v) for v in value.values())
        if isinstance(value, (list, tuple)):
            return all(plain(v) for v in value)
        return value is None or type(value) in (bool, int, float, str)

    assert plain(planted.to_dict())


def test_rows_of_maps_sum_to_one(planted: Look) -> None:
    for head in planted.heads:
        assert [sum(row) for row in head.map] == pytest.approx([1.0] * 32, abs=1e-3)


def test_a_look_prints_as_a_table(planted: Look) -> None:
    lines = str(planted).splitlines()
    assert lines[0] == "Planted: 1 layers x 8 heads, decoder, 97 tokens"
    assert lines[1].split()[:4] == ["layer", "head", "entropy", "largest"] and lines[1].endswith("role")
    assert lines[2].split()[:2] == ["0", "0"] and lines[2].endswith("previous-token 1.00")
    assert lines[1].split()[5:10] == ["moves", "sink", "prev", "self", "next"] and lines[2].split()[9] == "-"
    assert float(lines[2].split()[5]) == round(planted.heads[0].first_moved, 2)
    assert len(lines) == 2 + len(planted.heads)
    unmeasured = replace(planted, heads=(numbers(),), maps=(), moved=())
    assert str(unmeasured).splitlines()[2].split()[5:] == ["-"] * 8
    head = numbers(played("previous-token", 0.5, 0.25), Score("next-token", 0.75, None, 0.9, 7))
    assert str(replace(planted, heads=(head,), maps=(), moved=())).splitlines()[2].split()[6:9] == ["0.50", "-", "0.75"]


def test_a_look_makes_a_rich_table(planted: Look) -> None:
    from rich.console import Console

    role = planted.heads[0].roles[0]
    first = replace(planted.heads[0], scores={"[red]y[/red]": replace(role, name="[red]y[/red]")})
    hostile = replace(planted, model="[red]x[/red]", heads=(first, *planted.heads[1:]))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(hostile.table())
    printed = console.export_text()
    assert "[red]x[/red]" in printed and "[red]y[/red] 1.00" in printed and "duplicate-token 1.00" in printed
    assert "entropy in nats, distance in tokens" in printed
    on_picture = replace(planted, axes=(look.Axis("picture", planted.length),))
    caption = str(rich_table(on_picture, ["next"]).caption)
    assert caption.startswith("entropy in nats, distance in places, moves: ") and caption.endswith("\nno room for next")
    assert str(rich_table(planted, ["distance", "moves"]).caption) == "entropy in nats\nno room for distance, moves"
    layers = (numbers(role), numbers(head=1), numbers(layer=1), numbers(role, layer=2))
    table = replace(planted, heads=layers, maps=(), moved=()).table()
    assert [(row.style, row.end_section) for row in table.rows] == [
        ("", False), ("dim", True), ("dim", True), ("", False)
    ]  # fmt: skip


def test_a_look_shows_in_a_notebook_without_markup_of_others(planted: Look) -> None:
    class Tags(html.parser.HTMLParser):
        seen: set[str] = set()  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.seen.add(tag)

    hostile = "<script>alert(1)</script>"
    head = replace(planted.heads[0], scores={hostile: replace(planted.heads[0].roles[0], name=hostile)}, role=hostile)
    page = replace(planted, model=hostile, heads=(head,), maps=(), moved=())._repr_html_()
    parser = Tags()
    parser.feed(page)
    kept = {"div", "b", "span", "table", "caption", "tr", "th", "td", "details", "summary"}
    assert parser.seen == kept and "<script" not in page
    assert page.count("&lt;script&gt;") == 5  # title and legend; the cell's words; caption and row


def test_a_look_makes_a_frame(planted: Look) -> None:
    frame = planted.to_frame()
    assert len(frame) == len(planted.heads) and frame["roles"].tolist() == list(NAMES)
    assert frame["role"].tolist() == [head.role for head in planted.heads]
    assert frame.loc[0, "offset_1"] == planted.heads[0].offsets[1] and "map" not in frame.columns
    roles = (planted.heads[0].roles[0], planted.heads[2].roles[0])
    encoder = replace(planted, heads=(numbers(*roles, ahead=(0.75, 0.125)),), maps=(), moved=()).to_frame()
    assert encoder.loc[0, ["role", "roles"]].tolist() == ["previous-token", "previous-token, self"]
    assert encoder.loc[0, "self"] == roles[1].value and encoder.loc[0, "self.null"] == roles[1].null
    assert encoder.loc[0, ["ahead_1", "ahead_2"]].tolist() == [0.75, 0.125]
    assert not {"map", "offsets", "ahead"} & {*encoder.columns}


def test_without_pandas(planted: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pandas"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    expected = r"^to_frame\(\) needs pandas, which is not installed; pip install 'headwise\[look\]'$"
    with pytest.raises(ImportError, match=expected):
        planted.to_frame()


def test_heads_of_a_role(planted: Look) -> None:
    assert planted.with_role("induction") == (planted.heads[-1],)
    assert planted.with_role("nothing") == ()
    assert planted.heads[0].score("previous-token") == planted.heads[0].roles[0]
    assert numbers().score("induction") is None and numbers().role == "-" and not planted.heads[0].scores["self"].plays
    assert planted.head(0, 3) == planted.heads[3]
    with pytest.raises(IndexError, match=r"^Planted: 1 layers x 8 heads, decoder, 97 tokens has no head 1\.0; layers"):
        planted.head(1, 0)
    weaker = replace(planted.heads[-1], scores={"induction": replace(planted.heads[-1].roles[0], value=0.5)})
    both = replace(planted, heads=(weaker, planted.heads[-1]), maps=(), moved=())
    assert both.with_role("induction") == (planted.heads[-1], weaker)


def test_weights_of_a_map_that_is_not_square() -> None:
    exact = ((0.0, 0.04, 0.16), (0.36, 0.64, 1.0))
    assert HeadMap(2, 3, bytes([0, 51, 102, 153, 204, 255])).weights() == tuple(map(pytest.approx, exact))


def test_maps_are_checked(planted: Look) -> None:
    with pytest.raises(ValueError, match=re.escape("a map of 2 x 3 cells needs 6 bytes, got 5; give one byte a cell")):
        HeadMap(2, 3, bytes(5))
    with pytest.raises(ValueError, match=re.escape("got 1 maps for 8 heads; give one map a head, or none")):
        replace(planted, maps=planted.maps[:1])


@pytest.mark.parametrize("digits", [5, 6])
def test_arrays_are_rounded_as_numbers_are(digits: int) -> None:
    """The middles between two roundings, too, which no float hits: a product of one with 10**digits may."""
    make = np.random.default_rng(0)
    middles = (2 * make.integers(0, 10**digits, 3001) + 1) / (2 * 10**digits)
    numbers = np.concatenate([middles, make.normal(size=3001), [0.0, -1e-9, 1e12 + 0.1, 1e300]]).reshape(6, -1)
    assert rounded(numbers, digits) == [[round(x, digits) for x in row] for row in numbers.tolist()]
