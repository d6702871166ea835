"""The division of a weight's axes into heads, written as ``(H q | K k | K v) M``, and the selection of heads."""

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
    """The sizes of one attention layer: H query heads, K key-value heads, D numbers per key and V per value.

    In latent attention `rope_dim` of the D numbers are shared by all heads; each head has ``D - rope_dim`` of its own.
    """

    H: int
    K: int
    D: int
    V: int
    rope_dim: int = 0

    @property
    def group(self) -> int:
        """G = H / K, the number of query heads per key-value head."""
        return self.H // self.K

    def of(self, part: str) -> int:
        """Return the numbers per head of a part: q, k, v, o (the input of o_proj) or n; 1 for the part ''."""
        return {"": 1, "q": self.D, "k": self.D, "v": self.V, "o": self.V, "n": self.D - self.rope_dim}[part]

    def heads(self, kind: str) -> int:
        """Return H or K, as `kind` names it."""
        return self.H if kind == "H" else self.K


@dataclass(frozen=True)
class KeptHeads:
    """The heads of a layer that stay: query heads, and their key-value heads, both in order."""

    query: tuple[int, ...]
    kv: tuple[int, ...]

    def of(self, kind: str) -> tuple[int, ...]:
        """Return the query heads for "H", the key-value heads for "K"."""
        return self.query if kind == "H" else self.kv

    def sizes(self, before: Sizes) -> Sizes:
        """Return the sizes of the layer with only these heads."""
        return Sizes(len(self.query), len(self.kv), before.D, before.V, before.rope_dim)


@dataclass(frozen=True)
class HeadRun:
    """A section of an axis: for each head of a kind (H or K), its parts one after another."""

    kind: str
    parts: tuple[str, ...]

    def width(self, sizes: Sizes) -> int:
        """Return the numbers per head in this section."""
        return sum(sizes.of(part) for part in self.parts)

    def length(self, sizes: Sizes) -> int:
        """Return the numbers of all heads in this section."""
        return sizes.heads(self.kind) * self.width(sizes)


AxisRuns = tuple[HeadRun, ...]


@dataclass(frozen=True)
class TensorRuns:
    """The axes of a tensor, each as a list of sections of heads; the list is empty for an axis without heads.

    Example:
        >>> fused = form("(H q | K k | K v) M")
        >>> sizes = Sizes(H=4, K=2, D=3, V=3)
        >>> fused.shape((24, 7), sizes, KeptHeads((0, 1), (0,)))
        (12, 7)
    """

    axes: tuple[AxisRuns, ...]
    whole: bool = False

    def parts(self) -> set[str]:
        """Return the parts of a head that the tensor holds."""
        return {part for axis in self.axes for run in axis for part in run.parts}

    def fits(self, shape: Sequence[int], sizes: Sizes) -> bool:
        """Return whether a tensor of this shape agrees with these sizes."""
        if self.whole:
            return True
        return len(shape) == len(self.axes) and all(
            not axis or length == sum(run.length(sizes) for run in axis)
            for axis, length in zip(self.axes, shape, strict=True)
        )

    def shape(self, shape: Sequence[int], sizes: Sizes, kept: KeptHeads) -> tuple[int, ...]:
        """Return the shape with only the kept heads."""
        if self.whole:
            return tuple(shape)
        return tuple(
            sum(len(kept.of(run.kind)) * run.width(sizes) for run in axis) if axis else length
            for axis, length in zip(self.axes, shape, strict=True)
        )

    def keep(self, tensor: Tensor, sizes: Sizes, kept: KeptHeads) -> Tensor:
        """Return the tensor with only the kept heads."""
        for n, places in self._places(sizes, kept):
            tensor = tensor.index_select(n, places.to(tensor.device))
        return tensor

    def zero(self, tensor: Tensor, sizes: Sizes, kept: KeptHeads) -> Tensor:
        """Set the removed heads' part of o_proj to 0 in place, and return the tensor; other tensors do not change."""
        if "o" in self.parts():
            for n, places in self._places(sizes, kept):
                goes = torch.ones(tensor.shape[n], dtype=torch.bool, device="cpu").index_fill_(0, places, False)
                tensor.index_fill_(n, goes.nonzero().flatten(), 0)
        return tensor

    def _places(self, sizes: Sizes, kept: KeptHeads) -> Iterator[tuple[int, Tensor]]:
        """Yield (axis, indices of the kept heads on it) for each axis that holds heads."""
        for n, axis in enumerate(self.axes):
            if not axis:
                continue
            places, start = [], 0
            for run in axis:
                width = run.width(sizes)
                firsts = torch.tensor(kept.of(run.kind), dtype=torch.long, device="cpu") * width + start
                places.append((firsts[:, None] + torch.arange(width, device="cpu")).flatten())
                start += run.length(sizes)
            yield n, torch.cat(places)


@functools.cache
def form(text: str) -> TensorRuns:
    """Parse a text such as ``(H q | K k | K v) M``.

    Raises:
        ValueError: a text of another form, an unknown part, or heads within heads.

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
