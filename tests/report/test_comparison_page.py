"""The page of two looks side by side, in a browser: both matrices, roles gained and lost, and nothing that acts.

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
from looks import make_look
from reports import Elements

from headwise import report
from headwise.look import Score

pytestmark = MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


def opened(browser: Any, path: Path) -> Page:
    return Page(browser, path)


def test_it_shows_both_looks_and_what_changed(browser: Any, tmp_path: Path) -> None:
    before = make_look(layers=3, heads=5)
    number = next(i for i, head in enumerate(before.heads) if head.role == "self")
    other = next(head for head in before.heads if head.role == "induction")
    heads = list(before.heads)
    heads[number] = replace(other, layer=heads[number].layer, head=heads[number].head, module=heads[number].module)
    after = replace(before, heads=tuple(heads), model="changed")
    path = tmp_path / "changes.html"
    assert report.write_comparison(before, after, path) == path.stat().st_size
    data = Elements(path.read_text("utf8")).data
    labels = [role["label"] for role in data["roles"]]
    pair = data["pairs"][number]
    assert [labels[i] for i in pair["gained"]] == ["induction"] and [labels[i] for i in pair["lost"]] == ["self"]
    assert [p for p in data["pairs"] if p["gained"] or p["lost"]] == [pair]
    page = opened(browser, path)
    assert page.page.locator("#grid-0 .cell").count() == page.page.locator("#grid-1 .cell").count() == 15
    assert page.page.locator(".cell.changed").count() == 2
    letters = [page.page.locator(f"#grid-{side} .cell").nth(number).text_content() for side in (0, 1)]
    assert letters == ["=", "I"]
    first = page.page.locator("#heads tbody tr").first
    place = f"{heads[number].layer}.{heads[number].head}"
    assert first.locator("th").text_content() == place
    page.page.locator("#grid-1 .cell").nth(number).click()
    assert page.page.locator(".cell.now").count() == 2 and first.get_attribute("class") == "now"
    row = page.page.locator("#roles tbody tr", has_text="induction")
    counts = [len(look.with_role("induction")) for look in (before, after)]
    assert row.locator("td").all_text_contents() == [*map(str, counts), place, ""]
    page.check_calm()
    page.context.close()


def test_heads_that_one_look_lacks_are_crossed(browser: Any, tmp_path: Path) -> None:
    before = make_look(layers=2, heads=5)
    after = replace(before, heads=tuple(head for head in before.heads if (head.layer, head.head) != (1, 4)), maps=())
    report.write_comparison(before, after, tmp_path / "c.html", kept={1: [0, 1, 2, 3]})
    page = opened(browser, tmp_path / "c.html")
    assert page.page.locator("#grid-0 .cell.alone").count() == 1 and page.page.locator("#grid-1 .alone").count() == 0
    page.check_calm()
    page.context.close()


def test_a_role_that_one_look_did_not_measure_has_no_count_there(browser: Any, tmp_path: Path) -> None:
    before = make_look(layers=3, heads=5)
    left = (replace(one, scores={n: s for n, s in one.scores.items() if n != "induction"}) for one in before.heads)
    report.write_comparison(before, replace(before, heads=tuple(left)), tmp_path / "c.html")
    page = opened(browser, tmp_path / "c.html")
    cells = page.page.locator("#roles tbody tr", has_text="induction").locator("td").all_text_contents()
    assert cells == [str(len(before.with_role("induction"))), "\u2013", "", ""]
    assert page.page.locator(".cell.changed").count() == 0
    page.check_calm()
    page.context.close()


def test_hostile_text_does_nothing(browser: Any, tmp_path: Path) -> None:
    look = make_look(layers=4, heads=26, model="".join(PAYLOADS[:6]))
    heads = tuple(
        replace(head, scores={text: Score(text, 0.9, 0.1, 0.4, 7, plays=True)})
        for head, text in zip(look.heads, PAYLOADS * 2, strict=False)
    )
    report.write_comparison(replace(look, heads=heads), look, tmp_path / "c.html")
    page = opened(browser, tmp_path / "c.html")
    assert page.page.locator("#grid-0 .cell").count() == 104
    assert page.page.locator("img, iframe, object, form, a, style ~ style, script ~ script ~ script").count() == 0
    page.check_calm()
    page.context.close()
