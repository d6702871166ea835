"""Writes docs/how-to-read-the-report.md and the pictures in it: `python scripts/reading_page.py`; `--check` compares.

The roles, their ideal patterns, formulas and plain sentences are those of the code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from roles_page import on_a_picture, pattern

from headwise.look.roles.catalog import ROLES
from headwise.look.roles.role import Role
from headwise.look.views import palette, plain_words

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "how-to-read-the-report.md"
PICTURES = DOCS / "images" / "patterns"
CELL = 22

HEAD = """# How to read the report

The [report](look.md#the-report) is a page about the attention heads of one model. You need no formula to read it.

## The first screen

![The report: a matrix of heads; beside it the attention map of one head](images/report.png)

- **The matrix.** A row is a layer, a column is a head. The letter and the colour of a cell are the *role* of the head:
  the most specific thing that it was measured to do. The number is its score in that role, from 0 to 1.
- **Dots and rings.** A dot says that the head also puts much of its weight on a token that says little, most often the
  first: a *sink*. A ring says that it also spreads its weight *broadly*. In a large model many heads rest on a sink
  most of the time, and do something else where there is something to do. Neither tells what the head is for, so they
  are called *states*, not roles, and are drawn beside the role.
- **A grey cell** is a head that has none of the measured roles. With a dot or a ring it has a state alone; with a small
  middle dot it has no state either. It may do something that the report does not measure.
- **The buttons above the matrix** have the number of heads. A head may have several roles, and states beside them, so
  the numbers add up to more than all heads. *no role or state* counts the heads that have neither.
- **A large model** has the same screen. Here 198 of 270 heads of SmolLM2-135M rest on the first token, each with a dot,
  and the nine induction heads stand out; one of them is open.

![The report of SmolLM2-135M: 270 heads, most with a dot, induction heads in colour](images/report-smollm2.png)

- **A click on a button**, such as *induction*, shows the score of this role in every head as a heatmap, and opens
  the best of them. The same button, or Esc, goes back.

## One head

Click a cell.

- **Map** is the attention of this head on the text. A row is a *query*, the token that is read at that moment. A column
  is a *key*, a token that it may look at. The brighter a cell, the more weight. The weights of a row sum to 1. In a
  decoder the upper right is empty, for a token cannot look ahead.
- **Arcs** show the same for one sentence.
- **Show: what it moves** takes another number for each cell. A weight says how much of a token's value the head takes;
  but a value may be a vector of nearly 0. So the weight is multiplied by the length of the vector that the head adds to
  the residual stream for that token, and given as a share of the row. A head that only rests on the first token has a
  bright first column by weight, and a dark one by what it moves. *first token moves* is the share of that column.
- **The sum** shows how one weight is computed, number by number.
- **Evidence** lists the queries that show the role best.

## Is it real?

Each score stands beside what *chance* would give: the same number for uniform attention, or for the same head with
*shuffled links*: keys drawn at random in place of those that the role asks for. A head plays a role if its score is
above the *threshold* and clearly above chance. The *interval* says how far the score would move with other texts. Two
warnings: a role says what the head did on these texts, not what the model would do without it ([`headwise
ablate`](importance.md) measures that); and the names are ours or the literature's, not the model's.

## The roles

Each picture is a head that does nothing else: a row is a query, a column a key. Bright is where the weight lies, as
in the report. Relations of grammar are named by an arrow from the word that looks to the word that it looks at. [The
roles of heads](roles.md) has thresholds, controls and sources. `code` is the name in files and in Python.

"""

ORDER = (
    *("previous-token", "induction", "duplicate-token", "name mover", "negative name mover"),
    *("name suppressor", "coreference", "nsubj to head", "head to obj"),
    *("same word class", "retrieval", "self", "next-token", "offset-2", "local band", "delimiter", "punctuation"),
    *("special tokens", "alignment", "first to second", "left neighbour", "surroundings", "same row", "same column"),
    *("first-token sink", "sink elsewhere", "patch sink", "broad"),
)
"""The roles of the page: the best known first, states last; roles of a family have one entry."""


def svg(rows: Sequence[str], columns: Sequence[str], lit: Sequence[Sequence[bool]], bare: bool, about: str) -> str:
    """A picture of a pattern; with `bare`, keys after the query are left out."""
    left, top = (64 if rows else 2), (46 if columns else 2)
    width, height = left + CELL * len(lit[0]) + 2, top + CELL * len(lit) + 2
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">']
    parts.append(f"<title>{escape(about)}</title>")
    for j, name in enumerate(columns):
        x = left + CELL * j + CELL // 2 + 4
        parts.append(
            f'<text x="{x}" y="{top - 5}" transform="rotate(-60 {x} {top - 5})" fill="#7a7f8c">{escape(name)}</text>'
        )
    for i, row in enumerate(lit):
        y = top + CELL * i
        if rows:
            parts.append(f'<text x="{left - 6}" y="{y + 15}" text-anchor="end" fill="#7a7f8c">{escape(rows[i])}</text>')
        for j, on in enumerate(row):
            if bare and j > i:
                continue
            fill = "#fde725" if on else "#443983"  # as in the report's maps: bright is much weight
            parts.append(
                f'<rect x="{left + CELL * j}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3" fill="{fill}"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


def picture(role: Role) -> str | None:
    """The SVG of a role's ideal pattern; None without one."""
    about = f"the ideal pattern of {palette.label(role.name)}"
    ideal = pattern(role)
    if ideal is not None:
        tokens, keys = ideal
        lit = [[j in of for j in range(len(tokens))] for of in keys]
        return svg(tokens, tokens, lit, not any(j > i for i, of in enumerate(keys) for j in of if j < len(keys)), about)
    text = on_a_picture(role)
    if text is None:
        return None
    return svg([], [], [[cell != "." for cell in line.split()] for line in text.splitlines()], False, about)


def entry(role: Role, name: str) -> list[str]:
    """One role of the page."""
    label = palette.label(name)
    lines = [f"### {label}", "", plain_words.sentence(name)]
    if plain_words.example(name):
        lines[-1] += f" For instance: {plain_words.example(name)}."
    if picture(role) is not None:
        lines += ["", f"![The ideal pattern of {label}](images/patterns/{file_of(name)})"]
    return [*lines, "", f"`{name}`: {role.formula}", ""]


def file_of(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name) + ".svg"


def files() -> dict[Path, str]:
    """Every file and its text."""
    known = {role.name: role for role in ROLES}
    listed = [name for name in ORDER if name in known]
    out = {PICTURES / file_of(name): drawn for name in listed if (drawn := picture(known[name])) is not None}
    sections = [line for name in listed for line in entry(known[name], name)]
    arrows = ["### All relations of grammar", "", "| shown as | in files |", "|---|---|"]
    arrows += [f"| {palette.label(r.name)} | `{r.name}` |" for r in ROLES if palette.relation_words(r.name)]
    return {PAGE: HEAD + "\n".join([*sections, *arrows]) + "\n", **out}


def main() -> None:
    if "--check" in sys.argv:
        wrong = [path for path, text in files().items() if not path.exists() or path.read_text("utf8") != text]
        sys.exit(f"python scripts/reading_page.py: {', '.join(map(str, wrong))} differ" if wrong else 0)
    PICTURES.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, "utf8")


if __name__ == "__main__":
    main()
