"""A look as a table: for a console, as text, in a notebook, as a data frame."""

from __future__ import annotations

import html
import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from ...extras import missing_extra
from ...files.text import visible
from ...plan.show.printed import Printed
from ..records.axes import TEXT
from . import palette
from .cells import roles_text

if TYPE_CHECKING:
    import pandas
    import rich.table

    from ..records.head import HeadRecord
    from ..records.look_data import LookData

_SCORES = {
    "first-token sink": "sink",
    "previous-token": "prev",
    "self": "self",
    "next-token": "next",
    "delimiter": "delim",
    "duplicate-token": "dup",
    "induction": "induct",
}
"""The scores with their own column, and its heading; other scores are shown only for the roles that a head plays."""

MOVES = "moves"
"""The heading of the share of the first token in what a head moves; without a number for any head, it is left out."""

_COLUMNS = ("layer", "head", "entropy", "largest", "distance", MOVES, *_SCORES.values(), "role")


class Tabled(Printed):
    """A dataclass of a result that prints as its tables, also in a notebook, and converts to JSON."""

    @abstractmethod
    def table(self) -> rich.table.Table:
        """Return the first table of the result."""

    def _tables(self) -> Iterable[rich.table.Table]:
        return (self.table(),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists."""
        return asdict(cast(Any, self))

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _caption(look: LookData, without: Sequence[str]) -> str:
    """Return the units, and the names of the columns that are left out."""
    places = "places" if any(axis.kind != TEXT for axis in look.axes) else "tokens"
    without = [name for name in without if name in _columns(look.heads)]
    units = [f"{name} in {unit}" for name, unit in (("entropy", "nats"), ("distance", places)) if name not in without]
    if MOVES in _columns(look.heads) and MOVES not in without:
        units.append(
            f"{MOVES}: the first token's share of weight times length of what the head writes;\n"
            "sink to induct: scores of roles, from 0 to 1"
        )
    return "\n".join(filter(None, (", ".join(units), f"no room for {', '.join(without)}" * bool(without))))


def _columns(heads: Sequence[HeadRecord]) -> list[str]:
    """Return the columns for these heads."""
    known = any(head.first_moved is not None for head in heads)
    return [name for name in _COLUMNS if known or name != MOVES]


BEST = 5
"""The most heads that the summary names for a role."""


def summary_table(look: LookData) -> rich.table.Table:
    """Return a Rich table with a row for each played role: how many heads play it, and the best of them.

    The order is that of the report and of the catalog: from what few heads do to what many do, then states.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(look.title), header_style="bold")
    table.add_column("role", no_wrap=True)
    table.add_column("heads", justify="right", no_wrap=True)
    table.add_column("best, with their scores")
    played = {name: look.with_role(name) for name in dict.fromkeys(s.name for head in look.heads for s in head.roles)}
    for name in palette.in_order(played):
        heads = played[name]
        best = ", ".join(f"{head.layer}.{head.head} {head.scores[name].value:.2f}" for head in heads[:BEST])
        more = ", ..." if len(heads) > BEST else ""
        style = "dim" if palette.mark(name) else ""
        table.add_row(Text(visible(palette.label(name))), str(len(heads)), Text(best + more), style=style)
    idle = sum(not head.roles for head in look.heads)
    table.add_row("no role or state", str(idle), "", style="dim")
    return table


def _cells(head: HeadRecord) -> Sequence[str]:
    values = [head.value(name) for name in _SCORES]
    return (
        str(head.layer),
        str(head.head),
        f"{head.entropy:.2f}",
        f"{head.largest:.2f}",
        "-" if head.distance is None else f"{head.distance:.1f}",
        "-" if head.first_moved is None else f"{head.first_moved:.2f}",
        *("-" if value is None else f"{value:.2f}" for value in values),
        roles_text(head) or "-",
    )


def _lines(heads: Sequence[HeadRecord], without: Sequence[str] = ()) -> list[list[str]]:
    """Return the names of the columns for these heads, and the cells of each head."""
    kept = [_COLUMNS.index(name) for name in _columns(heads) if name not in without]
    return [[line[i] for i in kept] for line in (_COLUMNS, *map(_cells, heads))]


def rich_table(look: LookData, without: Sequence[str] = ()) -> rich.table.Table:
    """Return a Rich table: a section per layer, heads without a role dim; `without` names columns to leave out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(look.title), caption=Text(_caption(look, without)), header_style="bold")
    names, *lines = _lines(look.heads, without)
    for name in names:
        table.add_column(name, justify="left" if name == _COLUMNS[-1] else "right", no_wrap=True)
    layer = None
    for head, cells in zip(look.heads, lines, strict=True):
        if layer is not None and head.layer != layer:
            table.add_section()
        layer = head.layer
        table.add_row(*map(Text, cells), style="" if head.roles else "dim")
    return table


def text(look: LookData) -> str:
    """Return the table as aligned lines."""
    lines = _lines(look.heads)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    aligned = (
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    )
    return "\n".join([look.title, *aligned])


def html_text(look: LookData, heads: Sequence[HeadRecord]) -> str:
    """Return these heads as an HTML table, escaped."""

    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    names, *lines = _lines(heads)
    body = "".join(row(line, "td") for line in lines)
    return f"<table><caption>{html.escape(look.title)}</caption>{row(names, 'th')}{body}</table>"


def rows(look: LookData) -> list[dict[str, Any]]:
    """Return one flat row per head, with its place, statistics, roles and scores.

    The columns are ``offset_0`` ..., ``ahead_1`` ..., ``roles`` and ``role``, and for each measured role ``NAME``,
    ``NAME.null``, ``NAME.low``, ``NAME.high``, ``NAME.count`` and ``NAME.plays``.
    """
    return [flat(head) for head in look.heads]


def flat(head: HeadRecord) -> dict[str, Any]:
    """Return one row of `rows`."""
    named = [*("module", "call", "layer", "head", "part"), *("entropy", "largest", "distance", "first_moved")]
    named += ["queries", "keys"]
    row: dict[str, Any] = {name: getattr(head, name) for name in named}
    row["role"] = head.role
    row["roles"] = ", ".join(score.name for score in head.roles)
    row.update({f"offset_{k}": mass for k, mass in enumerate(head.offsets)})
    row.update({f"ahead_{k}": mass for k, mass in enumerate(head.ahead, 1)})
    row.update(head.extras)
    for name, score in head.scores.items():
        row[name] = score.value
        for part in ("null", "low", "high", "count", "plays"):
            row[f"{name}.{part}"] = getattr(score, part)
    return row


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return flat rows as columns, in the order of their names' first use; None if a row has no value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def frame(look: LookData) -> pandas.DataFrame:
    """Return the flat rows as a pandas frame; roles that a head's layer did not measure are missing values."""
    try:
        import pandas
    except ImportError as error:
        raise missing_extra("to_frame()", "look", error) from None
    return pandas.DataFrame(rows(look))
