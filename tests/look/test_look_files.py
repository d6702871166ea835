"""A look as a file, a card, a figure and in a notebook: complete, whole, and inert whatever its strings are."""

from __future__ import annotations

import csv
import html.parser
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import markdown
import pytest
from hostile import PAYLOADS
from planted import DELIMITERS, NAMES, Planted, text

from headwise import look
from headwise.files.text import visible
from headwise.look import Evidence, HeadImportance, Importance, Look, Score, files
from headwise.look.views import palette


@pytest.fixture(scope="module")
def planted() -> Look:
    return look.at(Planted(), text(), delimiters=DELIMITERS, name="planted")


@pytest.fixture(scope="module")
def hostile(planted: Look) -> Look:
    """Every string that a look holds is one that tries to act: tokens, model, roles, details."""
    tokens = tuple(PAYLOADS[i % len(PAYLOADS)] for i in range(len(planted.tokens)))
    heads = list(planted.heads)
    for n, payload in enumerate((*PAYLOADS, "a | b", "\\|")):
        old = heads[n % len(heads)]
        shown = (Evidence(0, n % 97, 3 * n % 97, 0.5),)
        scores = {payload: Score(payload, 0.9, 0.1, 0.4, 7, 0.8, 0.95, True, shown, payload)}
        previous = replace(old.scores["previous-token"], plays=True, evidence=shown, value=0.9)
        heads[n % len(heads)] = replace(old, scores={**old.scores, **scores, "previous-token": previous})
    return replace(planted, model="".join(PAYLOADS), tokens=tokens, heads=tuple(heads))


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_table_as_a_file_holds_every_row_of_the_look(planted: Look, tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = planted.rows()
    assert look.write(planted, tmp_path / "h.parquet") == (tmp_path / "h.parquet").stat().st_size
    table = pyarrow.parquet.read_table(tmp_path / "h.parquet")
    names = {name for row in rows for name in row}
    assert {*table.column_names} == names and table.to_pylist() == [{n: row.get(n) for n in names} for row in rows]
    assert json.loads(table.schema.metadata[b"headwise"]) == planted.about()
    assert table.schema.field("induction.count").type == "int64"  # not a float, though some heads may lack it
    look.write(planted, tmp_path / "h.csv")
    with open(tmp_path / "h.csv", newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [row["roles"] for row in read] == list(NAMES)
    states = ("first-token sink", "broad")
    assert [row["role"] for row in read] == ["-" if name in states else name for name in NAMES]
    assert [float(row["induction"]) for row in read] == [row["induction"] for row in rows]


def test_a_role_that_one_head_lacks_is_missing_there_alone(planted: Look, tmp_path: Path) -> None:
    import pyarrow.parquet

    heads = (replace(planted.heads[0], scores={}), *planted.heads[1:])
    look.write(replace(planted, heads=heads), tmp_path / "h.parquet")
    column = pyarrow.parquet.read_table(tmp_path / "h.parquet").column("self").to_pylist()
    assert column == [None, *(head.value("self") for head in planted.heads[1:])]


def test_json_is_read_back_whole(planted: Look, tmp_path: Path) -> None:
    look.write(planted, tmp_path / "h.json")
    assert look.read(tmp_path / "h.json") == planted and planted.maps and planted.neurons
    (tmp_path / "h.json").write_text(planted.to_json(maps=False))
    assert look.read(tmp_path / "h.json") == replace(planted, maps=(), moved=(), neurons=())


def test_a_file_larger_than_any_look_is_not_read(
    planted: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look.write(planted, tmp_path / "h.json")
    size = (tmp_path / "h.json").stat().st_size
    monkeypatch.setattr(files, "MAX_FILE", size)
    assert look.read(tmp_path / "h.json") == planted
    monkeypatch.setattr(files, "MAX_FILE", size - 1)
    with pytest.raises(ValueError, match=r"h\.json has more than 0 MB; a look is smaller"):
        look.read(tmp_path / "h.json")


@pytest.mark.unchecked
def test_what_is_no_look_is_told(planted: Look, tmp_path: Path) -> None:
    for name, content in (("a.json", b"{"), ("b.json", b"[1]"), ("c.json", b"\xff"), ("d.json", b"[" * 100_000)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is no look: .*; give what look.write or --json wrote$"):
            look.read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"cannot read .*none\\x1b.json: No such file"):
        look.read(tmp_path / "none\x1b.json")


def test_what_cannot_be_written_is_told_before_the_work(planted: Look, tmp_path: Path) -> None:
    endings = re.escape(".parquet .csv .json .md .svg .png")
    for name in ("h.xlsx", "h", "h.html", ".csv"):
        with pytest.raises(
            ValueError, match=rf"{re.escape(name)} ends in none of {endings}; the end says what to write"
        ):
            look.write(planted, tmp_path / name)
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        files.check(tmp_path / "none" / "h.csv")
    with pytest.raises(TypeError, match="a look, a comparison, a curve or a patching is written; got dict"):
        look.write({}, tmp_path / "h.csv")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_the_old_file(planted: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h.csv").write_text("old")

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(KeyboardInterrupt):
        look.write(planted, tmp_path / "h.csv")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("name", "package", "what"),
    [("h.parquet", "pyarrow", "a .parquet file"), ("h.svg", "matplotlib", "a figure")],
)
def test_without_the_package(
    name: str, package: str, what: str, planted: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    expected = rf"^{what} needs {package}, which is not installed; pip install 'headwise\[look\]'$"
    with pytest.raises(ImportError, match=expected):
        files.check(tmp_path / name)
    if package == "matplotlib":
        with pytest.raises(ImportError, match=expected):
            planted.plot_roles()
    look.write(planted, tmp_path / "h.csv")  # takes neither


# --- the card ---------------------------------------------------------------------------------------------------------


class Tags(html.parser.HTMLParser):
    """What a page is made of: its tags, their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def rendered(card: str) -> Tags:
    return Tags(markdown.markdown(card, extensions=["tables"]))


def test_the_card_shows_each_role_with_its_heads_and_what_shows_it(planted: Look) -> None:
    card = replace(planted, excerpts={}).card()
    assert "# Heads of `planted`" in card and "1 layers x 8 heads, `decoder`" in card
    score = planted.heads[0].scores["previous-token"]
    assert f"| `previous-token` | 1 | 0.0 | 1.00 | {score.null:.2f} | - |" in card
    induction = planted.heads[7].scores["induction"]
    assert f"1.00, chance {induction.null:.2f}, 95 % interval {induction.low:.2f} to {induction.high:.2f}, over" in card
    shown = score.evidence[0]
    token, before = planted.tokens[shown.query], planted.tokens[shown.key]
    assert shown.key == shown.query - 1
    assert f"from `{token}` (token {shown.query}) on `{before}` (token {shown.key}): " in card
    assert "of passage 0 read for it" in card, "the tokens of what was drawn are not those of the text"
    page = rendered(card)
    assert page.tags["tr"] == 1 + len(NAMES) and page.tags["td"] == 6 * len(NAMES)
    assert page.tags["h3"] == len(NAMES)


def test_the_card_quotes_what_else_was_read(planted: Look) -> None:
    shown = planted.heads[7].scores["induction"].evidence[0]
    places = {shown.query: " Mary", shown.query - 1: "then", shown.key: " John"}
    card = replace(planted, excerpts={f"copies {shown.text}": places}).card()
    assert (
        f"from ` Mary` (token {shown.query}) on ` John` (token {shown.key}): `then[ Mary]` looks at `[ John]`" in card
    )


def test_a_card_without_roles_and_of_many_texts(planted: Look) -> None:
    plain = replace(
        planted, heads=(replace(planted.heads[0], scores={}),), maps=(), moved=(), texts=7, tokens=(), length=1234
    )
    card = plain.card()
    assert "on 7 texts of 1,234 tokens together." in card and "No head plays any." in card
    several = replace(planted, excerpts={}, texts=7, tokens=(), maps=(), moved=())
    assert "of text 0" in several.card() and " looks at " not in several.card()


def test_strings_of_the_look_cannot_act_in_the_card(hostile: Look) -> None:
    card = hostile.card()
    assert all(c.isprintable() or c == "\n" for c in card)
    page = rendered(card)
    kept = {"h1", "h2", "h3", "p", "ul", "li", "code", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert {*page.tags} <= kept and page.attributes <= {"style", "class"}
    assert page.tags["tr"] == 1 + len(
        {name for head in hostile.heads for name in head.scores if head.scores[name].plays}
    )
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7}, "a bar in a name ends no cell"
    text = "".join(page.texts)
    for payload in PAYLOADS:
        shown = visible(payload).strip().replace("--!>", "-->")  # as this renderer has it
        assert shown in text, "the name of a role is shown whole"


@pytest.mark.parametrize("text", ["", " ", "`", "``a```", " a ", "a\\", "`a", "a` ", "\n", "|", "a|b``|"])
def test_a_code_span_holds_its_text(text: str) -> None:
    from headwise.look.views.model_card import code

    page = Tags(markdown.markdown(f"x {code(text)} y"))
    inside = visible(text)
    assert "".join(page.texts).replace(" ", "") == f"x{inside.strip() or '(nothing)' * (not text)}y".replace(
        " ", ""
    ) or (inside.isspace())
    assert page.tags["p"] == 1


# --- the notebook -----------------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_heads_in_the_colours_of_their_roles(planted: Look) -> None:
    page = planted._repr_html_()
    for name in NAMES:
        places = 0 if palette.mark(name) else 2  # in the legend, and in the grid; a state is a mark
        assert page.count(f"background:{palette.colour(name)}") == places, name
    assert "2 without a role" in page and 'title="0.7: induction 1.00' in page
    many = replace(planted, heads=planted.heads * 200, maps=(), moved=())
    assert "1344 more heads: to_frame() has them all." in many._repr_html_() and "title=" not in many._repr_html_()


def test_strings_of_the_look_cannot_act_in_a_notebook(hostile: Look) -> None:
    page = Tags(hostile._repr_html_())
    kept = {"div", "b", "span", "table", "tr", "td", "th", "caption", "details", "summary", "p"}
    assert {*page.tags} <= kept and page.attributes <= {"style", "title"}


# --- figures ----------------------------------------------------------------------------------------------------------


def words_of(figure: Any) -> set[str]:
    from matplotlib.text import Text

    return {text.get_text() for text in figure.findobj(Text)}


def test_the_roles_as_a_figure(planted: Look) -> None:
    figure = planted.plot_roles()
    words = words_of(figure)
    assert {f"{palette.letter(name)}  {name} (1)" for name in NAMES if not palette.mark(name)} | {
        "no role (2)",
        "sink (1)",
        "broad (1)",
    } <= words
    mesh, *marks = figure.axes[0].collections
    assert len(marks) == 2
    drawn = [mesh.cmap(mesh.norm(number))[:3] for number in mesh.get_array().ravel()]
    colours = [palette.NONE if palette.mark(name) else palette.colour(name) for name in NAMES]
    wanted = [tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)) for colour in colours]
    assert drawn == [pytest.approx(colour) for colour in wanted]
    assert "matplotlib.pyplot" not in sys.modules


def test_one_head_as_a_figure(planted: Look) -> None:
    figure = planted.plot_head(0, 7)
    image = figure.axes[0].images[0].get_array()
    assert image.tolist() == [pytest.approx(row) for row in planted.maps[7].weights()]
    assert "planted, head 0.7: induction 1.00" in words_of(figure)
    pooled = replace(planted, maps=(), moved=()).plot_head(0, 7)
    assert pooled.axes[0].images[0].get_array().tolist() == [pytest.approx(row) for row in planted.heads[7].map]
    with pytest.raises(IndexError, match=r"has no head 0\.8"):
        planted.plot_head(0, 8)


@pytest.mark.unchecked
def test_importance_as_a_figure() -> None:
    """Of two criteria, a panel each; where one falls below zero its scale has two sides."""
    heads = tuple(
        HeadImportance("m", 0, layer, head, head, gradient=layer + head / 3, zero=0.5 - layer)
        for layer, width in ((0, 3), (1, 2))
        for head in range(width)
    )
    figure = look.plot_importance(Importance("a$b", 1, 29, 1.25, ("gradient", "zero"), heads, (), 0.5))
    panels = {axes.get_title("left"): axes.images[0] for axes in figure.axes if axes.images}
    assert {*panels} == {"gradient", "zero"}
    gradient, zero = panels["gradient"], panels["zero"]
    assert gradient.get_array().filled(-1).tolist() == [
        pytest.approx(row) for row in ([0, 1 / 3, 2 / 3], [1, 4 / 3, -1])
    ]
    assert gradient.get_clim() == (0, pytest.approx(4 / 3)) and zero.get_clim() == (-0.5, 0.5)
    assert "a$b: loss 1.250 on 29 tokens" in words_of(figure)
    with pytest.raises(TypeError, match=r"plot_importance draws what headwise\.look\.importance gives; got int"):
        look.plot_importance(3)


def test_figures_are_files_of_equal_bytes_and_keep_hostile_names(hostile: Look, tmp_path: Path) -> None:
    short = replace(hostile, tokens=hostile.tokens[:7], length=7, maps=(), moved=())
    heads = tuple(replace(head, map=((1 / 7,) * 7,) * 7, queries=7, keys=7) for head in short.heads[:3])
    short = replace(short, heads=heads, num_heads=3)
    for name in ("a.svg", "b.svg", "a.png"):
        look.write(short, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.svg").read_text("utf-8")
    assert "<script" not in page and all(c.isprintable() or c in "\n\t" for c in page)
    formula = replace(short, model="$x^{$")  # one that is none: it would raise
    formula.plot_head(0, 1).savefig(tmp_path / "d.svg")
    look.write(formula, tmp_path / "c.svg")
