"""Figures of a look, with Matplotlib: each function returns a figure and does not use pyplot's state.

``figure.savefig("roles.svg")`` or ``.png`` writes it; a notebook shows it. Roles have the colors and letters of the
report; the color scales of maps and importance are readable with any color vision. Tokens and names are shown as
text: control characters are made visible, and a dollar sign does not begin a formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ...extras import missing_extra
from ...files.text import visible
from ...shapes.arguments import shown
from ..interventions.importance import Importance
from . import palette
from .cells import cell_of, roles_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..records.head import HeadRecord
    from ..records.look_data import LookData
    from ..records.scores import Score
    from .cells import Cell


MOST_LETTERS = 48
"""The largest number of heads or layers at which cells contain letters."""

MOST_LABELS = 41
"""The most tokens that are shown as labels of a map's axes."""

MOST_ROLES = 12
"""The most roles in one figure of a head or of a training run."""


@runtime_checkable
class HasPoints(Protocol):
    """The interface of the training curves that `plot_formation` needs."""

    @property
    def model(self) -> str:
        """The name of the model."""

    @property
    def thresholds(self) -> Mapping[str, float]:
        """The threshold of each role."""

    @property
    def points(self) -> Sequence[Any]:
        """The measurements, each with its `step` and `numbers`."""

    def best(self, role: str) -> tuple[list[int], list[float]]:
        """Return the steps, and the best head's score at each."""

    def formed(self) -> list[str]:
        """Return the roles that any head played."""


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Figure:
    """Return an empty figure with width and height in inches."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("a figure", "look", error) from None
    return Figure(figsize=(width, height), layout=layout)


def plot_roles(look: LookData) -> Figure:
    """Return a figure of every head's most specific role: one row per layer, one column per head.

    A dot marks a head that is a sink, a ring one that attends broadly.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    width, height = look.num_heads, look.num_layers
    cells = [(head, cell_of(head)) for head in look.heads]
    played = Counter(cell.role for _, cell in cells if cell.role)
    tall = max(1.4 + 0.32 * height, 1.2 + 0.19 * (len(played) + 3))  # the legend stands beside the matrix
    figure = new_figure(min(16.0, 3.6 + 0.32 * width), min(20.0, tall), "compressed")
    axes = figure.add_subplot()
    names = palette.in_order(played)
    numbers = np.full((max(1, height), max(1, width)), np.nan)
    for head, cell in cells:
        numbers[head.layer, head.head] = names.index(cell.role) + 1 if cell.role else 0
        if cell.role and max(width, height) <= MOST_LETTERS:
            _letter(axes, head.head, head.layer, cell.letter, palette.ink(cell.colour))
    _cells(axes, numbers, [palette.NONE, *map(palette.colour, names)])
    axes.set(xlabel="head", ylabel="layer")
    marked = _state_marks(axes, [(head.head, head.layer, cell) for head, cell in cells])
    figure.suptitle(visible(look.title, limit=60), fontsize=10, parse_math=False)
    idle = len(look.heads) - played.total()
    entries = [
        (f"{palette.letter(name)}  {palette.label(name)} ({played[name]})", palette.colour(name)) for name in names
    ]
    _legend(figure, [*entries, (f"no role ({idle})", palette.NONE)], marked)
    return figure


def plot_head(look: LookData, layer: int, head: int) -> Figure:
    """Return a figure of one head: its map, and its scores with each role's threshold and chance level.

    Raises:
        IndexError: the model has no such head.
        MissingExtra: Matplotlib is not installed.
    """
    record = look.head(layer, head)
    scored = sorted(record.scores.values(), key=lambda score: (not score.plays, -score.value, score.name))
    figure = new_figure(11.0, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    large = look.maps[look.heads.index(record)].weights() if look.maps else record.map
    _map(left, look, record, np.array(large, dtype=float).reshape(len(large), -1))
    _scores(right, scored[:MOST_ROLES])
    roles = roles_text(record) or "no role or state"
    title = f"{visible(look.model, limit=40)}, head {layer}.{head}: {roles}"
    figure.suptitle(visible(title, limit=120), fontsize=11, parse_math=False)
    return figure


def plot_importance(importance: Importance) -> Figure:
    """Return a figure of the importance of each head: one panel per criterion, a row per layer, a column per head.

    Raises:
        TypeError: `importance` is of another type.
        MissingExtra: Matplotlib is not installed.
    """
    if not isinstance(importance, Importance):
        raise TypeError(f"plot_importance draws what headwise.look.importance gives; got {type(importance).__name__}")
    grids = {by: _grid(importance.scores(by)) for by in importance.by}
    height, width = next(iter(grids.values())).shape
    panel = min(12.0, 2.2 + 0.28 * width)
    figure = new_figure(min(30.0, panel * len(grids)), min(20.0, 1.6 + 0.28 * height))
    for axes, (by, grid) in zip(figure.subplots(1, len(grids), squeeze=False)[0], grids.items(), strict=True):
        most = float(np.nanmax(np.abs(grid))) or 1.0
        below = float(np.nanmin(grid)) < 0  # a head that increases the loss: the scale has two sides
        drawn = axes.imshow(grid, cmap="PuOr_r" if below else "viridis", vmin=-most if below else 0, vmax=most)
        figure.colorbar(drawn, ax=axes, shrink=0.8)
        axes.set(xlabel="head", ylabel="layer")
        _whole_ticks(axes, width, height)
        _title(axes, by)
    what = f"loss {importance.loss:.3f}" if importance.measure == "loss" else "drift of the embedding"
    title = f"{visible(importance.model, limit=60)}: {what} on {importance.tokens:,} tokens"
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def plot_formation(curve: HasPoints, roles: Sequence[str] | None = None) -> Figure:
    """Return a figure of the best score of each role by step, and below it the training numbers, such as the loss.

    A dotted line is the threshold of the role in its color.

    Args:
        curve: the curve of `headwise.look.Watch`.
        roles: the roles to draw; the default is those that any head played at any step, most heads first.

    Raises:
        TypeError: not a curve, or `roles` are not names.
        ValueError: a role was not measured.
        MissingExtra: Matplotlib is not installed.
    """
    if not isinstance(curve, HasPoints):
        raise TypeError(f"plot_formation draws what headwise.look.Watch measured; got {shown(curve)}")
    if roles is not None and (isinstance(roles, (str, bytes)) or not isinstance(roles, Sequence)):
        raise TypeError(f"roles are the names of some, a list of strings; got {shown(roles)}")
    names = curve.formed()[:MOST_ROLES] if roles is None else list(roles)
    numbers = list(dict.fromkeys(name for point in curve.points for name in point.numbers))
    figure = new_figure(9.0, 4.2 + 1.8 * bool(numbers))
    rows = figure.subplots(1 + bool(numbers), 1, sharex=True, squeeze=False, height_ratios=(3, 1)[: 1 + bool(numbers)])
    top = rows[0][0]
    styles = ("-", "--", "-.", ":")
    taken: Counter[str] = Counter()
    for name in names:
        steps, values = curve.best(name)
        colour = palette.colour(name)
        top.plot(steps, values, styles[taken[colour] % 4], color=colour, marker="o", markersize=3, label=visible(name))
        taken[colour] += 1
        if name in curve.thresholds:
            top.axhline(curve.thresholds[name], color=colour, linewidth=0.8, linestyle=(0, (1, 4)))
    top.set(ylabel="best head's score", ylim=(0, 1.02))
    if numbers:
        for name in numbers:
            steps = [point.step for point in curve.points if name in point.numbers]
            values = [point.numbers[name] for point in curve.points if name in point.numbers]
            rows[1][0].plot(steps, values, color="#171b26", linewidth=1.2, label=visible(name))
        rows[1][0].set(ylabel=visible(numbers[0]) if len(numbers) == 1 else "")
        if len(numbers) > 1:
            rows[1][0].legend(fontsize=8, frameon=False)
    rows[-1][0].set_xlabel("step")
    for axes in rows[:, 0]:
        axes.grid(True, color="#dfe3ea", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    if names:
        top.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _title(top, f"{curve.model}: heads as they form")
    return figure


# --- the parts --------------------------------------------------------------------------------------------------------


def _title(axes: Axes, text: str) -> None:
    axes.set_title(visible(text, limit=60), fontsize=10, loc="left", parse_math=False)


def _letter(axes: Axes, x: int, y: int, letter: str, colour: str) -> None:
    axes.text(x, y, letter, ha="center", va="center", color=colour, fontsize=8, fontweight="bold", parse_math=False)


def _cells(axes: Axes, numbers: npt.NDArray[np.float64], colours: list[str]) -> None:
    """Draw colored cells with white lines between them; NaN cells are left out."""
    from matplotlib.colors import ListedColormap

    edges = [np.arange(n + 1) - 0.5 for n in numbers.shape]
    axes.pcolormesh(
        edges[1],
        edges[0],
        np.ma.masked_invalid(numbers),
        cmap=ListedColormap(colours),
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        edgecolors="white",
        linewidth=1.0 if max(numbers.shape) <= MOST_LETTERS else 0.2,
    )
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    _whole_ticks(axes, numbers.shape[1], numbers.shape[0])


def _whole_ticks(axes: Axes, width: int, height: int) -> None:
    for axis, n in ((axes.xaxis, width), (axes.yaxis, height)):
        axis.set_ticks(range(0, n, max(1, -(-n // 24))))
    axes.tick_params(length=0, labelsize=8)


def _state_marks(axes: Axes, cells: Sequence[tuple[int, int, Cell]]) -> list[Any]:
    """Draw dots and rings at the corners of the cells of sinks and of broad heads; return them, with their counts."""
    drawn = []
    for mark, side, about in (("dot", 0.32, "sink"), ("ring", -0.32, "broad")):
        places = [(x + side, y - 0.32) for x, y, cell in cells if mark in cell.marks]
        if not places:
            continue
        inside = "#444444" if mark == "dot" else "none"
        xs, ys = zip(*places, strict=True)
        label = f"{about} ({len(places)})"
        drawn.append(axes.scatter(xs, ys, s=9, facecolors=inside, edgecolors="#444444", linewidths=0.7, label=label))
    return drawn


def _legend(figure: Figure, entries: Sequence[tuple[str, str]], marks: Sequence[Any]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=visible(text, limit=40)) for text, colour in entries]
    drawn = figure.legend(handles=[*patches, *marks], loc="outside right center", fontsize=8, frameon=False)
    for text in drawn.get_texts():
        text.set_parse_math(False)


def _map(axes: Axes, look: LookData, record: HeadRecord, weights: npt.NDArray[np.float64]) -> None:
    """Draw attention weights on a square-root scale, which resolves small weights."""
    from matplotlib.colors import PowerNorm

    drawn = axes.imshow(weights, cmap="viridis", norm=PowerNorm(0.5, 0, 1), interpolation="nearest", aspect="auto")
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8, label="weight", ticks=(0, 0.01, 0.1, 0.25, 0.5, 1))
    pooled = "" if weights.shape == (record.queries, record.keys) else ", pooled"
    axes.set(xlabel=f"key (of {record.keys:,}{pooled})", ylabel=f"query (of {record.queries:,}{pooled})")
    labels = [visible(token, limit=12) for token in look.tokens]
    if weights.shape == (len(labels), len(labels)) and len(labels) <= MOST_LABELS:
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6, parse_math=False)
        axes.set_yticks(range(len(labels)), labels, fontsize=6, parse_math=False)
    else:  # pooled cells have no single token
        axes.set(xticks=[], yticks=[])


def _scores(axes: Axes, scores: Sequence[Score]) -> None:
    """Draw one bar per role, pale if not played, with its interval, a tick for the threshold, a cross for chance."""
    places = range(len(scores))
    for y, score in zip(places, scores, strict=True):
        axes.barh(y, score.value, height=0.6, color=palette.colour(score.name), alpha=1.0 if score.plays else 0.3)
        axes.plot([score.threshold] * 2, [y - 0.4, y + 0.4], color="#171b26", linewidth=1.2)
        if score.null is not None:
            axes.plot(score.null, y, "x", color="#171b26", markersize=5)
        if score.low is not None and score.high is not None:
            axes.plot([score.low, score.high], [y, y], color="#171b26", linewidth=1.0)
    names = [visible(palette.label(score.name), limit=40) for score in scores]
    axes.set_yticks(places, names, fontsize=8, parse_math=False)
    axes.set(xlim=(0, 1), xlabel="score;  | threshold,  x chance")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _grid(layers: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Return an array (layers, heads), NaN if a layer has fewer heads."""
    grid = np.full((len(layers), max(map(len, layers))), np.nan)
    for layer, values in enumerate(layers):
        grid[layer, : len(values)] = values
    return grid
