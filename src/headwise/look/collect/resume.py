"""The saved sums of a run: one file of numbers only (no pickles), replaced atomically."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...files.atomic_file import put
from .sums import LayerTally, RoleSums

FORMAT = 2


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
