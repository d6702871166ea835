"""A model folder as what it is: a download, from anyone. Nothing in it is run; every file is checked before use.

config.json, index files and safetensors headers are parsed here, strictly and size-capped, before transformers or any
large allocation. Pickle checkpoints are refused: opening one runs what it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .errors import ModelError, one_line

MAX_CONFIG = 1 << 20  # bytes; the largest on the hub are below 100 kB
MAX_INDEX = 64 << 20
MAX_HEADER = 100_000_000  # the safetensors format's own limit
SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})

BOUNDS: dict[str, tuple[int, int]] = {
    "head_dim": (1, 10_000),
    "hidden_size": (1, 1_000_000),
    "intermediate_size": (1, 10_000_000),
    "max_position_embeddings": (1, 100_000_000),
    "moe_intermediate_size": (1, 10_000_000),
    "num_attention_heads": (1, 10_000),
    "num_experts": (0, 100_000),
    "num_hidden_layers": (1, 1_000),
    "num_key_value_heads": (1, 10_000),
    "num_local_experts": (0, 100_000),
    "vocab_size": (1, 10_000_000),
}
"""Far outside of what exists, and still small enough to compute with."""


@dataclass(frozen=True)
class Weights:
    """The safetensors files of a folder and what their headers promise."""

    files: tuple[Path, ...]
    shapes: dict[str, tuple[int, ...]]
    dtypes: frozenset[str]

    @property
    def numel(self) -> int:
        """Numbers in all tensors together."""
        return sum(prod(shape) for shape in self.shapes.values())


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """A JSON object, strictly: no NaN or Infinity, no key twice, no more than `limit` bytes."""
    try:
        if not path.is_file():
            raise ModelError(f"{path}: not a regular file; a model folder has it beside its *.safetensors")
        size = path.stat().st_size
        if size > limit:
            raise ModelError(f"{path}: {size} bytes, at most {limit} are read; such a file describes no model")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({one_line(error)}); check its permissions") from None


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """As `read_json`, from bytes; `where` names them in the error."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise ModelError(f"{where}: not valid JSON ({what}); download the file anew") from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{where}: holds a JSON {type(value).__name__}, and an object is needed; download the file anew"
        )
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} stands there twice")
    return table


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


# -- config.json ------------------------------------------------------------------------------------------------------


def folder_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands, after the checks that need no knowledge of the model."""
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{folder}: holds an adapter, no model; merge it first (peft: model.merge_and_unload()) and save that"
            )
        raise ModelError(f"{folder}: no config.json, so no transformers checkpoint; give the folder that holds it")
    raw = read_json(folder / "config.json", MAX_CONFIG)
    if raw.get("quantization_config") is not None:
        raise ModelError(
            f"{folder}: a quantised checkpoint (quantization_config), whose weights are no plain numbers; "
            "give the original, or dequantise and save it with transformers first"
        )
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"{folder}/config.json: model_type is {model_type!r}, and a name is needed; download the file anew"
        )
    return raw


def check_numbers(raw: dict[str, Any], standard: Callable[[str], str], where: str) -> None:
    """Raise ModelError unless every size is an integer within BOUNDS; `standard`: a key's usual name."""
    for key, value in raw.items():
        bounds = BOUNDS.get(standard(key))
        for number in value if isinstance(value, list) else [value]:
            if bounds is None or number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or not bounds[0] <= number <= bounds[1]:
                raise ModelError(
                    f"{where}: {key} is {str(number)[:40]}, and an integer of {bounds[0]} to {bounds[1]} is needed; "
                    "correct config.json or download it anew"
                )


# -- the weights ------------------------------------------------------------------------------------------------------


def find_weights(folder: Path) -> Weights:
    """The safetensors files of a folder, their names, places and headers checked; no tensor is read."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
    elif index.exists():
        table = read_json(index, MAX_INDEX).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise ModelError(f"{index}: no weight_map of tensor names to file names; download the file anew")
        names = sorted(set(table.values()))
    else:
        raise _no_weights(folder)
    files = [_inside(folder, name) for name in names]
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: set[str] = set()
    for file in files:
        for tensor, entry in _header(file).items():
            if tensor in shapes:
                raise ModelError(f"{file}: the tensor {tensor[:80]!r} stands in two files; download the model anew")
            shapes[tensor], dtype = _entry(file, tensor, entry)
            dtypes.add(dtype)
    if dtypes - DTYPES:
        raise ModelError(
            f"{folder}: tensors of {', '.join(sorted(dtypes - DTYPES))}, a quantised checkpoint; give the original, or "
            "dequantise and save it with transformers first"
        )
    return Weights(tuple(files), shapes, frozenset(dtypes))


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        return ModelError(
            f"{folder}: no model.safetensors and no model.safetensors.index.json; download the weights too"
        )
    shown = folder if re.fullmatch(r"[\w./~-]+", str(folder)) else "FOLDER"  # it stands in a command to copy
    return ModelError(
        f"{folder}: the weights are in {pickles[0]!r} only, and opening such a file can run code hidden in it; "
        "headwise reads safetensors. If you trust the source, convert once: "
        'python -c "from transformers import AutoModel as A; '
        f"A.from_pretrained('{shown}').save_pretrained('{shown}-safetensors')\""
    )


def _inside(folder: Path, name: str) -> Path:
    """The real path of a weights file: a plain name, in the folder (or in the cache's blobs, for a cached model)."""
    if not SHARD.fullmatch(name):
        raise ModelError(
            f"{folder}: names the weights file {name[:80]!r}, where a plain *.safetensors name belongs; get it anew"
        )
    try:
        real = (folder / name).resolve(strict=True)
    except OSError:
        raise ModelError(f"{folder}: the weights file {name!r} is missing; download it anew") from None
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent / "blobs")
    if real.parent not in homes or not real.is_file():
        raise ModelError(f"{folder}: {name!r} leads to {real}, outside of the model's folder; copy the file into it")
    return real


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(MAX_HEADER, file.stat().st_size - 8):
                raise ModelError(f"{file}: no safetensors file (its header says {length} bytes); download it anew")
            header = parse_json(stream.read(length), f"{file}: header")
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({one_line(error)}); check its permissions") from None
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, tensor: str, entry: Any) -> tuple[tuple[int, ...], str]:
    shape, dtype = (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (None, None)
    if not isinstance(shape, list) or not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in shape):
        raise ModelError(f"{file}: the tensor {tensor[:80]!r} has no shape and dtype; download the file anew")
    return tuple(shape), dtype
