"""The report as a file: inert whatever the strings, small whatever the look, on disk whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import pytest
from hostile import HUGE, PAYLOADS
from looks import full_look, make_look, playing, words
from loops import inside
from reports import Elements, inflated, numbers, values

from headwise import report
from headwise.files.text import visible
from headwise.look import ROLES, Look, Score
from headwise.look.views.palette import COLOURS, GREY, label, letter_and_colour, linear_rgb, mark
from headwise.report import maps, pack
from headwise.report.escape import cut, json_for_html


def hostile_look(text: str) -> Look:
    """The text wherever a look holds a string."""
    look, _ = full_look(layers=1, heads=2, tokens=2)
    score = Score(text, 0.9, 0.1, 0.4, 7, plays=True, detail=text)
    heads = tuple(playing(head, score, module=text, part=text, extras={text: 0.25}) for head in look.heads)
    named = {"model": text, "kind": text, "version": text, "tokens": (text, "plain")}
    return replace(look, heads=heads, excerpts={text: {0: text}}, **named)


# --- nothing in it acts ---------------------------------------------------------------------------------------------


@cache
def plain_tags() -> Any:
    return Elements(report.render(hostile_look("plain"))).tags


@inside("payload", PAYLOADS)
def test_a_hostile_string_adds_no_element_and_comes_back_to_the_letter(payload: str) -> None:
    page = Elements(report.render(hostile_look(payload)))
    assert page.tags == plain_tags()
    assert [kind for kind, _ in page.code] == ["style", "json", "script", "script"]
    data = page.data
    assert data["model"] == data["cells"][0]["text"] == data["places"][0]["module"] == payload
    assert data["places"][0]["part"] == data["numbers"]["roles"][0]["label"] == payload
    assert numbers(data)["details"][0][0] == payload
    [[source, [[place, excerpt]]]] = data["excerpts"]
    assert (source, place, excerpt) == (cut(payload, 60), 0, cut(payload, 60))
    assert data["numbers"]["statistics"][-1]["label"] == cut(payload, 100)


def test_there_are_enough_payloads() -> None:
    assert len(set(PAYLOADS)) == len(PAYLOADS) >= 60


def test_the_inertness_test_would_see_markup() -> None:
    html = report.render(hostile_look("plain"))
    planted = html.replace("plain", PAYLOADS[1], 1)
    assert Elements(planted).tags != Elements(html).tags


@inside("payload", PAYLOADS)
def test_json_cannot_leave_its_element(payload: str) -> None:
    text = json_for_html({payload: [payload]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {payload: [payload]}


@inside("payload", PAYLOADS)
def test_visible_text_cannot_steer_a_terminal(payload: str) -> None:
    assert visible(payload).isprintable()
    visible(payload).encode()  # no lone surrogate either


def test_the_policy_names_exactly_what_is_there() -> None:
    elements = Elements(report.render(make_look()))
    policy = next(a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def hashes(kind: str) -> list[str]:
        texts = [code for k, code in elements.code if k == kind]
        return ["'sha256-" + base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() + "'" for t in texts]

    assert rules.pop("script-src").split() == hashes("script")
    assert rules.pop("style-src").split() == hashes("style")
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_no_element_points_outside() -> None:
    for tag, attributes in Elements(report.render(make_look())).tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("style", "srcdoc", "action"), (tag, name)
            assert name not in ("src", "href") or str(value).startswith("data:"), (tag, name, value)


def test_our_script_makes_no_markup_of_strings() -> None:
    folders = ("js", "shared")
    files = [file for folder in folders for file in (resources.files(report) / folder).iterdir()]
    scripts = {file.name: file.read_text() for file in files if file.name.endswith(".js")}
    assert len(scripts) > 5
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|\.html\(|DOMParser|fetch\(|https?:"
    )
    for name, source in scripts.items():
        assert not re.search(forbidden, source.replace("http://www.w3.org/2000/svg", "")), name
        assert len(source.splitlines()) <= 400
        assert "</script" not in source and "<!--" not in source


def test_the_library_is_the_one_that_was_checked() -> None:
    vendor = resources.files(report) / "vendor"
    digest = hashlib.sha256((vendor / "d3.min.js").read_bytes()).hexdigest()
    assert digest in (vendor / "README.md").read_text()
    assert "Permission to use, copy, modify" in (vendor / "LICENSE-d3.txt").read_text()


# --- what it says ---------------------------------------------------------------------------------------------------


def test_the_same_look_gives_the_same_bytes() -> None:
    assert report.render(make_look(seed=3)) == report.render(make_look(seed=3)) != report.render(make_look(seed=4))


def test_what_cross_attention_has_not_is_empty() -> None:
    look = make_look(layers=1, heads=2)
    cross = replace(look.heads[1], part="cross", distance=None, offsets=(), ahead=())
    data = Elements(report.render(replace(look, heads=(look.heads[0], cross)))).data
    assert values(data, "distance") == [pytest.approx(look.heads[0].distance, rel=1e-3), None]
    assert numbers(data)["offsets"][1] == [] and len(numbers(data)["offsets"][0]) == 9


def test_numbers_and_maps_are_those_of_the_look() -> None:
    look = make_look(layers=2, heads=3)
    data = Elements(report.render(look)).data
    assert data["maps"]["levels"] == 256
    assert inflated(data) == b"".join(m.data for m in look.maps)
    for statistic, wanted in {
        "entropy": [h.entropy for h in look.heads],
        "distance": [h.distance for h in look.heads],
        "previous-token": [h.value("previous-token") for h in look.heads],
        "induction": [h.value("induction") for h in look.heads],
    }.items():
        assert values(data, statistic) == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    columns, roles = numbers(data), data["numbers"]["roles"]
    for h, head in enumerate(look.heads):
        assert [roles[i]["label"] for i in columns["roles"][h]] == [s.name for s in head.roles]
        shown = [[[e.text, e.query, e.key, e.weight] for e in s.evidence] for s in head.roles]
        assert columns["evidence"][h] == shown
        for i, role in enumerate(roles):
            score = head.score(role["label"])
            assert score is not None and role["threshold"] == score.threshold
            for name in ("null", "low", "high", "count"):
                wanted = getattr(score, name)
                assert columns[name + "s"][i][h] == (None if wanted is None else pytest.approx(wanted, abs=1e-4))
    assert [cell["text"] for cell in data["cells"]] == list(look.tokens)


def test_what_an_encoder_attends_ahead_is_there() -> None:
    look = make_look(layers=2, heads=5, encoder=True)
    data = Elements(report.render(look)).data
    assert values(data, "next-token") == pytest.approx([h.ahead[0] for h in look.heads], rel=1e-3, abs=1e-5)
    assert numbers(data)["ahead"] == [pytest.approx(h.ahead, rel=1e-3, abs=1e-5) for h in look.heads]
    looks = [(role["letter"], role["colour"]) for role in data["numbers"]["roles"] if role["label"] == "next-token"]
    assert looks == [("N", 7)]
    decoder = Elements(report.render(make_look(layers=2, heads=5))).data
    assert "next-token" not in [s["label"] for s in decoder["numbers"]["statistics"]]
    assert numbers(decoder)["ahead"] == [[]] * 10


def test_without_large_maps_the_pooled_ones_are_shown() -> None:
    look = replace(make_look(), maps=())
    data = Elements(report.render(look)).data
    weights = (np.frombuffer(inflated(data), np.uint8).reshape(-1, 8, 8) / 255.0) ** 2
    np.testing.assert_allclose(weights, np.array([h.map for h in look.heads]), atol=0.004)
    assert len(data["cells"]) == 8 and "".join(c["text"] for c in data["cells"]) == "".join(look.tokens)


def test_cells_are_those_of_the_pooled_statistics() -> None:
    tokens = [f"<{i}>" for i in range(131)]
    cells = pack._cells(tokens, 17)
    for t in range(131):
        cell = cells[t * 17 // 131]
        assert cell["start"] <= t < cell["start"] + cell["count"]
        assert f"<{t}>" in cell["text"]


@pytest.mark.parametrize(("tokens", "cells"), [(41, 41), (300, 128)])
def test_the_axis_of_tokens_where_no_map_runs_over_them(tokens: int, cells: int) -> None:
    """A look at other keys (of cross-attention), or none; keys of 0 are those of an old record, which ran over all."""
    look = make_look(layers=1, heads=1, tokens=words(41))
    look = replace(look, tokens=words(tokens), length=tokens)
    for keys, expected in ((7, cells), (0, 41), (tokens, 41)):
        heads = (replace(look.heads[0], keys=keys),)
        assert len(pack.page_data(replace(look, heads=heads))["cells"]) == expected
    assert len(pack.page_data(replace(look, heads=(), maps=()))["cells"]) == cells


def test_roles_stand_in_the_order_of_the_catalogue() -> None:
    """Those that a head plays, the most specific first, unknown ones, then states; then those that none plays."""
    look = make_look(layers=1, heads=4)
    names = (("broad", "self"), ("self", "mine"), ("self", "broad"), ("name mover",))
    heads = [
        playing(
            head,
            *(Score(name, 0.9 - 0.1 * i, 0.1, 0.4, 7, plays=True) for i, name in enumerate(played)),
            *(Score(name, 0.9, 0.1, 0.4, 7) for name in ("retrieval", "an other", "induction")),
        )
        for head, played in zip(look.heads, names, strict=True)
    ]
    data = pack.page_data(replace(look, heads=tuple(heads)))
    listed = data["numbers"]["roles"]
    assert [(role["label"], role["played"]) for role in listed] == [
        ("name mover", 1), ("self", 3), ("mine", 1), ("broad", 2), ("induction", 0), ("retrieval", 0), ("an other", 0),
    ]  # fmt: skip
    assert numbers(data)["roles"] == [[1, 3], [1, 2], [1, 3], [0]]


def test_each_role_has_a_letter_and_a_colour() -> None:
    """Every role of the catalogue has a letter of its own, or two; unknown ones are grey."""
    style = resources.files("headwise.report").joinpath("shared", "tokens.css").read_text("utf8")
    shown = dict(re.findall(r"--role-(\d+): light-dark\((#[0-9a-f]{6})", style))
    assert [shown[str(number)] for number in range(len(COLOURS))] == list(COLOURS) and len(shown) == len(COLOURS)
    drawn = {role.name: letter_and_colour(role.name) for role in ROLES}
    assert all(1 <= len(letter) <= 2 and colour != GREY for letter, colour in drawn.values())
    assert len({letter for letter, _ in drawn.values()}) == len({label(name) for name in drawn}) == len(drawn)
    assert not [name for name in drawn if " to head" in label(name) or "head to " in label(name)]
    assert [letter_and_colour(name) for name in ("7 zoo", "\u202e", "offset-")] == [("z", GREY), ("?", GREY), ("o", 8)]


SIGHT = {
    "all cones": np.eye(3),
    "no long ones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no middle ones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no short ones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Machado et al. 2009, severity 1: what is left of red, green and blue light."""
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])


def seen_as(colour: str, sight: Any) -> Any:
    """The colour in CIELAB, to an eye."""
    light = XYZ @ np.clip(np.asarray(sight) @ linear_rgb(colour), 0, 1) / XYZ.sum(1)
    x, y, z = np.where(light > 0.008856, np.cbrt(light), 7.787 * light + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("sight", "least"), [(s, 25 if s == "all cones" else 10) for s in SIGHT])
def test_colours_of_roles_differ(sight: str, least: float) -> None:
    """2.3 is just noticeable side by side; states and unknown roles are drawn as marks, or named."""
    plain = {letter_and_colour(role.name)[1] for role in ROLES if not mark(role.name)}
    seen = [seen_as(COLOURS[number], SIGHT[sight]) for number in sorted(plain)]
    near = min(float(np.linalg.norm(a - b)) for i, a in enumerate(seen) for b in seen[:i])
    assert near > least, near


def test_weights_that_are_none_are_shown_as_none() -> None:
    """NaN as 0, and what rounding put beyond 0 or 1 at its end."""
    head = replace(make_look().heads[0], map=((float("nan"), 1.5), (-0.1, 0.25)))
    coarse = maps.coarse(head)
    assert (coarse.rows, coarse.columns, list(coarse.data)) == (2, 2, [0, 255, 0, 128])


def test_a_number_that_is_none_is_said_so() -> None:
    look = make_look(layers=1, heads=1)
    head = playing(look.heads[0], entropy=float("nan"), largest=float("inf"))
    odd = Score("odd", float("nan"), float("inf"), 0.4, 7, plays=True)
    other = playing(look.heads[0], odd, head=1)
    data = Elements(report.render(replace(look, heads=(head, other), maps=()))).data
    assert values(data, "entropy")[0] is values(data, "largest")[0] is None
    assert values(data, "odd") == [None, None] and numbers(data)["nulls"] == [[None, None]]


def test_a_huge_token_is_cut_and_its_length_told() -> None:
    look = make_look(layers=1, heads=1, tokens=(HUGE, "b"), model=HUGE)
    html = report.render(look)
    data = Elements(html).data
    assert data["cells"][0] == {"start": 0, "count": 1, "text": HUGE[:200], "full": len(HUGE)}
    assert data["model"] == HUGE[:300] + "\u2026"
    assert len(html) < 200_000
    assert pack._cells(["x" * 200, "x" * 201], 2) == [
        {"start": 0, "count": 1, "text": "x" * 200},
        {"start": 1, "count": 1, "text": "x" * 200, "full": 201},
    ]


def test_every_name_is_cut() -> None:
    """Whatever a stranger's model calls its parts; a role has the formula that is known by its name."""
    look = hostile_look(HUGE)
    html = report.render(look)
    data = Elements(html).data
    start = HUGE[:100]
    [place] = data["places"]
    assert (place["module"], place["part"]) == (HUGE[:300] + "\u2026", HUGE[:200] + "\u2026")
    assert (data["kind"], data["version"]) == (start + "\u2026", start + "\u2026")
    [role] = data["numbers"]["roles"]
    assert role["label"] == HUGE[:200] + "\u2026" and "name" not in role
    assert numbers(data)["details"] == [[HUGE[:200] + "\u2026"]] * 2
    assert len(html) < 200_000
    assert [cut("x" * n, 9) for n in (9, 10)] == ["x" * 9, "x" * 9 + "\u2026"]


def test_a_look_of_no_heads_is_a_page_too() -> None:
    look = Look("empty", 0, 0, 0, (), (), "decoder", 0.0, "0")
    assert Elements(report.render(look)).data["cells"] == []
