"""Arguments of the Triton kernels: padded sizes, shapes of programs by card, and what stands for an absent tensor."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CAPABILITY = 8
LEAST_VERSION = (3, 4)  # `constexpr_function`, and tuples as the state of a loop
LEAST = 16
"""The least size of a matrix product's axis."""


def trouble() -> str | None:
    """Return why no kernel can be compiled in this process; None if they can."""
    return _found()[0]


def trouble_on(device: torch.device) -> str | None:
    """Return why the kernels do not run on a device; None if they do."""
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return "the Triton kernels run on NVIDIA GPUs"
    if trouble() is None and device.type == "cuda":
        if torch.version.hip is not None:
            return "the Triton kernels were never run on ROCm"
        if torch.cuda.get_device_properties(device).major < CAPABILITY:
            return f"the Triton kernels need a card of compute capability {CAPABILITY}.0"
    return trouble()


def interpreted() -> bool:
    """Return True if Triton interprets kernels in this process (TRITON_INTERPRET=1), also on tensors of the CPU."""
    return _found()[1]


@cache
def _found() -> tuple[str | None, bool]:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install triton", False
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < LEAST_VERSION:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, LEAST_VERSION))}", False
    return None, bool(triton.knobs.runtime.interpret)


# To torch.compile they are constants, for it would trace the import; see `call._is_transformed`.
trouble._dynamo_marked_constant = True  # type: ignore[attr-defined]
interpreted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def power(n: int) -> int:
    """Return the least power of two >= n that a matrix product takes."""
    return max(LEAST, 1 << (n - 1).bit_length())


def halves(n: int) -> tuple[int, int]:
    """Return two powers of two that hold n, the second 0 if one does: 576 = 512 + 64, 80 = 64 + 16."""
    one = max(LEAST, 1 << (n.bit_length() - 1))
    return one, power(n - one) if n > one else 0


@cache
def shapes() -> dict[str, Any]:
    """Return `shapes.json`: for each kernel, card and head dim the shape of a program.

    It is the rows of queries, for `decode` the keys of a tile and the most rows; then warps and stages.
    """
    return json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf8"))


def shape_of(kernel: str, dim: int, device: torch.device) -> tuple[int, ...]:
    """Return the shape of a program for a padded head dim on a card, as in `shapes.json`.

    Of a card that is not in the file, it is that of the nearest older one.
    """
    table = shapes()[kernel]
    capability = "80"
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        capability = max((known for known in table if int(known) <= 10 * major + minor), key=int, default="80")
    of_card = table[capability]
    return tuple(of_card[str(min((int(d) for d in of_card if int(d) >= dim), default=max(map(int, of_card))))])


def strides(x: Tensor | None, *axes: int) -> tuple[int, ...]:
    """Return the strides of some axes, 0 for one of size 1, so that it repeats; zeros without a tensor."""
    return tuple(0 if x is None or x.shape[axis] == 1 else x.stride(axis) for axis in axes)


def rows_of(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, as kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def ends_of(ends: Sequence[Tensor | None], absent: Tensor) -> tuple[int, list[Tensor], list[int]]:
    """Return which of low, high, start and stop are tensors, as bits; the tensors; their strides."""
    which = sum(1 << n for n, x in enumerate(ends) if x is not None)
    return which, [absent if x is None else x for x in ends], [n for x in ends for n in strides(x, 0)]
