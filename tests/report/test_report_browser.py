"""The report in a real browser: it draws, it answers, and nothing hostile in it acts.

Needs Playwright (from PyPI) and a Chromium of the system; Playwright's own browser is never downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import MARKS, Opened, launched
from hostile import HUGE, PAYLOADS
from looks import codes, make_look, playing, words

from headwise.look import Look, Score
from headwise.report import page as page_module

pytestmark = MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    pages: list[Opened] = []

    def open_look(look: Look, **options: Any) -> Opened:
        pages.append(Opened(browser, look, tmp_path, **options))
        return pages[-1]

    yield open_look
    for page in pages:
        page.check_calm()
        page.context.close()


def units(text: str) -> list[int]:
    """UTF-16 code units: what a JavaScript string is made of, lone surrogates included."""
    raw = text.encode("utf-16-le", "surrogatepass")
    return [int.from_bytes(raw[i : i + 2], "little") for i in range(0, len(raw), 2)]


PLACES = [*(("\u2212", k) for k in range(8, 0, -1)), *(("+", k) for k in range(1, 9))]
CODES = "(nodes) => nodes.map((n) => Array.from({length: n.textContent.length}, (_, i) => n.textContent.charCodeAt(i)))"


def test_the_grid_shows_every_head(opened: Any) -> None:
    page = opened(make_look(layers=3, heads=5)).page
    assert page.locator("#grid .tile").count() == 15
    assert page.locator("#table tbody tr").count() == 15
    assert page.locator("#chart circle").count() == 15
    assert page.locator("#model").text_content() == "synthetic/llama-3x5"
    page.locator("#show").select_option("map")
    page.locator(".tile canvas[data-shade]").nth(14).wait_for()
    drawn = page.evaluate(
        "[...document.querySelectorAll('.tile canvas')].map((c) => new Set(c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data).size)"
    )
    assert min(drawn) > 3  # colours, not one flat square


def test_a_click_opens_the_large_map_with_the_weights_of_that_head(opened: Any) -> None:
    look = make_look(layers=3, heads=5)
    page = opened(look).page
    page.locator("#grid .tile").nth(7).click()
    assert page.locator("#head-title").text_content() == "Layer 1, head 2"
    assert page.locator(".tile[aria-current]").count() == 1
    size = look.maps[7].rows
    page.evaluate("document.getElementById('readout').scrollIntoView({ block: 'end' })")
    box = page.locator("#map .cells").bounding_box()
    cell = box["width"] / size
    for row, column in ((30, 20), (12, 12), (40, 0)):
        page.mouse.move(box["x"] + (column + 0.5) * cell, box["y"] + (row + 0.5) * cell)
        said = page.locator("#readout").text_content()
        weight = (look.maps[7].data[row * size + column] / 255) ** 2
        assert f"query {row} " in said and f"key {column} " in said and f"weight {weight:.3f}" in said
    page.mouse.click(box["x"] + 20.5 * cell, box["y"] + 30.5 * cell)
    assert "query 30 " in page.locator("#readout").text_content()
    assert page.locator("#strongest-title").text_content().startswith("Query 30 ")
    page.mouse.move(0, 0)  # away: the query stays
    assert page.locator("#strongest-title").text_content().startswith("Query 30 ")
    page.mouse.move(box["x"] + 30.5 * cell, box["y"] + 3.5 * cell)
    assert "not allowed" in page.locator("#readout").text_content()


def test_the_map_draws_the_weights(opened: Any) -> None:
    """Lightness rises with the weight: the rank of each cell's green must be the rank of its weight."""
    look = make_look(layers=1, heads=2)
    page = opened(look).page
    page.locator("#grid .tile").nth(0).click()
    pixels = page.evaluate(
        "(() => { const c = document.querySelector('#map .cells');"
        " return [c.width, ...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; })()"
    )
    size, data = pixels[0], pixels[1:]
    assert size == 41
    codes = look.maps[0].data
    for i in range(size):
        for j in range(size):
            at = 4 * (i * size + j)
            assert data[at + 3] == (255 if j <= i else 0)
    lower = [(codes[i * size + j], data[4 * (i * size + j) + 1]) for i in range(size) for j in range(i + 1)]
    greens = [green for _, green in sorted(lower)]
    assert greens == sorted(greens)
    assert len(set(greens)) == pytest.approx(len({code for code, _ in lower}), abs=1)


def test_filter_by_role(opened: Any) -> None:
    look = make_look(layers=3, heads=5)
    page = opened(look).page
    wanted = [h.role == "induction" for h in look.heads]
    page.locator("#roles .chip", has_text="induction").click()
    framed = page.evaluate("[...document.querySelectorAll('#grid .tile')].map((t) => t.classList.contains('plays'))")
    assert framed == wanted and page.locator("#grid .tile.off").count() == 0
    scores = [float(said) for said in page.locator("#grid .tile .letter").all_text_contents()]
    assert scores == [pytest.approx(h.value("induction"), abs=0.006) for h in look.heads]
    best = max(look.heads, key=lambda h: h.value("induction"))
    assert page.locator("#head-title").text_content() == f"Layer {best.layer}, head {best.head}"
    assert page.locator("#table tbody tr").count() == sum(wanted)
    assert page.locator("#count").text_content() == f"{sum(wanted)} of 15 heads"
    page.locator("#roles .chip", has_text="no role or state").click()
    idle = [not h.roles for h in look.heads]  # a state, such as a sink, has a button of its own
    assert any(h.role == "-" and h.states for h in look.heads) and any(idle)
    assert page.locator("#table tbody tr").count() == sum(idle)
    off = page.evaluate("[...document.querySelectorAll('#grid .tile')].map((t) => t.classList.contains('off'))")
    assert off == [not one for one in idle] and page.locator("#show").input_value() == "role"
    page.locator("#roles .chip", has_text="all heads").click()
    assert page.locator("#grid .tile.off").count() == 0


@pytest.mark.parametrize(
    ("layers", "heads", "size"), [(30, 9, (390, 844)), (80, 64, (1280, 800)), (80, 64, (390, 844))]
)
def test_a_large_matrix_stays_on_one_screen(opened: Any, layers: int, heads: int, size: tuple[int, int]) -> None:
    look = make_look(layers=layers, heads=heads, tokens=words(3))
    page = opened(look, viewport={"width": size[0], "height": size[1]}).page
    box = page.locator("#grid").bounding_box()
    assert box["height"] < size[1] and box["width"] < size[0]
    if size[0] > 1000:
        assert box["y"] + box["height"] <= size[1]
    page.locator("#roles .chip", has_text="induction").click()
    best = max(look.heads, key=lambda h: h.value("induction") if h.role == "induction" else 0)
    assert page.locator("#head-title").text_content() == f"Layer {best.layer}, head {best.head}"
    chosen = page.locator(".tile[aria-current]").bounding_box()
    assert chosen["y"] >= 0 and chosen["y"] + chosen["height"] <= size[1]


def test_an_encoders_head_shows_what_it_attends_ahead(opened: Any) -> None:
    look = make_look(layers=1, heads=5, encoder=True)
    page = opened(look).page
    shown = [head.role for head in look.heads].index("next-token")
    page.locator("#roles .chip", has_text="next-token").click()
    assert page.locator("#head-title").text_content() == f"Layer 0, head {shown}"
    bars = [float(said) for said in page.locator("#offsets .mass title").all_text_contents()]
    masses = [*reversed(look.heads[shown].offsets), *look.heads[shown].ahead]
    assert bars == pytest.approx(masses, abs=6e-4) and max(bars) == bars[9] > 0.8  # -8 ... 0, then +1
    places = page.locator("#offsets .tick text").all_text_contents()
    assert [place for place in places if place[0] in "+\u2212"] == [f"{sign}{k}" for sign, k in PLACES]
    assert [head for head in page.locator("#table th").all_text_contents() if head == "next-token"] == ["next-token"]
    page = opened(make_look(layers=1, heads=5)).page
    assert (
        page.locator("#offsets .mass").count() == 9 and "next-token" not in page.locator("#table thead").text_content()
    )


@pytest.mark.parametrize("encoder", [False, True])
def test_only_cells_that_could_not_be_attended_are_bare(opened: Any, encoder: bool) -> None:
    look = make_look(layers=1, heads=5, encoder=encoder)
    lower = codes(np.tril(np.full((41, 41), 0.5)))  # an encoder's head, too, may never look ahead
    page = opened(replace(look, maps=(lower,) * 5)).page
    page.locator("#show").select_option("map")
    page.locator(".tile canvas[data-shade]").nth(4).wait_for()
    corner = "(c) => c.getContext('2d').getImageData(c.width - 1, 0, 1, 1).data[3]"
    drawn = f"[...document.querySelectorAll('.tile canvas')].map({corner})"
    assert page.evaluate(drawn) == [255 * encoder] * 5


def test_keys_walk_over_the_heads_and_over_the_map(opened: Any) -> None:
    look = make_look(layers=3, heads=5)
    page = opened(look).page
    page.locator("#grid .tile").nth(0).click()
    for key, title in (
        ("ArrowRight", "Layer 0, head 1"),
        ("ArrowDown", "Layer 1, head 1"),
        ("End", "Layer 1, head 4"),
        ("ArrowRight", "Layer 1, head 4"),
        ("ArrowUp", "Layer 0, head 4"),
        ("ArrowLeft", "Layer 0, head 3"),
        ("PageDown", "Layer 2, head 3"),
        ("Home", "Layer 2, head 0"),
    ):
        page.keyboard.press(key)
        assert page.locator("#head-title").text_content() == title, key
        assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    assert page.locator("#grid .tile[tabindex='0']").count() == 1  # one stop for Tab
    page.locator("#map").focus()
    page.keyboard.press("Home")
    row = int(page.locator("#readout").text_content().split()[1])
    for key, (query, column) in (
        ("ArrowUp", (row - 1, 0)),
        ("ArrowRight", (row - 1, 1)),
        ("Shift+ArrowRight", (row - 1, 9)),
        ("ArrowDown", (row, 9)),
        ("End", (row, 40)),
        ("ArrowRight", (row, 40)),
    ):
        page.keyboard.press(key)
        said = page.locator("#readout").text_content()
        assert f"query {query} " in said and f"key {column} " in said, key


def test_the_text_is_tinted_by_the_weights_of_the_token_pointed_at(opened: Any) -> None:
    look = make_look(layers=1, heads=5)
    page = opened(look).page
    page.locator("#grid .tile").nth(0).click()  # the previous-token head
    page.locator("#tokens .token").nth(17).hover()
    tints = page.evaluate(
        "[...document.querySelectorAll('#tokens .token')].map((t) => parseFloat(t.style.getPropertyValue('--weight')))"
    )
    codes = look.maps[0].data[17 * 41 : 18 * 41]
    assert tints == pytest.approx([100 * c / 255 for c in codes], abs=0.06)
    assert max(range(41), key=tints.__getitem__) == 16
    assert page.locator("#strongest li").first.text_content().startswith("16 ")
    page.locator("#attended").click()
    page.locator("#tokens .token").nth(17).hover()
    tints = page.evaluate(
        "[...document.querySelectorAll('#tokens .token')].map((t) => parseFloat(t.style.getPropertyValue('--weight')))"
    )
    assert max(range(41), key=tints.__getitem__) == 18


def test_the_table_sorts(opened: Any) -> None:
    look = make_look(layers=3, heads=5)
    page = opened(look).page
    header = page.locator("#table th[data-key='0']")
    for direction in ("descending", "ascending"):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == direction
        order = page.evaluate("[...document.querySelectorAll('#table tbody tr')].map((r) => Number(r.dataset.head))")
        entropies = [float(f"{look.heads[i].entropy:.4g}") for i in order]
        assert entropies == sorted(entropies, reverse=direction == "descending")
    page.locator("#table tbody tr").nth(3).click()
    assert (
        page.locator("#head-title").text_content()
        == f"Layer {look.heads[order[3]].layer}, head {look.heads[order[3]].head}"
    )


def test_other_colours_and_zoom(opened: Any) -> None:
    page = opened(make_look()).page
    flat = "document.querySelector('#map .cells').toDataURL()"
    before = page.evaluate(flat)
    page.locator("#shade").select_option("plain")
    assert page.evaluate(flat) != before
    page.locator("#shade").select_option("row")
    width = page.locator("#map .cells").bounding_box()["width"]
    page.locator("#larger").click()
    assert page.locator("#map .cells").bounding_box()["width"] == pytest.approx(1.5 * width, rel=0.01)
    page.locator("#fit").click()
    assert page.locator("#map .cells").bounding_box()["width"] == pytest.approx(width, rel=0.01)


def hostile_look() -> Look:
    """Every payload as a token, and as role, source, module, kind and name as far as there are heads."""
    look = make_look(layers=4, heads=26, tokens=PAYLOADS, model="".join(PAYLOADS[:6]))
    heads = tuple(
        playing(head, Score(text, 0.9, 0.1, 0.4, 7, plays=True, detail=text), module=text, part=text)
        for head, text in zip(look.heads, PAYLOADS * 2, strict=False)
    )
    return replace(look, heads=heads, kind=PAYLOADS[1], version=PAYLOADS[2])


def test_hostile_text_is_shown_to_the_letter_and_does_nothing(opened: Any) -> None:
    page = opened(hostile_look(), offline=True).page
    shown = page.eval_on_selector_all("#tokens .token", CODES)
    assert shown == [units(payload) for payload in PAYLOADS]
    assert page.eval_on_selector_all("#model", CODES) == [units("".join(PAYLOADS[:6])[:300])]
    for i in range(0, len(PAYLOADS), 23):  # hover, focus and click what might answer
        page.locator("#grid .tile").nth(i).click()
        page.locator("#tokens .token").nth(i).dispatch_event("click")
        page.locator("#map").focus()
        page.keyboard.press("ArrowUp")
    page.locator("#roles .chip").nth(3).click()
    page.keyboard.press("Escape")
    for pane in ("arcs", "sum", "evidence"):
        page.locator(f"#tab-{pane}").click()
    for i, text in enumerate(PAYLOADS[::30]):
        page.locator("#search").fill(text[:40])
        page.keyboard.press("Enter")
        page.locator("#show").select_option(index=i + 2)
        stated = page.locator("#played h4").text_content()
        assert stated.count("\u2026") <= 2
    wrong = "img, iframe, object, embed, form, video, a, base, math, style ~ style, script ~ script ~ script ~ script"
    assert page.locator(wrong).count() == 0
    assert (
        page.evaluate("document.querySelectorAll('[onerror], [onload], [onfocus], [href]:not([rel=icon])').length") == 0
    )


def test_what_hides_or_turns_text_is_made_visible(opened: Any) -> None:
    look = make_look(layers=1, heads=1, tokens=("\u202egnp.exe", "\0", "\u200b", "\x1b[2J", "\ud800", "ok"))
    page = opened(look).page
    names = page.evaluate("[...document.querySelectorAll('#tokens .acting')].map((n) => n.dataset.show)")
    assert names == ["U+202E", "\u2400", "U+200B", "\u241b", "U+D800"]
    widths = page.evaluate(
        "[...document.querySelectorAll('#tokens .acting')].map((n) => n.getBoundingClientRect().width)"
    )
    assert min(widths) > 4
    labels = page.evaluate("[...document.querySelectorAll('#map .queries text')].map((n) => n.textContent)")
    assert labels == ["U+202Egnp.exe", "\u2400", "U+200B", "\u241b[2J", "U+D800", "ok"]
    assert (
        page.evaluate("getComputedStyle(document.querySelector('#tokens .acting')).unicodeBidi") == "isolate-override"
    )


@pytest.mark.parametrize("policy", [True, False])
def test_the_checks_of_this_file_can_fail(
    policy: bool, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the escaping the policy must stop it, and be seen to; without both the script is seen to run."""
    attack = "1</script><img src=https://example.invalid/x.png><script>alert(1)</script>"
    monkeypatch.setattr(page_module, "json_for_html", lambda value: attack)
    if not policy:
        monkeypatch.setattr(page_module, "_hash", lambda text: "'unsafe-inline'")
    opened = Opened(browser, make_look(), tmp_path, ready=False)
    opened.page.wait_for_timeout(200)
    assert any("img-src" in violation for violation in opened.page.evaluate("window.violations"))
    assert ("dialog: 1" in opened.faults) is not policy
    with pytest.raises(AssertionError):
        opened.check_calm()
    opened.context.close()


def test_long_text_is_shown_in_cells(opened: Any) -> None:
    look = make_look(layers=1, heads=2, tokens=words(128))
    tokens = words(1280)
    heads = tuple(replace(head, queries=1280, keys=1280) for head in look.heads)
    page = opened(replace(look, length=1280, tokens=tokens, heads=heads)).page
    assert page.locator("#tokens .token").count() == 128
    assert page.locator("#tokens").text_content() == "".join(tokens)
    assert "cells stands for several tokens" in page.locator("#precision").text_content()
    page.locator("#map").focus()
    page.keyboard.press("Home")
    assert "key 0\u20139 " in page.locator("#readout").text_content()


def test_a_megabyte_of_a_token_is_cut(opened: Any) -> None:
    page = opened(make_look(layers=1, heads=1, tokens=(HUGE, "b"), model=HUGE)).page
    assert page.locator("#tokens .token").first.text_content() == HUGE[:200]
    assert page.locator("#tokens .more").first.get_attribute("data-show") == "\u2026 (1,000,003 characters)"


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1400), ("light", 390)])
def test_it_fits_the_screen(opened: Any, scheme: str, width: int) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    page = opened(make_look(layers=4, heads=12, tokens=words(128)), **options).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, background[4:-1].split(",")))
    assert lightness < 200 if scheme == "dark" else lightness > 700


def test_heads_that_do_not_run_over_the_text(opened: Any) -> None:
    """Cross-attention: other keys than the text, positions in the place of tokens."""
    look = make_look(layers=1, heads=2)
    map_ = replace(look.maps[0], columns=7, rows=41, data=bytes(range(7)) * 41)
    head = replace(look.heads[0], keys=7)
    page = opened(replace(look, heads=(head, look.heads[1]), maps=(map_, look.maps[1]))).page
    page.locator("#grid .tile").nth(0).click()
    assert page.locator("#map .keys text").all_text_contents() == [f"#{i}" for i in range(7)]
    assert "does not run over this text" in page.locator("#strongest-title").text_content()
