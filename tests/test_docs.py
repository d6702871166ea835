"""What the README and the documentation show is run.

- ```` ```python ```` blocks are executed, and ```` ```pycon ```` sessions must print what the page says;
  the blocks of one page share their names, from top to bottom.
- Links to files of this repository must lead somewhere.
- Every exported name has its entry in the API pages.
"""

import ast
import doctest
import re
from pathlib import Path

import pytest

from headwise.ops.native_library import trouble

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)

pytestmark = pytest.mark.unchecked  # pages show what a user sees


def run_blocks(name: str, text: str) -> int:
    """Run the blocks of one page; returns how many there were. A wrong page raises AssertionError or its own error."""
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        body = re.sub(rf"^{found['indent']}", "", found["body"], flags=re.M)
        if found["language"] == "python":
            code = ast.increment_lineno(ast.parse(body, name), line)
            exec(compile(code, name, "exec"), names)
        elif found["language"] == "pycon":
            test = doctest.DocTestParser().get_doctest(body, names, name, name, line)
            said: list[str] = []
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
            runner.run(test, out=said.append, clear_globs=False)
            names.update(test.globs)
            assert not said, "".join(said)
        else:
            continue
        ran += 1
    return ran


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_is_true(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "backends.md" and trouble():
        pytest.skip(f"it shows the native kernel: {trouble()}")
    monkeypatch.chdir(tmp_path)
    run_blocks(page.relative_to(ROOT).as_posix(), page.read_text("utf8"))


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
def test_a_wrong_page_is_seen(wrong: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_blocks("page", wrong)


def test_blocks_of_a_page_share_names() -> None:
    assert run_blocks("page", "```python\nx = 2\n```\ntext\n```pycon\n>>> x\n2\n```\n```sh\nno\n```") == 2


def dead_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead to no file."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)\"", FENCE.sub("", text))
    local = [link for pair in links for link in pair if link and "://" not in link and not link.startswith("mailto:")]
    return [link for link in local if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text("utf8")) == []


def test_a_dead_link_is_seen() -> None:
    text = '[here](README.md) [no](nowhere.md#part) <img src="gone.png"> [out](https://example.org/x)'
    assert dead_links(ROOT / "x.md", text) == ["nowhere.md", "gone.png"]


def test_every_exported_name_is_in_the_api_pages() -> None:
    from test_architecture import EXPORTS

    shown = re.findall(r"^::: (\S+)", "\n".join(p.read_text("utf8") for p in (ROOT / "docs/api").glob("*.md")), re.M)
    assert sorted(set(EXPORTS) - {"look", "nn", "plan"} - {entry.split(".")[-1] for entry in shown}) == []
