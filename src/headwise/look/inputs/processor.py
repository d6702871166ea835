"""The output of a processor, checked and prepared for a model: texts, pictures and sound by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...shapes.arguments import check_dense, shown
from ..roles.call_tokens import FIRST, SECOND, Passage
from . import ids as inputs
from .ids import IGNORED, TEXTS, IdFacts
from .model_input import PIXELS, SOUNDS, Source

MASKS = ("attention_mask", "decoder_attention_mask")
Named = Sequence[str] | Mapping[str, Sequence[str]] | None


def source_of(model: nn.Module, read: Mapping[Any, Any], tokens: Named) -> tuple[Source, tuple[list[int], list[int]]]:
    """Return the source of a model's input, checked, and the ids of its text and its decoder's; empty without them."""
    values = _checked(inputs.checked_model(model), read)
    ids = inputs.as_row(values.pop("input_ids")) if "input_ids" in values else []
    target = _target(model, values)
    names = _names(tokens, ids, target)
    segments = values.get("token_type_ids")
    if segments is not None and not bool(segments.any()) and not _beside(values):
        del values["token_type_ids"]
    takes, device = inspect.signature(model.forward).parameters, inputs.device_of(model)
    dtype = next((weight.dtype for weight in model.parameters()), None)
    call = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in values.items()}
    for name in MASKS:
        if ids or name not in takes:
            call.pop(name, None)
    facts = IdFacts.of(model, ids or target or [0])
    first, second = (torch.tensor([row], device=device) if row else None for row in (ids, target))
    texts = (first, second) if first is None or target else inputs.rows(model, first, facts)
    passages = _passages(ids, target, segments, facts, call)
    source = Source(model, texts, passages, call, names, own=bool(target) and bool(ids))
    for row in (ids, target):
        image = source.image_id()
        inputs.check_fits([i for i in row if i != image], facts.vocabulary, None)
        inputs.check_fits([0] * len(row), None, facts.positions)
    return source, (ids, target)


def _checked(model: nn.Module, read: Mapping[Any, Any]) -> dict[str, Any]:
    """Return tensors by name, checked against the model's parameters; None is left out."""
    takes = inspect.signature(model.forward).parameters
    rule = f"{type(model).__name__} is called with what its processor gives"
    takes_any = any(one.kind == one.VAR_KEYWORD for one in takes.values())
    values: dict[str, Any] = {}
    for name, value in read.items():
        if not isinstance(name, str):
            raise TypeError(f"{rule}, by name; got {shown(name)} for a name")
        if value is None:
            continue
        known = name in takes or name in (*TEXTS, *MASKS, "labels") or takes_any
        known = known or name not in inputs.by_name(model, {name: value})
        if not known:
            raise ValueError(f"{rule}: it takes {', '.join(takes)}; got {name!r}; leave that out")
        values[name] = _tensor(name, value, rule)
    if not any(name in values for name in (*TEXTS, PIXELS, *SOUNDS)):
        wanted = ", ".join((*TEXTS, PIXELS, *SOUNDS))
        raise ValueError(f"{rule}: one of {wanted} at the least; got {', '.join(values) or 'nothing'}")
    for name in MASKS:
        if name in values and any(text in values for text in TEXTS) and not bool(values[name].bool().all()):
            raise ValueError(f"look reads texts without padding; {name} has zeros: cut those places off")
    return values


def _tensor(name: str, value: object, rule: str) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{rule}: tensors, arrays or lists of numbers; got {shown(value)} for {name}") from None
    check_dense(name, tensor)
    if name in (*TEXTS, "labels"):
        return tensor
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no numbers; give what the processor gave")
    if 0 in tensor.shape or tensor.ndim == 0:
        raise ValueError(f"{rule}: {name} holds nothing, got shape {tuple(tensor.shape)}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(f"{rule}: {name} holds NaN or infinite numbers; give another input")
    if name in (PIXELS, *SOUNDS):
        if not tensor.is_floating_point():
            raise TypeError(f"{rule}: {name} are floats, as the processor makes them; got {tensor.dtype}")
        least = 3 if name == "input_features" else 2
        if not least <= tensor.ndim <= 5 or (name in SOUNDS and (tensor.shape[0] != 1 or tensor.ndim > 3)):
            raise ValueError(
                f"{rule}: pictures (N, C, height, width) or one sound (1, ...); got {name} of {tuple(tensor.shape)}"
            )
    return tensor


def _target(model: nn.Module, values: dict[str, Any]) -> list[int]:
    """Return the decoder's ids: given, or from the labels after the start id; only the start for sound or pictures."""
    labels = values.pop("labels", None)
    if "decoder_input_ids" in values:
        return inputs.as_row(values.pop("decoder_input_ids"))
    if not inputs.is_pair(model):
        return []
    facts = IdFacts.of(model, [0])
    if labels is not None:
        return [facts.start, *(i for i in inputs.as_row(labels) if i != IGNORED)][:-1]
    return [] if "input_ids" in values or not _beside(values) else [facts.start]


def _beside(values: Mapping[str, Any]) -> bool:
    return any(name in values for name in (PIXELS, *SOUNDS))


def _names(tokens: Named, ids: Sequence[int], target: Sequence[int]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the tokens of both texts."""
    if isinstance(tokens, Mapping):
        return (inputs.as_tokens(ids, tokens.get(TEXTS[0])), inputs.as_tokens(target, tokens.get(TEXTS[1])))
    if ids or not target:
        return inputs.as_tokens(ids, tokens if ids else None), inputs.as_tokens(target, None)
    return (), inputs.as_tokens(target, tokens)


def _passages(
    ids: Sequence[int], target: Sequence[int], segments: Tensor | None, facts: IdFacts, call: Mapping[str, Any]
) -> list[Passage]:
    """Return the texts as passages, with classes for a sentence pair; or one passage per picture or sound."""
    if not ids and not target:
        first = next(call[name] for name in (PIXELS, *SOUNDS) if name in call)
        return [Passage((), text=n) for n in range(first.shape[0])]
    classes: dict[str, list[int]] = {}
    if segments is not None and bool(segments.any()):
        kinds = segments.reshape(-1).tolist()
        if len(kinds) != len(ids):
            raise ValueError(f"token_type_ids are one for each id; got {len(kinds)} for {len(ids)} ids; give one each")
        special = {*facts.special.values(), ids[0], ids[-1]}
        for name, kind in ((FIRST, 0), (SECOND, 1)):
            classes[name] = [n for n, i in enumerate(ids) if kinds[n] == kind and i not in special]
    return [Passage(ids or target, classes=classes)]
