"""Fit tables to the width of the terminal without cutting text; rich would replace the end of a number by dots."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GAP = 1
"""Spaces between the columns of a table without a frame."""


def fit(table: Table, shown: Console) -> None:
    """Set the width of each column if the table is wider than the terminal.

    Texts are broken between words first; then the frame is removed, and then numbers are broken from their units. If
    words still do not fit, a terminal breaks them, and a table in a pipe gets wider. No text is cut.
    """
    whole = [_widths(table, i, shown) for i in range(len(table.columns))]
    room = shown.width - _frame(table)
    if sum(most for _, _, most in whole) <= room:
        return
    least = [numbers for _, numbers, _ in whole]
    if sum(least) > room:
        remove_frame(table)
        room = shown.width - _frame(table)
    if sum(least) > room:
        least = [word for word, _, _ in whole]
    if sum(least) > room and not shown.is_terminal:
        room = sum(least)
        shown.width = room + _frame(table)
    for column, width in zip(table.columns, _shared(least, [most for _, _, most in whole], room), strict=True):
        column.width, column.no_wrap, column.overflow = width, False, "fold"


def remove_frame(table: Table) -> None:
    """Remove the frame, and leave one space between columns."""
    table.box, table.padding, table.pad_edge = None, (0, GAP, 0, 0), False


def _frame(table: Table) -> int:
    """Return the characters per line that the frame and the gaps take."""
    if table.box is None:
        return GAP * (len(table.columns) - 1)
    return 3 * len(table.columns) + 1


def _widths(table: Table, index: int, shown: Console) -> tuple[int, int, int]:
    """Return a column's longest word; its longest number with unit, or word; and its longest line."""
    from rich.measure import Measurement

    column, wide = table.columns[index], shown.options.update(width=10_000)
    head = Measurement.get(shown, wide, column.header)
    cells = [Measurement.get(shown, wide, cell) for cell in column.cells] or [head]
    word = max(head.minimum, *(cell.minimum for cell in cells))
    most = max(cell.maximum for cell in cells)
    number = max(word, most) if column.justify == "right" else word
    return word, number, max(most, head.maximum)


def _shared(least: list[int], most: list[int], room: int) -> list[int]:
    """Return column widths: each gets its minimum, then the narrowest unsatisfied column gets one character at a time.

    If the minimum does not fit, the widest column loses one character at a time.
    """
    widths = list(least)
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    while sum(widths) < room:
        wanting = [i for i, width in enumerate(widths) if width < most[i]]
        if not wanting:
            break
        widths[min(wanting, key=widths.__getitem__)] += 1
    return widths
