"""Records from a model and ids: a few forward passes, each attention call reduced to numbers immediately."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, TypeAlias

import numpy.typing as npt
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.unwrap import unwrap
from ..inputs import ids as inputs
from ..inputs.model_input import Source
from ..inputs.processor import source_of
from ..inputs.repeated_tokens import Repeats
from ..result import Look
from ..roles.call_tokens import NameSigns, Passage, usual_distances
from ..roles.catalog import COPIES, ROLES, TEXT
from ..weights.copying import Copying
from .excerpts import around
from .finalize import records
from .forward import OnProgress, Reader, batches, random_copies

LARGE_MAP = 128
"""The most cells per side of the large maps."""

LARGE_PICTURE = 320
"""The same limit for pictures and sound, where each of 16 x 16 patches and some tokens has its own cell."""

BATCH = 4096
"""The most tokens of one forward pass over several passages."""

Ids: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[int] | Sequence[Sequence[int]]"

REPEATS = Repeats()
"""The repeated random tokens that `at` uses by default."""


def at(
    model: nn.Module,
    ids: Ids | Mapping[str, Any],
    *,
    tokens: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    delimiters: Collection[int] | None = None,
    name: str | None = None,
    map_size: int = 32,
    full_maps: bool = True,
    repeats: Repeats | None = REPEATS,
    readings: Mapping[str, Sequence[Passage]] | None = None,
    progress: OnProgress | None = None,
) -> Look:
    """Measure every attention head of a model on a text.

    Two forward passes run without gradients and without dropout: one over the text, one over repeated random tokens
    (for duplicate-token and induction); `readings` add more. Each attention call is reduced to numbers immediately, in
    O(T) memory; no attention matrix is ever stored. The model is not changed. docs/look.md says what long texts cost.

    Args:
        model: any module made of `headwise.MultiHeadAttention`, or of the modules that `headwise.nn.replace` creates
            from `torch.nn.MultiheadAttention`, called as ``model(ids)``; or a transformers model, once `headwise.hf` is
            imported. Wrappers (adapters, data parallelism, compiled) are removed first.
        ids: (T,) or (1, T), integers, in a tensor, an array or a list: one text, special tokens included. Or the output
            of a processor or tokenizer, a mapping of tensors by name: ``pixel_values``, ``input_features``,
            ``input_values``, ``input_ids``, ``token_type_ids``, ``decoder_input_ids`` or ``labels``, and other inputs
            of the model.
        tokens: the T tokens as text; the default is the digits of the ids. For two texts a mapping, by the names of the
            ids.
        delimiters: ids that count as delimiters; the default is those whose token is one of ``. , ; : ! ?`` or a
            newline.
        name: the name of the model in the table; the default is its `name_or_path` or its class.
        map_size: the most cells per side of the map in each record.
        full_maps: whether to keep the large maps too (`Look.maps`), at most 128 cells per side (320 for pictures and
            sound), and for texts of at most 1,024 tokens the same maps by what the weights move (`Look.moved`) and the
            vectors of the first 64 (`Look.neurons`).
        repeats: the settings of the random tokens; None skips that pass.
        readings: additional passages, for the roles that need them: annotated ``"sentences"`` (see
            `headwise.look.annotate`), or texts with ``"needles"``.
        progress: called as ``progress(done, total)`` after each attention call.

    Raises:
        TypeError: `model` has no attention that headwise supports, or the ids are not integers.
        ValueError: ids for a model that takes no text, or a model that is divided over processes; no token, several
            texts, padding, ids outside the vocabulary, more tokens than the model has positions, an input that it does
            not take, layers that attend within windows of a picture, or scores that are not finite.

    Example:
        >>> import headwise
        >>> from headwise.testing.constructed import constructed
        >>> model, _ = constructed([["previous-token", "self"], ["induction"]])
        >>> look = headwise.look.at(model, [1, 2, 3, 5, 8, 13, 21, 34])
        >>> look.kind, look.num_layers, look.num_heads, len(look.heads[0].map)
        ('decoder', 2, 2, 8)
        >>> [head.role for head in look.heads]
        ['previous-token', 'self', 'induction']
    """
    started = time.perf_counter()
    model = unwrap(model)
    inputs.check_options(name, map_size, full_maps, repeats, progress)
    source, rows, named, facts = _read(model, ids, tokens)
    row = rows[0] or rows[1]
    words = inputs.vocabulary(row, named, delimiters, facts)
    others = inputs.checked_readings(readings, facts)
    repeats = repeats if rows[0] else None  # only pictures or sound: no ids to repeat
    passes = 1 + (repeats is not None) + len(others)
    large = LARGE_MAP if source is None or not source.beside() else LARGE_PICTURE
    sizes = map_size, map_size * max(1, large // map_size) if full_maps else 0
    reader = Reader(model, facts, words, ROLES, sizes, progress, passes, source)
    with in_eval_mode_without_grad(model):
        reader.pass_over(source or Source.of_rows(model, [Passage(row)], facts, None), TEXT)
        kept = reader.kept()
        copies = read_more(reader, repeats, others)
    length = len(row) or max(tally.widest[0] for tally in reader.tallies)
    pictures = source.pictures() if source is not None else ()
    seen = look_of(reader, name, started, length=length, tokens=named, pictures=pictures, **kept)
    spelt = dict(zip(row, named, strict=True))
    return replace(seen, excerpts=around(seen.heads, {COPIES: copies}, lambda one: spelt.get(one, f" {one}")))


def repeats_of(
    model: nn.Module, ids: Ids, tokens: Sequence[str] | None, delimiters: Collection[int] | None, *, ahead: bool
) -> Sequence[Passage]:
    """Return the repeated random tokens that `at` reads beside this text; `ahead` is true for an encoder."""
    model = unwrap(model)
    row = inputs.as_row(ids)
    facts = inputs.IdFacts.of(model, row)
    words = inputs.vocabulary(row, inputs.as_tokens(row, tokens), delimiters, facts)
    return random_copies(REPEATS, facts, words, ahead=ahead)


def _read(
    model: nn.Module, ids: Ids | Mapping[str, Any], tokens: Any
) -> tuple[Source | None, tuple[list[int], list[int]], tuple[str, ...], inputs.IdFacts]:
    """Return the source (None for one plain text), the ids of its texts, their tokens, and the facts about the ids."""
    if isinstance(ids, Mapping):
        source, rows = source_of(model, ids, tokens)
        facts = inputs.IdFacts.of(model, rows[0] or rows[1] or [0])
        return source, rows, tuple(source.names[0] or source.names[1]), facts
    row, facts = inputs.checked_row(model, ids)
    return None, (row, []), inputs.as_tokens(row, tokens), facts


def look_of(reader: Reader, name: str | None, started: float, **rest: Any) -> Look:
    """Return the sums of a reader as a look; `rest` are the fields that depend on the input."""
    return Look(
        model=name or inputs.model_name(reader.model),
        num_layers=len(reader.tallies),
        num_heads=max(tally.heads for tally in reader.tallies),
        heads=records(reader.tallies, reader.roles, reader.axes),
        kind=reader.kind,
        axes=reader.axes,
        seconds=round(time.perf_counter() - started, 3),
        version=version(),
        **rest,
    )


def read_more(
    reader: Reader,
    repeats: Repeats | None,
    readings: Mapping[str, Sequence[Passage]],
    mine: Callable[[Sequence[Passage]], bool] = bool,
) -> Sequence[Passage]:
    """Run the passes over repeated random tokens (returned), and over `readings`; only the batches that are `mine`."""
    drawn: Sequence[Passage] = ()
    if repeats is not None:
        drawn = random_copies(repeats, reader.facts, reader.words, ahead=reader.kind == "encoder")
        if drawn and mine(drawn):
            try:
                reader.read(drawn, COPIES)
            except IndexError as error:  # a model whose config has no number of positions
                raise ValueError(
                    f"{type(reader.model).__name__} failed on the {len(drawn[0].ids)} random tokens, repeated, that "
                    f"look reads beside the text ({error}); if it takes fewer positions, give "
                    "repeats=headwise.look.Repeats(length=...) or repeats=None"
                ) from error
    for reads, passages in readings.items():
        usual, reader.copying = usual_distances(passages), _copying(reader.model, passages)
        for batch in batches((replace(one, text=n) for n, one in enumerate(passages)), BATCH):
            if mine(batch):
                reader.read(batch, reads, usual)
    return drawn


def _copying(model: nn.Module, passages: Sequence[Passage]) -> NameSigns | None:
    """Return what heads do to the logits of all names that passages link; None without such links."""
    named = [one for one in passages if "name mover" in one.links]
    links = [(one, one.links.get(link, ())) for one in named for link in ("name mover", "other name")]
    names = {int(one.ids[key]) for one, rows in links for keys in rows for key in keys}
    among = {int(i) for one in passages for i in one.ids}
    copying = Copying.of(model, [int(i) for i in named[0].ids], names, among) if names else None
    return None if copying is None else copying.signs


def version() -> str:
    """Return the installed version of headwise."""
    try:
        return metadata.version("headwise")
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"
