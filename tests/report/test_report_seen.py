"""Reports of looks at pictures and sound: what the page holds, and what a browser shows of it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsers import MARKS, Opened, launched
from looks import make_look
from reports import Elements

from headwise import look, report
from headwise.look.records import axes
from headwise.look.records.images import sound_of
from headwise.report import maps
from headwise.testing.pictures import constructed_picture

pytestmark = MARKS
GRID = (5, 7)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    pages: list[Opened] = []

    def open_look(one: look.Look) -> Opened:
        pages.append(Opened(browser, one, tmp_path))
        return pages[-1]

    yield open_look
    for page in pages:
        page.check_calm()
        page.context.close()


@pytest.fixture(scope="module")
def seen() -> look.Look:
    model, _ = constructed_picture([["right neighbour", "upper neighbour", "[CLS] sink"]], GRID, registers=2, patch=6)
    return look.at(model, {"pixel_values": model.sample()}, name="seen")


def heard(seen: look.Look) -> look.Look:
    """The same heads, as if they ran over a sound of two seconds."""
    sound = replace(sound_of(torch.randn(4000)), seconds=2.0)  # type: ignore[type-var]
    return replace(seen, axes=(axes.Axis(axes.SOUND, 38),), pictures=(sound,))


def test_the_page_holds_axes_and_the_picture(seen: look.Look) -> None:
    data = Elements(report.render(seen)).data
    [axis] = data["axes"]
    assert axis["kind"] == "picture" and axis["total"] == 38 and axis["grids"] == [list(GRID)] and not axis["main"]
    assert axis["apart"] == {"[CLS]": [0], "registers": [1, 2]} and axis["at"][9:15] == [0, 0, 0, 0, 0, 1]
    assert all(place["over"] == [0, 0] for place in data["places"])
    assert base64.b64decode(data["pictures"][0]["data"]) == seen.pictures[0].data
    hostile = replace(seen.axes[0], kind="text", names=("</script><b>",) * 38, apart={"<i>" * 99: (1,)})
    page = report.render(replace(seen, axes=(hostile,)))
    assert "</script><b>" not in page and "<i><i>" not in page


def test_maps_over_patches_keep_a_cell_a_patch_where_there_is_room() -> None:
    model, _ = constructed_picture([["right neighbour", "self"]], (13, 15), patch=1)
    wide = look.at(model, {"pixel_values": model.sample()})
    assert wide.maps[0].rows == 196 and wide.neurons
    data = Elements(report.render(wide)).data
    assert data["maps"]["rows"] == [196, 196] and data["maps"]["levels"] == 256
    noise = [look.HeadMap(196, 196, np.random.default_rng(h).bytes(196 * 196)) for h in range(2)]
    assert [maps.packed(noise, budget)["rows"][0] for budget in (110_000, 60_000, 30_000)] == [196, 196, 128]


HEAT = """(() => {
  const canvas = document.querySelector('#scene .heat');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return [canvas.width, canvas.height, Array.from({ length: pixels.length / 4 }, (_, i) => pixels[4 * i + 3])];
})()"""


def brightest(page: Any) -> tuple[int, int]:
    width, _, alpha = page.evaluate(HEAT)
    place = alpha.index(max(alpha))
    return place // width, place % width


def test_attention_is_laid_over_the_picture(seen: look.Look, opened: Any) -> None:
    page = opened(seen).page
    assert page.locator("#tab-picture").get_attribute("aria-selected") == "true"
    assert page.locator("#running").is_hidden() and page.locator("#scene img").count() == 1
    assert page.evaluate("document.querySelector('#scene img').naturalWidth") == seen.pictures[0].width
    assert page.locator("#numbers small").all_text_contents() == [" nats", " places"]
    width, height, _ = page.evaluate(HEAT)
    assert (height, width) == GRID
    box = page.locator("#scene .heat").bounding_box()
    for row, column in ((2, 3), (4, 0)):
        x, y = box["width"] * (column + 0.5) / GRID[1], box["height"] * (row + 0.5) / GRID[0]
        page.locator("#scene .heat").click(position={"x": x, "y": y})
        assert brightest(page) == (row, column + 1)
        assert f"r{row} c{column}" in page.locator("#scene-readout").text_content()
        assert f"most on r{row} c{column + 1} 1.000" in page.locator("#scene-readout").text_content()
    page.locator("#scene").press("ArrowUp")
    assert brightest(page) == (3, 1)
    page.locator("#scene-mode").select_option("attended")
    page.locator("#scene").press("ArrowRight")
    assert brightest(page) == (3, 0) and "r3 c1\u201d gets from" in page.locator("#scene-readout").text_content()
    page.locator("#scene-mode").select_option("attends")
    page.locator('.tile[data-head="2"]').click()
    assert page.locator("#scene-apart li").all_text_contents()[0].startswith("[CLS] 1.000")
    page.locator("#scene-apart button").first.click()
    assert page.locator(".patch-mark").is_hidden() and "[CLS]" in page.locator("#scene-readout").text_content()
    page.keyboard.press("1")
    assert page.locator("#pane-map").is_visible()
    assert "r0 c0" in page.locator("#map .queries").text_content()
    page.keyboard.press("5")
    assert page.locator("#pane-picture").is_visible()


def test_attention_is_laid_over_time(seen: look.Look, opened: Any) -> None:
    page = opened(heard(seen)).page
    assert page.locator("#tab-picture").text_content() == "Sound"
    width, height, _ = page.evaluate(HEAT)
    assert (width, height) == (38, 1) and page.locator("#scene .times").text_content() == "02.00 s"
    box = page.locator("#scene .heat").bounding_box()
    page.locator("#scene .heat").click(position={"x": box["width"] * 10.5 / 38, "y": 5})
    assert brightest(page) == (0, 11) and "0.53 s" in page.locator("#scene-readout").text_content()


def test_a_look_at_text_has_no_picture(opened: Any) -> None:
    page = opened(make_look()).page
    assert page.locator("#numbers small").all_text_contents() == [" nats", " tokens"]
    assert page.locator("#tab-picture").is_hidden() and page.locator("#pane-map").is_visible()
    page.keyboard.press("5")
    assert page.locator("#pane-map").is_visible()
