"""The result: the cost of a model's attention, as a frozen dataclass that prints, draws and converts to JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config.reader import parse
from .costs import totals as costs
from .costs.plan_data import ContextCost, PlanData
from .model.heads_plan import apply_heads
from .model.model import Model
from .shape import check_between
from .show.printed import Printed
from .sources import find_model
from .units import rate

MAX_CONTEXT, MAX_BATCH, MAX_CONTEXTS = 10**10, 10**7, 64


@dataclass(frozen=True)
class AttentionPlan(Printed, PlanData):
    """The cost of a model's attention. Created by `of`; prints as tables and a chart, and shows an image in a notebook.

    Attributes:
        model: The model: every layer with its sizes.
        batch: The number of texts.
        kv_dtype: The dtype of the cache.
        contexts: The costs at each context length.
        planned: The cost of the same model after a heads plan; None without one.
        card: The note of its built-in card on facts that common texts state differently; empty without a card.

    Example:
        >>> plan = of("gpt-3", context=2048)
        >>> plan.kind, plan.contexts[0].cache_bytes / 2**30, plan.parameters()["total"]
        ('MHA', 9.0, 174604259328)
    """

    planned: AttentionPlan | None = None

    def _tables(self) -> Iterator[Any]:
        from .show.tables import tables

        return tables(self)

    def svg(self) -> str:
        """Return the chart of cache against context as SVG; raises MissingExtra if Matplotlib is not installed."""
        from .show.chart import svg

        return svg([self])

    def _repr_html_(self) -> str:
        from base64 import b64encode
        from html import escape

        text = f"<pre>{escape(str(self))}</pre>"
        try:
            image = "" if self.model.is_encoder else b64encode(self.svg().encode()).decode()
        except ImportError:  # Without Matplotlib there is no image.
            image = ""
        return text + (f'<img alt="cache against context" src="data:image/svg+xml;base64,{image}">' if image else "")


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
    """Return the cost of a model's attention, computed from its config.

    Args:
        config: A config.json, a checkpoint folder, a card's name, a hub name in the local cache, a dict, or a
            transformers config.
        context: Tokens of a text; a sequence of them to compare.
        batch: The number of texts.
        kv_dtype: The dtype of the cache: bf16, fp16, fp32, fp8 or int8, which has a scale for every token and head.
        heads_plan: The heads to keep, or the number of key-value heads to merge into: a dict or a JSON file, as in
            `headwise.plan.model.heads_plan`.
        bandwidth: Memory bandwidth in bytes per second, or a text such as ``"3.35TB/s"``.
        flops: FLOPs per second, or a text such as ``"990TF"``.

    Raises:
        TypeError: a config or heads plan of an unsupported type.
        ValueError: a one-line message for every other error: no such config, an unsupported architecture or field, a
            number out of range.

    Example:
        >>> plan = of("gpt-3", context=2048)
        >>> plan.kind, plan.bytes_per_token, plan.contexts[0].cache_bytes
        ('MHA', 4718592, 9663676416)
    """
    name, model, card = find_model(config)
    lengths = _checked(context, batch, kv_dtype)
    speeds = {
        "bandwidth": None if bandwidth is None else rate(bandwidth, "bandwidth"),
        "flop_rate": None if flops is None else rate(flops, "flops"),
    }
    numbers = costs.bytes_of(kv_dtype)

    def priced(one: Model) -> tuple[ContextCost, ...]:
        return tuple(_cost(one, length, batch, numbers, speeds) for length in lengths)

    planned = None
    if heads_plan is not None:
        entries = _heads_plan(heads_plan)
        try:
            after = apply_heads(model, entries)
        except ValueError as wrong:
            raise ValueError(f"{name!r}: {wrong}") from None
        planned = AttentionPlan(after, batch, kv_dtype, priced(after))
    return AttentionPlan(model, batch, kv_dtype, priced(model), planned, card.get("note", ""))


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
        check_between(what, value, 1, most)
    costs.check_kv_dtype(kv_dtype)
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
