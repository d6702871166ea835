"""The report as a file: inert whatever the strings, small whatever the look, on disk whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import HUGE, PAYLOADS
from looks import make_look, random_look, words

from headwise import report
from headwise.look import HeadMap, HeadRecord, Look, RoleScore
from headwise.report import pack
from headwise.report.escape import json_for_html, visible

LIMIT = 2_000_000
SHORT = [f"{i}-{ascii(payload)[1:25]}" for i, payload in enumerate(PAYLOADS)]


class Elements(HTMLParser):
    """The start tags with their attributes, and the text of each script and style."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.code: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("style", "script"):
            self.code.append(("json" if attrs else tag, ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            kind, before = self.code.pop()
            self.code.append((kind, before + data))

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(next(code for kind, code in self.code if kind == "json"))
        return found


def hostile_look(text: str) -> Look:
    """The text wherever a look holds a string."""
    look = make_look(layers=1, heads=2, tokens=(text, "plain"), model=text)
    role = RoleScore(text, 0.9, 0.4, text)
    heads = tuple(replace(head, module=text, roles=(role,)) for head in look.heads)
    return replace(look, heads=heads, kind=text, version=text)


def inflated(data: dict[str, Any]) -> bytes:
    return zlib.decompress(base64.b64decode(data["maps"]["data"]), -zlib.MAX_WBITS)


# --- nothing in it acts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", PAYLOADS, ids=SHORT)
def test_a_hostile_string_adds_no_element_and_comes_back_to_the_letter(payload: str) -> None:
    found = Elements(report.render(hostile_look(payload)))
    plain = Elements(report.render(hostile_look("plain")))
    assert found.tags == plain.tags
    assert [kind for kind, _ in found.code] == ["style", "json", "script", "script"]
    data = found.data
    assert data["model"] == data["cells"][0]["text"] == data["heads"]["module"][0] == payload
    assert data["roles"][0] == {"name": payload, "colour": 8, "formula": "", "source": payload}


def test_there_are_enough_payloads() -> None:
    assert len(set(PAYLOADS)) == len(PAYLOADS) >= 60


def test_the_inertness_test_would_see_markup() -> None:
    html = report.render(hostile_look("plain"))
    planted = html.replace("plain", PAYLOADS[1], 1)
    assert Elements(planted).tags != Elements(html).tags


@pytest.mark.parametrize("payload", PAYLOADS, ids=SHORT)
def test_json_cannot_leave_its_element(payload: str) -> None:
    text = json_for_html({payload: [payload]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {payload: [payload]}


@pytest.mark.parametrize("payload", PAYLOADS, ids=SHORT)
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
    scripts = {file.name: file.read_text() for file in (resources.files(report) / "js").iterdir()}
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


def test_numbers_and_maps_are_those_of_the_look() -> None:
    look = make_look(layers=2, heads=3)
    data = Elements(report.render(look)).data
    assert data["maps"]["levels"] == 256
    assert inflated(data) == b"".join(m.data for m in look.maps)
    for key, value in {
        "entropy": lambda h: h.entropy,
        "previous": lambda h: h.offsets[1],
        "self": lambda h: h.self_mass,
    }.items():
        assert data["heads"][key] == pytest.approx([value(h) for h in look.heads], rel=1e-3)
    assert [[(data["roles"][i]["name"], s, t, b) for i, s, t, b in roles] for roles in data["heads"]["roles"]] == [
        [(r.name, pytest.approx(r.score, rel=1e-3), r.threshold, r.baseline) for r in h.roles] for h in look.heads
    ]
    assert [cell["text"] for cell in data["cells"]] == list(look.tokens)


def test_what_an_encoder_attends_ahead_is_there() -> None:
    look = make_look(layers=2, heads=5, encoder=True)
    data = Elements(report.render(look)).data
    assert data["heads"]["next"] == pytest.approx([h.ahead[0] for h in look.heads], rel=1e-3)
    assert data["heads"]["ahead"] == [pytest.approx(h.ahead, rel=1e-3) for h in look.heads]
    assert [role["colour"] for role in data["roles"] if role["name"] == "next-token"] == [7]
    decoder = Elements(report.render(make_look(layers=2, heads=5))).data["heads"]
    assert decoder["next"] == [None] * 10 and decoder["ahead"] == [[]] * 10


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


def test_roles_stand_in_the_order_of_their_heads() -> None:
    """Those that most heads play first, then by name; each with the first source that was met."""
    look = make_look(layers=1, heads=4)
    names = (("b", "c"), ("c", "a"), ("c", "b"), ("d",))
    heads = [
        replace(head, roles=tuple(RoleScore(name, 0.9, 0.4, f"source {i}") for name in played))
        for i, (head, played) in enumerate(zip(look.heads, names, strict=True))
    ]
    data = pack.page_data(replace(look, heads=tuple(heads)))
    assert [(role["name"], role["source"]) for role in data["roles"]] == [
        ("c", "source 0"), ("b", "source 0"), ("a", "source 1"), ("d", "source 3"),
    ]  # fmt: skip
    assert [[role[0] for role in played] for played in data["heads"]["roles"]] == [[1, 0], [0, 2], [0, 1], [3]]


def test_weights_that_are_none_are_shown_as_none() -> None:
    """NaN as 0, and what rounding put beyond 0 or 1 at its end."""
    head = replace(make_look().heads[0], map=((float("nan"), 1.5), (-0.1, 0.25)))
    found = pack._coarse(head)
    assert (found.rows, found.columns, list(found.data)) == (2, 2, [0, 255, 0, 128])


def test_a_number_that_is_none_is_said_so() -> None:
    look = make_look(layers=1, heads=1)
    head: HeadRecord = replace(look.heads[0], entropy=float("nan"), largest=float("inf"), induction=None)
    data = Elements(report.render(replace(look, heads=(head,)))).data["heads"]
    assert data["entropy"] == data["largest"] == data["induction"] == [None]


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
    assert data["heads"]["module"] == [HUGE[:300] + "\u2026"] * 2
    assert (data["kind"], data["version"]) == (start + "\u2026", start + "\u2026")
    assert data["roles"] == [
        {"name": HUGE[:200] + "\u2026", "colour": 7, "formula": "", "source": HUGE[:500] + "\u2026"}
    ]
    assert len(html) < 200_000
    assert [pack.cut("x" * n, 9) for n in (9, 10)] == ["x" * 9, "x" * 9 + "\u2026"]


def test_a_look_of_no_heads_is_a_page_too() -> None:
    look = Look("empty", 0, 0, 0, (), (), "decoder", 0.0, "0")
    assert Elements(report.render(look)).data["cells"] == []


# --- how large it gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "heads"), [(12, 12), (32, 32)])
def test_incompressible_maps_keep_below_two_megabytes(layers: int, heads: int, tmp_path: Path) -> None:
    size = report.write(random_look(layers, heads), tmp_path / "r.html")
    assert size < LIMIT
    data = Elements((tmp_path / "r.html").read_text()).data
    assert sum(a * b for a, b in zip(data["maps"]["rows"], data["maps"]["columns"], strict=True)) == len(inflated(data))


def test_twelve_by_twelve_keeps_its_cells_at_the_worst() -> None:
    data = Elements(report.render(random_look())).data
    assert data["maps"]["rows"] == data["maps"]["columns"] == [128] * 144
    codes = np.frombuffer(inflated(data), np.uint8).astype(float)
    given = np.frombuffer(b"".join(m.data for m in random_look().maps), np.uint8)
    np.testing.assert_allclose(
        codes / (data["maps"]["levels"] - 1), given / 255.0, atol=0.5001 / (data["maps"]["levels"] - 1)
    )


def test_a_plain_look_of_that_size_is_small_and_exact(tmp_path: Path) -> None:
    look = make_look(layers=12, heads=12, tokens=words(128))
    assert report.write(look, tmp_path / "r.html") < 1_400_000
    assert Elements((tmp_path / "r.html").read_text()).data["maps"]["levels"] == 256


@pytest.mark.parametrize("size", [100, 300_000])
def test_the_budget_holds_to_its_last_byte(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small maps come out when the squeezer ends, large ones before: both count."""
    maps = [np.random.default_rng(2).bytes(size)] * 2
    whole = pack._deflate(maps, 256)
    assert whole is not None
    packed = len(base64.b64decode(whole))
    for spare, fits in ((0, True), (-1, False)):
        monkeypatch.setattr(pack, "MAPS_BUDGET", -(-4 * (packed + spare) // 3))
        assert (pack._deflate(maps, 256) is not None) is fits


def test_the_finest_step_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ever less room: fewer levels first, then fewer cells, and at last an error."""
    maps = random_look(1, 2).maps
    sizes = []
    for side, levels in pack._STEPS:
        text = pack._deflate([pack._pool(m, side).data for m in maps], levels)
        assert text is not None
        sizes.append(-(-4 * len(base64.b64decode(text)) // 3))
    for budget in sorted({*sizes, *(size - 1 for size in sizes)}):
        monkeypatch.setattr(pack, "MAPS_BUDGET", budget)
        first = next((step for step, size in zip(pack._STEPS, sizes, strict=True) if size <= budget), None)
        if first is None:
            with pytest.raises(ValueError, match="shows up to about 10,000 heads, got 2; look at a part of the model"):
                pack._pack(maps)
        else:
            found = pack._pack(maps)
            assert (found["levels"], found["rows"]) == (first[1], [first[0]] * 2)


@pytest.mark.parametrize("rows", [9, 41, 128, 97])
@pytest.mark.parametrize("side", [16, 37])
def test_pooling_keeps_the_mass_of_a_row(rows: int, side: int) -> None:
    matrix = np.random.default_rng(0).dirichlet(np.ones(61), size=rows)
    large = HeadMap(rows, 61, np.rint(255 * np.sqrt(matrix)).astype(np.uint8).tobytes())
    small = pack._pool(large, side)
    weights = np.array(small.weights())
    assert weights.shape == (min(rows, side), side)
    np.testing.assert_allclose(weights.sum(1), 1, atol=0.05)
    edges = [-(-i * 61 // side) for i in range(side + 1)]
    row_edges = [-(-i * rows // min(rows, side)) for i in range(side + 1)]
    wanted = matrix[row_edges[3] : row_edges[4], edges[5] : edges[6]].sum(1).mean()
    assert weights[3, 5] == pytest.approx(wanted, abs=0.01)
