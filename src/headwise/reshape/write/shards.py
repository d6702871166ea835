"""Plan the layout of safetensors files from shapes alone, so that headers are known before any tensor is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

MAX_SHARD = 5 * 10**9
"""The largest number of tensor bytes in a file, a common limit; a larger tensor has a file of its own."""

METADATA = "__metadata__"
NAME = re.compile(r"[\w.-]{1,255}", re.ASCII)
WORDS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ORDER = [*WORDS]
"""The order of the safetensors library within a file: wide dtypes first, so that each tensor is aligned."""


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its name, dtype and shape, and the function that computes it when it is written.

    `make` may return a view of a larger tensor; its result is dropped after writing.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file of tensors, in the order in which they are stored."""

    name: str
    header: bytes
    tensors: tuple[Planned, ...]

    @property
    def size(self) -> int:
        """The size of its tensors in bytes."""
        return sum(tensor.size for tensor in self.tensors)


def plan_shards(tensors: Sequence[Planned]) -> list[Shard]:
    """Return the files for these tensors, filled in their order, so that a layer stays together."""
    _check(tensors)
    groups: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size > MAX_SHARD:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size
    if len(groups) == 1:
        return [_shard("model.safetensors", groups[0])]
    return [_shard(f"model-{i:05}-of-{len(groups):05}.safetensors", group) for i, group in enumerate(groups, 1)]


def index(shards: Sequence[Shard]) -> bytes:
    """Return model.safetensors.index.json, which names the file of each tensor."""
    table = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    size = sum(shard.size for shard in shards)
    return as_json({"metadata": {"total_size": size}, "weight_map": table})


def as_json(table: object) -> bytes:
    """Return JSON in transformers' format: sorted keys, and a newline at the end."""
    return (json.dumps(table, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _check(tensors: Sequence[Planned]) -> None:
    if not tensors:
        raise ValueError("a checkpoint has tensors; none are planned")
    names = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"the tensor {tensor.name!r} is planned twice; a checkpoint has each once")
        names.add(tensor.name)
        if not NAME.fullmatch(tensor.name) or tensor.name == METADATA:
            raise ValueError(f"{tensor.name[:80]!r} is no name of a tensor (letters, digits, '.', '_', '-')")
        if tensor.dtype not in WORDS:
            raise ValueError(f"the tensor {tensor.name!r} is planned in {tensor.dtype}; plain numbers are written")


def _shard(name: str, tensors: Sequence[Planned]) -> Shard:
    ordered = sorted(tensors, key=lambda tensor: (ORDER.index(tensor.dtype), tensor.name))
    table: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.size
        table[tensor.name] = {"dtype": WORDS[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Shard(name, len(text).to_bytes(8, "little") + text, tuple(ordered))
