"""The answer: what the attention of one model costs, as a frozen record that prints, draws and goes to JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import costs
from .config import parse
from .costs import Floor, Flops
from .heads import apply_heads
from .model import Model, model_of
from .parts import ROOMS, parameters
from .shape import short
from .sources import find_config
from .units import rate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MAX_CONTEXT, MAX_BATCH, MAX_CONTEXTS = 10**10, 10**7, 64


@dataclass(frozen=True)
class ContextCost:
    """What a context of that many tokens costs, for the whole batch.

    Attributes:
        context: Tokens of a text, the newest included.
        source_tokens: Tokens the encoder reads beside; 0 where there is none.
        cache_bytes: Keys and values in the cache, windows cut; with their scales where they are int8.
        state_bytes: What layers with a state of fixed size hold beside; 0 for most models.
        reserved_bytes: The same where every layer keeps the whole context.
        as_mha_bytes: What the model would hold with as many key-value heads as query heads, windows cut.
        as_gqa8_bytes: With 8 key-value heads; None where its heads do not split into 8.
        as_mqa_bytes: With one.
        prefill: Operations of reading the context.
        decode: Operations of making the last of its tokens; None for a model that only reads.
        decode_expanded: The same for latent attention that makes keys and values anew, as transformers does; else None.
        eager_bytes: Attention weights of one layer written out, two bytes each.
        kernel_bytes: What a kernel that never writes them keeps in their place: one float32 a query and head.
        floors: The least time of a decoding step, batch by batch.
    """

    context: int
    source_tokens: int
    cache_bytes: int
    state_bytes: int
    reserved_bytes: int
    as_mha_bytes: int
    as_gqa8_bytes: int | None
    as_mqa_bytes: int
    prefill: Flops
    decode: Flops | None
    decode_expanded: Flops | None
    eager_bytes: int
    kernel_bytes: int
    floors: tuple[Floor, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        flops = {name: getattr(self, name) for name in ("prefill", "decode", "decode_expanded")}
        operations = {name: None if cost is None else cost.to_dict() for name, cost in flops.items()}
        return {**asdict(self), **operations, "floors": [floor.to_dict() for floor in self.floors]}


@dataclass(frozen=True)
class AttentionPlan:
    """What the attention of a model costs. Made by `of`; prints as tables and a chart, draws itself in a notebook.

    Attributes:
        model: The model as read: every layer with its sizes.
        batch: Texts at once.
        kv_dtype: What the cache's numbers are.
        contexts: The costs, context by context.
        planned: The same model after a heads plan, priced alike; None without one.
        card: What its built-in card says, where common texts tell another story; empty without a card.

    Example:
        >>> plan = of("gpt-3", context=2048)
        >>> plan.kind, plan.contexts[0].cache_bytes / 2**30, plan.parameters()["total"]
        ('MHA', 9.0, 174604259328)
    """

    model: Model
    batch: int
    kv_dtype: str
    contexts: tuple[ContextCost, ...]
    planned: AttentionPlan | None = None
    card: str = ""

    @property
    def name(self) -> str:
        """The config's name, as in the tables."""
        return self.model.name

    @property
    def exact(self) -> bool:
        """Whether every count is that of the model transformers builds; if not, `notes` says what is left out."""
        return not self.model.notes

    @property
    def notes(self) -> tuple[str, ...]:
        """What the counts leave out, and where the contexts go beyond the model."""
        return self.model.notes_at(cost.context for cost in self.contexts)

    @property
    def kind(self) -> str:
        """MHA, GQA with its group, MQA or MLA, and which layers have windows.

        Example:
            >>> of("gpt-3").kind
            'MHA'
        """
        kinds = dict.fromkeys(layer.kind for layer in self.model.layers)
        shown = " and ".join(kinds)
        if tuple(kinds) == ("GQA",):
            groups = dict.fromkeys(layer.num_heads / layer.num_kv_heads for layer in self.model.layers)
            shown += f" (G = {', '.join(f'{group:g}' for group in groups)})"
        windows = [layer.window for layer in self.model.layers if layer.window is not None]
        full = len(self.model.layers) - len(windows)
        word = "chunks of" if any(layer.chunked for layer in self.model.layers) else "window"
        if windows and full:
            shown += f", hybrid: {full} full, {len(windows)} {word} {windows[0]}"
        elif windows:
            shown += f", {word} {windows[0]}"
        states = self.model.states
        layers = "layer" if len(states) == 1 else "layers"
        return shown + (f"; {len(states)} {layers} with a state ({states[0].kind})" if states else "")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one text takes while no window is full."""
        return costs.bytes_per_token(self.model, *costs.bytes_of(self.kv_dtype))

    @property
    def attention_computations(self) -> int:
        """How often softmax(Q K^T) V is computed in a forward pass: layers x heads."""
        return sum(layer.num_heads for layer in self.model.layers)

    def parameters(self) -> dict[str, int]:
        """Parameters by room of the text model, of its towers together, and of all.

        Example:
            >>> of("gpt-3").parameters()["attention"]
            57986777088
        """
        parts = self.model.parts()
        rooms = {room: parameters(parts, room) for room in ROOMS}
        return {**rooms, "towers": self.model.tower_parameters(), "total": self.model.total_parameters()}

    def further(self) -> dict[str, int] | None:
        """Layers that predict further tokens: how many, their parameters and bytes, and their cache's bytes a token.

        None where the config has none. They are in no other count.
        """
        model = self.model
        if not model.further:
            return None
        each = model.layers[-1].cached_bytes(*costs.bytes_of(self.kv_dtype))
        return {
            "layers": model.further_layers,
            "parameters": parameters(model.further),
            "weight_bytes": sum(map(model.part_bytes, model.further)),
            "bytes_per_token": each * model.further_layers,
        }

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON."""
        return {
            "name": self.name,
            "model_type": self.model.model_type,
            "kind": self.kind,
            "exact": self.exact,
            "notes": list(self.notes),
            "card": self.card,
            "d_model": self.model.d_model,
            "layers": [
                {**asdict(layer), "kind": layer.kind, "parameters": layer.parameter_counts()}
                for layer in self.model.layers
            ],
            "states": [
                {"index": s.index, "kind": s.kind, "conv": s.conv, "state": s.state, "bytes": s.bytes(number)}
                for number in [self.model.number_bytes]
                for s in self.model.states
            ],
            "towers": [tower.to_dict() for tower in self.model.towers],
            "further": self.further(),
            "weight_bytes": self.model.stored_bytes(),
            "packing": None if self.model.packing is None else self.model.packing.method,
            "parameters": self.parameters(),
            "active_parameters": self.model.active_parameters(),
            "attention_share": self.model.attention_parameters() / self.model.total_parameters(),
            "attention_computations": self.attention_computations,
            "batch": self.batch,
            "kv_dtype": self.kv_dtype,
            "bytes_per_token": self.bytes_per_token,
            "contexts": [cost.to_dict() for cost in self.contexts],
            "planned": None if self.planned is None else self.planned.to_dict(),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .text import tables

        yield from tables(self)

    def __str__(self) -> str:
        from .text import plain

        return plain(self)

    def svg(self) -> str:
        """Cache against context, as an SVG image."""
        from .chart import svg

        return svg([self])

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>{'' if self.model.is_encoder else self.svg()}"


def of(
    config: Any,
    *,
    context: int | Sequence[int] = (8192, 131072),
    batch: int = 1,
    kv_dtype: str = "bf16",
    heads_plan: Mapping[str, Any] | str | Path | None = None,
    bandwidth: float | str | None = None,
    flops: float | str | None = None,
) -> AttentionPlan:
    """What the attention of a model costs, from its config alone.

    Args:
        config: A config.json, a checkpoint folder, a card's name, a hub name in the local cache, a dict, or a
            transformers config.
        context: Tokens of a text; several to compare.
        batch: Texts at once.
        kv_dtype: Numbers in the cache: bf16, fp16, fp32, fp8 or int8, which has a scale for every token and head.
        heads_plan: Which heads are kept, or how many key-value heads remain: a dict or a JSON file, as in
            `headwise.plan.heads`.
        bandwidth: Memory speed in bytes a second, or a text such as ``"3.35TB/s"``.
        flops: FLOPs a second, or a text such as ``"990TF"``.

    Raises:
        TypeError: a config or heads plan of a type that is none of these.
        ValueError: in one line, for whatever else is wrong: no such config, an architecture or field that is not
            modelled, a number out of range.

    Example:
        >>> plan = of("gpt-3", context=2048)
        >>> plan.kind, plan.bytes_per_token, plan.contexts[0].cache_bytes
        ('MHA', 4718592, 9663676416)
    """
    name, content, card = find_config(config)
    try:
        model = model_of(content, name, left_out=tuple(card.get("left_out", ())))
    except ValueError as wrong:
        raise ValueError(f"{name!r}: {wrong}") from None
    lengths = _checked(context, batch, kv_dtype)
    speeds = {
        "bandwidth": None if bandwidth is None else rate(bandwidth, "bandwidth"),
        "flop_rate": None if flops is None else rate(flops, "flops"),
    }
    planned = None
    if heads_plan is not None:
        entries = _heads_plan(heads_plan)
        try:
            after = apply_heads(model, entries)
        except ValueError as wrong:
            raise ValueError(f"{name!r}: {wrong}") from None
        planned = _priced(after, lengths, batch, kv_dtype, speeds)
    priced = _priced(model, lengths, batch, kv_dtype, speeds)
    return AttentionPlan(model, batch, kv_dtype, priced.contexts, planned, card.get("note", ""))


def _priced(
    model: Model, lengths: tuple[int, ...], batch: int, kv_dtype: str, speeds: dict[str, float | None]
) -> AttentionPlan:
    numbers = costs.bytes_of(kv_dtype)
    return AttentionPlan(model, batch, kv_dtype, tuple(_cost(model, n, batch, numbers, speeds) for n in lengths))


def _cost(
    model: Model, context: int, batch: int, numbers: tuple[int, int], speeds: dict[str, float | None]
) -> ContextCost:
    number, scale = numbers

    def cache(what: Model | None, *, windowed: bool = True) -> int | None:
        if what is None:
            return None
        return costs.cache_bytes(what, context, number, batch=batch, windowed=windowed, scale_bytes=scale)

    latent = any(layer.latent is not None for layer in model.layers)
    eager, kernel = costs.eager_bytes(model, context, batch=batch)
    return ContextCost(
        context,
        model.source_tokens(context),
        cache(model) or 0,
        costs.state_bytes(model, batch=batch),
        cache(model, windowed=False) or 0,
        cache(costs.as_kv_heads(model, None)) or 0,
        cache(costs.as_kv_heads(model, 8)),
        cache(costs.as_kv_heads(model, 1)) or 0,
        costs.prefill(model, context, batch=batch),
        costs.decode(model, context, batch=batch),
        costs.decode(model, context, batch=batch, absorbed=False) if latent else None,
        eager,
        kernel,
        costs.floors(model, context, number, scale_bytes=scale, **speeds),
    )


def _checked(context: int | Sequence[int], batch: int, kv_dtype: str) -> tuple[int, ...]:
    several = isinstance(context, (Sequence, Set, Iterator)) and not isinstance(context, (str, bytes))
    lengths: tuple[Any, ...] = tuple(context) if several else (context,)  # type: ignore[arg-type]
    if not 1 <= len(lengths) <= MAX_CONTEXTS:
        raise ValueError(f"give 1 to {MAX_CONTEXTS} contexts; got {len(lengths)}")
    for what, value, most in (*(("context", n, MAX_CONTEXT) for n in lengths), ("batch", batch, MAX_BATCH)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{what} is a whole number between 1 and {most}; got {short(value)}")
    if not isinstance(kv_dtype, str) or kv_dtype not in costs.KV_BYTES:
        raise ValueError(f"kv_dtype is one of {', '.join(costs.KV_BYTES)}; got {short(kv_dtype)}")
    return lengths


def _heads_plan(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, Path)):
        raise TypeError(f"a heads plan is a dict or the path of a JSON file; got {type(source).__name__}")
    try:
        return parse(Path(source))
    except ValueError as wrong:
        raise ValueError(f"heads plan {str(source)!r}: {wrong}") from None
