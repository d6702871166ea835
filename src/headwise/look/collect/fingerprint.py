"""Fingerprints of runs over many texts: sums are only added if their fingerprints are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs.repeated_tokens import Repeats
from ..roles.call_tokens import Passage, Vocabulary
from ..roles.catalog import ROLES
from .text import version

CHUNK = 1 << 26
"""The bytes of a weight that are on the CPU at a time."""

VOLATILE = ("name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Config keys about the origin of a model instead of its computation; the dtype is read from the weights."""


def fingerprint(
    name: str,
    repeats: Repeats | None,
    words: Vocabulary,
    readings: Mapping[str, Sequence[Passage]],
    first: Sequence[int],
    model: str = "",
) -> str:
    """Return the SHA-256 of what two runs must share before their sums may be added; `model` is that of `of_model`.

    Thresholds are not included: they are compared with the sums at the end.
    """
    listed = [sorted(getattr(words, one.name)) for one in fields(words)]
    roles = [[role.name, role.formula, role.reads, sorted(role.over)] for role in ROLES]
    read = {reads: [_of_passage(one) for one in passages] for reads, passages in readings.items()}
    text = json.dumps(
        [version(), name, model, repr(repeats), listed, read, roles, [*first]], sort_keys=True, default=list
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _of_passage(passage: Passage) -> list[Any]:
    """Return the contents of a passage; a list and a tuple of the same numbers give the same result."""
    links = {name: [[int(key) for key in keys] for keys in rows] for name, rows in passage.links.items()}
    classes = {name: [int(place) for place in places] for name, places in passage.classes.items()}
    return [[int(i) for i in passage.ids], links, classes, passage.text]


def of_model(model: nn.Module) -> str:
    """Return the SHA-256 of a model's configuration and of the bytes of its weights, on any device.

    For a model that is divided over processes it covers the part of this process.
    """
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    config = _stable(to_dict()) if callable(to_dict) else None
    # the type of a value that JSON cannot store: its repr may contain an address that changes
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=lambda one: type(one).__name__).encode())
    for name, weight in model.state_dict().items():
        here = weight.to_local() if hasattr(weight, "to_local") else weight
        if isinstance(here, Tensor):
            digest.update(json.dumps([name, str(here.dtype), [*here.shape]]).encode())
            if here.layout == torch.strided and not here.is_meta:
                with suppress(RuntimeError, TypeError):  # a quantized weight may have no bytes; its name is included
                    for part in here.detach().reshape(-1).view(torch.uint8).split(CHUNK):
                        digest.update(part.cpu().numpy())
    return digest.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(name): one for name, one in value.items() if not str(name).startswith("_")}
        return {name: _stable(one) for name, one in kept.items() if name not in VOLATILE}
    return [*map(_stable, value)] if isinstance(value, (list, tuple)) else value
