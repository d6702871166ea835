"""A heatmap of numbers of either sign, with the name of each row and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...files.text import visible
from .figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMES = 64
"""The most names on an axis; of more, every n-th is shown."""


def heatmap(
    cells: Mapping[tuple[int, int], float],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    axes: tuple[str, str],
    title: Sequence[str],
    label: str,
) -> Figure:
    """Return a heatmap on a scale that is symmetric about 0.

    Args:
        cells: The numbers by (row, column); cells without a number stay empty.
        rows: The name of each row.
        columns: The name of each column.
        axes: What rows and columns are.
        title: The lines above it.
        label: What the numbers are.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    grid = np.full((len(rows), len(columns)), np.nan)
    for place, number in cells.items():
        grid[place] = number
    figure = new_figure(min(24.0, 3.2 + 0.3 * max(len(columns), 14)), min(24.0, 2.0 + 0.24 * len(rows)))
    drawing = figure.add_subplot()
    most = max(float(np.nanmax(np.abs(grid))), 1e-6)
    drawn = drawing.imshow(grid, cmap="PuOr_r", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    figure.colorbar(drawn, ax=drawing, shrink=0.8, label=label)
    for axis, names in ((drawing.xaxis, columns), (drawing.yaxis, rows)):
        step = -(-len(names) // MOST_NAMES)
        shown = [visible(name, limit=40) for name in names[::step]]
        axis.set_ticks(range(0, len(names), step), shown, fontsize=7, parse_math=False)
    drawing.tick_params(length=0)
    if max(map(len, columns)) > 3:
        drawing.tick_params("x", rotation=90)
    drawing.set(ylabel=axes[0], xlabel=axes[1])
    lines = "\n".join(visible(line, limit=90) for line in title)
    drawing.set_title(lines, fontsize=9, loc="left", parse_math=False)
    return figure
