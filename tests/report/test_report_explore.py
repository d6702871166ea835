"""Exploring a report in a real browser: overview, search, arcs, the sum, evidence, keys. One page serves all tests.

Needs Playwright and a Chromium of the system, as `test_report_browser.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsers import MARKS, Opened, launched
from looks import full_look, make_look, playing, words

import headwise
from headwise import hf, models
from headwise.look import Evidence, Score

pytestmark = MARKS
LOOK, CALLS = full_look()
TOKENS = words(29)
WEIGHTS = [
    one for call in CALLS for one in headwise.weights(call.query, call.key, **call.scoring)[0].numpy()
]  # a matrix a head
SHOWN = "[...document.querySelectorAll('#grid .tile')].map((t) => Number(t.dataset.head))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def shared(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    opened = Opened(browser, LOOK, tmp_path_factory.mktemp("explore"))
    yield opened
    opened.check_calm()
    opened.context.close()


@pytest.fixture
def page(shared: Opened) -> Any:
    """The page as it was at first: no filter, no search, roles shown in their order, the map of head 1.2 open."""
    page = shared.page
    page.locator("#search").fill("")
    page.locator("#roles .chip").first.click()
    page.locator("#show").select_option("role")
    page.locator("#order").select_option("head")
    page.locator("#tab-map").click()
    tile(page, 6).click()
    return page


def tile(page: Any, head: int) -> Any:
    return page.locator(f"#grid .tile[data-head='{head}']")


def test_the_overview_has_a_letter_and_a_colour_for_each_role(page: Any) -> None:
    letters = page.locator("#grid .tile .letter").all_text_contents()
    of = {"previous-token": "P", "induction": "I", "self": "=", "-": "\u00b7"}
    assert letters == ["" if head.role == "-" and head.states else of[head.role] for head in LOOK.heads]
    scores = page.locator("#grid .tile .value").all_text_contents()
    assert scores == ["" if head.role == "-" else f"{head.value(head.role):.2f}" for head in LOOK.heads]
    marks = page.eval_on_selector_all("#grid .tile", "(all) => all.map((t) => t.dataset.marks)")
    assert marks == ["dot" if head.states == ("first-token sink",) else "" for head in LOOK.heads] and "dot" in marks
    colours = page.eval_on_selector_all("#grid .tile", "(all) => all.map((t) => getComputedStyle(t).backgroundColor)")
    named = {(letter, colour) for letter, colour in zip(letters, colours, strict=True) if letter not in ("", "\u00b7")}
    assert len(named) == len(set(letters) - {"", "\u00b7"}) == len({colour for _, colour in named})
    assert tile(page, 0).get_attribute("aria-label") == "Layer 0, head 0: previous-token 1.00"


def test_the_overview_shows_any_number_and_orders_by_it(page: Any) -> None:
    page.locator("#show").select_option(label="share of the stream")
    letters = page.locator("#grid .tile .letter").all_text_contents()
    assert [float(said) for said in letters] == pytest.approx([i / 7 for i in range(12)], rel=0.01)
    assert page.locator("#legend span").all_text_contents() == ["0", "1.57"]
    page.locator("#order").select_option("value")
    assert page.evaluate(SHOWN) == [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8]
    tile(page, 6).focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#head-title").text_content() == "Layer 1, head 3"
    page.locator("#order").select_option("head")
    assert page.evaluate(SHOWN) == list(range(12))
    numbers = dict(
        zip(*(page.locator(f"#numbers {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True),
    )
    assert numbers["importance, gradient"] == "0.0864" and numbers["entropy"] == f"{LOOK.heads[7].entropy:.2f} nats"


def test_a_token_is_searched_and_the_heads_that_look_there(page: Any) -> None:
    page.locator("#search").fill("QUICK")
    places = [i for i, token in enumerate(TOKENS) if "quick" in token]
    flags = page.evaluate("[...document.querySelectorAll('#tokens .token')].map((t) => t.classList.contains('found'))")
    assert [i for i, one in enumerate(flags) if one] == places and len(places) == 4
    mass = [float(w[places[0] :, places].sum(1).mean()) for w in WEIGHTS]
    said = page.locator("#matches .link").all_text_contents()
    order = sorted(range(12), key=lambda i: -mass[i])[:5]
    assert [one.split() for one in said] == [[f"{i // 4}.{i % 4}", f"{mass[i]:.2f}"] for i in order]
    assert page.locator("#show").input_value() == "search" and "4 tokens" in page.locator("#matches").text_content()
    page.locator("#matches .link").first.click()
    assert page.locator("#head-title").text_content() == f"Layer {order[0] // 4}, head {order[0] % 4}"
    page.locator("#search").focus()
    for place in (*places, places[0]):
        page.keyboard.press("Enter")
        assert page.locator("#tokens .token.chosen").text_content() == TOKENS[place]
        assert f"query {place} " in page.locator("#readout").text_content()
    page.keyboard.press("Escape")
    assert page.locator("#tokens .token.found").count() == 0 and page.locator("#show").input_value() == "role"
    assert page.locator("#matches").text_content() == ""


def test_arcs_join_the_words_of_a_sentence(page: Any) -> None:
    page.locator("#tab-arcs").click()
    page.locator("#sentence").select_option("1")
    first, end = (i + 1 for i, token in enumerate(TOKENS) if token == "\n")
    inside = range(first, end)
    shown = [TOKENS[i].replace(" ", "\u00b7").replace("\n", "\u23ce") for i in inside]
    assert page.locator("#arcs .word text").all_text_contents() == shown
    for least in ("0.1", "0.05"):
        page.locator("#least").select_option(least)
        drawn = page.eval_on_selector_all("#arcs .arc", "(all) => all.map((a) => [a.dataset.query, a.dataset.key])")
        wanted = {(i, j) for i in inside for j in inside if WEIGHTS[6][i, j] >= float(least) + 0.004}
        about = {(i, j) for i in inside for j in inside if WEIGHTS[6][i, j] >= float(least) - 0.004}
        pairs = {(int(i), int(j)) for i, j in drawn}
        assert wanted <= pairs <= about and wanted
    chosen = inside[-1]
    page.locator(f"#arcs .word[data-token='{chosen}']").click()
    best = int(WEIGHTS[6][chosen].argmax())
    said = page.locator("#arc-readout").text_content()
    assert said.startswith(f"query {chosen} ") and f"attends {best} " in said
    assert f"{WEIGHTS[6][chosen, best]:.2f}" in said
    aside = page.eval_on_selector_all(
        "#arcs .arc:not(.aside)", "(all) => all.map((a) => [a.dataset.query, a.dataset.key])"
    )
    assert aside and all(str(chosen) in pair for pair in aside)
    page.locator("#arcs").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#arc-readout").text_content().startswith(f"query {chosen - 1} ")
    page.locator("#least").select_option("0.4")  # a word without an arc: the arcs of others are not faint
    drawn = page.eval_on_selector_all("#arcs .arc", "(all) => all.flatMap((a) => [a.dataset.query, a.dataset.key])")
    lone = next(i for i in inside if str(i) not in drawn)
    page.locator(f"#arcs .word[data-token='{lone}']").click()
    assert page.locator("#arcs .arc").count() == len(drawn) / 2 > 0
    assert not page.locator("#arcs .arc.aside").count()
    page.locator("#least").select_option("0.05")


def test_only_rare_relations_of_grammar_wait_behind_a_button(browser: Any, tmp_path: Path) -> None:
    """They hid the name movers and the states; the button shows them in their place."""
    look = make_look(layers=1, heads=7)
    relations = ("det to head", "head to det", "obj to head")  # of one, three, and two heads
    others = ("induction", "name mover", "negative name mover", "name suppressor", "duplicate-token", "retrieval")
    others += ("previous-token", "self", "coreference", "punctuation", "local band", "first-token sink", "broad")
    plays = {0: (*others, *relations), 1: relations[1:], 2: relations[1:2]}
    heads = [
        playing(head, *(Score(name, 0.9, 0.1, 0.4, 7, plays=True) for name in plays.get(i, ())))
        for i, head in enumerate(look.heads)
    ]
    opened = Opened(browser, replace(look, heads=tuple(heads)), tmp_path)
    chips = opened.page.locator("#roles .chip")
    shown = chips.all_text_contents()
    hidden = "[...document.querySelectorAll('#roles .chip')].filter((c) => c.hidden).map((c) => c.textContent)"
    assert opened.page.evaluate(hidden) == ["ovobject -> verb2", "dndeterminer -> noun1"], shown
    assert shown[-1] == "2 more" and shown[1:3] == ["Iinduction1", "Mname mover1"]
    opened.page.locator("#roles .more-chips").click()
    assert opened.page.evaluate(hidden) == [] and opened.page.locator("#roles .more-chips").text_content() == "fewer"
    opened.check_calm()
    opened.context.close()


def test_the_sum_is_that_of_the_model(page: Any) -> None:
    """Head 1.2 of four reads the second key-value head; bytes keep the score to about a hundredth."""
    page.locator("#tab-sum").click()
    page.locator("#sum-query").select_option("17")
    call, weights = CALLS[1], WEIGHTS[6]
    best = int(weights[17].argmax())
    for key in (best, 3):
        page.locator("#sum-key").select_option(str(key))
        equation = page.locator("#sum .equation").nth(0).text_content()
        total, scale, score = (float(x) for x in re.findall(r"-?\d+\.\d+", equation)[:3])
        q, k = call.query[0, 2, 17], call.key[0, 1, key]
        size = float((q.abs() * k.abs()).sum())
        assert total == pytest.approx(float(q @ k), abs=0.02 * size)
        assert scale == pytest.approx(7**-0.5, abs=1e-4) and score == pytest.approx(total * scale, abs=0.01)
        said = page.locator("#sum .equation").nth(1).text_content()
        assert float(said.rsplit("=", 1)[1]) == pytest.approx(float(weights[17, key]), abs=0.005)
    assert page.locator("#sum .bars rect").count() == 7
    assert page.locator("#sum .key-bar").count() == 18  # no later key may be attended
    strips = page.locator("#sum section").nth(2).locator(".strip")
    assert strips.last.locator("b").text_content() == "sum" and 2 <= strips.count() <= 7
    pixels = "(c) => [...c.getContext('2d').getImageData(0, 0, c.width, 1).data]"
    output = strips.last.locator("canvas").evaluate(pixels)
    wanted = weights[17] @ call.value[0, 1].numpy()
    signs = [-1 if output[4 * d] == 0 else 1 for d in range(5)]
    assert [sign for sign, x in zip(signs, wanted, strict=True) if abs(x) > 0.05] == [
        1 if x > 0 else -1 for x in wanted if abs(x) > 0.05
    ]
    page.locator("#sum").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#sum-query").input_value() == "16"
    assert page.locator("#sum-key").input_value() == str(int(weights[16].argmax()))
    page.locator("#tab-map").click()
    assert page.locator("#readout").text_content().startswith("query 16 ")  # the map went along


def test_each_role_has_its_evidence(page: Any) -> None:
    index = next(i for i, head in enumerate(LOOK.heads) if head.role == "previous-token")
    tile(page, index).click()
    page.locator("#tab-evidence").click()
    score = LOOK.heads[index].roles[0]
    said = page.locator("#played .measured").text_content()
    assert said == f"{score.value:.3f} \u00b7 threshold 0.50 \u00b7 chance 0.021 \u00b7 28 queries"
    one = score.evidence[0]
    first = page.locator("#played .evidence li").first
    assert first.locator(".where").text_content() == f"query {one.query} \u2192 key {one.key} "
    assert first.locator("mark.is-query").text_content() == TOKENS[one.query]
    assert first.locator("mark.is-key").text_content() == TOKENS[one.key]
    first.locator("button").click()
    assert f"query {one.query} " in page.locator("#readout").text_content()
    assert f"key {one.key} " in page.locator("#readout").text_content()
    index = next(i for i, head in enumerate(LOOK.heads) if head.role == "induction")
    tile(page, index).click()
    page.locator("#tab-evidence").click()
    score = LOOK.heads[index].roles[0]
    said = page.locator("#played .measured").text_content()
    assert f"(95 %: {score.low:.3f} to {score.high:.3f})" in said
    first = page.locator("#played .evidence li").first
    assert first.locator(".where").text_content().startswith("random tokens, row 0: query ")
    assert first.locator("mark.is-query").text_content() == f" r{score.evidence[0].query}"
    assert first.locator("button").count() == 0  # another text than the one shown
    others = page.locator("#others tr").count()
    assert others == len(LOOK.heads[index].scores) - 1


def test_keys_reach_everything(page: Any) -> None:
    tile(page, 6).focus()
    for key, title in (("]", "Layer 1, head 3"), ("[", "Layer 1, head 2"), ("ArrowUp", "Layer 0, head 2")):
        page.keyboard.press(key)
        assert page.locator("#head-title").text_content() == title
    for key, pane in (("2", "arcs"), ("3", "sum"), ("4", "evidence"), ("1", "map")):
        page.keyboard.press(key)
        assert page.locator(f"#pane-{pane}").is_visible()
        assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{pane}"
    tile(page, 2).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "map"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.head") == "2"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("t")  # nothing acts behind it
    assert page.evaluate("document.documentElement.dataset.theme") is None
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("t1?")
    assert page.locator("#search").input_value() == "t1?" and not page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.locator("#roles .chip", has_text="induction").click()
    page.keyboard.press("]")
    assert LOOK.heads[int(page.locator(".tile[aria-current]").get_attribute("data-head"))].role == "induction"
    page.keyboard.press("Escape")
    assert page.locator("#grid .tile.off").count() == 0


def test_the_address_names_the_open_head(browser: Any, tmp_path: Any) -> None:
    opened = Opened(browser, LOOK, tmp_path)
    page, title = opened.page, opened.page.locator("#head-title")
    assert "#" not in page.url
    tile(page, 9).click()
    page.wait_for_url("**#2.1")
    page.evaluate("location.hash = '#1.3'")
    page.wait_for_function("document.querySelector('#head-title').textContent === 'Layer 1, head 3'")
    page.evaluate("location.hash = '#7.7'")  # no such head: the open one stays
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert title.text_content() != "Layer 1, head 3"
    page.goto(page.url.partition("#")[0] + "#0.2")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert title.text_content() == "Layer 0, head 2"
    opened.check_calm()
    opened.context.close()


CONTRAST = """(all) => {
  const light = (css) => css.match(/[\\d.]+/g).slice(0, 3).map((v) => v / (css.startsWith("color(") ? 1 : 255))
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
  return all.map((e) => [light(getComputedStyle(e).color), light(getComputedStyle(e).backgroundColor)])
    .map(([ink, behind]) => Math.max(ink / behind, behind / ink));
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_stands_on_a_colour_can_be_read(page: Any, theme: str) -> None:
    """WCAG's 4.5 to 1; on the ramp of numbers neither black nor white reaches it everywhere."""
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    assert (
        min(page.eval_on_selector_all("#grid .tile:not(.none), #roles .chip:not([aria-pressed='true']) i", CONTRAST))
        >= 4.5
    )
    page.locator("#tokens .token").nth(5).click()
    assert page.locator("#tokens .token.strong").count()
    assert min(page.eval_on_selector_all("#tokens .token.strong", CONTRAST)) >= 4.5
    page.locator("#show").select_option(label="share of the stream")
    assert min(page.eval_on_selector_all("#grid .tile:not(.none)", CONTRAST)) >= 4.2
    page.evaluate("delete document.documentElement.dataset.theme")


def test_light_and_dark_by_a_switch(page: Any) -> None:
    lightness = {}
    for _ in range(3):
        theme = page.evaluate("document.documentElement.dataset.theme ?? 'auto'")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness[theme] = sum(map(int, background[4:-1].split(",")))
        page.locator("#theme").click()
    assert lightness["dark"] < 200 and lightness["light"] > 700 and lightness["auto"] == lightness["light"]


def test_parts_stand_apart_and_a_decoder_reads_behind_its_start(browser: Any, tmp_path: Any) -> None:
    """Encoder, decoder and cross-attention; the decoder's text begins with a start token and ends one token before."""
    look = make_look(layers=3, heads=2, tokens=words(29))
    small = make_look(layers=3, heads=2, tokens=words(28))
    parts = [("encoder", 29, 29), ("decoder", 28, 28), ("cross", 28, 29)]
    heads, maps = [], []
    for i, head in enumerate(look.heads):
        part, queries, keys = parts[head.layer]
        heads.append(replace(head, part=part, queries=queries, keys=keys))
        cross = look.maps[i].data[: 28 * 29]
        maps.append({"encoder": look, "decoder": small}[part].maps[i] if part != "cross" else None)
        maps[-1] = maps[-1] or replace(look.maps[i], rows=28, data=cross)
    shown = Score("induction", 0.9, 0.1, 0.4, 7, plays=True, evidence=(Evidence(0, 9, 4, 0.75),))
    heads[2:] = [playing(head, shown) for head in heads[2:]]
    spelt = {"copies 0": {place: f" r{place}" for place in range(29)}}
    heads[4:] = [replace(head, distance=None, offsets=(), ahead=()) for head in heads[4:]]
    look = replace(look, kind="encoder-decoder", heads=tuple(heads), maps=tuple(maps), excerpts=spelt)
    opened = Opened(browser, look, tmp_path)
    page = opened.page
    assert page.locator("#grid .part-title").all_text_contents() == ["Encoder", "Decoder", "Cross-attention"]
    tile(page, 5).click()
    queries, keys = (page.locator(f"#map .{axis} .tick text").all_text_contents() for axis in ("queries", "keys"))
    assert queries[:2] == ["(start)", "\u00b7The"] and keys[0] == "\u00b7The"
    assert page.locator("#offsets").text_content() == "Not measured: queries and keys are of two texts."
    assert page.locator("#offsets-of").text_content() == ""
    page.locator("#tab-arcs").click()
    page.locator("#sentence").select_option("0")
    assert page.locator("#arcs .arc-key").count() == 29 and page.locator("#arcs .arc").count() > 3
    page.locator("#tab-evidence").click()
    for head, marked in ((5, [" r8", " r4"]), (2, [" r3", " r8"])):  # across two texts, and within the decoder's
        tile(page, head).click()
        assert page.locator("#played mark").all_text_contents() == marked
    opened.check_calm()
    opened.context.close()


def test_many_heads_are_dense_and_the_table_comes_in_parts(browser: Any, tmp_path: Any) -> None:
    opened = Opened(browser, make_look(layers=25, heads=26, tokens=words(5)), tmp_path)
    page = opened.page
    assert page.locator("#grid .tile").count() == 650
    assert page.locator("#grid").bounding_box()["height"] < 1000
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400
    page.locator("#show").select_option("map")
    page.locator(".tile canvas[data-shade]").nth(19).wait_for()
    assert page.locator(".tile canvas[data-shade]").count() < 650  # those in sight alone
    assert page.locator("#table tbody tr").count() == 200
    page.locator("#more-rows").click()
    assert page.locator("#table tbody tr").count() == 400
    opened.check_calm()
    opened.context.close()


def test_what_shows_less_than_there_is_says_so(browser: Any, tmp_path: Any) -> None:
    """The sum of the first queries only, where the map is at a later one; labels of the axes; roles of 32 heads."""
    loaded = hf.load(models.tiny_path())
    ids, tokens = loaded.encode(models.default_text())
    seen = headwise.look.at(loaded.model, ids, tokens=tokens, delimiters=loaded.delimiters)
    opened = Opened(browser, seen, tmp_path)
    page = opened.page
    assert page.locator("#labelled").text_content()
    page.locator("#tab-sum").click()
    queries = page.locator("#sum-query option").count()
    assert queries < len(tokens) and int(page.locator("#sum-query").input_value()) < queries
    note = page.locator("#sum-other")
    assert str(queries) in note.text_content()
    page.locator("#sum-query").select_option("17")  # map and text go along
    assert note.text_content() == ""
    bare = sum(not head.roles for head in seen.heads)
    idle = sum(head.role == "-" for head in seen.heads)
    counted = page.eval_on_selector_all("#roles .chip", "(all) => all.map((n) => [n.textContent, n.innerText])")
    assert counted[-1][0].endswith(str(bare)) and bare < idle
    assert page.locator("#grid .tile.none").count() == idle
    assert page.locator("#grid .tile.none:not([data-marks=''])").count() == idle - bare
    opened.check_calm()
    opened.context.close()
