"""How a reader walks through the tour: contents, links, keys, what is explained before it is used, what becomes old."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import MARKS, Page, launched, until

from headwise import models, tour
from headwise.tour import page as page_module

pytestmark = [*MARKS, pytest.mark.unchecked]
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tour") / "tour.html"
    path.write_text(tour.render(tour.read(models.tiny_path()), models.default_text(), packaged=True))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def visit(browser: Any, written: Path) -> Iterator[Any]:
    pages: list[Page] = []

    def open_page(address: str = "", **options: Any) -> Any:
        pages.append(Page(browser, written, address, **{"viewport": LAPTOP, **options}))
        return pages[-1].page

    yield open_page
    for page in pages:
        page.check_calm()
        page.context.close()


def rest(page: Any) -> None:
    """Waits until what is near the view is drawn and measured, and a look after it finds nothing more to do."""
    said = None
    for _ in range(60):
        page.wait_for_timeout(100)  # a scroll is told to the observers of the sections a frame or two later
        now = page.evaluate(
            """async () => {
              await window.headwise.refresh();
              const { layers, draws } = window.headwise.counts;
              return JSON.stringify([layers, draws, scrollY, document.documentElement.scrollHeight]);
            }"""
        )
        if now == said:
            return
        said = now
    raise AssertionError("the page never comes to rest")


def distance(page: Any, section: str) -> float:
    """How far a section's top is from where it should stand, below the bar."""
    return float(
        page.evaluate(
            "(id) => document.getElementById(id).getBoundingClientRect().top"
            " - parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop)",
            section,
        )
    )


@pytest.mark.parametrize("section", ["grid", "cost"])
def test_an_address_and_a_link_lead_to_their_section(visit: Any, section: str) -> None:
    """Figures that are drawn on the way change the heights; the section is brought into place again."""
    page = visit(f"#{section}")
    rest(page)
    assert abs(distance(page, section)) < 2
    other = visit()
    other.locator(f'#contents a[href="#{section}"]').click()
    rest(other)
    assert abs(distance(other, section)) < 2


def test_a_key_that_is_pressed_fast_counts_each_time(visit: Any) -> None:
    page = visit()
    for _ in range(6):
        page.keyboard.press("j")
    wanted = page.evaluate("[...document.querySelectorAll('main > section')].map((node) => node.id)")[6 - 1]
    assert page.evaluate("document.activeElement.id") == f"{wanted}-title"
    rest(page)
    assert abs(distance(page, wanted)) < 2


def test_who_scrolls_is_not_brought_back(visit: Any) -> None:
    page = visit("#share")
    page.mouse.wheel(0, -900)
    rest(page)
    assert distance(page, "share") > 300


def test_the_contents_are_numbered_as_the_sections_are(visit: Any) -> None:
    numbers = "(all) => all.map((node) => node.textContent.trim())"
    page = visit()
    listed = page.eval_on_selector_all("#contents .number", numbers)
    assert listed == page.eval_on_selector_all("main > section h2 .number", numbers) and len(listed) == 14
    assert page.locator("#contents a").last.is_visible()
    text = page.locator("main").bounding_box()
    beside = page.locator("#contents").bounding_box()
    assert beside["x"] + beside["width"] <= page.locator("#maps").bounding_box()["x"] and beside["y"] < 300, text
    narrow = visit(viewport=PHONE)
    assert not narrow.locator("#contents a").first.is_visible()
    narrow.locator("#contents summary").click()
    assert narrow.locator("#contents a").last.is_visible()


def test_verdicts_are_explained_before_the_first_and_at_the_ledger(visit: Any) -> None:
    page = visit()
    page.evaluate("window.headwise.drawAll(false)")
    assert page.eval_on_selector_all("#verdicts dt", "(all) => all.map((node) => node.textContent)") == list(
        page_module.VERDICTS
    )
    follows = "document.querySelector('#verdicts').compareDocumentPosition(document.querySelector('.claim'))"
    assert page.evaluate(follows) == 4  # DOCUMENT_POSITION_FOLLOWING
    ledger = page.locator("#ledger .figure").text_content()
    assert all(said in ledger for said in page_module.VERDICTS.values())


def test_prices_of_another_setting_are_called_old(visit: Any) -> None:
    page = visit("#t=def%20f(a)")  # a short text, whose prices are computed fast
    old = page.locator("#price-old")
    page.locator('#switches [data-item="0.0"]').wait_for()
    price_all(page)
    assert page.locator('#switches [data-item="0.0"] .cost').text_content().strip() and not old.is_visible()
    page.locator('#switches [data-item="2.1"]').click()
    old.wait_for()
    price_all(page)
    old.wait_for(state="hidden")


def test_a_claim_leaves_the_prices_of_the_setting_shown(visit: Any) -> None:
    """A claim prices the plain run in the background; a reader's own prices may come before it."""
    page = visit("#t=def%20f(a)")
    page.locator('#switches [data-item="2.1"]').click()
    price_all(page)
    page.evaluate("() => window.headwise.drawAll()")
    page.locator('[data-claim="redundant"].measured').wait_for(state="attached")
    assert not page.locator("#price-old").is_visible()


def price_all(page: Any) -> None:
    """Prices every head, and waits for the last price."""
    page.locator("#price").click()  # it is disabled at once
    page.wait_for_selector("#price:not(:disabled)")


def test_a_line_is_broken_where_nothing_was_measured(visit: Any) -> None:
    """The fit that was trained on was made for 4 and for 1 key-value heads, not for 2."""
    page = visit("#share")
    page.locator("#share-chart").scroll_into_view_if_needed()
    page.locator("#share-chart .line").nth(4).wait_for(state="attached")
    paths = page.eval_on_selector_all("#share-chart .line", "(all) => all.map((node) => node.getAttribute('d'))")
    assert [path.count("M") for path in paths] == [1, 1, 1, 1, 2]


def test_a_change_comes_before_claims(visit: Any) -> None:
    """While all sections are drawn and measured, a head that is switched waits for one layer at most."""
    page = visit()
    first, last = page.evaluate(
        """() => new Promise((go) => {
          new MutationObserver((_, measured) => {
            measured.disconnect();
            const before = { ...window.headwise.counts };
            new MutationObserver(() => go([before, { ...window.headwise.counts }]))
              .observe(document.getElementById('bar-changes'), { childList: true });
            document.querySelector('#switches [data-item="1.2"]').click();
          }).observe(document.querySelector('#pattern .claim output'), { childList: true });
          window.headwise.drawAll();
        })"""
    )
    assert last["layers"] - first["layers"] in (3, 4) and last["forwards"] - first["forwards"] == 1
    until(page, f"window.headwise.counts.forwards > {last['forwards'] + 4}")  # the claims go on afterwards


def test_what_is_out_of_view_is_drawn_when_it_comes_into_view(visit: Any) -> None:
    page = visit()
    rest(page)
    draws = "window.headwise.counts.draws"
    assert set(page.evaluate(draws)) <= {"type draw", "one draw", "type look", "one look"}
    page.evaluate("document.querySelector('#switches [data-item=\"0.7\"]').click()")
    rest(page)
    assert not {"off draw", "grid draw", "ledger draw"} & set(page.evaluate(draws))
    page.locator('#switches [data-item="0.7"][aria-pressed="false"]').wait_for(state="attached")  # unlike the rest
    page.evaluate("scrollTo(0, 1e6)")
    page.evaluate("document.getElementById('off').scrollIntoView()")
    page.locator("#off-said", has_text="31 of 32 heads are on.").wait_for()
    page.locator('#maps [data-item="0.7"][aria-label$=", off"]').wait_for()
    once = page.evaluate(draws)
    assert once["off draw"] == 1 and "learn draw" not in once and "order draw" not in once
    assert page.locator('#switches [data-item="0.7"]').get_attribute("aria-current") is not None
