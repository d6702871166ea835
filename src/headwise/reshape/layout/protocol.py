"""Protocols for an open checkpoint, as the writer and the planners use it; `headwise.hf.checkpoint` opens one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...shapes.arguments import shown


@runtime_checkable
class Entry(Protocol):
    """The header entry of one tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""


def check_source(source: object) -> None:
    """Check that `source` is an open checkpoint; raise TypeError otherwise."""
    if not (hasattr(source, "config") and hasattr(source, "tensors")):
        raise TypeError(f"source is a checkpoint that headwise.hf.checkpoint opened; got {shown(source)}")


def check_unpruned(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a config with ``pruned_heads``; transformers would load it as if no head was pruned."""
    if config.get("pruned_heads"):
        raise ValueError(
            "config.json has pruned_heads, as transformers up to version 4 wrote them, and version 5 does not load "
            "such weights; give the checkpoint that was not pruned"
        )


@runtime_checkable
class CheckpointSource(Protocol):
    """A checkpoint folder, opened read-only, with all headers checked and no tensor in memory."""

    @property
    def folder(self) -> Path:
        """The path of the folder."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, without the keys that name code, kernels or further files."""

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """The header entries of all tensors by name; a tied weight that is not stored has no entry."""

    @property
    def files(self) -> tuple[str, ...]:
        """Further files that a copy needs: tokenizer, generation_config.json, licence."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """All files that are read: config.json, weights, their index, and `files`."""

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, in its own memory."""

    def chunks(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of one of `inputs`, in pieces."""

    def copy(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of one of `files` for a copy, without keys that name code."""

    def check(self) -> None:
        """Raise ValueError if a file has changed since the folder was opened."""


@runtime_checkable
class ReshapableCheckpoint(CheckpointSource, Protocol):
    """A checkpoint that also has the table of layouts and can prove a result, as `headwise.hf.checkpoint` opens it."""

    @property
    def layouts(self) -> Mapping[str, Any]:
        """The table of layouts: how each architecture stores its attention."""

    def prove(self, folder: Path, request: Mapping[str, Any], *, compare: bool = True) -> dict[str, Any]:
        """Return the measurements that a fresh process takes of the result."""


@runtime_checkable
class BuildableCheckpoint(ReshapableCheckpoint, Protocol):
    """A checkpoint that can also build a model of its architecture, as `headwise.hf.checkpoint` opens it."""

    def build(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
        """Return the model of this config with these tensors, in float32."""
