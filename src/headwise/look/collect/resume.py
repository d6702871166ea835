"""The saved sums of a run, one file of numbers only (no pickles), and the fingerprint that sums to be added share."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...files.atomic_file import put
from ..inputs.repeated_tokens import Repeats
from ..roles.call_tokens import Passage, Vocabulary
from ..roles.catalog import ROLES
from .sums import LayerTally, RoleSums
from .text import version

FORMAT = 2

CHUNK = 1 << 26
"""The bytes of a weight that are on the CPU at a time."""

VOLATILE = ("name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Config keys about the origin of a model instead of its computation; the dtype is read from the weights."""


def save(path: str | os.PathLike[str], about: str, tallies: Sequence[LayerTally], done: int, length: int) -> None:
    """Write the sums of `done` texts; an earlier file is replaced once the new one is complete."""
    put(pack(about, tallies, done, length, write=np.savez_compressed), path)


def pack(about: str, tallies: Sequence[LayerTally], done: int = 0, length: int = 0, *, write: Any = np.savez) -> bytes:
    """Return the sums as bytes, for a file or for another process."""
    arrays: dict[str, Any] = {}
    layers = []
    for number, tally in enumerate(tallies):
        for name, sums in tally.roles.items():
            arrays[f"{number}/role/{name}"] = sums.ints
        for name, whole in tally.numbers.items():
            arrays[f"{number}/number/{name}"] = whole
        layers.append(
            {
                "place": tally.place,
                "heads": tally.heads,
                "widest": tally.widest,
                "without null": [name for name, sums in tally.roles.items() if not sums.has_null],
                "shown": [[role, head, best] for (role, head), best in sorted(tally.shown.items())],
                "details": [[role, head, said] for (role, head), said in sorted(tally.details.items())],
            }
        )
    head = {"format": FORMAT, "about": about, "done": done, "length": length, "layers": layers}
    buffer = io.BytesIO()
    write(buffer, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    return buffer.getvalue()


def load(path: str | os.PathLike[str], about: str) -> tuple[list[LayerTally], int, int]:
    """Return the sums, the number of texts and of tokens from a file; raise ValueError if it is not of this run."""
    where = Path(path)
    try:
        if not where.is_file():
            raise ValueError("it is no regular file")
        content = where.read_bytes()
        if not content.startswith(b"PK"):  # else numpy's error would be about pickles
            raise ValueError("it holds something else")
        return unpack(content, about)
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(
            f"{where}: not the state of this look ({error or type(error).__name__}); remove it to begin anew, or give "
            "another path"
        ) from None


def unpack(content: bytes, about: str) -> tuple[list[LayerTally], int, int]:
    """Return the arguments of `pack`; raise one of several errors if the bytes are no such sums."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        head = json.loads(bytes(arrays["head"]))
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']}")
        if head["about"] != about:
            raise ValueError("another model (by name, configuration or weights), version, or other options")
        tallies = [_tally(number, layer, arrays) for number, layer in enumerate(head["layers"])]
        return tallies, int(head["done"]), int(head["length"])


def _tally(number: int, layer: dict[str, Any], arrays: Any) -> LayerTally:
    tally = LayerTally(layer["place"], int(layer["heads"]), widest=tuple(layer["widest"]))
    for key in arrays.files:
        at, _, rest = key.partition("/")
        kind, _, name = rest.partition("/")
        if at != str(number):
            continue
        if kind == "role":
            tally.roles[name] = RoleSums(arrays[key], name not in layer["without null"])
        else:
            tally.numbers[name] = arrays[key]
    tally.shown = {(role, head): [tuple(one) for one in best] for role, head, best in layer["shown"]}
    tally.details = {(role, head): said for role, head, said in layer["details"]}
    return tally


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
