"""What the writer and the planners ask of an opened checkpoint; `headwise.hf.checkpoint` hands one over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...shapes.arguments import shown


@runtime_checkable
class Entry(Protocol):
    """What a checkpoint's header says of one tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Its numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""


def check_source(source: object) -> None:
    """An open checkpoint; raises TypeError."""
    if not (hasattr(source, "config") and hasattr(source, "tensors")):
        raise TypeError(f"source is a checkpoint that headwise.hf.checkpoint opened; got {shown(source)}")


def check_unpruned(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint with ``pruned_heads``, which transformers would load as if it had none."""
    if config.get("pruned_heads"):
        raise ValueError(
            "config.json has pruned_heads, as transformers up to version 4 wrote them, and version 5 does not load "
            "such weights; give the checkpoint that was not pruned"
        )


@runtime_checkable
class CheckpointSource(Protocol):
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
        """Return one tensor, on the CPU, in memory of its own."""

    def chunks(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of one of `inputs`, in pieces."""

    def copy(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of one of `files` as they may be handed on: without keys that name code."""

    def check(self) -> None:
        """Raise ValueError unless every file is what it was when the folder was opened."""


@runtime_checkable
class ReshapableCheckpoint(CheckpointSource, Protocol):
    """A checkpoint with the table of layouts, and with the proof of a result, as `headwise.hf.checkpoint` opens it."""

    @property
    def layouts(self) -> Mapping[str, Any]:
        """How checkpoints store their attention."""

    def prove(self, folder: Path, request: Mapping[str, Any], *, compare: bool = True) -> dict[str, Any]:
        """Return what a fresh process measures of the result."""


@runtime_checkable
class BuildableCheckpoint(ReshapableCheckpoint, Protocol):
    """A checkpoint that can also build a model of its architecture, as `headwise.hf.checkpoint` opens it."""

    def build(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
        """Return the model of a config and its tensors, in float32."""
