"""A report in which maps, arcs and evidence show what the weights move, in a browser as `test_report_browser.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsers import MARKS, Opened, launched
from looks import make_look

from headwise.look import Look
from headwise.look.records.head import HeadMap

pytestmark = MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


def half_from_the_first(look: Look) -> Look:
    """Half of what each row moves is from the first key, half from its own; of the last head it is not known."""
    size = look.maps[0].rows
    rows = [[0.5 * (j == 0) + 0.5 * (j == i) for j in range(size)] for i in range(size)]
    moved = HeadMap(size, size, bytes(round(255 * x**0.5) for row in rows for x in row))
    heads = tuple(replace(head, first_moved=0.5) for head in look.heads)
    return replace(look, heads=heads, moved=(*[moved] * (len(heads) - 1), HeadMap(0, 0, b"")))


def test_the_switch_changes_map_arcs_and_text(browser: Any, tmp_path: Path) -> None:
    look = half_from_the_first(make_look(layers=2, heads=4))
    number = next(i for i, head in enumerate(look.heads) if head.role == "previous-token")
    opened = Opened(browser, look, tmp_path)
    page = opened.page
    said = page.locator("#readout")
    page.locator("#grid .tile").nth(number).click()
    before = said.text_content()
    page.locator("#weigh-moved").click()
    assert "moves" not in before and "moves" in said.text_content()
    assert float(said.locator("b").text_content().split(" ")[0]) == pytest.approx(0.5, abs=0.02)
    page.locator("#tab-arcs").click()
    weights = [float(title.rsplit(": ", 1)[1]) for title in page.locator("#arcs .arc title").all_text_contents()]
    assert weights and all(min(abs(weight - 0.5), abs(weight - 1)) < 0.02 for weight in weights)
    page.locator("#tab-evidence").click()
    line = page.locator("#played .evidence li").first.text_content()
    weight = look.heads[number].roles[0].evidence[0].weight
    assert f"{weight:.2f} of the weight, 0.00 of what it moves" in line
    assert page.locator("#weigh-why").text_content() == ""
    page.locator("#grid .tile").nth(7).click()
    page.locator("#tab-map").click()
    assert "moves" not in said.text_content() and page.locator("#weigh-why").text_content()
    page.keyboard.press("w")
    assert page.locator("#weigh-weight").get_attribute("aria-pressed") == "true"
    opened.check_calm()
    opened.context.close()


def test_the_matrix_shows_the_share_of_the_first_token(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, half_from_the_first(make_look(layers=2, heads=3)), tmp_path)
    opened.page.locator("#show").select_option(label="first token moves")
    assert set(opened.page.locator("#grid .tile .letter").all_text_contents()) == {"0.50"}
    opened.check_calm()
    opened.context.close()


def test_without_maps_of_what_moves_there_is_no_switch(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, make_look(layers=2, heads=3), tmp_path)
    assert opened.page.locator("#weigh").is_hidden()
    opened.context.close()
