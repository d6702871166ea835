"""Writes docs/roles.md from `headwise.look.ROLES`: `python scripts/roles_page.py`; `--check` says whether it is true.

Each role gets a plain sentence, and its ideal pattern on a small text: a row a query, ``#`` where a head has its
weight.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headwise.look.roles.catalog import RELATIONS, ROLES, TEXT
from headwise.look.roles.role import Role

PAGE = Path(__file__).resolve().parent.parent / "docs" / "roles.md"
PLAIN = ["<s>", "The", "cat", "sat", ".", "It", "slept", "."]
COPIES = ["<s>", "a", "b", "c", "a", "b", "c", "a"]
SENTENCE = ["<s>", "The", "cat", "saw", "its", "tail", "."]
GIFT = ["<s>", "Mary", "met", "John", ".", "John", "thanked"]
PAIR = ["[CLS]", "It", "rains", "[SEP]", "Stay", "in", "[SEP]"]
NEEDLE = ["<s>", "x", "k", "v", "y", "z", "k", "v"]
HEAD = """# The roles of heads

What `headwise look` calls a head, by which formula, and what the score is held against. A role is played where the
value exceeds the threshold **and** what chance gives: `times` the null, plus `plus`, over at least `least` queries.
Where several texts were read, the lower end of the 95 % interval (a bootstrap over texts) has to stand above the null
as well. Every score shows these numbers: `seen.heads[0].scores["induction"]`.

A head may play several roles. `head.role` is the first of them in the order of this page, which goes from what few
heads do (induction) to what many do (attending nearby). Scores of different roles cannot be compared, so the order of
this page decides. Sinks and broad attention are states, in `head.states`, not roles: they say where the weight lies
when a head finds nothing to do, and most heads of a large model have one beside their role. A head with a state
alone, or with nothing, has no role: `head.role` is `-`. The report and the tables count "no role or state" for heads
with neither.

`A[i, j]` is the weight of query i on key j. Means are over the queries that may attend that key. The first token of a
decoder attends itself alone: a query without a choice is left out of the roles of offsets, bands and words. Evidence is
chosen among the pairs of query and key that the score counts.

The patterns show a head that does nothing else: a row a query, `#` where its weight lies; or the patches of a picture,
`o` the query. All but the last section, [on a real model](#on-a-real-model), is written by `scripts/roles_page.py` from
`headwise.look.ROLES`.

| what is read | when |
|---|---|
| text, picture, sound | always: what is looked at, or the corpus |
| copies | always: random tokens, repeated with random periods |
| sentences | annotated ones, with `--sentences`: [annotated text](annotation.md) |
| needles | the text with a needle in it, with `--needles` |
"""

BY_HAND = "\n## On a real model\n"
"""The title of the last section, which is not written by this script."""

MEANING = {
    "name mover": "The last token looks back at the name that should come next, and copies it.",
    "negative name mover": "The last token looks back at the name that should come next, and makes it less likely.",
    "name suppressor": "The last token looks back at the name that should not come next, and makes it less likely.",
    "name mover by attention": "The last token looks at the name that should come next, in models without logits.",
    "induction": "Each token looks for itself in the earlier text and attends what came next there.",
    "duplicate-token": "Each token looks at its own earlier copies.",
    "retrieval": "A token of a repeated phrase looks at what followed it the first time, far back in the text.",
    "alignment": "The decoder looks at the word of the encoder's text that it is reading.",
    "alignment, next": "The decoder looks at the word of the encoder's text that it has to write next.",
    "previous-token": "Each token looks at the token right before it.",
    "offset-2": "Each token looks a fixed number of tokens back.",
    "self": "Each token looks at itself.",
    "next-token": "Each token looks at the token right behind it.",
    "offset+2": "Each token looks a fixed number of tokens ahead.",
    "far offset": "Each token looks at one and the same distance, further away than eight tokens.",
    "coreference": "A pronoun or a name looks at an earlier mention of the same person or thing.",
    "nsubj to head": "A word looks at the word that it belongs to in the sentence, such as a subject at its verb.",
    "head to nsubj": "A word looks at a word that belongs to it in the sentence, such as a verb at its subject.",
    "same word class": "A word looks at other words of its class, such as a noun at other nouns.",
    "[SEP]": "Tokens look at the separator behind a sentence.",
    "full stop": "Tokens look at full stops.",
    "comma": "Tokens look at commas.",
    "delimiter": "Tokens look at the marks that end sentences and clauses.",
    "punctuation": "Tokens look at punctuation of any kind.",
    "special tokens": "Tokens look at the model's special tokens, the first of the text aside.",
    "first to second": "The tokens of the first sentence look at the second one.",
    "second to first": "The tokens of the second sentence look at the first one.",
    "left neighbour": "Each patch looks at the patch to its left.",
    "right neighbour": "Each patch looks at the patch to its right.",
    "upper neighbour": "Each patch looks at the patch above it.",
    "lower neighbour": "Each patch looks at the patch below it.",
    "surroundings": "Each patch looks at the patches around it.",
    "same row": "Each patch looks along its row.",
    "same column": "Each patch looks along its column.",
    "local band": "Each token looks at the few tokens around it, at none of them most of all.",
    "first-token sink": "Tokens leave much of their weight on the first token of the text, whatever it is.",
    "sink elsewhere": "Tokens leave most of their weight on one and the same token, which is not the first.",
    "[CLS] sink": "Patches leave their weight on the token that stands for the whole picture.",
    "register sink": "Patches leave their weight on the extra tokens that the model has for it.",
    "patch sink": "Patches leave their weight on one and the same patch.",
    "broad": "Tokens look at everything before them, nearly evenly.",
}
"""What each role means in one sentence; a family has the sentence of its first role."""


def pattern(role: Role) -> tuple[Sequence[str], Sequence[Sequence[int]]] | None:
    """The text, and for each of its tokens the keys that an ideal head attends."""
    n = len(PLAIN)
    every = range(n)
    rows: dict[str, tuple[Sequence[str], list[list[int]]]] = {
        "previous-token": (PLAIN, [[i - 1] for i in every]),
        "self": (PLAIN, [[i] for i in every]),
        "next-token": (PLAIN, [[i + 1] for i in every]),
        "offset-2": (PLAIN, [[i - 2] for i in every]),
        "offset+2": (PLAIN, [[i + 2] for i in every]),
        "local band": (PLAIN, [[i - 2, i - 1, i] for i in every]),
        "first-token sink": (PLAIN, [[0] for _ in every]),
        "sink elsewhere": (PLAIN, [[2] if i >= 2 else [] for i in every]),
        "delimiter": (PLAIN, [[j for j in (4, 7) if j <= i] for i in every]),
        "punctuation": (PLAIN, [[j for j in (4, 7) if j <= i] for i in every]),
        "full stop": (PLAIN, [[j for j in (4, 7) if j <= i] for i in every]),
        "[SEP]": ([*PLAIN[:-1], "[SEP]"], [[7] for _ in every]),
        "first to second": (PAIR, [[4, 5] if i in (1, 2) else [] for i in range(7)]),
        "second to first": (PAIR, [[1, 2] if i in (4, 5) else [] for i in range(7)]),
        "special tokens": ([*PLAIN[:-1], "[SEP]"], [[7] for _ in every]),
        "broad": (PLAIN, [[*range(i + 1)] for i in every]),
        "alignment": (PLAIN, [[i - 1] for i in every]),
        "alignment, next": (PLAIN, [[i] for i in every]),
        "duplicate-token": (COPIES, [[j for j in range(i) if COPIES[j] == COPIES[i]] for i in range(8)]),
        "induction": (COPIES, [[j + 1 for j in range(i) if COPIES[j] == COPIES[i]] for i in range(8)]),
        "same word class": (SENTENCE, [[], [], [5], [], [], [2], []]),
        "nsubj to head": (SENTENCE, [[], [], [3], [], [], [], []]),
        "head to nsubj": (SENTENCE, [[], [], [], [2], [], [], []]),
        "coreference": (SENTENCE, [[], [], [], [], [2], [], []]),
        **dict.fromkeys(
            ("name mover", "negative name mover", "name mover by attention"), (GIFT, [[], [], [], [], [], [], [1]])
        ),
        "name suppressor": (GIFT, [[], [], [], [], [], [], [3, 5]]),
        "retrieval": (NEEDLE, [[], [], [], [], [], [], [3], []]),
    }
    return rows.get(role.name)


def on_a_picture(role: Role) -> str | None:
    """A picture of 4 x 6 patches: `o` is a query, `#` where an ideal head has its weight; None for other roles."""
    r, c = 1, 3
    every = [(i, j) for i in range(4) for j in range(6)]
    cells: dict[str, list[tuple[int, int]]] = {
        "left neighbour": [(r, c - 1)],
        "right neighbour": [(r, c + 1)],
        "upper neighbour": [(r - 1, c)],
        "lower neighbour": [(r + 1, c)],
        "surroundings": [(i, j) for i, j in every if abs(i - r) <= 1 and abs(j - c) <= 1],
        "same row": [(i, j) for i, j in every if i == r and abs(j - c) > 1],
        "same column": [(i, j) for i, j in every if j == c and abs(i - r) > 1],
        "patch sink": [(2, 0)],
    }
    if role.name not in cells:
        return None
    chosen = cells[role.name]
    marks = [["o" if (i, j) == (r, c) else "#" if (i, j) in chosen else "." for j in range(6)] for i in range(4)]
    return "\n".join(" ".join(row) for row in marks)


def drawn(tokens: Sequence[str], rows: Sequence[Sequence[int]]) -> str:
    """The pattern as text."""
    width = max(map(len, tokens))
    across = [f"{token[:5]:>5}" for token in tokens]
    lines = [" " * width + " ".join(["", *across])]
    for token, keys in zip(tokens, rows, strict=True):
        cells = ("#" if j in keys else "." for j in range(len(tokens)))
        lines.append(f"{token:>{width}} " + " ".join(f"{cell:>5}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def shown() -> list[tuple[str, Role]]:
    """The roles that have a section: of a family its first stands for all."""
    titles = {
        "offset-2": "offset-2 ... offset-8",
        "offset+2": "offset+2 ... offset+8",
        "nsubj to head": "RELATION to head",
        "head to nsubj": "head to RELATION",
    }
    heads = {f"{label} to head" for label in RELATIONS} | {f"head to {label}" for label in RELATIONS}
    others = heads | {f"offset{sign}{k}" for sign in "+-" for k in range(2, 9)}
    return [
        (titles.get(role.name, role.name), role) for role in ROLES if role.name in titles or role.name not in others
    ]


def read(role: Role) -> str:
    """What is read for a role; of what is looked at, which kinds of it."""
    kinds = [name for name in ("text", "picture", "sound") if name in role.over]
    return ", ".join(kinds) if role.reads == TEXT else role.reads


def section(title: str, role: Role) -> str:
    """One role."""
    bar = [f"above {role.threshold:.2f}", f"above {role.times:g} x null" + (f" + {role.plus:g}" if role.plus else "")]
    mass = "" if role.mass is None else f", with more than {role.mass:g} of the weight on right choices"
    least = f"{mass}, over at least {role.least} queries" if role.least > 1 else ""
    state = " A state." if role.state else ""
    lines = [
        f"## {title}",
        "",
        MEANING[role.name],
        "",
        f"`{role.formula}`",
        "",
        f"- Read: {read(role)}. Played {' and '.join(bar)}{least}.{state}",
        f"- Null: {role.control}.",
        f"- Source: {role.source}.",
    ]
    if title in ("RELATION to head", "head to RELATION"):
        lines.append(f"- Relations of Universal Dependencies: {', '.join(RELATIONS)}.")
    picture = pattern(role)
    grid = on_a_picture(role)
    if grid is not None:
        lines += ["", "```text", grid, "```"]
    if picture is not None:
        lines += ["", "```text", drawn(*picture), "```"]
    return "\n".join([*lines, ""])


def page() -> str:
    """The whole page; its last section is taken from the file as it is."""
    _, mark, by_hand = PAGE.read_text("utf8").partition(BY_HAND)
    return "\n".join([HEAD, *(section(title, role) for title, role in shown())]) + mark + by_hand


def main() -> None:
    if "--check" in sys.argv:
        if PAGE.read_text("utf8") != page():
            sys.exit("docs/roles.md does not say what ROLES say; run python scripts/roles_page.py")
        return
    PAGE.write_text(page(), "utf8")


if __name__ == "__main__":
    main()
