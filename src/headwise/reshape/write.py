"""Writes a checkpoint folder: whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .source import Source


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: what it will be, and how it is made when its turn comes.

    `make` may return a view of something larger; nothing keeps what it returns.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class Manifest:
    """What a written folder holds, and what it was made from: (bytes, sha256) by file name."""

    files: Mapping[str, tuple[int, str]]
    source: Mapping[str, tuple[int, str]]


def kept(source: Source, name: str) -> Planned:
    """A tensor of the source as it is."""
    entry = source.tensors[name]
    return Planned(name, entry.dtype, entry.shape, lambda: source.read(name))


def write(
    destination: Path,
    *,
    config: Mapping[str, Any],
    tensors: Sequence[Planned],
    source: Source,
    extra: Mapping[str, bytes] | None = None,
    check: Callable[[Path], Mapping[str, bytes] | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Writes config, weights, the source's `files` and a manifest into a folder that is there whole, or not at all.

    Args:
        destination: the folder; it must not exist, its parent must.
        config: what becomes config.json.
        tensors: the weights; each is made when its turn comes, and dropped before the next.
        source: where they come from; it must not change meanwhile.
        extra: further files by name; one of the source's `files` of that name is left out.
        check: called with the finished folder under its temporary name, before it gets its own. What it raises ends the
            run, and nothing is left; what it returns are further files (a report of the check).
        progress: called with the bytes written and the bytes to write.
    """
    raise NotImplementedError
