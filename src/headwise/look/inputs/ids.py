"""Token ids checked against the model, and the arguments of the model's forward pass.

The module reads attribute names that most models share: ``config.vocab_size``, ``config.max_position_embeddings``,
``use_cache`` and others, where they exist. No model library is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.probe import AttentionCall
from ...nn.hooks.projections import is_intercepted
from ...shapes.arguments import check_counts, check_dense, check_flags, check_texts, shown, whole_numbers
from ..roles.call_tokens import Passage, Vocabulary, classes_of
from .repeated_tokens import Repeats

SPECIAL = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "decoder_start")
TEXTS = ("input_ids", "decoder_input_ids")
IGNORED = -100  # the label of a place without a loss
EXTRA_READINGS = ("sentences", "needles")


def check_reads_text(model: object) -> None:
    """Raise TypeError if this is not a model, ValueError if its main input is a picture or a sound."""
    takes = getattr(checked_model(model), "main_input_name", "input_ids")
    if takes != "input_ids":
        raise ValueError(_no_text(model, f"takes {takes!r}"))


def checked_model(model: object) -> nn.Module:
    """Return a model; raise TypeError if it is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"look needs a torch.nn.Module, got {type(model).__name__}; load the model first")
    return model


def device_of(model: nn.Module) -> torch.device:
    """Return the device for the inputs: that of the first weight with numbers; the CPU if no weight has any yet.

    An offloaded model keeps its weights on the meta device and loads those of a module when the module is called.

    Raises:
        ValueError: all weights are on the meta device, and no hook or replaced forward could load them.
    """
    first = None
    for first in model.parameters():
        if not first.is_meta:
            return first.device
    if first is not None and not any(is_intercepted(part) for part in model.modules()):
        raise ValueError(
            f"the weights of {type(model).__name__} are on the meta device and hold no numbers; load them first, for "
            "example with from_pretrained, or with model.to_empty(device='cpu') and model.load_state_dict(...)"
        )
    return torch.device("cpu")


def check_reads_nothing_else(model: nn.Module, error: Exception) -> None:
    """Raise ValueError if the model failed on ids only and its `input_modalities` list more than text."""
    kinds = getattr(model, "input_modalities", "text")
    if not isinstance(kinds, str) and set(kinds) != {"text"}:
        what = f"takes {' and '.join(kinds)}, and does not run on ids alone ({type(error).__name__}: {error})"
        raise ValueError(_no_text(model, what)) from error


def _no_text(model: object, what: str) -> str:
    return (
        f"ids are a text, and {type(model).__name__} {what}; give look.at what its processor gives, such as "
        "processor(images=image, return_tensors='pt'), or look at its text part"
    )


def check_heads(module: object, call: AttentionCall) -> None:
    """Raise ValueError if a module ran a number of query heads that differs from its own or its config's."""
    config = getattr(module, "config", None)
    said = [(module, "num_heads"), (module, "num_attention_heads"), (config, "num_attention_heads")]
    counts, heads = [n for owner, name in said if (n := whole_of(owner, name)) is not None], call.query.shape[1]
    if counts and heads not in counts:
        raise ValueError(
            f"module {call.module!r} ran {heads} query heads and has {counts[0]}: the model is split over processes "
            "(tensor parallelism), and its heads would be numbered wrong; load the whole model in one process"
        )


def whole_of(owner: object, name: str) -> int | None:
    """Return an attribute that is an int; None for other types, and if reading it fails."""
    try:
        value = getattr(owner, name, None)
    except Exception:  # a config with different layers may raise its own errors
        return None
    return value if isinstance(value, int) else None


def as_row(ids: object) -> list[int]:
    """Return the ids of one text from a tensor (T,) or (1, T), an array, or a list of ints; raise if it is none."""
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
        raise TypeError(
            f"ids are the integers a tokenizer gives; got {row.dtype}; convert with .long(), or pass what is no text "
            "by name: {'pixel_values': x}"
        )
    if row.ndim == 0 or row.ndim > 2 or (row.ndim == 2 and row.shape[0] > 1):
        raise ValueError(
            f"look reads one text at a time, ids (T,) or (1, T); got {tuple(row.shape)}; look at each row by itself"
        )
    return [int(i) for i in row.reshape(-1).tolist()]


def checked_row(model: nn.Module, ids: object) -> tuple[list[int], IdFacts]:
    """Return the ids of one text and the facts about them; raise TypeError or ValueError if the model takes no such."""
    check_reads_text(model)
    row = as_row(ids)
    facts = IdFacts.of(model, row)
    check_fits(row, facts.vocabulary, facts.positions)
    return row, facts


def check_fits(ids: Sequence[int], vocabulary: int | None, positions: int | None) -> None:
    """Raise ValueError if an id is outside the vocabulary, or the text is longer than the model's positions."""
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
    """Check the other arguments of `look.at`; raise TypeError or ValueError."""
    check_told(name, progress)
    check_counts(1, map_size=map_size)
    check_flags(full_maps=full_maps)
    if repeats is not None and not isinstance(repeats, Repeats):
        raise TypeError(f"repeats is a headwise.look.Repeats or None; got {shown(repeats)}")


def check_told(name: object, progress: object) -> None:
    """Check the name of the model and the progress callback; raise TypeError."""
    if name is not None:
        check_texts(name=name)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is called as progress(done, total), or None; got {shown(progress)}")


def checked_readings(readings: object, facts: IdFacts) -> Mapping[str, Sequence[Passage]]:
    """Return the additional readings, checked; raise TypeError or ValueError."""
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
    """Raise TypeError if links or classes are not lists of positions, ValueError for positions out of range."""
    T, where = len(passage.ids), f"readings[{reads!r}]"
    for what, named in (("links", passage.links), ("classes", passage.classes)):
        if not isinstance(named, Mapping):
            raise TypeError(f"{where}: {what} of a passage are a dict, name -> places; got {shown(named)}")
        for key, listed in named.items():
            name, rows = f"{what}[{key!r}]", listed if what == "links" else [listed]
            if isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence):
                raise TypeError(f"{where}: {name} is a list of places for each token; got {shown(rows)}")
            if len(rows) > T:
                raise ValueError(
                    f"{where}: {name} lists the places linked to each token, and the passage has {T} tokens; got "
                    f"{len(rows)} lists"
                )
            places = [place for row in rows for place in whole_numbers(f"{where}: places in {name}", row)]
            if wrong := [place for place in places if not 0 <= place < T]:
                raise ValueError(
                    f"{where}: places of a passage of {T} tokens are 0 to {T - 1}; {name} names {wrong[0]}"
                )


@dataclass(frozen=True)
class IdFacts:
    """The facts about a model's ids, and the first and last id of a text."""

    vocabulary: int | None  # the number of ids: from the config, else the rows of the first embedding
    positions: int | None  # the most tokens of a text, if the config has it
    special: dict[str, int]  # the special ids in the config, by ``bos``, ``eos``, ``pad``, ...
    first: int
    last: int
    apart: frozenset[int] = frozenset()  # all ids that the config names, such as placeholders of pictures

    @classmethod
    def of(cls, model: nn.Module, ids: Sequence[int]) -> IdFacts:
        """Read the facts from the model's config and the text."""
        whole = getattr(model, "config", None)
        nested = getattr(whole, "get_text_config", None)
        config = nested() if callable(nested) else whole
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
        named = getattr(whole, "__dict__", {}).items()
        apart = [i for name, i in named if isinstance(i, int) and name.endswith(("_token_id", "_token_index"))]
        return cls(vocabulary, limit, special, ids[0], ids[-1], frozenset(apart))

    @property
    def opener(self) -> int:
        """The id that begins a text: the first one of this text, unless that is not special and the model has a BOS."""
        return self.first if self.first in self.special.values() else self.special.get("bos", self.first)

    @property
    def start(self) -> int:
        """The first id of the decoder in an encoder-decoder."""
        return self.special.get("decoder_start", self.opener)


def model_name(model: nn.Module) -> str:
    """Return the path or name from which the model was loaded, or its class."""
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    return name if isinstance(name, str) and name else type(model).__name__


def as_tokens(ids: Sequence[int], tokens: object) -> tuple[str, ...]:
    """Return the tokens as text, one per id; the digits of the ids if `tokens` is None."""
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
    """Return the classes of a text's ids; `classes_of` describes the delimiters."""
    words = classes_of([*zip(ids, tokens, strict=True)], delimiters, frozenset(facts.special.values()))
    closers = {i for name, i in facts.special.items() if name == "sep"}
    return replace(words, separators=words.separators | closers)


def is_pair(model: nn.Module) -> bool:
    """Return whether a model is an encoder-decoder, by the parameters of its `forward`."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def rows(model: nn.Module, ids_BT: Tensor, facts: IdFacts) -> tuple[Tensor, Tensor | None]:
    """Return the ids, and for an encoder-decoder those of its decoder: its start id, then the ids without the last two.

    It reads one fewer in total than the encoder, so the length identifies it.
    """
    if not is_pair(model):
        return ids_BT, None
    start = torch.full_like(ids_BT[:, :1], facts.start)
    return ids_BT, torch.cat([start, ids_BT[:, : max(ids_BT.shape[1] - 2, 0)]], dim=1)


def by_name(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a model; pixels take its only required name if it has no `pixel_values`."""
    takes = inspect.signature(model.forward).parameters.values()
    required = [one.name for one in takes if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    known = any(one.name == "pixel_values" or one.kind is one.VAR_KEYWORD for one in takes)
    own = "pixel_values" if known or len(required) != 1 else required[0]
    return {own if name == "pixel_values" else name: value for name, value in values.items()}


def forward(
    model: nn.Module, ids: Tensor | None, target: Tensor | None, call: Mapping[str, Any], *, last: bool = True
) -> Any:
    """Return the model's output for the ids of its text and of its decoder's, and other arguments by name.

    The pass is cheap where the model has the options: no cache, and with `last` only the last logits.
    """
    wanted = {"use_cache": False} | ({"logits_to_keep": 1} if last else {})
    named = inspect.signature(model.forward).parameters
    options = {name: value for name, value in wanted.items() if name in named} | by_name(model, call)
    if target is not None:
        options["decoder_input_ids"] = target
    if ids is not None and call:
        options["input_ids"] = ids
    return model(*[ids] * (ids is not None and not call), **options)
