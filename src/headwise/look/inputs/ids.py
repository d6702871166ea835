"""What goes into a look: ids checked against the model, and how the model wants to be called.

Models are read by the names that are common to most: ``config.vocab_size``, ``config.max_position_embeddings``,
``use_cache`` and the like, wherever they are there. No library of models is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.probe import AttentionCall
from ...shapes.arguments import check_counts, check_dense, check_flags, check_texts, shown, whole_numbers
from ..roles.call_tokens import BLANKS, MARKS, Passage, Vocabulary, is_punctuation
from .repeated_tokens import Repeats

SPECIAL = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "decoder_start")
EXTRA_READINGS = ("sentences", "needles")


def check_reads_text(model: object) -> None:
    """Raise where the model is none, or its first input is no text.

    Raises:
        TypeError: not a module.
        ValueError: a model of images or sound.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"look needs a torch.nn.Module, got {type(model).__name__}; load the model first")
    takes = getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids":
        raise ValueError(_no_text(model, f"takes {takes!r}"))


def check_reads_nothing_else(model: nn.Module, error: Exception) -> None:
    """Raise ValueError where the model failed on ids alone, and says that it reads more than text."""
    kinds = getattr(model, "input_modalities", "text")
    if not isinstance(kinds, str) and set(kinds) != {"text"}:
        what = f"takes {' and '.join(kinds)}, and does not run on ids alone ({type(error).__name__}: {error})"
        raise ValueError(_no_text(model, what)) from error


def _no_text(model: nn.Module, what: str) -> str:
    return (
        f"ids are a text, and {type(model).__name__} {what}; give look.at what its processor gives, such as "
        "processor(images=image, return_tensors='pt'), or look at its text part"
    )


def check_heads(module: object, call: AttentionCall) -> None:
    """Raise ValueError where a module ran another number of query heads than it, or its config, says that it has."""
    config = getattr(module, "config", None)
    words = [_whole(module, "num_heads"), _whole(module, "num_attention_heads"), _whole(config, "num_attention_heads")]
    counts, heads = [word for word in words if word is not None], call.query.shape[1]
    if counts and heads not in counts:
        raise ValueError(
            f"module {call.module!r} ran {heads} query heads and has {counts[0]}: the model is split over processes "
            "(tensor parallelism), and its heads would be numbered wrong; load the whole model in one process"
        )


def _whole(owner: object, name: str) -> int | None:
    """Return an attribute that is a whole number; None for any other, and for one that cannot be read."""
    try:
        value = getattr(owner, name, None)
    except Exception:  # a config whose layers differ may raise of its own
        return None
    return value if isinstance(value, int) else None


def as_row(ids: object) -> list[int]:
    """Return the ids of one text from a tensor (T,) or (1, T), an array, or a list of ints.

    Raises:
        TypeError: not integers.
        ValueError: no token, or more than one text.
    """
    try:
        row = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(
            f"ids are the integers a tokenizer gives, (T,) or (1, T); got {type(ids).__name__}; "
            "pass tokenizer(text)['input_ids']"
        ) from None
    check_dense("ids", row)
    if row.is_meta:
        raise ValueError("ids are on the meta device and hold no numbers; give those that the tokenizer gave")
    if row.numel() == 0:
        raise ValueError(f"look needs at least one token, got ids of shape {tuple(row.shape)}; give a longer text")
    if row.is_floating_point() or row.is_complex() or row.is_quantized or row.dtype == torch.bool:
        raise TypeError(f"ids are the integers a tokenizer gives; got {row.dtype}; convert with .long()")
    if row.ndim == 0 or row.ndim > 2 or (row.ndim == 2 and row.shape[0] > 1):
        raise ValueError(
            f"look reads one text at a time, ids (T,) or (1, T); got {tuple(row.shape)}; look at each row by itself"
        )
    return [int(i) for i in row.reshape(-1).tolist()]


def check_fits(ids: Sequence[int], vocabulary: int | None, positions: int | None) -> None:
    """Raise ValueError where an id is none of the model's, or the text is longer than its positions."""
    if vocabulary is not None:
        wrong = [(place, i) for place, i in enumerate(ids) if not 0 <= i < vocabulary]
        if wrong:
            raise ValueError(
                f"ids of this model are 0 to {vocabulary - 1}; got {wrong[0][1]} at place {wrong[0][0]} "
                f"({len(wrong)} of {len(ids)} ids do not fit); use the tokenizer that belongs to the model"
            )
    if positions is not None and len(ids) > positions:
        raise ValueError(
            f"the text has {len(ids)} tokens, but the model takes {positions} positions; give a shorter text"
        )


def check_options(name: object, map_size: object, full_maps: object, repeats: object, progress: object) -> None:
    """What else `look.at` takes; raises TypeError or ValueError."""
    check_told(name, progress)
    check_counts(0, map_size=map_size)
    if map_size == 0:
        raise ValueError(f"map_size is the number of cells a side of a map, at least 1; got {map_size}")
    check_flags(full_maps=full_maps)
    if repeats is not None and not isinstance(repeats, Repeats):
        raise TypeError(f"repeats is a headwise.look.Repeats or None; got {shown(repeats)}")


def check_told(name: object, progress: object) -> None:
    """The name of the model, and what is told of the work; raises TypeError."""
    if name is not None:
        check_texts(name=name)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is called as progress(done, total), or None; got {shown(progress)}")


def checked_readings(readings: object, facts: IdFacts) -> Mapping[str, Sequence[Passage]]:
    """Return what else the model reads; raise TypeError or ValueError."""
    if readings is None:
        return {}
    if not isinstance(readings, Mapping):
        raise TypeError(f"readings are a dict, kind of reading -> passages; got {shown(readings)}")
    for reads, passages in readings.items():
        if reads not in EXTRA_READINGS:
            raise ValueError(f"readings are by kind: {' and '.join(EXTRA_READINGS)}; got {shown(reads)}")
        if isinstance(passages, (str, bytes)) or not isinstance(passages, Sequence):
            raise TypeError(f"readings[{reads!r}] is a list of headwise.look.Passage; got {shown(passages)}")
        for passage in passages:
            if not isinstance(passage, Passage):
                raise TypeError(f"readings[{reads!r}] holds headwise.look.Passage; got {shown(passage)}")
            check_fits(as_row(list(passage.ids)), facts.vocabulary, facts.positions)
            _check_places(reads, passage)
    return {reads: passages for reads, passages in readings.items() if passages}


def _check_places(reads: str, passage: Passage) -> None:
    """Raise where links or classes are no lists of places (TypeError), or name places outside the passage."""
    T, places = len(passage.ids), dict[str, list[int]]()
    for name, linked in _items(reads, "links", passage.links):
        if isinstance(linked, (str, bytes)) or not isinstance(linked, Sequence):
            raise TypeError(f"readings[{reads!r}]: {name} is a list of places for each token; got {shown(linked)}")
        if len(linked) > T:
            raise ValueError(
                f"readings[{reads!r}]: {name} lists the places linked to each token, and the passage has {T} tokens; "
                f"got {len(linked)} lists"
            )
        rows = [whole_numbers(f"readings[{reads!r}]: places in {name}", keys) for keys in linked]
        places[name] = [place for row in rows for place in row]
    for name, members in _items(reads, "classes", passage.classes):
        places[name] = whole_numbers(f"readings[{reads!r}]: places in {name}", members)
    for name, listed in places.items():
        wrong = [place for place in listed if not 0 <= place < T]
        if wrong:
            raise ValueError(
                f"readings[{reads!r}]: places of a passage of {T} tokens are 0 to {T - 1}; {name} names {wrong[0]}"
            )


def _items(reads: str, what: str, named: object) -> list[tuple[str, Any]]:
    """The entries of a passage's links or classes, each with its name as errors say it; TypeError for no dict."""
    if not isinstance(named, Mapping):
        raise TypeError(f"readings[{reads!r}]: {what} of a passage are a dict, name -> places; got {shown(named)}")
    return [(f"{what}[{name!r}]", places) for name, places in named.items()]


def text_config(model: nn.Module) -> Any:
    """Return the model's configuration of its text part, an empty object where it has none."""
    config = getattr(model, "config", None)
    nested = getattr(config, "get_text_config", None)
    return nested() if callable(nested) else config


@dataclass(frozen=True)
class IdFacts:
    """What a model says of its ids, and what a text begins and ends with.

    Attributes:
        vocabulary: how many ids it knows: its config's word, else the rows of its first embedding; None without both.
        positions: how many tokens it takes; None where it does not say.
        special: the ids its config names, by ``bos``, ``eos``, ``pad``, ...
        first: what the text began with.
        last: what the text ended with.
        apart: further ids that its config names: places of pictures and the like, which no random text may hold.
    """

    vocabulary: int | None
    positions: int | None
    special: dict[str, int]
    first: int
    last: int
    apart: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, ids: Sequence[int]) -> IdFacts:
        """Read from the model's config, and from the text."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"look needs a torch.nn.Module, got {type(model).__name__}; load the model first")
        config = text_config(model)
        vocabulary = getattr(config, "vocab_size", None)
        if not isinstance(vocabulary, int):
            tables = (part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding))
            vocabulary = next(tables, None)
        positions = getattr(config, "max_position_embeddings", None)
        special = {}
        for name in SPECIAL:
            value = getattr(config, f"{name}_token_id", None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and 0 <= value < (vocabulary or value + 1):
                special[name] = value
        limit = positions if isinstance(positions, int) and positions > 0 else None
        named = getattr(getattr(model, "config", None), "__dict__", {}).items()
        apart = [i for name, i in named if isinstance(i, int) and name.endswith(("_token_id", "_token_index"))]
        return cls(vocabulary, limit, special, ids[0], ids[-1], frozenset(apart))

    @property
    def opener(self) -> int:
        """What begins a text: what this one began with, unless that is no special id and the model has a BOS."""
        return self.first if self.first in self.special.values() else self.special.get("bos", self.first)

    @property
    def start(self) -> int:
        """What a decoder beside an encoder begins with."""
        return self.special.get("decoder_start", self.opener)


def model_name(model: nn.Module) -> str:
    """Return what the model calls itself: the path or name it was loaded from, or its class."""
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    return name if isinstance(name, str) and name else type(model).__name__


def as_tokens(ids: Sequence[int], tokens: object) -> tuple[str, ...]:
    """Return the tokens as text, one an id; the ids' digits where the caller names none."""
    if tokens is None:
        return tuple(str(i) for i in ids)
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokens are the text of each id, a list of strings; got {shown(tokens)}")
    if len(tokens) != len(ids):
        raise ValueError(f"tokens are the text of each id: got {len(tokens)} tokens for {len(ids)} ids; give one each")
    return tuple(str(token) for token in tokens)


def vocabulary(
    ids: Sequence[int], tokens: Sequence[str], delimiters: Collection[int] | None, facts: IdFacts
) -> Vocabulary:
    """What the ids are: delimiters as the caller says, or those whose text is a punctuation mark or a line's end."""
    pairs = list(zip(ids, tokens, strict=True))
    if delimiters is not None:
        chosen = frozenset(whole_numbers("delimiters", list(delimiters) if isinstance(delimiters, Set) else delimiters))
    else:
        chosen = frozenset(i for i, token in pairs if token.strip(BLANKS) in MARKS)
    special = frozenset(facts.special.values())
    marks = frozenset(i for i, token in pairs if i not in special and is_punctuation(token))
    closers = {facts.special.get("sep")} | (chosen & special) | {i for i, token in pairs if token == "[SEP]"}
    return Vocabulary(
        chosen,
        marks,
        special,
        stops=frozenset(i for i, token in pairs if token.strip(BLANKS) == "."),
        commas=frozenset(i for i, token in pairs if token.strip(BLANKS) == ","),
        separators=frozenset(i for i in closers if i is not None),
    )


def is_pair(model: nn.Module) -> bool:
    """Return whether a model is an encoder-decoder, by what its forward takes."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def rows(model: nn.Module, ids_BT: Tensor, facts: IdFacts) -> tuple[Tensor, ...]:
    """Return what the model reads: the ids, and for an encoder-decoder those of its decoder.

    The decoder reads the same ids behind its start, one fewer than the encoder: so its length tells which is which.
    """
    if not is_pair(model):
        return (ids_BT,)
    start = torch.full_like(ids_BT[:, :1], facts.start)
    return ids_BT, torch.cat([start, ids_BT[:, : max(ids_BT.shape[1] - 2, 0)]], dim=1)


def by_name(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is called with; pixels go by the name that it has for its one input, where it takes no other."""
    takes = inspect.signature(model.forward).parameters.values()
    required = [one.name for one in takes if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    known = any(one.name == "pixel_values" or one.kind is one.VAR_KEYWORD for one in takes)
    own = "pixel_values" if known or len(required) != 1 else required[0]
    return {own if name == "pixel_values" else name: value for name, value in values.items()}


def lean(model: nn.Module) -> dict[str, Any]:
    """Options of a lean forward: where the model lets us, no cache is filled and only the last logits are made."""
    wanted: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
    named = inspect.signature(model.forward).parameters
    return {name: value for name, value in wanted.items() if name in named}


def run(model: nn.Module, rows: tuple[Tensor, ...]) -> None:
    """One lean forward pass over texts."""
    options = lean(model)
    if len(rows) > 1:
        options["decoder_input_ids"] = rows[1]
    model(rows[0], **options)
