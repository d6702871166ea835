"""One reading from a processor's output (a picture, a sound, or two texts), with the labels for a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.hooks.eval_mode import in_eval_mode_without_grad
from ..nn.hooks.probe import AttentionCall, probe
from ..shapes.arguments import shown
from .collect.reduce import looks_ahead
from .inputs.ids import IGNORED, TEXTS, checked_model, device_of
from .inputs.model_input import SOUNDS
from .interventions.losses import Loss, Reading, logits_in, readings, texts_of
from .interventions.outputs import as_classes


def all_readings(
    model: nn.Module, read: Any, *, loss: Loss | None, mask_id: int | None, seed: int, labels: bool = True
) -> list[Reading]:
    """Return the readings of texts, or the one reading of a processor's output; raise as these do."""
    if not isinstance(read, Mapping):
        return readings(model, texts_of(read), loss=loss, mask_id=mask_id, seed=seed)
    checked_model(model)
    if loss is not None and labels:
        raise ValueError("loss is of texts, (output, ids) -> (B,); leave it out where a processor made what is read")
    return [reading_of(model, read, labels=labels)]


def reading_of(model: nn.Module, values: Mapping[str, Any], *, labels: bool = True) -> Reading:
    """Return the reading of a processor's output with one batch row.

    If the logits predict the next token of a text, the labels are the next tokens. Otherwise (the class of a picture,
    the letters of a sound, the words of an encoder) the labels are the predictions of the unchanged model.

    Raises:
        TypeError: the values are not tensors by name.
        ValueError: there are several texts or sounds, or the model has no logits.
    """
    if not values or not all(isinstance(name, str) and isinstance(x, Tensor) and x.ndim for name, x in values.items()):
        raise TypeError(f"what a processor gives are tensors by name, such as pixel_values; got {shown(values)}")
    rows = {values[name].shape[0] for name in (*TEXTS, *SOUNDS) if name in values}
    if rows - {1}:
        raise ValueError(f"importance is measured on one text or sound at a time; got {shown(sorted(rows))} rows")
    call = {name: x.to(device_of(model)) for name, x in values.items()}
    reading = Reading((), torch.zeros(1, 0, dtype=torch.long, device="cpu"), call=call)
    return _labelled(model, reading) if labels else reading


def _labelled(model: nn.Module, reading: Reading) -> Reading:
    """Return the reading with its labels."""
    ahead: list[bool | None] = []

    def each(call: AttentionCall) -> None:
        ahead.append(looks_ahead(call))

    with in_eval_mode_without_grad(model), probe(model, each):
        output = reading.output(model)
    logits = logits_in(output)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3) or not logits.is_floating_point():
        raise ValueError(
            f"what {type(model).__name__} gives has no logits (B, T, vocabulary) or (B, classes) to measure a loss on; "
            "load it with its head"
        )
    logits = as_classes(logits)
    text = reading.call.get(TEXTS[1], reading.call.get(TEXTS[0]))
    decodes = TEXTS[1] in reading.call or not any(ahead)
    if text is None or not decodes or text.shape[1] != logits.shape[1] or text.shape[1] < 2:
        labels = logits.argmax(-1)
    else:
        labels = torch.full_like(text, IGNORED)
        labels[:, :-1] = text[:, 1:]
        labels[(labels < 0) | (labels >= logits.shape[-1])] = IGNORED
        for name in ("image_token_id", "image_token_index", "audio_token_id"):
            labels[labels == getattr(getattr(model, "config", None), name, None)] = IGNORED
    return Reading((), labels, logits.shape[-1], call=reading.call)
