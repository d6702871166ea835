"""A checkpoint for the page: its own numbers, in a byte order that compresses well. Read with numpy only."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .facts import read_json

MAX_PARAMETERS = 20_000_000
"""The most parameters of a checkpoint in a page; a million parameters add about 2.3 MB."""

MAX_HEADER = 1_000_000
WIDTHS = {"F16": 2, "BF16": 2, "F32": 4}
NEEDED = ("config.json", "tokenizer.json", "model.safetensors")


@dataclass(frozen=True)
class TourCheckpoint:
    """The data of a model that the page needs.

    Attributes:
        name: the name of the folder.
        config: ``config.json``.
        tokenizer: ``tokenizer.json``.
        tokenizer_config: ``tokenizer_config.json``; empty if it does not exist.
        tensors: name, dtype, shape and offset into `numbers` of each tensor.
        numbers: for each tensor all highest bytes, then all second ones, and so on.
        curve: ``loss_curve.json``, if it exists.
    """

    name: str
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tensors: list[list[Any]]
    numbers: bytes
    curve: dict[str, Any] | None

    def packed(self) -> str:
        """Return the numbers deflated, as base64 text."""
        squeezer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        return base64.b64encode(squeezer.compress(self.numbers) + squeezer.flush()).decode("ascii")


def read(folder: Path) -> TourCheckpoint:
    """Read a checkpoint for the page.

    Args:
        folder: a folder with ``config.json``, ``tokenizer.json`` and ``model.safetensors``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the page's engine does not run this kind of model, or it is too large.

    >>> from headwise.models import tiny_path
    >>> checkpoint = read(tiny_path())
    >>> checkpoint.config["num_attention_heads"], len(checkpoint.tensors)
    (8, 38)
    """
    for name in NEEDED:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder}: the tour needs {', '.join(NEEDED)} in one folder, and {name} is missing; "
                "headwise look opens every other kind of checkpoint"
            )
    config = _object(folder / "config.json")
    check_config(config)
    tensors, numbers = _weights(folder / "model.safetensors")
    size = sum(int(np.prod(shape)) for _, _, shape, _ in tensors)
    if size > MAX_PARAMETERS:
        raise ValueError(
            f"{folder}: {size:,} parameters, and the page supports at most {MAX_PARAMETERS:,}; "
            "headwise look opens any model"
        )
    own, curve = folder / "tokenizer_config.json", folder / "loss_curve.json"
    return TourCheckpoint(
        name=folder.resolve().name,
        config=config,
        tokenizer=_object(folder / "tokenizer.json"),
        tokenizer_config=_object(own) if own.is_file() else {},
        tensors=tensors,
        numbers=numbers,
        curve=_object(curve) if curve.is_file() else None,
    )


def check_config(config: dict[str, Any]) -> None:
    """Raise ValueError if the config differs in more than numbers from the models that the page's engine runs."""
    rules = read_json("facts.json")["accepted"]
    architecture = (config.get("architectures") or [None])[0]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    wrong = [
        f"{name} is {config.get(name)!r}" for name, value in rules["equal"].items() if config.get(name, value) != value
    ]
    if architecture not in rules["architectures"]:
        wrong.insert(0, f"its architecture is {architecture!r}")
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        wrong.append(f"its rotary positions are {rope.get('rope_type') or rope.get('type')!r}")
    for name in rules["sizes"]:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 10_000_000:
            wrong.append(f"{name} is {value!r}")
    if wrong:
        raise ValueError(
            f"the tour runs {' and '.join(rules['architectures'])} with default settings only, and in this checkpoint "
            f"{'; '.join(wrong[:3])}; headwise look opens it"
        )


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: does not contain a JSON object")
    return value


def _weights(path: Path) -> tuple[list[list[Any]], bytes]:
    """Return the tensors by name, and their numbers in byte planes; every offset is checked."""
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - 8):
            raise ValueError(f"{path}: its header does not fit the file; download it again")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            places = [(name, *_place(name, entry, size - 8 - length)) for name, entry in sorted(entries.items())]
        except (AttributeError, KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: its header is not a list of tensors ({error}); download it again") from None
        if size - 8 - length > 4 * MAX_PARAMETERS:
            raise ValueError(
                f"{path}: {size:,} bytes, and the page supports at most {MAX_PARAMETERS:,} parameters; "
                "headwise look opens any model"
            )
        content = file.read()
    tensors: list[list[Any]] = []
    numbers = bytearray()
    for name, dtype, shape, begin, end in places:
        _check_finite(path, name, dtype, content[begin:end])
        tensors.append([name, dtype, shape, len(numbers)])
        planes = np.frombuffer(content, np.uint8, end - begin, begin).reshape(-1, WIDTHS[dtype])
        numbers += planes[:, ::-1].T.tobytes()
    return tensors, bytes(numbers)


def _place(name: str, entry: dict[str, Any], size: int) -> tuple[str, list[int], int, int]:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in WIDTHS:
        raise ValueError(f"{name} is {dtype!r}; the tour reads F16, BF16 and F32")
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end))
    if not whole or end > size or end - begin != WIDTHS[dtype] * int(np.prod(shape, dtype=object)):
        raise ValueError(f"{name}: its bytes do not fit its shape; download the file again")
    return dtype, list(shape), begin, end


def _check_finite(path: Path, name: str, dtype: str, content: bytes) -> None:
    words = np.frombuffer(content, "<u4" if dtype == "F32" else "<u2")
    mask = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}[dtype]
    if bool(((words & mask) == mask).any()):
        raise ValueError(f"{path}: {name} contains numbers that are not finite, so the page cannot compute with it")
