"""A model over ranks as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .grid import Seconds, Spread
from .units import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from .over import ModelOverRanks

NONE = "-"


def tables(model: ModelOverRanks) -> Iterator[Any]:
    """The whole text, in order."""
    from rich.text import Text

    yield _rank(model)
    yield _layouts(model.spread)
    yield _scaling(model)
    yield Text(_remarks(model))


def _rank(model: ModelOverRanks) -> Table:
    from rich.table import Table

    at = model.spread
    grid = at.grid
    table = Table(model.name, "a rank", title=f"{grid.ranks:,} ranks: {grid.tensor} x heads, {grid.context} x tokens")
    text = f"{at.tokens:,} tokens" + (f", batch {at.batch}" if at.batch > 1 else "")
    table.add_row("at", text)
    table.add_row("weights", show_bytes(at.weight_bytes))
    table.add_row("cache", NONE if at.decode is None else show_bytes(at.cache_bytes))
    table.add_row("activations of a layer", show_bytes(at.activation_bytes))
    table.add_row("sent in a prefill", show_bytes(at.sent()))
    sent = sum(layer.count * layer.decode_bytes for layer in at.layers)
    table.add_row("sent in a decoded token", NONE if at.decode is None else show_bytes(sent))
    table.add_row("prefill, at least", _times(at.prefill))
    table.add_row("a decoded token, at least", NONE if at.decode is None else _times(at.decode))
    return table


def _times(time: Seconds) -> str:
    parts = {"computing": time.compute, "memory": time.memory, "link": time.link}
    parts_text = ", ".join(f"{name} {show_seconds(value)}" for name, value in parts.items() if value is not None)
    return parts_text if time.total is None else f"{show_seconds(time.total)} ({parts_text})"


def _layouts(at: Spread) -> Table:
    """For each kind of layer what each layout sends and takes; the one to choose first."""
    from rich.table import Table

    headers = ("layers", "layout", "sent, forward", "backward", "activations", "link", "at least")
    table = Table(*headers, title="One layer of a prefill, on the rank that has most")
    for column in table.columns[2:]:
        column.justify = "right"
    for layer in at.layers:
        table.add_section()
        table.add_row(
            f"{layer.count} {layer.kind}", "tensor (two all-reduces)", show_bytes(layer.tensor_bytes), "", "", "", ""
        )
        for cost in layer.costs:
            name = f"{cost.layout}, {cost.order}" if cost.layout == "ring" and not _halo(layer.kind) else cost.layout
            name = "halo" if cost.layout == "ring" and _halo(layer.kind) else name
            table.add_row(
                "",
                name + (" (choose)" if cost is layer.choose else ""),
                show_bytes(cost.bytes),
                show_bytes(layer.backward[cost.layout]),
                show_bytes(layer.activations[cost.layout]),
                NONE if cost.link_seconds is None else show_seconds(cost.link_seconds),
                NONE if cost.seconds is None else show_seconds(cost.seconds),
            )
    return table


def _halo(kind: str) -> bool:
    return kind.startswith(("window", "chunks"))


def _scaling(model: ModelOverRanks) -> Table:
    from rich.table import Table

    headers = ("ranks", "tokens", "held by a rank", "prefill", "efficiency", "link", "a decoded token")
    table = Table(*headers, title="Scaling: the least times, by the link's bandwidth and latency")
    for column in table.columns:
        column.justify = "right"
    tokens = None
    for row in model.scaling:
        if tokens not in (None, row.tokens):
            table.add_section()
        tokens = row.tokens
        table.add_row(
            f"{row.ranks:,}",
            f"{row.tokens:,}",
            show_bytes(row.rank_bytes),
            show_seconds(row.prefill_seconds),
            NONE if row.efficiency is None else f"{row.efficiency:.0%}",
            NONE if row.link_share is None else f"{row.link_share:.0%}",
            NONE if row.decode_seconds is None else show_seconds(row.decode_seconds),
        )
    return table


def _remarks(model: ModelOverRanks) -> str:
    lines = [f"not counted or not known: {note}" for note in model.notes]
    if model.spread.prefill.compute is None:
        lines.append("without a speed of computing (flops) times are the link's alone")
    if model.spread.model.towers or model.spread.model.states:
        lines.append("towers and layers with a state lie on every rank, whole")
    return "\n".join(lines)
