"""Loading of safetensors files into modules with sharded parameters: each process reads only its own part."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..extras import missing_extra
from ..shapes.arguments import check_texts, shown

Module = TypeVar("Module", bound=nn.Module)
INDEX = "model.safetensors.index.json"


def load_slices(module: Module, source: str | os.PathLike[str], *, prefix: str = "") -> Module:
    """Load a module's parameters and buffers from safetensors files; each process reads only its own part.

    For a DTensor with `Shard(0)` the part is some rows, with `Shard(1)` some columns, so a process never holds more
    than its share: create the module on the meta device, split it, and load. Parameters on the meta device get memory
    on the mesh's device (the CPU for plain tensors); others are overwritten in place. Numbers are converted to the
    parameter's dtype.

    Args:
        module: a module with any parameters, sharded (`tensor_parallel`) or not; dtype and `requires_grad` stay.
        source: a safetensors file, or a folder with one or more of them and their index.
        prefix: the prefix of the parameter names in the files, such as "model.layers.0.self_attn.".

    Returns:
        The module.

    Raises:
        TypeError: not a module, or not a path.
        FileNotFoundError: no such file, or a folder without safetensors files.
        ValueError: not a safetensors file, missing names, or tensors with other shapes; the module is unchanged then.

    Example:
        >>> with torch.device("meta"):
        ...     mha = headwise.MultiHeadAttention(4096, 32, num_kv_heads=8)  # doctest: +SKIP
        >>> mha = load_slices(tensor_parallel(mha, mesh), "folder", prefix="layers.0.attention.")  # doctest: +SKIP
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"load_slices takes a torch.nn.Module; got {shown(module)}")
    check_texts(prefix=prefix)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source is the path of a safetensors file, or of a folder with some; got {shown(source)}")
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise missing_extra("headwise.parallel.load_slices", "hf", error) from None
    places = _files(Path(source))
    wanted = module.state_dict()
    lacking = [prefix + name for name in wanted if prefix + name not in places]
    if lacking:
        raise ValueError(
            f"{source} lacks {len(lacking)} of {len(wanted)} tensors, {lacking[0]!r} first; `prefix` is what stands "
            f"before a parameter's name there, now {prefix!r}"
        )
    opened = {path: _opened(path) for path in {places[prefix + name] for name in wanted}}
    slices = {name: opened[places[prefix + name]].get_slice(prefix + name) for name in wanted}
    for name, old in wanted.items():
        if tuple(slices[name].get_shape()) != tuple(old.shape):
            raise ValueError(
                f"{prefix + name} is {tuple(slices[name].get_shape())} in {source}, and {tuple(old.shape)} in the "
                "module; build the module of the sizes of the checkpoint"
            )
    for name in wanted:
        _fill(module, name, slices[name])
    return module


def _files(source: Path) -> Mapping[str, Path]:
    """Return the file of each tensor."""
    index = source / INDEX
    if source.is_dir() and index.is_file():
        try:
            listed: dict[str, str] = json.loads(index.read_text("utf8"))["weight_map"]
            return {name: source / Path(file).name for name, file in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files ({error}); download it again") from None
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"{source} is no safetensors file, and no folder with such files")
    return {name: file for file in files for name in _opened(file).keys()}  # noqa: SIM118 - no dict


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file ({error}); download it again") from None


@torch.no_grad()
def _fill(module: nn.Module, name: str, stored: Any) -> None:
    """Load one parameter or buffer from its tensor in a file."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    old: Any = getattr(owner, last)
    if not isinstance(old, DTensor):
        new = stored[...].to(old.dtype)
        if not old.is_meta:
            old.copy_(new)
        else:
            _put(owner, last, new, old)
        return
    shape, offset = compute_local_shape_and_global_offset(old.shape, old.device_mesh, old.placements)
    part = stored[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))].to(old.dtype)
    if not old.is_meta:
        old.to_local().copy_(part)
        return
    local = part.to(old.device_mesh.device_type).contiguous()
    spread = DTensor.from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    _put(owner, last, spread, old)


def _put(owner: nn.Module, name: str, new: Tensor, old: Tensor) -> None:
    """Replace a parameter or buffer that has no memory."""
    setattr(owner, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
