"""How the axes of a weight divide into heads, written as ``(H q | K k | K v) M``; and what follows for its rows."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = "*"
PARTS = ("q", "k", "v", "o", "n")


@dataclass(frozen=True)
class Sizes:
    """Of one attention layer: H query heads, K key-value heads, D and V numbers a head.

    `rope_dim` is how many of D a latent key shares among its heads, so its own part has ``D - rope_dim``.
    """

    H: int
    K: int
    D: int
    V: int
    rope_dim: int = 0

    @property
    def group(self) -> int:
        """G = H / K: query heads that read one key-value head."""
        return self.H // self.K

    def of(self, part: str) -> int:
        """Return numbers that a head has of a part: q, k, v, o (as o_proj reads it), n; one where the part is ''."""
        return {"": 1, "q": self.D, "k": self.D, "v": self.V, "o": self.V, "n": self.D - self.rope_dim}[part]

    def heads(self, kind: str) -> int:
        """Return how many there are of H or K."""
        return self.H if kind == "H" else self.K


@dataclass(frozen=True)
class KeptHeads:
    """The heads of a layer that stay: query heads, and the key-value heads they read, both in order."""

    query: tuple[int, ...]
    kv: tuple[int, ...]

    def of(self, kind: str) -> tuple[int, ...]:
        """Those of H or K."""
        return self.query if kind == "H" else self.kv

    def sizes(self, before: Sizes) -> Sizes:
        """Return the layer's sizes with these heads alone."""
        return Sizes(len(self.query), len(self.kv), before.D, before.V, before.rope_dim)


@dataclass(frozen=True)
class HeadRun:
    """A stretch of an axis: for each head of a kind (H or K), its parts one after another."""

    kind: str
    parts: tuple[str, ...]

    def width(self, sizes: Sizes) -> int:
        """Return numbers that one head has here."""
        return sum(sizes.of(part) for part in self.parts)


AxisRuns = tuple[HeadRun, ...]


@dataclass(frozen=True)
class TensorRuns:
    """A tensor's axes, each the runs of heads that it is made of; an axis without heads has none.

    Example:
        >>> fused = form("(H q | K k | K v) M")
        >>> sizes = Sizes(H=4, K=2, D=3, V=3)
        >>> fused.shape((24, 7), sizes, KeptHeads((0, 1), (0,)))
        (12, 7)
    """

    axes: tuple[AxisRuns, ...]
    whole: bool = False

    def parts(self) -> set[str]:
        """Return which parts of a head the tensor holds."""
        return {part for axis in self.axes for run in axis for part in run.parts}

    def fits(self, shape: Sequence[int], sizes: Sizes) -> bool:
        """Return whether a tensor of this shape can be of these sizes."""
        if self.whole:
            return True
        return len(shape) == len(self.axes) and all(
            not axis or length == sum(sizes.heads(run.kind) * run.width(sizes) for run in axis)
            for axis, length in zip(self.axes, shape, strict=True)
        )

    def shape(self, shape: Sequence[int], sizes: Sizes, kept: KeptHeads) -> tuple[int, ...]:
        """Return the shape with these heads alone."""
        if self.whole:
            return tuple(shape)
        return tuple(
            sum(len(kept.of(run.kind)) * run.width(sizes) for run in axis) if axis else length
            for axis, length in zip(self.axes, shape, strict=True)
        )

    def keep(self, tensor: Tensor, sizes: Sizes, kept: KeptHeads) -> Tensor:
        """Return the tensor with these heads alone."""
        for n, places in self._places(sizes, kept):
            tensor = tensor.index_select(n, places.to(tensor.device))
        return tensor

    def zero(self, tensor: Tensor, sizes: Sizes, kept: KeptHeads) -> Tensor:
        """The tensor itself, with 0 in what o_proj reads of the heads that go; other tensors stay as they are."""
        if "o" in self.parts():
            for n, places in self._places(sizes, kept):
                goes = torch.ones(tensor.shape[n], dtype=torch.bool, device="cpu").index_fill_(0, places, False)
                tensor.index_fill_(n, goes.nonzero().flatten(), 0)
        return tensor

    def _places(self, sizes: Sizes, kept: KeptHeads) -> Iterator[tuple[int, Tensor]]:
        """(axis, its indices that belong to kept heads), of each axis that is made of heads."""
        for n, axis in enumerate(self.axes):
            if not axis:
                continue
            places, start = [], 0
            for run in axis:
                width = run.width(sizes)
                firsts = torch.tensor(kept.of(run.kind), dtype=torch.long, device="cpu") * width + start
                places.append((firsts[:, None] + torch.arange(width, device="cpu")).flatten())
                start += sizes.heads(run.kind) * width
            yield n, torch.cat(places)


@functools.cache
def form(text: str) -> TensorRuns:
    """Return what a text such as ``(H q | K k | K v) M`` says.

    Raises:
        ValueError: a text that is none: a part that is not known, or heads within heads.

    Example:
        >>> form("R H").axes
        ((), (HeadRun(kind='H', parts=('',)),))
    """
    if text == WHOLE:
        return TensorRuns((), whole=True)
    axes = re.findall(r"\((?:[^()]|\([^()]*\))*\)|[^\s()]+", text)
    if not axes or "".join(axes).replace(" ", "") != text.replace(" ", ""):
        raise ValueError(f"the form of a tensor is such as '(H q | K k) M'; got {text!r}")
    return TensorRuns(tuple(_axis(axis, text) for axis in axes))


def _axis(axis: str, text: str) -> AxisRuns:
    if axis in ("H", "K"):
        return (HeadRun(axis, ("",)),)
    if not axis.startswith("("):
        return ()
    runs = []
    for stretch in re.split(r"\|(?![^()]*\))", axis[1:-1]):
        match = re.fullmatch(r"\s*([HK])\s+(\w+|\(.*\))\s*", stretch)
        parts = tuple(part.strip() for part in match[2].strip("()").split("|")) if match else ()
        if match is None or not set(parts) <= set(PARTS):
            raise ValueError(
                f"heads on an axis are such as (H q) or (H (q | k | v)); got {stretch.strip()!r} in {text!r}"
            )
        runs.append(HeadRun(match[1], parts))
    return tuple(runs)
