"""Reading of safetensors headers, checked against the size of the file before tensors are allocated."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from io import FileIO
from math import prod
from typing import Any, TypeGuard

import torch

from ..errors import ModelError
from .reader import parse_json, read_part

MAX_HEADER = 16 << 20
"""The limit in bytes, about 100,000 tensors. The format allows 6 times as many, which take 1 GB when parsed."""

TENSOR = re.compile(r"[\w.-]{1,255}", re.ASCII)
MAX_DIMS, MAX_NUMEL = 16, 1 << 48
NUMBERS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The supported dtypes; files with any other dtype (of 8 or 4 bits) count as quantised."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The dtype and shape of a tensor in a file, with the first byte and the number of bytes of its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def header(file: FileIO, where: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of an open file by name, and its metadata. The tensors must fill the file without overlap."""
    room = os.fstat(file.fileno()).st_size - 8
    length = int.from_bytes(read_part(file, 0, 8, where), "little") if room > 0 else 0
    if not 0 < length <= min(MAX_HEADER, room):
        raise ModelError(f"{where}: no safetensors file (its header says {length} bytes); download it anew")
    entries = parse_json(read_part(file, 8, length, where), f"{where}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ModelError(f"{where}: its metadata is no table of texts; download it anew")
    tensors = {name: _entry(name, entry, length + 8, where) for name, entry in entries.items()}
    end = length + 8
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if stored.start != end:
            what = "overlaps another" if stored.start < end else "begins behind bytes of no tensor"
            raise ModelError(f"{where}: the tensor {name!r} {what}; download it anew")
        end += stored.size
    if end != room + 8:
        raise ModelError(
            f"{where}: its tensors end at byte {end:,} and the file at {room + 8:,}; the download broke off, or bytes "
            "were added: download it anew"
        )
    return tensors, metadata


def _entry(name: str, entry: Any, base: int, where: str) -> TensorEntry:
    table = entry if isinstance(entry, dict) else {}
    shape, dtype, offsets = table.get("shape"), table.get("dtype"), table.get("data_offsets")
    if not TENSOR.fullmatch(name):
        raise ModelError(f"{where}: {name[:80]!r} is no name of a tensor (letters, digits, '.', '_', '-'); get it anew")
    if (
        not isinstance(dtype, str)
        or not _counts(shape, MAX_DIMS, MAX_NUMEL)
        or prod(max(size, 1) for size in shape) > MAX_NUMEL  # tensors with an empty axis have strides, too
    ):
        raise ModelError(f"{where}: the tensor {name[:80]!r} has no shape and dtype; download the file anew")
    if dtype not in NUMBERS:
        raise ModelError(
            f"{where}: tensors of {dtype[:40]!r}, a quantised checkpoint; give the original, or dequantise and save it "
            "with transformers first"
        )
    if not _counts(offsets, 2, 1 << 62) or len(offsets) != 2:
        raise ModelError(f"{where}: the tensor {name[:80]!r} has no data_offsets; download the file anew")
    start, size = base + offsets[0], offsets[1] - offsets[0]
    needed = prod(shape) * NUMBERS[dtype].itemsize
    if size != needed:
        raise ModelError(
            f"{where}: the tensor {name[:80]!r} has {size:,} bytes, and {shape} of {dtype} is {needed:,}; get it anew"
        )
    return TensorEntry(NUMBERS[dtype], tuple(shape), start, size)


def _counts(value: Any, most: int, largest: int) -> TypeGuard[list[int]]:
    """Return whether the value is a list of at most `most` integers from 0 to `largest`."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n <= largest for n in value)
