"""``headwise plan --tensor --context-ranks --link``: one model over a grid of ranks, and how it scales."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from .costs import KV_BYTES
from .grid import Grid, Spread, spread
from .links import Link
from .model import Model, model_of
from .shape import short
from .sources import find_config
from .units import link as read_link
from .units import rate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MOST_RANKS, FAR = 4096, 10_000_000
MAX_TOKENS, MAX_BATCH = 10**10, 10**7


@dataclass(frozen=True)
class ScalingRow:
    """What a number of ranks comes to at one length of text.

    Attributes:
        ranks: All of them.
        tokens: Of the text.
        rank_bytes: Weights, cache and one layer's activations of a rank.
        prefill_seconds: At least; without a speed of computing what the link takes.
        efficiency: Of the first row's time by ranks over this one's; None where no speed of computing is known.
        link_share: Of a prefill's time, on the link alone; None likewise.
        decode_seconds: At least, of one more token; None for a model that only reads.
    """

    ranks: int
    tokens: int
    rank_bytes: int
    prefill_seconds: float
    efficiency: float | None
    link_share: float | None
    decode_seconds: float | None


@dataclass(frozen=True)
class ModelOverRanks:
    """A model over ranks. Made by `over`; prints as tables.

    Attributes:
        name: The model's.
        spread: At the tokens and ranks asked for.
        scaling: From the smallest grid to 4,096 ranks, at the tokens asked for and at 10 million.
        notes: What the model's plan leaves out.
    """

    name: str
    spread: Spread
    scaling: tuple[ScalingRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [asdict(row) for row in self.scaling]
        return {"name": self.name, **self.spread.to_dict(), "scaling": rows, "notes": list(self.notes)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .rank_text import tables

        yield from tables(self)

    def __str__(self) -> str:
        from .text import plain

        return plain(self)


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
    """What a model costs over `tensor` times `ranks` ranks: held, sent, and the least times.

    Args:
        config: As for `headwise.plan.of`.
        link: Between two ranks, such as ``"50GB/s,2us"``.
        tensor: Ranks that share heads and feed-forward layers; they divide both.
        ranks: Ranks that share a text's tokens; any number up to that of tokens.
        tokens: Of a text.
        batch: Texts at once.
        kv_dtype: Numbers in the cache.
        bandwidth: A rank's memory speed; without it a decoded token has no time of reading.
        flops: A rank's FLOPs a second; without them only the link's time is told.

    Raises:
        TypeError: a config of a type that is none of these.
        ValueError: in one line, for whatever else is wrong.

    Example:
        >>> found = over("gpt-3", "50GB/s,2us", tensor=8, ranks=16, tokens=2048)
        >>> found.spread.weight_bytes, found.spread.layers[0].choose.layout
        (43715791872, 'ulysses')
    """
    name, content, card = find_config(config)
    try:
        model = model_of(content, name, left_out=tuple(card.get("left_out", ())))
    except ValueError as wrong:
        raise ValueError(f"{name!r}: {wrong}") from None
    check_grid(tensor, ranks, tokens, batch)
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_BYTES:
        raise ValueError(f"kv_dtype is one of {', '.join(KV_BYTES)}; got {short(kv_dtype)}")
    grid = Grid(
        tensor,
        ranks,
        Link(*read_link(link)),
        None if bandwidth is None else rate(bandwidth, "bandwidth"),
        None if flops is None else rate(flops, "flops"),
    )
    at = spread(model, grid, tokens, batch=batch, kv_dtype=kv_dtype)
    return ModelOverRanks(name, at, _scaling(model, at, kv_dtype), model.notes_at([tokens]))


def check_grid(
    tensor: int,
    ranks: int,
    tokens: int,
    batch: int,
    *,
    names: tuple[str, str, str, str] = ("tensor", "ranks", "tokens", "batch"),
) -> None:
    """Raise ValueError for numbers that make no grid; `names` is what whoever gave them calls them."""
    mosts = MOST_RANKS, MOST_RANKS, MAX_TOKENS, MAX_BATCH
    for what, value, most in zip(names, (tensor, ranks, tokens, batch), mosts, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{what} is a whole number between 1 and {most}; got {short(value)}")
    if tensor * ranks > MOST_RANKS:
        raise ValueError(f"{names[0]} times {names[1]} is at most {MOST_RANKS}; got {tensor} x {ranks}")
    if ranks > tokens:
        raise ValueError(f"{names[1]} = {ranks} is more than the text has tokens, {tokens}")


def _scaling(model: Model, at: Spread, kv_dtype: str) -> tuple[ScalingRow, ...]:
    rows: list[ScalingRow] = []
    for tokens in sorted({at.tokens, FAR}):
        first: ScalingRow | None = None
        context = 1
        while at.grid.tensor * context <= MOST_RANKS and context <= tokens:
            grid = replace(at.grid, context=context)
            row = _row(spread(model, grid, tokens, batch=at.batch, kv_dtype=kv_dtype), first)
            first = first or row
            rows.append(row)
            context *= 2
    return tuple(rows)


def _row(one: Spread, first: ScalingRow | None) -> ScalingRow:
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
