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

import pytest
from planted import DELIMITERS, NAMES, Planted, numbers, text

from headwise import look
from headwise.look import HeadMap, Look


@pytest.fixture(scope="module")
def planted() -> Look:
    return look.at(Planted(), text(), delimiters=DELIMITERS)


def test_a_look_survives_the_trip_through_json(planted: Look) -> None:
    assert Look.from_dict(json.loads(planted.to_json(maps=True))) == planted
    without = json.loads(planted.to_json())
    assert "maps" not in without and Look.from_dict(without) == replace(planted, maps=())
    assert Look.from_dict(planted.to_dict()) == planted
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(planted, seconds=math.nan).to_json()
    with pytest.raises(ValueError, match=re.escape("a look is read from format 1, got 99; write it again")):
        Look.from_dict(planted.to_dict() | {"format": 99})


def test_a_look_of_before_heads_looked_ahead_is_read(planted: Look) -> None:
    seen = look.at(Planted(["next-token"], ahead=True), text(7), repeats=None)
    assert Look.from_dict(json.loads(seen.to_json(maps=True))) == seen and len(seen.heads[0].ahead) == 8
    old = planted.to_dict()
    for head in old["heads"]:
        del head["ahead"]
    assert Look.from_dict(old) == planted


def test_records_are_plain_numbers(planted: Look) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(plain(v) for v in value.values())
        if isinstance(value, (list, tuple)):
            return all(plain(v) for v in value)
        return value is None or type(value) in (int, float, str)

    assert plain(planted.to_dict())


def test_rows_of_maps_sum_to_one(planted: Look) -> None:
    for head in planted.heads:
        assert [sum(row) for row in head.map] == pytest.approx([1.0] * 32, abs=1e-3)


def test_a_look_prints_as_a_table(planted: Look) -> None:
    lines = str(planted).splitlines()
    assert lines[0] == "Planted: 1 layers x 8 heads, decoder, 97 tokens"
    assert lines[1].split()[:4] == ["layer", "head", "entropy", "largest"] and lines[1].endswith("role")
    assert lines[2].split()[:2] == ["0", "0"] and lines[2].endswith("previous-token 1.00")
    assert lines[1].split()[6:9] == ["prev", "self", "next"] and lines[2].split()[8] == "-"
    assert len(lines) == 2 + len(planted.heads)
    unmeasured = replace(planted, heads=(numbers(offsets=(0.25,)),), maps=())
    assert str(unmeasured).splitlines()[2].split()[6:] == ["-", "0.00", "-", "0.00", "-", "-", "-"]
    both = replace(planted, heads=(numbers(offsets=(0.25, 0.5), ahead=(0.75, 0.125)),), maps=())
    assert str(both).splitlines()[2].split()[6:9] == ["0.50", "0.00", "0.75"]


def test_a_look_makes_a_rich_table(planted: Look) -> None:
    from rich.console import Console

    role = planted.heads[0].roles[0]
    first = replace(planted.heads[0], roles=(replace(role, name="[red]y[/red]"),))
    hostile = replace(planted, model="[red]x[/red]", heads=(first, *planted.heads[1:]))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(hostile.table())
    printed = console.export_text()
    assert "[red]x[/red]" in printed and "[red]y[/red] 1.00" in printed and "duplicate-token 1.00" in printed
    layers = (numbers(roles=(role,)), numbers(head=1), numbers(layer=1), numbers(layer=2, roles=(role,)))
    table = replace(planted, heads=layers, maps=()).table()
    assert [(row.style, row.end_section) for row in table.rows] == [
        ("", False), ("dim", True), ("dim", True), ("", False)
    ]  # fmt: skip


def test_a_look_shows_in_a_notebook_without_markup_of_others(planted: Look) -> None:
    class Tags(html.parser.HTMLParser):
        seen: set[str] = set()  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.seen.add(tag)

    hostile = "<script>alert(1)</script>"
    head = replace(planted.heads[0], roles=(replace(planted.heads[0].roles[0], name=hostile),))
    page = replace(planted, model=hostile, heads=(head,), maps=())._repr_html_()
    parser = Tags()
    parser.feed(page)
    assert parser.seen == {"table", "caption", "tr", "th", "td"}
    assert page.count("&lt;script&gt;") == 2


def test_a_look_makes_a_frame(planted: Look) -> None:
    frame = planted.to_frame()
    assert len(frame) == len(planted.heads) and frame["role"].tolist() == list(NAMES)
    assert frame.loc[0, "offset_1"] == planted.heads[0].offsets[1] and "map" not in frame.columns
    roles = (planted.heads[0].roles[0], planted.heads[2].roles[0])
    encoder = replace(planted, heads=(numbers(ahead=(0.75, 0.125), roles=roles),), maps=()).to_frame()
    assert encoder.loc[0, ["role", "roles"]].tolist() == ["previous-token", "previous-token, self"]
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
    assert planted.heads[0].score("induction") is None and numbers().role == "-"
    weaker = replace(planted.heads[-1], roles=(replace(planted.heads[-1].roles[0], score=0.5),))
    both = replace(planted, heads=(weaker, planted.heads[-1]), maps=())
    assert both.with_role("induction") == (planted.heads[-1], weaker)


def test_weights_of_a_map_that_is_not_square() -> None:
    exact = ((0.0, 0.04, 0.16), (0.36, 0.64, 1.0))
    assert HeadMap(2, 3, bytes([0, 51, 102, 153, 204, 255])).weights() == tuple(map(pytest.approx, exact))


def test_maps_are_checked(planted: Look) -> None:
    with pytest.raises(ValueError, match=re.escape("a map of 2 x 3 cells needs 6 bytes, got 5; give one byte a cell")):
        HeadMap(2, 3, bytes(5))
    with pytest.raises(ValueError, match=re.escape("got 1 maps for 8 heads; give one map a head, or none")):
        replace(planted, maps=planted.maps[:1])
