"""The page of a patching or an attribution, in a browser: every head with its effect, the texts, and nothing that acts.

Needs Playwright and a Chromium of the system, as `test_report_browser.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsers import MARKS, Page, launched
from hostile import PAYLOADS
from reports import Elements

from headwise import report
from headwise.look import Attribution, HeadLogit, HeadPatch, Patching

pytestmark = MARKS

PLACES = [(layer, head) for layer in range(3) for head in range(4)]
EFFECTS = {place: round(0.07 * n - 0.4, 3) for n, place in enumerate(PLACES)}
PATCHED = tuple(HeadPatch(*place, None, effect) for place, effect in EFFECTS.items())
PATCHING = Patching("m", "logit of 'x' minus 'y'", 2.0, -1.0, ("a", "b", "c"), ("a", "d", "c"), PATCHED)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


def opened(browser: Any, result: Patching | Attribution, path: Path) -> Page:
    assert report.write_effects(result, path) == path.stat().st_size
    return Page(browser, path)


def test_the_heatmap_has_the_effect_of_every_head(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, PATCHING, tmp_path / "p.html")
    cells = page.page.locator("#grid .cell")
    titles = [cells.nth(n).get_attribute("title") for n in range(cells.count())]
    shown = {tuple(map(int, t.split(":")[0].split("."))): float(t.split(" ")[1].replace("\u2212", "-")) for t in titles}
    assert shown == EFFECTS
    colours = [cells.nth(n).evaluate("(cell) => getComputedStyle(cell).backgroundColor") for n in (0, 11)]
    assert colours[0] != colours[1]  # below and above 0
    assert page.page.locator("#texts mark").all_text_contents() == ["b", "d"]
    assert page.page.locator("#by-position").is_hidden()
    assert page.page.locator("#heads tbody th").first.text_content() == "0.0"  # the largest of either sign
    cells.nth(5).click()
    assert page.page.locator("#heads tr.now th").text_content() == "1.1"
    page.check_calm()
    page.context.close()


def test_a_head_is_patched_at_each_position(browser: Any, tmp_path: Path) -> None:
    heads = tuple(HeadPatch(*place, at, EFFECTS[place] / (1 + at)) for place in PLACES for at in range(3))
    page = opened(browser, replace(PATCHING, heads=heads), tmp_path / "p.html")
    assert page.page.locator("#grid .cell").first.get_attribute("title") == "0.0: \u22120.400"
    row = page.page.locator("#positions tbody tr", has=page.page.locator("th", has_text="0.0"))
    assert row.locator("td").all_text_contents() == ["\u22120.40", "\u22120.20", "\u22120.13"]
    heads_of = page.page.locator("#positions thead th").all_text_contents()
    assert len(heads_of) == 3 and "b" in heads_of[1] and "d" in heads_of[1]
    page.page.locator("#grid .cell").nth(6).click()
    assert page.page.locator("#positions tr.now th").text_content() == "1.2"
    page.check_calm()
    page.context.close()


def test_an_attribution_has_both_signs_and_heads_without_an_effect(browser: Any, tmp_path: Path) -> None:
    effects = [*EFFECTS.values()]
    effects[3] = None  # type: ignore[call-overload]
    heads = tuple(HeadLogit(*place, effect) for place, effect in zip(PLACES, effects, strict=True))
    found = Attribution("m", "x", "y", ("a", "b"), 1.5, heads, 0.25)
    page = opened(browser, found, tmp_path / "a.html")
    titles = [page.page.locator("#grid .cell").nth(n).get_attribute("title") for n in (3, 11)]
    assert titles == ["0.3: \u2013", "2.3: +0.370"]
    page.check_calm()
    page.context.close()


def test_hostile_text_does_nothing(browser: Any, tmp_path: Path) -> None:
    tokens = tuple(PAYLOADS[:8])
    hostile = replace(PATCHING, model="".join(PAYLOADS[:6]), metric=PAYLOADS[0], clean_tokens=tokens)
    page = opened(browser, hostile, tmp_path / "p.html")
    texts = Elements((tmp_path / "p.html").read_text("utf8")).data["texts"]
    assert page.page.locator("#texts dd").first.text_content() == "".join(texts[0]["tokens"])
    assert page.page.locator("img, iframe, object, form, a, style ~ style, script ~ script ~ script").count() == 0
    page.check_calm()
    page.context.close()


def test_no_page_of_anything_else(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"headwise\.look\.patch or headwise\.look\.attribute returns; got str"):
        report.render_effects("patching")  # type: ignore[arg-type]
