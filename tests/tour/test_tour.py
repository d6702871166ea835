"""The tour as a file and as a page: command, refusals, same bytes, policy, state in the address, hostile text, keys."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from browsers import MARKS, Page, launched, until
from command_line import CliRunner
from draw import drawn
from hostile import PAYLOADS

from headwise import cli, hf, models, reshape, tour
from headwise.tour import page as page_module
from headwise.tour.facts import read_json
from headwise.tour.mathml import scripts_in_html
from headwise.tour.weights import check_config

pytestmark = [*MARKS, pytest.mark.unchecked]
ROOM = resources.files("headwise.tour")
CSP = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
runner = CliRunner()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tour") / "tour.html"
    result = runner.invoke(cli.app, ["tour", "--out", str(path)])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def visit(browser: Any, written: Path) -> Iterator[Any]:
    pages: list[Page] = []

    def open_page(address: str = "", path: Path = written, **options: Any) -> Any:
        pages.append(Page(browser, path, address, **options))
        return pages[-1].page

    yield open_page
    for page in pages:
        page.check_calm()
        page.context.close()


def click(page: Any, selector: str) -> None:
    """Clicks when every section is drawn.

    A section that is drawn meanwhile may move the button between press and release, and a browser then sends no click.
    """
    page.evaluate("window.headwise.drawAll(false)")
    page.locator(selector).click()


def bar(page: Any) -> tuple[str, str]:
    return page.locator("#bar-loss").text_content(), page.locator("#bar-changes").text_content()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_two_writes_give_the_same_bytes_within_the_budget(written: Path, tmp_path: Path) -> None:
    assert runner.invoke(cli.app, ["tour", "--out", str(tmp_path / "again.html")]).exit_code == 0
    assert (tmp_path / "again.html").read_bytes() == written.read_bytes()
    assert written.stat().st_size <= 9_500_000
    scripts = sum(len(ROOM.joinpath("js", *name.split("/")).read_bytes()) for name in page_module.SCRIPTS)
    styles = sum(len(ROOM.joinpath("css", name).read_bytes()) for name in page_module.STYLES)
    assert scripts <= 133_200 and styles <= 25_000


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from headwise import models, tour; "
        "tour.render(tour.read(models.tiny_path()), 'a b', packaged=True); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, cwd=tmp_path, check=False).returncode == 0


def test_the_policy_lets_run_what_was_written_and_nothing_else(written: Path) -> None:
    text = written.read_text()
    policy = CSP.search(text)
    assert policy
    rules = dict(part.split(" ", 1) for part in policy[1].replace("&#39;", "'").split("; "))
    assert rules["default-src"] == "'none'" and rules["trusted-types"] == "'none'"
    assert set(re.findall(r"'(unsafe[^']*|wasm[^']*)'", policy[1].replace("&#39;", "'"))) == {"wasm-unsafe-eval"}
    assert len(re.findall(r"'sha256-[^']+'", rules["script-src"])) == 3
    assert not re.search(r"<[a-z]+ [^>]*\bon[a-z]+=", text.split("<script")[0])
    assert not re.search(r'(?:src|href)="(?!#|data:)', text.split('<script type="application/json"')[0])


def test_scripts_make_no_markup_of_strings() -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|\.html\(|DOMParser|fetch\(|https?:"
    )
    for name in page_module.SCRIPTS:
        source = ROOM.joinpath("js", *name.split("/")).read_text()
        assert not re.search(forbidden, source), name
        assert "</script" not in source and "<!--" not in source
        assert len(source.splitlines()) <= 400


def test_what_is_vendored_is_what_was_checked() -> None:
    readme = (ROOM / "vendor" / "README.md").read_text()
    for name in ("vendor/tokenizers.min.js", "gemm.wasm"):
        assert hashlib.sha256(ROOM.joinpath(*name.split("/")).read_bytes()).hexdigest() in readme, name


def test_text_of_the_command_is_in_the_page(tmp_path: Path) -> None:
    out = tmp_path / "own.html"
    text = "</textarea><script>alert(1)</script>"
    assert runner.invoke(cli.app, ["tour", "--text", text, "--out", str(out)]).exit_code == 0
    assert text not in out.read_text()


# --- own checkpoints -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(models.tiny_path(), tmp_path / "model"))


def refused(*arguments: str) -> str:
    result = runner.invoke(cli.app, ["tour", *arguments], standalone_mode=True)
    assert result.exit_code == 2, result.output
    return result.output + (result.stderr if result.stderr_bytes else "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_size": "256"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
    ],
)
def test_other_models_are_refused_in_one_line(change: dict[str, Any], said: str) -> None:
    config = json.loads((models.tiny_path() / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        check_config(config)
    assert "headwise look opens it" in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_files_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    good = file.read_bytes()
    header = good[8 : 8 + struct.unpack("<Q", good[:8])[0]]
    moved = header.replace(b'"data_offsets":[0,', b'"data_offsets":[2,', 1)
    infinite = bytearray(good)
    infinite[-2:] = struct.pack("<H", 0x7C00)
    for content in (
        b"",
        good[:5],
        b"\xff" * 16,
        good[:4000],
        good[:-2],
        good[:8] + moved + good[8 + len(header) :],
        bytes(infinite),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError):
            tour.read(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        tour.read(folder)


def test_what_regroup_wrote_opens(tmp_path: Path, visit: Any) -> None:
    """The loop closes: the page of a regrouped model, and its files opened in the packaged model's page."""
    reshape.regroup(hf.checkpoint(models.tiny_path()), tmp_path / "kv4", 4, method="mean", proof=None)
    out = tmp_path / "own.html"
    assert runner.invoke(cli.app, ["tour", str(tmp_path / "kv4"), "--out", str(out)]).exit_code == 0
    page = visit(path=out)
    assert float(bar(page)[0]) == pytest.approx(4.107, abs=0.01)
    assert page.evaluate("window.headwise.state().kv") == 4
    other = visit()
    assert float(bar(other)[0]) == pytest.approx(1.663, abs=0.001)
    files = [str(tmp_path / "kv4" / name) for name in ("config.json", "tokenizer.json", "model.safetensors")]
    other.locator("#files").set_input_files(files)
    until(other, "document.getElementById('bar-loss').textContent.startsWith('4.')")
    assert bar(other)[0] == bar(page)[0]
    broken = tmp_path / "broken"
    broken.mkdir()
    for name, content in (("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "x")):
        (broken / name).write_text(content)
    other.locator("#files").set_input_files([str(path) for path in broken.iterdir()])
    until(other, "document.getElementById('files-said').textContent.startsWith('Not opened')")


# --- the page --------------------------------------------------------------------------------------------------------


def test_head_off_undo_reset_and_address(visit: Any) -> None:
    page = visit()
    assert bar(page) == ("1.663", "no change")
    click(page, '#switches [data-item="2.1"]')
    until(page, "document.getElementById('bar-changes').textContent === 'head 2.1 off'")
    assert bar(page)[0] == "2.278" and page.locator("#bar-more").text_content() == "+0.616"
    until(page, "location.hash.includes('off=2.1')")  # written when the figures are drawn
    address = page.evaluate("location.hash")
    page.keyboard.press("u")
    until(page, "document.getElementById('bar-loss').textContent === '1.663'")
    again = visit(address)
    assert bar(again) == ("2.278", "head 2.1 off")
    again.keyboard.press("r")
    until(again, "document.getElementById('bar-loss').textContent === '1.663'")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "address",
    [
        "#a=b&=",
        "#" + "t=" + "x" * 5000,
        "#t=%00%E2%80%AE&at=2.1",
        "#at=0.0&constructor=1",
        "#at=9.9&off=1.1,x&kv=3&no=sense",
    ],
)
def test_an_odd_address_is_harmless(visit: Any, address: str) -> None:
    page = visit(address)
    assert float(bar(page)[0]) > 0
    odd = address != "#t=%00%E2%80%AE&at=2.1"
    assert page.locator("#notice").is_visible() is odd


def test_typed_text_wins_over_what_was_typed_before(visit: Any) -> None:
    page = visit()
    text = page.locator("#text")
    text.fill("def a(b):\n    return b")
    text.fill("import os\nprint(os.getcwd())\n")
    wanted = page.evaluate("window.headwise.ids('import os\\nprint(os.getcwd())\\n').length")
    until(page, f"document.getElementById('bar-tokens').textContent === '{wanted}'")
    text.fill("")
    until(page, "document.getElementById('bar-tokens').textContent === '1'")
    text.fill("word " * 900)
    until(page, "document.getElementById('left').textContent.includes('stay outside')")
    assert page.locator("#bar-tokens").text_content() == "160"


def test_keys_that_are_pressed_while_a_text_runs_are_kept(visit: Any) -> None:
    page = visit()
    text = page.locator("#text")
    text.fill("")
    until(page, "document.getElementById('bar-tokens').textContent === '1'")
    page.evaluate(
        """() => { // one more key between the bar's answer and the drawing of the figures
          const box = document.getElementById('text');
          const watch = new MutationObserver(() => {
            watch.disconnect();
            box.value += 'b';
            box.dispatchEvent(new Event('input'));
          });
          watch.observe(document.getElementById('bar-tokens'), { childList: true, characterData: true, subtree: true });
        }"""
    )
    text.fill("def a(a")
    until(page, "document.getElementById('text').value.endsWith('b') && window.headwise.state().text.endsWith('b')")
    assert text.input_value() == "def a(ab"


def test_hostile_text_is_shown_and_does_nothing(visit: Any) -> None:
    page = visit()
    elements = "document.querySelectorAll('script, iframe, img, object, embed, link, base, form, style').length"
    before = page.evaluate(elements)
    until(page, "window.headwise.counts.draws['type draw'] >= 1")
    for start in drawn(range(0, len(PAYLOADS), 9), most=2):
        text = "".join(PAYLOADS[start : start + 9]).encode("utf-8", "ignore").decode()
        drawn_before = page.evaluate("window.headwise.counts.draws['type draw']")
        page.evaluate(
            "(text) => { const box = document.getElementById('text'); box.value = text; box.oninput(); }",
            text,
        )
        until(page, f"window.headwise.counts.draws['type draw'] > {drawn_before}")
        shown = "[...document.querySelectorAll('#tokens .token')].map((n) => n.textContent).join('').length"
        assert page.evaluate(shown) > 3 and page.evaluate("document.getElementById('text').value.length") > 0
    page.evaluate("window.headwise.drawAll()")
    assert page.evaluate(elements) == before


def test_keys_walk_through_the_page(visit: Any) -> None:
    page = visit()
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.id").endswith("-title")
    page.keyboard.press("]")
    assert page.evaluate("[window.headwise.state().layer, window.headwise.state().head]") == [2, 2]
    page.keyboard.press("x")
    until(page, "document.getElementById('bar-changes').textContent === 'head 2.2 off'")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.locator('#switches [data-item="2.2"]').focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.item") == "3.2"
    assert page.locator("#switches [tabindex='0']").count() == 1


def test_one_token_at_a_time(visit: Any) -> None:
    page = visit()
    click(page, "#step-text")
    until(page, "document.getElementById('step-said').textContent.startsWith('128 tokens read')")
    said = page.locator("#step-said").text_content()
    assert "8,256" in said and said.endswith("over the whole text: 0.")
    click(page, "#step")
    until(page, "document.getElementById('made').textContent.includes('The model goes on')")


def test_every_control_has_a_name_and_ids_are_one_each(visit: Any) -> None:
    page = visit()
    page.evaluate("window.headwise.drawAll(false)")
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, select, input, textarea, [tabindex="0"], [role=img]')]
        .filter((n) => !(n.getAttribute('aria-label') || n.getAttribute('aria-labelledby') ||
          n.textContent.trim() || n.labels?.length || n.title))
        .map((n) => n.outerHTML.slice(0, 90))"""
    )
    assert nameless == []
    twice = page.evaluate(
        "(() => { const all = [...document.querySelectorAll('[id]')].map((n) => n.id);\n"
        "return all.filter((id, n) => all.indexOf(id) !== n); })()"
    )
    assert twice == []


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light"), (360, "dark")])
def test_no_width_scrolls_sideways(visit: Any, width: int, scheme: str) -> None:
    page = visit(viewport={"width": width, "height": 780}, color_scheme=scheme, reduced_motion="reduce")
    page.evaluate("window.headwise.drawAll(false)")  # the claims already show the numbers of this text
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_scripts_the_chapter_can_be_read(browser: Any, written: Path) -> None:
    page = Page(browser, written, ready=False, java_script_enabled=False)
    assert page.page.locator("[data-claim='one-distribution'] output").text_content() == "1.66 \u2192 3.06"
    assert (
        page.page.locator("noscript, .notice").first.is_visible() or page.page.locator("main > section").count() == 14
    )
    assert page.page.locator(":is(canvas, button, select, input):visible").count() == 0  # they would do nothing
    assert page.faults == []
    page.context.close()


def test_print_has_every_answer_and_no_controls(visit: Any) -> None:
    page = visit()
    answers = page.locator(".ask p")
    assert answers.count() > 14 and not answers.first.is_visible()
    page.emulate_media(media="print")
    assert all(answer.is_visible() for answer in answers.all())
    assert page.locator("#bar:visible, .row-of-buttons:visible, .try button:visible").count() == 0


def test_indices_and_exponents_of_formulas_are_html() -> None:
    nested = "<msup><mi>e</mi><msub><mi>s</mi><mrow><mi>i</mi><mi>j</mi></mrow></msub></msup>"
    power = "<sup><span><i>s</i><sub><i>i</i><i>j</i></sub></span></sup>"
    assert scripts_in_html(nested) == f"<mi><span><i>e</i>{power}</span></mi>"
    both = "<msubsup><mi>W</mi><mi>Q</mi><mi>T</mi></msubsup>"
    stacked = '<span class="scripts"><span><i>T</i></span><span><i>Q</i></span></span>'
    assert scripts_in_html(both) == f"<mi><span><i>W</i>{stacked}</span></mi>"
    prime = "<msubsup><mi>W</mi><mi>O</mi><mi>&#x02032;</mi></msubsup>"  # high by itself
    assert scripts_in_html(prime) == "<mi><span><i>W</i>\u2032<sub><i>O</i></sub></span></mi>"
    under = '<span class="root">\u221a<span><span><i>d</i><sub><i>k</i></sub></span></span></span>'
    assert scripts_in_html("<msqrt><mrow><msub><mi>d</mi><mi>k</mi></msub></mrow></msqrt>") == f"<mi>{under}</mi>"
    for name, formula in read_json("formulas.json").items():
        assert "<msqrt" not in scripts_in_html(formula["mathml"]), name
        assert "<msu" not in scripts_in_html(formula["mathml"]), name
