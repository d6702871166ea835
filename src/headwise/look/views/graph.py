"""A graph of heads that read what earlier heads wrote: layers from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...files.text import visible
from .figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Head = tuple[int, int]

COLOURS = {"q": "#1f6fb2", "k": "#c2571a", "v": "#3b8f4a"}
"""The colour of reading through queries, keys and values; distinct with any colour vision."""

NAMES = {"q": "queries", "k": "keys", "v": "values"}


def graph(edges: Sequence[tuple[str, Head, Head, float]], roles: Mapping[str, str], title: str) -> Figure:
    """Return a figure of heads and of who reads whom.

    Args:
        edges: Each as (kind, reader, writer, multiple of chance), heads as (layer, head).
        roles: The role of each head, by ``"layer.head"``; heads without one have their number alone.
        title: The line above it.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    heads = sorted({head for _, reader, writer, _ in edges for head in (reader, writer)})
    layers = sorted({layer for layer, _ in heads})
    column = {layer: n for n, layer in enumerate(layers)}
    in_layer = {layer: [head for head in heads if head[0] == layer] for layer in layers}
    tallest = max(map(len, in_layer.values()), default=1)
    place = {
        head: (column[layer], (n - (len(row) - 1) / 2)) for layer, row in in_layer.items() for n, head in enumerate(row)
    }
    figure = new_figure(min(30.0, 2.5 + 1.7 * len(layers)), min(24.0, 1.8 + 0.6 * tallest))
    axes = figure.add_subplot()
    strongest = max((times for *_, times in edges), default=1.0)
    for kind, reader, writer, times in edges:
        style = {"arrowstyle": "-|>", "color": COLOURS[kind], "linewidth": 0.6 + 2.4 * times / strongest, "alpha": 0.75}
        bend = {"q": 0.12, "k": -0.12, "v": 0.25}[kind]
        axes.annotate(
            "",
            place[reader],
            place[writer],
            arrowprops=style | {"connectionstyle": f"arc3,rad={bend}", "shrinkA": 16, "shrinkB": 16},
        )
    for head, (x, y) in place.items():
        name = "{}.{}".format(*head)
        text = f"{name}\n{visible(roles[name], limit=24)}" if name in roles else name
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#8a93a5"}
        axes.text(x, y, text, ha="center", va="center", fontsize=7, bbox=box, parse_math=False)
    for kind in sorted({kind for kind, *_ in edges}):
        axes.plot([], [], color=COLOURS[kind], label=f"through {NAMES[kind]}")
    if edges:
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    axes.set(xlim=(-0.6, len(layers) - 0.4), ylim=(tallest / 2 + 0.2, -tallest / 2 - 0.2), yticks=[])
    axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(visible(title, limit=90), fontsize=10, loc="left", parse_math=False)
    return figure
