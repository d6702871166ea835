"""The head card: a page of Markdown about the roles of a model's heads, with evidence.

Every string of a look is untrusted. Tokens and names of models and roles enter the page only as code spans, with
control characters made visible, inside a fence longer than any run of backticks in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...files.text import visible
from ..roles.catalog import COPIES, NEEDLES, ROLES, SENTENCES, TEXT
from ..roles.role import Role
from . import palette

if TYPE_CHECKING:
    from ..records.head import HeadRecord
    from ..records.look_data import LookData
    from ..records.scores import Evidence, Score

BEST = 3
"""The number of heads shown for each role."""

AROUND = 4
"""The number of tokens shown on each side of a token."""

_ROLES = {role.name: role for role in ROLES}
_READINGS = {
    TEXT: "the text",
    COPIES: "random tokens repeated",
    SENTENCES: "annotated sentences",
    NEEDLES: "texts with a needle in them",
}


def markdown(look: LookData) -> str:
    """Return the card: what was read, the roles with their numbers of heads, and the best heads with evidence."""
    names = _names(look)
    played = [name for name in names if look.with_role(name)]
    idle = sum(not head.roles for head in look.heads)
    shape = f"{look.num_layers} layers x {look.num_heads} heads"
    lines = [
        f"# Heads of {code(look.model, 100)}",
        "",
        f"{shape}, {code(look.kind, 40)}. Measured by headwise {code(look.version, 40)} on {_texts(look)}.",
        "",
        "## What they do",
        "",
        "| role | heads | best | score | chance | 95 % interval |",
        "|---|---:|---|---:|---:|---|",
        *(_row(look, name) for name in played),
        "",
        f"{idle} of {len(look.heads)} heads play none of the {len(names)} roles that were measured.",
        "",
        "## The heads of each role",
        "",
    ]
    for name in played:
        lines += _section(look, name)
    if not played:
        lines += ["No head plays any.", ""]
    return "\n".join([*lines, *_methods(look, names, played)])


def code(text: str, limit: int = 200) -> str:
    r"""Return the text as a code span: control characters made visible, the fence longer than any run of backticks.

    >>> print(code("a`b"), code(" fox"), code("<b>\n"))
    ``a`b`` ` fox` `<b>\n`
    """
    shown = visible(text, limit=limit)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    if not shown.strip():
        return f"`{shown}`" if shown else "(nothing)"
    edges = shown[0] + shown[-1]
    pad = " " if "`" in edges or edges == "  " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _cell(text: str) -> str:
    """Return a code span for a table cell, where a bar would end the cell."""
    return code(visible(text).replace("|", "\\x7c"))


def _names(look: LookData) -> list[str]:
    """Return the roles that were measured, in the order of the catalog, then others."""
    measured = dict.fromkeys(name for head in look.heads for name in head.scores)
    return [name for name in _ROLES if name in measured] + [name for name in measured if name not in _ROLES]


def _texts(look: LookData) -> str:
    if look.texts != 1:
        return f"{look.texts:,} texts of {look.length:,} tokens together"
    excerpt = _joined(look.tokens[: 8 * AROUND])
    counted = f"{look.length:,} token{'s' * (look.length != 1)}"
    return f"one text of {counted}: {code(excerpt + (' ...' if look.length > 8 * AROUND else ''))}"


def _row(look: LookData, name: str) -> str:
    heads = look.with_role(name)
    best = heads[0]
    score = best.scores[name]
    numbers = f"{score.value:.2f} | {_number(score.null)} | {_interval(score) or '-'}"
    return f"| {_cell(palette.label(name))} | {len(heads)} | {_place(best)} | {numbers} |"


def _section(look: LookData, name: str) -> Iterable[str]:
    heads = look.with_role(name)
    role = _ROLES.get(name)
    yield f"### {code(palette.label(name))}"
    yield ""
    if role is not None:
        above = f"above {heads[0].scores[name].threshold:.2f} and {_bar(role)}"
        yield f"{code(role.formula, 300)}, {above}. Read: {_READINGS[role.reads]}. Source: {role.source}."
        yield ""
    for head in heads[:BEST]:
        yield f"- **{_place(head)}** {_score(head.scores[name])}"
        for evidence in head.scores[name].evidence[:1]:
            yield f"    - {_quote(look, head, role, evidence)}"
    if len(heads) > BEST:
        yield f"- and {', '.join(_place(head) for head in heads[BEST : BEST + 12])}{' ...' * (len(heads) > BEST + 12)}"
    yield ""


def _bar(role: Role) -> str:
    if role.control.startswith("none"):
        return "no control"
    return f"{role.times:g} times chance{f' plus {role.plus:g}' if role.plus else ''} ({role.control})"


def _score(score: Score) -> str:
    chance = "" if score.null is None else f", chance {score.null:.2f}"
    interval = _interval(score)
    spread = "" if interval is None else f", 95 % interval {interval}"
    detail = f", {code(score.detail, 60)}" if score.detail else ""
    return f"scores {score.value:.2f}{chance}{spread}, over {score.count:,} queries{detail}"


def _quote(look: LookData, head: HeadRecord, role: Role | None, evidence: Evidence) -> str:
    """Return one query whose largest weight shows the role, with its tokens if they are known."""
    weight, i, j = f"weight {evidence.weight:.2f}", evidence.query, evidence.key
    tokens = _tokens(look, head, role, evidence)
    if i in tokens and j in tokens:
        return (
            f"{weight} from {code(tokens[i])} (token {i}) on {code(tokens[j])} (token {j}): "
            f"{_around(tokens, i)} looks at {_around(tokens, j)}"
        )
    where = f"text {evidence.text}" if role is None or role.reads == TEXT else f"passage {evidence.text} read for it"
    return f"{weight} from token {i} on token {j} of {where}"


def _tokens(look: LookData, head: HeadRecord, role: Role | None, evidence: Evidence) -> Mapping[int, str]:
    """Return the known tokens of the evidence's text, by position."""
    if role is None:
        return {}
    if role.reads != TEXT or look.texts != 1:
        straight = look.kind != "encoder-decoder" or head.part == "encoder"  # else a start token shifts them
        return look.excerpts.get(f"{role.reads} {evidence.text}", {}) if straight else {}
    whole = head.queries == head.keys == look.length == len(look.tokens)
    return dict(enumerate(look.tokens)) if whole else {}


def _around(tokens: Mapping[int, str], place: int) -> str:
    """Return a token in brackets with its neighbors."""
    before, after = (
        _joined([tokens[i] for i in span if i in tokens])
        for span in (range(place - AROUND, place), range(place + 1, place + 1 + AROUND))
    )
    return code(f"{before[-60:]}[{tokens[place][:60]}]{after[:60]}")


def _joined(tokens: Sequence[str]) -> str:
    """Return the tokens as text; digits of ids are separated by spaces."""
    return (" " if all(token.isdigit() for token in tokens) else "").join(tokens)


def _methods(look: LookData, names: list[str], played: list[str]) -> list[str]:
    readings = dict.fromkeys(_ROLES[name].reads for name in names if name in _ROLES)
    others = [code(name) for name in names if name not in played]
    missing = [name for name in _ROLES if name not in names]
    relations = [name for name in missing if name.endswith(" to head") or name.startswith("head to ")]
    apart = [code(name) for name in missing if name not in relations]
    if relations:
        apart.append(f"{len(relations)} relations of grammar")
    bootstrap = any(score.low is not None for head in look.heads for score in head.scores.values())
    interval = " The interval is a bootstrap over texts." if bootstrap else " With one text there is no interval."
    read = [_looked_at(look) if one == TEXT else _READINGS[one] for one in readings]
    return [
        "## How it was measured",
        "",
        f"The model read {', '.join(read) or 'the text'}; every attention call was reduced to sums as it ran, and the "
        "numbers are exact. A head plays a role where its score exceeds the "
        f"threshold and what chance gives by the role's control.{interval}",
        "",
        *([f"Measured, and played by no head: {', '.join(others)}.", ""] if others else []),
        *([f"Not measured: {', '.join(apart)}.", ""] if apart else []),
        "## What this card does not say",
        "",
        "A role describes what a head did on these texts. It does not say what the head does on others, what the model "
        "would do without the head, or that a head without a role does nothing.",
        "",
    ]


def _place(head: HeadRecord) -> str:
    return f"{head.layer}.{head.head}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(score: Score) -> str | None:
    return None if score.low is None or score.high is None else f"{score.low:.2f} to {score.high:.2f}"


def _looked_at(look: LookData) -> str:
    """Return the input of the main pass, in words."""
    kinds = {kind for axis in look.axes for kind in axis.kind.split(" and ")}
    named = [f"the {kind}" for kind in ("picture", "sound", "text") if kind in kinds]
    return " and ".join(named) or "the text"
