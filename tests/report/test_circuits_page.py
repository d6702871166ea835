"""The page of a model's circuits, in a browser: the graph with its lines and names, the tables, and the keyboard.

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
from headwise.look import Circuits, Composition, HeadWrites
from headwise.report.circuits.circuits_page import MOST_PAIRS

pytestmark = MARKS

PAIRS = (
    Composition("q", (2, 4), (0, 1), 0.3, 0.1),
    Composition("k", (2, 3), (1, 2), 0.7, 0.1),
    Composition("k", (2, 4), (1, 2), 0.5, 0.1),
    Composition("v", (1, 2), (0, 1), 0.2, 0.1),
)
WRITES = tuple(
    HeadWrites("attn", layer, head, 1.5 + layer, 0.1 * head, 0.2, None if head == 3 else 0.25, 0.75, 0.0)
    for layer in range(3)
    for head in range(5)
)
ROLES = {"0.1": "first-token sink", "1.2": "previous-token", "2.3": "induction", "2.4": "head to obj"}
FOUND = Circuits("m", PAIRS, {"q": 50, "k": 50, "v": 50}, WRITES, ROLES)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


def opened(browser: Any, found: Circuits, path: Path, **options: Any) -> Page:
    assert report.write_circuits(found, path) == path.stat().st_size
    return Page(browser, path, **options)


def drawn(page: Any) -> set[tuple[str, str, str]]:
    """The lines of the graph that are not dimmed: writer, reader, and their label."""
    names = page.evaluate("JSON.parse(look.textContent).heads.map(({ layer, head }) => `${layer}.${head}`)")
    lines = page.eval_on_selector_all(
        ".edge:not(.off):has(text)",
        "(all) => all.map((one) => [one.dataset.ends, one.querySelector('text').textContent])",
    )
    placed = [([names[int(end)] for end in ends.split()], label) for ends, label in lines]
    return {(writer, reader, label) for (writer, reader), label in placed}


EVERY = {
    ("0.1", "2.4", "Q 3.0\u00d7"),
    ("1.2", "2.3", "K 7.0\u00d7"),
    ("1.2", "2.4", "K 5.0\u00d7"),
    ("0.1", "1.2", "V 2.0\u00d7"),
}


def test_the_graph_has_every_pair_with_its_kind_and_strength(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, FOUND, tmp_path / "c.html")
    assert drawn(page.page) == EVERY
    boxes = page.page.locator(".node")
    assert boxes.locator(".name").all_text_contents() == ["\u25cf 0.1", "P 1.2", "I 2.3", "vo 2.4"]
    assert boxes.locator(".role").all_text_contents() == ["previous-token", "induction", "verb -> object"]
    tops = [boxes.nth(n).bounding_box()["y"] for n in range(4)]
    assert tops[0] < tops[1] < tops[2] == tops[3]  # a row a layer
    rows = page.page.locator("#pairs tbody tr")
    assert [row.split("\t") for row in rows.all_inner_texts()][:2] == [
        ["2.3 induction", "1.2 previous-token", "K", "0.700", "7.0\u00d7"],
        ["2.4 verb -> object", "1.2 previous-token", "K", "0.500", "5.0\u00d7"],
    ]
    written = page.page.locator("#writes tbody tr").all_inner_texts()
    assert written[2].split("\t") == ["2.3", "induction", "3.500", "0.300", "\u2013", "0.750", "0.000"]
    page.check_calm()
    page.context.close()


def test_one_head_is_shown_by_mouse_by_keyboard_and_in_words(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, FOUND, tmp_path / "c.html")
    name = page.page.locator(".node").nth(1).get_attribute("aria-label")
    assert name == (
        "head 1.2 previous-token: reads 0.1 first-token sink through its values (2.0\u00d7); is read by 2.3 induction "
        "through its keys (7.0\u00d7), 2.4 verb -> object through its keys (5.0\u00d7)"
    )
    page.page.locator(".node").nth(2).click()
    assert drawn(page.page) == {("1.2", "2.3", "K 7.0\u00d7")}
    assert page.page.locator("#pairs tr.now").count() == page.page.locator("#writes tr.now").count() == 1
    assert "1.2 previous-token through its keys" in page.page.locator("#said").text_content()
    page.page.keyboard.press("Escape")
    assert drawn(page.page) == EVERY
    page.page.locator(".node[tabindex='0']").focus()  # the one that was chosen last: 2.3
    for key in ("ArrowRight", "ArrowUp", "Enter"):
        page.page.keyboard.press(key)
    assert page.page.locator(".node[aria-pressed='true'] .name").text_content() == "P 1.2"
    assert drawn(page.page) == {line for line in EVERY if "1.2" in line}
    page.page.locator("#pairs button", has_text="0.1").first.click()
    assert drawn(page.page) == {line for line in EVERY if "0.1" in line}
    page.check_calm()
    page.context.close()


def test_kinds_and_the_number_of_lines_are_chosen(browser: Any, tmp_path: Path) -> None:
    many = [Composition("v", (2, n % 5), (n // 5 % 2, n // 10), 0.9 - 0.01 * n, 0.1) for n in range(20)]
    page = opened(browser, replace(FOUND, compositions=(*PAIRS[:3], *many)), tmp_path / "c.html")
    assert len(drawn(page.page)) == 3 + 8
    page.page.locator("#most").select_option("12")
    assert len(drawn(page.page)) == 3 + 12
    page.page.locator("#kinds label", has_text="values").click()
    assert drawn(page.page) == EVERY - {("0.1", "1.2", "V 2.0\u00d7")}
    assert page.page.locator("#pairs tbody tr").count() == 3
    page.check_calm()
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_and_its_labels_hide_no_head(browser: Any, tmp_path: Path, scheme: str) -> None:
    page = opened(browser, FOUND, tmp_path / "c.html", viewport={"width": 390, "height": 844}, color_scheme=scheme)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    hidden = page.page.evaluate(
        """() => {
          const box = (node) => node.getBoundingClientRect();
          const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
          const [labels, heads] = [".edge rect", ".node rect"].map((of) => [...document.querySelectorAll(of)].map(box));
          return labels.some((one) => heads.some((head) => !apart(one, head)));
        }"""
    )
    assert not hidden
    page.check_calm()
    page.context.close()


def test_a_model_of_one_layer_says_that_no_head_reads_another(browser: Any, tmp_path: Path) -> None:
    found = replace(FOUND, compositions=(), pairs=dict.fromkeys("qkv", 0), heads=WRITES[:5])
    page = opened(browser, found, tmp_path / "c.html")
    assert "No head reads another" in page.page.locator("#place").text_content()
    page.check_calm()
    page.context.close()


def test_hostile_text_does_nothing(browser: Any, tmp_path: Path) -> None:
    roles = dict(zip(ROLES, PAYLOADS, strict=False))
    found = replace(FOUND, model="".join(PAYLOADS[:6]), roles=roles)
    page = opened(browser, found, tmp_path / "c.html")
    assert page.page.locator(".node").count() == 4
    assert page.page.locator("img, iframe, object, form, a, style ~ style, script ~ script ~ script").count() == 0
    page.check_calm()
    page.context.close()


def test_the_page_holds_the_strongest_pairs_alone(tmp_path: Path) -> None:
    many = tuple(Composition("k", (1, n), (0, n), 0.9 - 0.001 * n, 0.1) for n in range(3 * MOST_PAIRS))
    data = Elements(report.render_circuits(replace(FOUND, compositions=many, heads=(), roles={}))).data
    assert len(data["edges"]) == MOST_PAIRS and data["edges"][-1]["times"] == pytest.approx(9 - 0.01 * 49)
    with pytest.raises(TypeError, match=r"headwise\.look\.circuits returns; got str"):
        report.render_circuits("circuits")  # type: ignore[arg-type]
