"""A model folder as an untrusted download: nothing in it is run, and every file is checked before use.

config.json, index files and safetensors headers are parsed strictly and with a size limit, before transformers reads
them and before large allocations. Pickle checkpoints are refused, because opening one can run code in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...files.text import is_utf8
from ..errors import ModelError
from .reader import inside, open_file, read_json
from .safetensors_header import TensorEntry, header

MAX_CONFIG = 1 << 20  # bytes; the largest on the hub are below 100 kB
MAX_INDEX = 32 << 20  # bytes; the largest on the hub are below 10 MB
MAX_SHARDS = 500  # A checkpoint keeps all of them open; the largest models have about 200.
SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")

BOUNDS: dict[str, tuple[int, int]] = {
    "decoder_attention_heads": (1, 10_000),
    "decoder_layers": (0, 1_000),
    "encoder_attention_heads": (1, 10_000),
    "encoder_layers": (0, 1_000),
    "head_dim": (1, 10_000),
    "hidden_size": (1, 1_000_000),
    "intermediate_size": (1, 10_000_000),
    "max_position_embeddings": (1, 100_000_000),
    "moe_intermediate_size": (1, 10_000_000),
    "num_attention_heads": (1, 10_000),
    "num_decoder_layers": (0, 1_000),
    "num_experts": (0, 100_000),
    "num_hidden_layers": (1, 1_000),
    "num_key_value_heads": (1, 10_000),
    "num_local_experts": (0, 100_000),
    "vocab_size": (1, 10_000_000),
}
"""The lowest and highest value of each size: far beyond all existing models, but small enough to compute with."""


@dataclass(frozen=True)
class Weights:
    """The safetensors files of a folder by name, and the tensors of each."""

    files: dict[str, Path]
    tensors: dict[str, dict[str, TensorEntry]]
    metadata: dict[str, dict[str, str]]
    index: dict[str, str] | None
    """The file of each tensor according to the index; None without an index."""

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The entries of all files by the name of the tensor."""
        return {name: entry for table in self.tensors.values() for name, entry in table.items()}

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """All dtypes that occur."""
        return frozenset(entry.dtype for entry in self.entries.values())

    @property
    def numel(self) -> int:
        """The total number of elements of all tensors."""
        return sum(prod(entry.shape) for entry in self.entries.values())


# -- config.json ------------------------------------------------------------------------------------------------------


def folder_config(folder: Path) -> dict[str, Any]:
    """Return config.json unchanged, after the checks that do not depend on the model."""
    if not os.path.lexists(folder / "config.json"):
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{folder}: holds an adapter, no model; merge it first (peft: model.merge_and_unload()) and save that"
            )
        raise ModelError(f"{folder}: no config.json, so no transformers checkpoint; give the folder that holds it")
    raw = read_json(folder, "config.json", MAX_CONFIG)
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


def check_numbers(raw: dict[str, Any], names: Mapping[str, str], where: str) -> None:
    """Raise ModelError unless every size is an integer within BOUNDS; `names` maps usual names to this config's."""
    usual = {own: name for name, own in names.items() if name in BOUNDS}
    for key, value in raw.items():
        bounds = BOUNDS.get(usual.get(key, key))
        for number in value if isinstance(value, list) else [value]:
            if bounds is None or number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or not bounds[0] <= number <= bounds[1]:
                raise ModelError(
                    f"{where}: {key} is {repr(number)[:40]}, and an integer of {bounds[0]} to {bounds[1]} is needed; "
                    "correct config.json or download it anew"
                )


# -- the weights ------------------------------------------------------------------------------------------------------


def find_weights(folder: Path) -> Weights:
    """Return the safetensors files of a folder after a check of their names, paths and headers; no tensor is read."""
    index = None
    if os.path.lexists(folder / SINGLE):
        names = [SINGLE]
    elif os.path.lexists(folder / INDEX):
        index = _index(folder)
        names = sorted(set(index.values()))
    else:
        raise _no_weights(folder)
    weights = Weights({}, {}, {}, index)
    seen: set[str] = set()
    for name in names:
        weights.files[name] = _shard(folder, name)
        with open_file(folder, name) as file:
            weights.tensors[name], weights.metadata[name] = header(file, f"{folder}/{name}")
        for tensor in weights.tensors[name]:
            if tensor in seen:
                raise ModelError(f"{folder}/{name}: the tensor {tensor!r} stands in two files; download the model anew")
            seen.add(tensor)
    return weights


def _index(folder: Path) -> dict[str, str]:
    table = read_json(folder, INDEX, MAX_INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ModelError(f"{folder}/{INDEX}: no weight_map of tensor names to file names; download the file anew")
    number = len(set(table.values()))
    if number > MAX_SHARDS:
        raise ModelError(f"{folder}/{INDEX}: names {number} weights files, at most {MAX_SHARDS} are read; save it anew")
    return table


def _shard(folder: Path, name: str) -> Path:
    if not SHARD.fullmatch(name):
        raise ModelError(
            f"{folder}: names the weights file {name[:80]!r}, where a plain *.safetensors name belongs; get it anew"
        )
    if not os.path.lexists(folder / name):
        raise ModelError(f"{folder}: the weights file {name[:80]!r} is missing; download it anew")
    path = inside(folder, name)
    if not is_utf8(path):
        raise ModelError(
            f"{folder}: the path is not valid UTF-8, and the safetensors library opens no other; rename the folder"
        )
    return path


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        return ModelError(
            f"{folder}: no model.safetensors and no model.safetensors.index.json; download the weights too"
        )
    shown = folder if re.fullmatch(r"[\w./~-]+", str(folder)) else "FOLDER"  # Users copy the command into a shell.
    return ModelError(
        f"{folder}: the weights are in {pickles[0]!r} only, and opening such a file can run code hidden in it; "
        "headwise reads safetensors. If you trust the source, convert once: "
        'python -c "from transformers import AutoModel as A; '
        f"A.from_pretrained('{shown}').save_pretrained('{shown}-safetensors')\""
    )
