"""What the writer and the planners ask of an opened checkpoint; `headwise.hf.checkpoint` hands one over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """What a checkpoint's header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """A checkpoint folder, opened read-only, every header checked, no tensor in memory."""

    @property
    def folder(self) -> Path:
        """Where it lies."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, less the keys that name code, kernels or further files."""

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """Every tensor by name; a tied weight that the files leave out is not there."""

    @property
    def files(self) -> tuple[str, ...]:
        """Files beside config and weights that belong to a copy: tokenizer, generation_config.json, licence."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every file that is read: config.json, weights and their index, and `files`."""

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in memory of its own."""

    def chunks(self, file: str) -> Iterator[bytes]:
        """The bytes of one of `inputs`, in pieces."""

    def copy(self, file: str) -> Iterator[bytes]:
        """The bytes of one of `files` as they may be handed on: without keys that name code."""

    def check(self) -> None:
        """Raises ValueError unless every file is what it was when the folder was opened."""
