"""Memory and time of `headwise.statistics` from 1k to 16k tokens: the table, and the slope of log(memory) on log(n).

    python benchmarks/statistics_memory.py [--heads 1] [--head-dim 64] [--longest 16384]

A slope of 1 is memory that grows linearly; the matrix itself has slope 2. Memory is counted, not sampled: the bytes of
every live tensor storage after every operation, so the figures are the same on every run and every machine. Inputs are
counted too; memory that an operation takes and frees inside itself is not.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise.ops.masks import Mask, causal, window
from headwise.ops.statistics import statistics


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensor storages alive after each operation in the block: `.peak` and `.largest`."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.largest = 0  # bytes of the largest single storage
        self._count(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(result)
        return result

    def _count(self, tree: Any) -> None:
        for x in tree_leaves(tree):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        if self._bytes() > self.peak:  # an upper bound, for some may be freed by now: count those that are not
            self.seen = {key: pair for key, pair in self.seen.items() if not pair[0].expired()}
            self.peak = max(self.peak, self._bytes())

    def _bytes(self) -> int:
        return sum(size for _, size in self.seen.values())


Run = Callable[[Tensor, Tensor], object]


def inputs(n: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Query and key of n tokens."""
    make = torch.Generator().manual_seed(n)
    query, key = (torch.randn(1, heads, n, head_dim, generator=make) for _ in range(2))
    return query, key


def peak_bytes(run: Run, n: int, heads: int = 1, head_dim: int = 4) -> tuple[int, int]:
    """Peak live bytes of `run(query, key)` at n tokens, and the bytes of the largest storage."""
    query, key = inputs(n, heads, head_dim)
    with LiveBytes(query, key) as live:
        run(query, key)
    return live.peak, live.largest


def seconds(run: Run, n: int, heads: int, head_dim: int) -> float:
    """Wall time of `run(query, key)` at n tokens, the better of two."""
    query, key = inputs(n, heads, head_dim)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run(query, key)
        times.append(time.perf_counter() - start)
    return min(times)


def slope(lengths: Sequence[int], sizes: Sequence[float]) -> float:
    """Least-squares slope of log(size) on log(length)."""
    x, y = [math.log(n) for n in lengths], [math.log(size) for size in sizes]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--longest", type=int, default=16384)
    args = parser.parse_args()
    lengths = [n for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536) if n <= args.longest]
    masks: dict[str, Mask] = {"causal": causal(), "window(1024)": window(1024)}
    print(f"{args.heads} head(s) of {args.head_dim}, float32, {torch.get_num_threads()} thread(s)")
    for name, mask in masks.items():
        print(f"\n{name}\n{'tokens':>8} {'peak MiB':>9} {'matrix MiB':>11} {'seconds':>8}")
        peaks = []
        for n in lengths:
            run = partial(statistics, mask=mask)
            peaks.append(peak_bytes(run, n, args.heads, args.head_dim)[0])
            took = seconds(run, n, args.heads, args.head_dim)
            print(f"{n:>8} {peaks[-1] / 2**20:>9.2f} {args.heads * n * n * 4 / 2**20:>11.1f} {took:>8.3f}")
        if len(lengths) > 1:
            print(f"slope of log(memory) on log(tokens): {slope(lengths, peaks):.3f}")


if __name__ == "__main__":
    main()
