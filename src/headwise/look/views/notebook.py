"""A look in a notebook: a colored grid of heads, a legend, and a folded table. No script; all strings are escaped."""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING

from ...files.text import visible
from . import palette, tables
from .cells import MARKS, cell_of, roles_text

if TYPE_CHECKING:
    from ..records.head import HeadRecord
    from ..records.look_data import LookData

MOST_ROWS = 256
"""The most rows of the table; a notebook keeps its outputs in one file."""

MOST_TITLES = 1024
"""The most heads whose cells have a tooltip."""

_CELL = "padding:0;min-width:1.7em;height:1.7em;text-align:center;font:600 12px monospace;border:2px solid transparent"
_PLAIN = "padding:0 .5em;text-align:right;font:11px monospace;border:0;background:none"


def markup(look: LookData) -> str:
    """Return the grid of heads by role, and the table of heads."""
    played = Counter(cell.role for cell in map(cell_of, look.heads) if cell.role)
    legend = "".join(_legend(name, played[name]) for name in palette.in_order(played))
    idle = len(look.heads) - played.total()
    states = f"{idle} without a role; {MARKS['dot']} sink, {MARKS['ring']} broad"
    return (
        f"<div><b>{_escaped(look.title)}</b>"
        f"<div style='margin:.4em 0'>{legend}<span style='white-space:nowrap'>{states}</span></div>"
        f"{_grid(look)}{_details(look)}</div>"
    )


def _legend(name: str, count: int) -> str:
    colour = palette.colour(name)
    style = f"background:{colour};color:{palette.ink(colour)};padding:.1em .45em;font:600 12px monospace"
    letter = html.escape(palette.letter(name))
    return (
        f"<span style='white-space:nowrap;margin-right:1em'><span style='{style}'>{letter}</span> "
        f"{_escaped(palette.label(name))} ({count})</span> "
    )


def _grid(look: LookData) -> str:
    titles = len(look.heads) <= MOST_TITLES
    rows: dict[int, list[str]] = {}
    for head in look.heads:
        rows.setdefault(head.layer, []).append(_head(head, titles))
    numbers = "".join(f"<td style='{_PLAIN};text-align:center'>{h}</td>" for h in range(look.num_heads))
    lines = "".join(f"<tr><td style='{_PLAIN}'>{layer}</td>{''.join(cells)}</tr>" for layer, cells in rows.items())
    return (
        "<div style='overflow-x:auto'><table style='border-collapse:separate;border-spacing:0;width:auto'>"
        f"<tr><td style='{_PLAIN}'>layer</td>{numbers}</tr>{lines}</table></div>"
    )


def _head(head: HeadRecord, titled: bool) -> str:
    cell = cell_of(head)
    colour = cell.colour
    letter = cell.letter + "".join(MARKS[mark] for mark in cell.marks if cell.role)
    says = f"{head.layer}.{head.head}: {roles_text(head) or 'no role or state'}, entropy {head.entropy:.2f}"
    title = f' title="{_escaped(says)}"' if titled else ""
    style = f"{_CELL};background:{colour};background-clip:padding-box;color:{palette.ink(colour)}"
    return f"<td style='{style}'{title}>{html.escape(letter)}</td>"


def _details(look: LookData) -> str:
    heads = [head for head in look.heads if head.roles] if len(look.heads) > MOST_ROWS else list(look.heads)
    shown = heads[:MOST_ROWS]
    left = len(look.heads) - len(shown)
    rest = f"<p>{left} more heads: to_frame() has them all.</p>" if left else ""
    return f"<details><summary>numbers of {len(shown)} heads</summary>{tables.html_text(look, shown)}{rest}</details>"


def _escaped(text: str) -> str:
    return html.escape(visible(text, limit=300))
