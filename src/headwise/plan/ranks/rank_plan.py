"""The plan of ``headwise plan --tensor --context-ranks --link``: one model over a grid of ranks, and its scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..costs.totals import check_kv_dtype
from ..model.model import Model
from ..shape import check_between
from ..show.printed import Printed, number_table
from ..sources import find_model
from ..units import link as read_link
from ..units import rate, show_bytes, show_seconds
from .communication import Link
from .mesh import Grid, MeshCost, TimeEstimate, mesh_cost

if TYPE_CHECKING:
    from rich.table import Table

MOST_RANKS, FAR = 4096, 10_000_000
MAX_TOKENS, MAX_BATCH = 10**10, 10**7


@dataclass(frozen=True)
class ScalingRow:
    """The cost at one number of ranks and one length of text.

    Attributes:
        ranks: The number of all ranks.
        tokens: Tokens of the text.
        rank_bytes: Bytes of weights, cache and one layer's activations of a rank.
        prefill_seconds: The least time of a prefill; without a FLOP rate, the time on the link.
        efficiency: Ranks times time of the first row, divided by those of this row; None without a FLOP rate.
        link_share: The link's share of the prefill time; None without a FLOP rate.
        decode_seconds: The least time of one more token; None for an encoder.
    """

    ranks: int
    tokens: int
    rank_bytes: int
    prefill_seconds: float
    efficiency: float | None
    link_share: float | None
    decode_seconds: float | None


@dataclass(frozen=True)
class ModelOverRanks(Printed):
    """A model over ranks. Created by `over`; prints as tables.

    Attributes:
        name: The name of the model.
        cost: The cost at the requested tokens and ranks.
        scaling: Rows from the smallest grid to 4,096 ranks, at the requested tokens and at 10 million.
        notes: Notes on parts that the model's plan leaves out.
    """

    name: str
    cost: MeshCost
    scaling: tuple[ScalingRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a dict for JSON."""
        rows = [asdict(row) for row in self.scaling]
        return {"name": self.name, **self.cost.to_dict(), "scaling": rows, "notes": list(self.notes)}

    def _tables(self) -> Iterator[Any]:
        from rich.text import Text

        yield _rank(self)
        yield _layouts(self.cost)
        yield _scaling_table(self)
        yield Text(_remarks(self))


def over(
    config: Any,
    link: str,
    *,
    tensor: int = 1,
    ranks: int = 1,
    tokens: int = 131072,
    batch: int = 1,
    kv_dtype: str = "bf16",
    bandwidth: float | str | None = None,
    flops: float | str | None = None,
) -> ModelOverRanks:
    """Return the cost of a model over `tensor` times `ranks` ranks: memory, bytes sent, and the least times.

    Args:
        config: The config, as in `headwise.plan.of`.
        link: The link between two ranks, such as ``"50GB/s,2us"``.
        tensor: The number of ranks that share heads and feed-forward layers; it must divide both.
        ranks: The number of ranks that share a text's tokens; at most the number of tokens.
        tokens: Tokens of a text.
        batch: The number of texts.
        kv_dtype: The dtype of the cache.
        bandwidth: A rank's memory bandwidth; without it, decode times include no memory reads.
        flops: A rank's FLOPs per second; without it, times are those of the link only.

    Raises:
        TypeError: a config of an unsupported type.
        ValueError: a one-line message for every other invalid argument.

    Example:
        >>> found = over("gpt-3", "50GB/s,2us", tensor=8, ranks=16, tokens=2048)
        >>> found.cost.weight_bytes, found.cost.layers[0].choose.layout
        (43715791872, 'ulysses')
    """
    name, model, _ = find_model(config)
    if any(layer.indexer or layer.keys_of is not None or layer.shared_key for layer in model.layers):
        raise ValueError(
            f"{name!r}: how its sparse or compressed attention, or its layers that read the keys of others, are placed "
            "over several ranks is not known; headwise plan without --link shows one machine"
        )
    check_grid(tensor, ranks, tokens, batch)
    check_kv_dtype(kv_dtype)
    grid = Grid(
        tensor,
        ranks,
        Link(*read_link(link)),
        None if bandwidth is None else rate(bandwidth, "bandwidth"),
        None if flops is None else rate(flops, "flops"),
    )
    at = mesh_cost(model, grid, tokens, batch=batch, kv_dtype=kv_dtype)
    return ModelOverRanks(name, at, _scaling(model, at, kv_dtype), model.notes_at([tokens]))


def check_grid(
    tensor: int,
    ranks: int,
    tokens: int,
    batch: int,
    *,
    names: tuple[str, str, str, str] = ("tensor", "ranks", "tokens", "batch"),
) -> None:
    """Raise ValueError for an invalid grid; `names` are the argument names in the message."""
    mosts = MOST_RANKS, MOST_RANKS, MAX_TOKENS, MAX_BATCH
    for what, value, most in zip(names, (tensor, ranks, tokens, batch), mosts, strict=True):
        check_between(what, value, 1, most)
    if tensor * ranks > MOST_RANKS:
        raise ValueError(f"{names[0]} times {names[1]} is at most {MOST_RANKS}; got {tensor} x {ranks}")
    if ranks > tokens:
        raise ValueError(f"{names[1]} = {ranks} is more than the number of tokens, {tokens}")


def _scaling(model: Model, at: MeshCost, kv_dtype: str) -> tuple[ScalingRow, ...]:
    rows: list[ScalingRow] = []
    for tokens in sorted({at.tokens, FAR}):
        first: ScalingRow | None = None
        context = 1
        while at.grid.tensor * context <= MOST_RANKS and context <= tokens:
            grid = replace(at.grid, context=context)
            row = _row(mesh_cost(model, grid, tokens, batch=at.batch, kv_dtype=kv_dtype), first)
            first = first or row
            rows.append(row)
            context *= 2
    return tuple(rows)


def _row(one: MeshCost, first: ScalingRow | None) -> ScalingRow:
    time, decode = one.prefill, one.decode
    seconds = time.link if time.total is None else time.total
    efficiency = share = None
    if time.compute is not None and seconds:
        share = time.link / seconds
        ranks, before = (one.grid.ranks, seconds) if first is None else (first.ranks, first.prefill_seconds)
        efficiency = ranks * before / (one.grid.ranks * seconds)
    memory = one.weight_bytes + one.cache_bytes + one.activation_bytes
    after = None if decode is None else decode.link if decode.total is None else decode.total
    return ScalingRow(one.grid.ranks, one.tokens, memory, seconds, efficiency, share, after)


# --- tables ----------------------------------------------------------------------------------------------------------

ABSENT = "-"


def _rank(model: ModelOverRanks) -> Table:
    from rich.table import Table

    at = model.cost
    grid = at.grid
    table = Table(model.name, "per rank", title=f"{grid.ranks:,} ranks: {grid.tensor} x heads, {grid.context} x tokens")
    table.add_row("at", f"{at.tokens:,} tokens" + (f", batch {at.batch}" if at.batch > 1 else ""))
    table.add_row("weights", show_bytes(at.weight_bytes))
    table.add_row("cache", ABSENT if at.decode is None else show_bytes(at.cache_bytes))
    table.add_row("activations of one layer", show_bytes(at.activation_bytes))
    table.add_row("sent per prefill", show_bytes(at.sent()))
    sent = sum(layer.count * layer.decode_bytes for layer in at.layers)
    table.add_row("sent per decoded token", ABSENT if at.decode is None else show_bytes(sent))
    table.add_row("prefill, at least", _times(at.prefill))
    table.add_row("decoded token, at least", ABSENT if at.decode is None else _times(at.decode))
    return table


def _times(time: TimeEstimate) -> str:
    parts = {"computing": time.compute, "memory": time.memory, "link": time.link}
    parts_text = ", ".join(f"{name} {show_seconds(value)}" for name, value in parts.items() if value is not None)
    return parts_text if time.total is None else f"{show_seconds(time.total)} ({parts_text})"


def _layouts(at: MeshCost) -> Table:
    """Return a table of the bytes and times of each layout for each kind of layer, the cheapest layout first."""
    columns = ("layers", "layout", "sent, forward", "backward", "activations", "link", "at least")
    table = number_table("One layer of a prefill, on the busiest rank", columns, left=columns[:2])
    for layer in at.layers:
        table.add_section()
        table.add_row(
            f"{layer.count} {layer.kind}", "tensor (two all-reduces)", show_bytes(layer.tensor_bytes), "", "", "", ""
        )
        for cost in layer.costs:
            name: str = cost.layout
            if name == "ring":
                name = "halo" if layer.kind.startswith(("window", "chunks")) else f"ring, {cost.order}"
            table.add_row(
                "",
                name + (" (fastest)" if cost is layer.choose else ""),
                show_bytes(cost.bytes),
                show_bytes(layer.backward[cost.layout]),
                show_bytes(layer.activations[cost.layout]),
                ABSENT if cost.link_seconds is None else show_seconds(cost.link_seconds),
                ABSENT if cost.seconds is None else show_seconds(cost.seconds),
            )
    return table


def _scaling_table(model: ModelOverRanks) -> Table:
    columns = ("ranks", "tokens", "memory per rank", "prefill", "efficiency", "link", "decoded token")
    table = number_table("Scaling: the least times, by the link's bandwidth and latency", columns)
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
            ABSENT if row.efficiency is None else f"{row.efficiency:.0%}",
            ABSENT if row.link_share is None else f"{row.link_share:.0%}",
            ABSENT if row.decode_seconds is None else show_seconds(row.decode_seconds),
        )
    return table


def _remarks(model: ModelOverRanks) -> str:
    lines = [f"not counted or unknown: {note}" for note in model.notes]
    if model.cost.prefill.compute is None:
        lines.append("without flops, times include the link only")
    if model.cost.model.towers or model.cost.model.states:
        lines.append("every rank holds all towers and all layers with a state")
    return "\n".join(lines)
