"""What a call does on CUDA at any size, without a GPU and without numbers: launches, bytes, the largest tensor.

Tensors are fake (torch's FakeTensorMode): they have shapes and a device, and no memory. Whatever reads a number raises.
A fused kernel (SDPA, compiled FlexAttention) is one launch that reads and writes each of its operands once.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from pretend_cuda import NO_LAUNCH, card_of, load_guard
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_definitions import LAUNCHES

from headwise.ops.backends import flex, sdpa


class Cost(TorchDispatchMode):
    """The launches, the bytes that they move and the largest tensor that one of them writes, since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.largest = 0
        self.from_host: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.count(func.overloadpacket.__name__, read, written)
        return out

    def count(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        """Count one operator."""
        devices = {x.device.type for x in (*read, *written) if x.ndim or x.device.type != "cpu"}
        if name == "triton_append":  # it changes a part of its arguments: as much as it reads
            read = written = read[:2]
        if "cuda" not in devices or name in NO_LAUNCH or not written:  # such as the question for a tensor's device
            return
        if len(devices) > 1:
            self.from_host[name] += 1
        self.launches[name] += LAUNCHES.get(name, 1)
        self.bytes[name] += _moved(name, read, written)
        if name == "triton_decode":  # the parts of each split are written and read, in float32
            table = [x for x in read if x.ndim == 2 and x.dtype == torch.int64]
            splits = -(-read[1].shape[2] * (table[0].shape[1] if table else 1) // 256)
            self.bytes[name] += 8 * written[0].numel() * splits
        if name == "triton_attend":  # `flags` reads all of it once more
            self.bytes[name] += sum(map(_own_bytes, read[:3]))
        self.largest = max([self.largest, *(_own_bytes(x) // x.itemsize for x in written)])


def _moved(name: str, read: list[Tensor], written: list[Tensor]) -> int:
    """The bytes that an operator reads and writes; of a tensor that it indexes, the places that it picks."""
    if name == "triton_decode":
        read = _of_listed_pages(read)
    if name in ("index", "gather", "index_select"):
        read = [*read[1:], *written]
    elif name == "index_put_":
        read, written = [*read[1:], read[-1]], []
    return sum(_own_bytes(x) for x in (*read, *written))


def _of_listed_pages(read: list[Tensor]) -> list[Tensor]:
    """Of pages of a pool, those that a table lists: key, value and their scales are (P, K, size, ...)."""
    table = next((x for x in read if x.ndim == 2 and x.dtype == torch.int64), None)
    if table is None:
        return read
    pages = read[1].shape[0]
    return [x[: min(pages, table.numel())] if x.shape[0] == pages and x.ndim >= 3 else x for x in read]


def _own_bytes(x: Tensor) -> int:
    """The bytes of a tensor, without the repetitions of axes that are expanded."""
    numbers = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * x.itemsize


@contextmanager
def fake_cuda(major: int = 9) -> Iterator[Callable[[], Cost]]:
    """Make fake tensors on a CUDA card of this capability; the value, called, gives a context that counts."""
    load_guard()
    running: list[Cost] = []

    def fused(name: str, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        read = [x for x in tree_leaves((query, key, value, others)) if isinstance(x, Tensor)]
        for cost in running:
            cost.count(name, read, [out])
        return out

    def attend_sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        return fused("sdpa", query, key, value, attn_mask)

    def attend_flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Any]:
        tiles = options["block_mask"]
        lists = () if tiles is None else (tiles.kv_indices, tiles.full_kv_indices)
        out = fused("flex", query, key, value, *lists)
        return out, types.SimpleNamespace(lse=query.new_empty(query.shape[:3], dtype=torch.float32))

    @contextmanager
    def counted() -> Iterator[Cost]:
        with Cost() as cost:
            running.append(cost)
            yield cost
            running.pop()

    stand_ins = (
        mock.patch.object(sdpa, "scaled_dot_product_attention", attend_sdpa),
        mock.patch.object(flex, "_compiled", lambda: attend_flex),
        *card_of(major),
    )
    with ExitStack() as stack:
        for change in (*stand_ins, torch.no_grad(), FakeTensorMode()):
            stack.enter_context(change)
        yield counted
