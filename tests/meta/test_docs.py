"""What the README and the documentation show is run.

- ```` ```python ```` blocks are executed, and ```` ```pycon ```` sessions must print what the page says; the blocks of
  one page share an interpreter, from top to bottom, in which nothing but they import (`tests/helpers/pages.py`).
- Links to files of this repository must lead somewhere.
- Every exported name has its entry in the API pages, and so has all that a room exports.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from pages import FENCE, run_fresh, run_page

import headwise.hf  # what a test imports must not reach a page
from headwise.ops.native.library import error_for

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = "the-tour.html"  # docs/site_hooks.py makes it
RUNS = re.compile(r"^ *```(python|pycon)", re.M)

pytestmark = pytest.mark.unchecked  # pages show what a user sees


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_is_true(page: Path, tmp_path: Path) -> None:
    if page.name == "backends.md" and error_for():
        pytest.skip(f"it shows the native kernel: {error_for()}")
    text = page.read_text("utf8")
    if RUNS.search(text):
        run_fresh(page.relative_to(ROOT).as_posix(), text, tmp_path)


def test_the_page_of_roles_says_what_the_roles_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    page = importlib.import_module("roles_page").page()
    assert page == (ROOT / "docs/roles.md").read_text("utf8"), "run python scripts/roles_page.py"
    for path, text in importlib.import_module("reading_page").files().items():
        assert path.read_text("utf8") == text, f"{path.name}: run python scripts/reading_page.py"


def test_the_readme_shows_code() -> None:
    assert "```python" in (ROOT / "README.md").read_text("utf8")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("```python\nassert 1 == 2\n```", AssertionError),
        ("```pycon\n>>> 1 + 1\n3\n```", AssertionError),
        ("```python\nx = 1\n```\n\n- in a list\n\n  ```python\n  y\n  ```\n", NameError),
    ],
)
def test_a_wrong_page_is_seen(wrong: str, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        run_fresh("page", wrong, tmp_path)


@pytest.mark.slow
def test_nothing_but_a_page_imports_for_it(tmp_path: Path) -> None:
    assert headwise.hf.load
    page = "```python\nimport headwise\n```\nand `headwise.causal()`, {}`headwise.hf.load(folder)`"
    with pytest.raises(AssertionError, match=r"^page names what its imports do not give: headwise\.hf\.load$"):
        run_fresh("page", page.format(""), tmp_path)
    assert run_fresh("page", page.format("after `import headwise.hf` "), tmp_path) == 1
    with pytest.raises(AttributeError, match=r"import headwise\.hf first"):
        run_fresh("page", "```python\nimport headwise\n\nheadwise.hf.load\n```", tmp_path)
    with pytest.raises(AssertionError, match="this interpreter is not fresh: it holds headwise"):
        run_page("page", "", tmp_path)
    run_fresh("page", "```python\nimport os\n\nassert os.listdir() == []\n```", tmp_path)


def test_blocks_of_a_page_share_names(tmp_path: Path) -> None:
    page = "```python\nx = 2\n```\ntext\n```pycon\n>>> x\n2\n```\n```sh\nno\n```"
    assert run_fresh("page", page, tmp_path) == 2


def dead_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead to no file."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)\"", FENCE.sub("", text))
    local = [link for pair in links for link in pair if link and "://" not in link and not link.startswith("mailto:")]
    return [link for link in local if link != MADE and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text("utf8")) == []


def test_a_dead_link_is_seen() -> None:
    text = '[here](README.md) [no](nowhere.md#part) <img src="gone.png"> [out](https://example.org/x)'
    assert dead_links(ROOT / "x.md", text) == ["nowhere.md", "gone.png"]


def test_every_exported_name_is_in_the_api_pages() -> None:
    from test_architecture import EXPORTS

    shown = re.findall(r"^::: (\S+)", "\n".join(p.read_text("utf8") for p in (ROOT / "docs/api").glob("*.md")), re.M)
    assert (
        sorted(
            set(EXPORTS)
            - {"cache", "look", "nn", "parallel", "plan", "report", "reshape"}
            - {entry.split(".")[-1] for entry in shown}
        )
        == []
    )


def not_shown(room: str, entries: list[str]) -> list[str]:
    """What a room exports and none of the entries shows; the entry of a module shows all that it exports."""
    shown: list[object] = []
    for entry in entries:
        module, _, name = entry.rpartition(".")  # `headwise.a.b.b`: the room has a function of its module's name
        target = getattr(importlib.import_module(module), name, None) or importlib.import_module(entry)
        shown += [getattr(target, one) for one in getattr(target, "__all__", ())] + [target]
    exported = importlib.import_module(f"headwise.{room}")
    return [
        name
        for name in exported.__all__
        if not isinstance(thing := getattr(exported, name), ModuleType) and not any(thing is one for one in shown)
    ]


def test_all_that_a_room_exports_is_in_the_documentation() -> None:
    pages = "\n".join(page.read_text("utf8") for page in PAGES)
    entries = re.findall(r"^::: (\S+)$(?!\n    options:\n      members: false)", pages, re.M)
    rooms = ("cache", "hf", "look", "nn", "parallel", "plan", "reshape", "testing")
    assert {room: missing for room in rooms if (missing := not_shown(room, entries))} == {}
    assert not_shown("plan", [entry for entry in entries if entry != "headwise.plan.of"]) == ["of"]
