"""Tables as wide as the terminal, with nothing in them cut: rich ends a number that has no room with three dots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GAP = 1
"""Blanks between the columns of a table without a frame."""


def parts(what: Any, shown: Console) -> Iterator[Any]:
    """Yield what is printed of it, in order: a record that prints as tables, or a group of them, taken apart."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(what, Group):
        for one in what.renderables:
            yield from parts(one, shown)
    elif isinstance(what, Table | Text | str) or not hasattr(what, "__rich_console__"):
        yield what
    else:
        for one in what.__rich_console__(shown, shown.options):
            yield from parts(one, shown)


def fit(table: Table, shown: Console) -> None:
    """Give each column its width, where not all of it has room.

    Texts are broken between words, then numbers from their units, and before any word is, the frame goes. A pipe has no
    width: there the table gets wider instead. In a terminal too narrow for the words they are broken: none is cut.
    """
    whole = [_widths(table, i, shown) for i in range(len(table.columns))]
    room = shown.width - _frame(table)
    if sum(most for _, _, most in whole) <= room:
        return
    least = [numbers for _, numbers, _ in whole]
    if sum(least) > room:
        unframe(table)
        room = shown.width - _frame(table)
    if sum(least) > room:
        least = [word for word, _, _ in whole]
    if sum(least) > room and not shown.is_terminal:
        room = sum(least)
        shown.width = room + _frame(table)
    for column, width in zip(table.columns, _shared(least, [most for _, _, most in whole], room), strict=True):
        column.width, column.no_wrap, column.overflow = width, False, "fold"


def unframe(table: Table) -> None:
    """Leave nothing but a blank between columns."""
    table.box, table.padding, table.pad_edge = None, (0, GAP, 0, 0), False


def _frame(table: Table) -> int:
    """Letters of a line that are no column's."""
    if table.box is None:
        return GAP * (len(table.columns) - 1)
    return 3 * len(table.columns) + 1


def _widths(table: Table, index: int, shown: Console) -> tuple[int, int, int]:
    """Of a column the longest word; the longest number with its unit, or word; and the longest line."""
    from rich.measure import Measurement

    column, wide = table.columns[index], shown.options.update(width=10_000)
    head = Measurement.get(shown, wide, column.header)
    cells = [Measurement.get(shown, wide, cell) for cell in column.cells] or [head]
    word = max(head.minimum, *(cell.minimum for cell in cells))
    most = max(cell.maximum for cell in cells)
    number = max(word, most) if column.justify == "right" else word
    return word, number, max(most, head.maximum)


def _shared(least: list[int], most: list[int], room: int) -> list[int]:
    """The room dealt out: to each its least, then a letter more to the narrowest that wants one; or, short of the
    least, a letter less to the widest."""
    widths = list(least)
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    while sum(widths) < room:
        wanting = [i for i, width in enumerate(widths) if width < most[i]]
        if not wanting:
            break
        widths[min(wanting, key=widths.__getitem__)] += 1
    return widths
