"""From a model and ids to records: two forward passes, each attention call reduced to numbers as it happens."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, TypeAlias

import numpy.typing as npt
from torch import Tensor, nn

from ..nn.unwrap import unwrap
from . import inputs
from .measure import Measured, Sizes
from .passes import Progress, Steps, random_copies, read_copies, read_text, resting
from .records import Look
from .repeats import Repeats
from .roles import find

LARGE_MAP = 128
"""Most cells a side of the large maps."""

Ids: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[int] | Sequence[Sequence[int]]"

REPEATS = Repeats()
"""The repeated random tokens that `at` reads by default."""


def at(
    model: nn.Module,
    ids: Ids,
    *,
    tokens: Sequence[str] | None = None,
    delimiters: Collection[int] | None = None,
    name: str | None = None,
    map_size: int = 32,
    full_maps: bool = True,
    repeats: Repeats | None = REPEATS,
    progress: Progress | None = None,
) -> Look:
    """Look at every attention head of a model while it reads a text.

    Two forward passes, without gradients and with dropout off: the text, and random tokens repeated (for
    duplicate-token and induction). Each attention call is reduced to numbers at once, in O(T) memory; no attention
    matrix exists at any time. The model is left as it was.

    Args:
        model: any module made of `headwise.MultiHeadAttention`, called as ``model(ids)``; or a transformers model, once
            `headwise.hf` is imported. Wrapped ones (adapters, data parallelism, compiled) are read as what they wrap.
        ids: (T,) or (1, T), integers, in a tensor, an array or a list: one text, special tokens included.
        tokens: the T tokens as text; the ids' digits by default.
        delimiters: ids that count as delimiters; by default those whose token is one of ``. , ; : ! ?`` or a line end.
        name: of the model, for the table; what the model calls itself by default.
        map_size: most cells a side of the map in each record.
        full_maps: whether to keep the large maps too (`Look.maps`), at most 128 cells a side.
        repeats: how the random tokens are made; None skips that pass.
        progress: called as ``progress(done, total)`` after each attention call.

    Raises:
        TypeError: `model` holds no attention that headwise can see, or ids that are no integers.
        ValueError: the model reads no text, or is split over processes; no token, several texts, ids the model does not
            know, more tokens than it has positions, or scores that are not finite.

    Example:
        >>> import torch, headwise
        >>> class Reader(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.attend = torch.nn.Embedding(97, 12), headwise.MultiHeadAttention(12, 3)
        ...     def forward(self, ids):
        ...         return self.attend(self.embed(ids), mask=headwise.causal())
        >>> look = headwise.look.at(Reader(), [1, 2, 3, 5, 8, 13, 21, 34])
        >>> look.kind, look.num_layers, look.num_heads, len(look.heads[0].map)
        ('decoder', 1, 3, 8)
    """
    started = time.perf_counter()
    model = unwrap(model)
    inputs.check_reads_text(model)
    row = inputs.as_row(ids)
    facts = inputs.IdFacts.of(model, row)
    inputs.check_fits(row, facts.vocabulary, facts.positions)
    named = inputs.as_tokens(row, tokens)
    inputs.check_options(name, map_size, full_maps, repeats, progress)
    marks = inputs.delimiter_ids(row, named, delimiters)
    sizes = Sizes(map_size, map_size * max(1, LARGE_MAP // map_size) if full_maps else 0)
    steps = Steps(progress, passes=1 if repeats is None else 2)
    with resting(model):
        calls = read_text(model, row, facts, marks, sizes, steps)
        kind = kind_of(calls)
        if repeats is not None:
            drawn = random_copies(repeats, facts, marks, ahead=kind == "encoder")
            calls = read_copies(model, drawn, facts, calls, steps)
    return Look(
        model=name or inputs.model_name(model),
        num_layers=len(calls),
        num_heads=max(len(call.heads) for call in calls),
        length=len(row),
        tokens=named,
        heads=tuple(replace(head, roles=find(head, call.uniform)) for call in calls for head in call.heads),
        kind=kind,
        seconds=round(time.perf_counter() - started, 3),
        version=_version(),
        maps=tuple(large for call in calls for large in call.maps),
    )


def kind_of(calls: Sequence[Measured]) -> str:
    """What the model is, by where its queries may look."""
    if any(call.ahead is None for call in calls):
        return "encoder-decoder"
    return "encoder" if any(call.ahead for call in calls) else "decoder"


def _version() -> str:
    try:
        return metadata.version("headwise")
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"
