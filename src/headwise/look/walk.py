"""The walk through one attention head of a model on a text: every stage for one query, with the model's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..files.text import visible
from ..nn.hooks.eval_mode import in_eval_mode_without_grad
from ..nn.hooks.output_projections import output_projections
from ..nn.hooks.probe import AttentionCall, probe
from ..nn.hooks.unwrap import unwrap
from ..ops.statistics.weights import weights
from ..plan.show.printed import Printed
from ..shapes.arguments import FAR, check_counts
from .inputs import ids as inputs

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 6
"""The numbers of a vector that the printed tables show."""

MOST_KEYS = 8
"""The keys that the printed table shows: those with the largest weights."""


@dataclass(frozen=True)
class WalkStage:
    """One vector of the walk.

    Attributes:
        name: its name, such as ``"query"``.
        formula: how it is made.
        values: its numbers.
    """

    name: str
    formula: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class WalkKey:
    """One key that the query may attend or not.

    Attributes:
        position: its position.
        token: its token as text.
        key: the vector k_j, after norms and rotary embedding.
        value: the vector v_j.
        score: the scaled score; softcap, biases and masks act afterwards.
        masked: the score with them; None if the query may not attend this key.
        weight: the weight.
    """

    position: int
    token: str
    key: tuple[float, ...]
    value: tuple[float, ...]
    score: float
    masked: float | None
    weight: float


@dataclass(frozen=True)
class Walk(Printed):
    """One query of one head, from its scores to what it writes. Prints as tables.

    Attributes:
        model: the name of the model.
        module: the qualified name of the attention module.
        layer, head: the place of the head.
        query: the position of the query.
        token: its token as text.
        scale: the factor of the scores.
        stages: the vectors: the query, the head's output before W_O, what it adds after W_O, and the layer's output.
            Without a plain output projection the last two are missing.
        keys: all keys in order.
    """

    model: str
    module: str
    layer: int
    head: int
    query: int
    token: str
    scale: float
    stages: tuple[WalkStage, ...]
    keys: tuple[WalkKey, ...]

    def __getitem__(self, name: str) -> WalkStage:
        """Return the stage of that name, or raise a KeyError with the names of all stages."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; there are {', '.join(stage.name for stage in self.stages)}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers."""
        about = {name: getattr(self, name) for name in ("model", "module", "layer", "head", "query", "token", "scale")}
        stages = [{"name": s.name, "formula": s.formula, "values": list(s.values)} for s in self.stages]
        keys = [{**vars(one), "key": list(one.key), "value": list(one.value)} for one in self.keys]
        return {**about, "stages": stages, "keys": keys}

    def _tables(self) -> Iterator[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        title = f"{visible(self.model, limit=60)}, head {self.layer}.{self.head}: "
        title += f"query {self.query} {visible(self.token)!r}, one row of softmax(Q K^T / sqrt(d_k)) V"
        named = Table("j", "key", "k_j", "score", "weight", "v_j", title=Text(title))
        best = sorted(self.keys, key=lambda one: (-one.weight, one.position))[:MOST_KEYS]
        for one in best:
            score = "masked" if one.masked is None else f"{one.masked:.3f}"
            cells = (str(one.position), repr(visible(one.token)), _short(one.key), score, f"{one.weight:.4f}")
            named.add_row(*map(Text, (*cells, _short(one.value))))
        yield named
        if len(self.keys) > len(best):
            left = sum(one.weight for one in self.keys) - sum(one.weight for one in best)
            yield Text(f"{len(self.keys) - len(best)} more keys with a weight of {left:.4f} together")
        stages = Table("stage", "formula", "size", "numbers", "length")
        for stage in self.stages:
            length = sum(x * x for x in stage.values) ** 0.5
            cells = (stage.name, stage.formula, str(len(stage.values)), _short(stage.values), f"{length:.3f}")
            stages.add_row(*map(Text, cells))
        yield stages


def _short(values: Sequence[float]) -> str:
    shown = " ".join(f"{value:+.2f}" for value in values[:SHOWN])
    return f"[{shown}{' ...' if len(values) > SHOWN else ''}]"


def walk(
    model: nn.Module,
    ids: Any,
    *,
    layer: int = 0,
    head: int = 0,
    query: int = -1,
    tokens: Sequence[str] | None = None,
    name: str | None = None,
) -> Walk:
    """Return every stage of one head for one query of a text, with the model's own numbers.

    Args:
        model: as for `at`.
        ids: (T,) or (1, T), integers: one text.
        layer: the index of the attention call in the forward pass, from 0.
        head: the index of the query head, from 0.
        query: the position of the query; negative counts from the end.
        tokens: the T tokens as text; the default is the digits of the ids.
        name: the name of the model; the default is its `name_or_path` or its class.

    Raises:
        TypeError: `model` has no attention that headwise supports, or the ids are not integers.
        ValueError: the model takes no text, the ids do not fit it, or there is no such layer, head or query.

    Example:
        >>> import headwise
        >>> class Reader(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.attend = nn.Embedding(97, 12), headwise.MultiHeadAttention(12, 3)
        ...     def forward(self, ids):
        ...         return self.attend(self.embed(ids), mask=headwise.causal())
        >>> found = walk(Reader(), [1, 2, 3, 5, 8], head=2, query=1)
        >>> [stage.name for stage in found.stages], [key.masked is None for key in found.keys]
        (['query', 'head', 'written', 'layer'], [False, False, True, True, True])
    """
    check_counts(0, layer=layer, head=head)
    inputs.check_told(name, None)
    model = unwrap(model)
    row, _ = inputs.checked_row(model, ids)
    named = inputs.as_tokens(row, tokens)
    check_counts(-FAR, query=query)
    place = query + len(row) if query < 0 else query
    if not 0 <= place < len(row):
        raise ValueError(f"the text has {len(row)} tokens, 0 to {len(row) - 1}; got query {query}")
    device = inputs.device_of(model)
    calls: list[AttentionCall] = []
    seen: list[int] = []

    def each(call: AttentionCall) -> None:
        seen.append(call.order)
        if call.order == layer:
            calls.append(call)

    def run(one: nn.Module) -> None:
        one(torch.tensor([row], device=device))

    with in_eval_mode_without_grad(model), torch.no_grad():
        with probe(model, each):
            run(model)
        if not calls:
            raise ValueError(f"the model has {len(seen)} layers, 0 to {len(seen) - 1}; got layer {layer}")
        [call] = calls
        if head >= call.query.shape[1]:
            H = call.query.shape[1]
            raise ValueError(f"layer {layer} has {H} heads, 0 to {H - 1}; got head {head}")
        projection = output_projections(model, run).get(call.module)
        part = None if projection is None else model.get_submodule(projection)
        stages = _stages(call, head, place, part)
    keys = _keys(call, head, place, named)
    scale = float(call.query.shape[-1] ** -0.5 if call.scale is None else call.scale)
    shown = name or inputs.model_name(model)
    return Walk(shown, call.module, layer, head, place, named[place], scale, stages, keys)


def _stages(call: AttentionCall, head: int, place: int, part: nn.Module | None) -> tuple[WalkStage, ...]:
    """Return the vectors of the query: before and after the weights, before and after W_O."""
    out = call.attend()  # (1, H, T, V)
    stages = [
        WalkStage("query", "q_i = x_i W_Q, after norms and rotary embedding", _numbers(call.query[0, head, place])),
        WalkStage("head", "head_i = sum_j P_ij v_j, before W_O", _numbers(out[0, head, place])),
    ]
    if part is not None:
        rows = out.transpose(1, 2)[:, place : place + 1]  # (1, 1, H, V)
        alone = torch.zeros_like(rows)
        alone[:, :, head] = rows[:, :, head]
        nothing = part(torch.zeros_like(rows).flatten(2))
        written = part(alone.flatten(2)) - nothing
        stages.append(WalkStage("written", "head_i W_O: what this head adds", _numbers(written[0, 0])))
        whole = part(rows.flatten(2))
        stages.append(WalkStage("layer", "Concat(head_1 .. head_h) W_O: all heads", _numbers(whole[0, 0])))
    return tuple(stages)


def _keys(call: AttentionCall, head: int, place: int, tokens: Sequence[str]) -> tuple[WalkKey, ...]:
    """Return all keys of the query."""
    with torch.no_grad():
        stages: tuple[Any, ...] = ("raw", "biased", "probabilities")
        raw, biased, shares = (
            weights(call.query, call.key, rows=place, heads=head, stage=stage, **call.scoring)[0, 0, 0]
            for stage in stages
        )
    shared = head // (call.query.shape[1] // call.key.shape[1])
    keys = call.key[0, shared]
    values = keys[:, :0] if call.value is None else call.value[0, shared]
    return tuple(
        WalkKey(
            position=j,
            token=tokens[j] if j < len(tokens) else f"#{j}",
            key=_numbers(keys[j]),
            value=_numbers(values[j]),
            score=float(raw[j]),
            masked=float(biased[j]) if torch.isfinite(biased[j]) else None,
            weight=float(shares[j]),
        )
        for j in range(keys.shape[0])
    )


def _numbers(vector: Tensor) -> tuple[float, ...]:
    return tuple(vector.detach().float().tolist())
