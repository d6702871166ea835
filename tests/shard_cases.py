"""Schedules of a key-value cache, drawn: the same on a cache of one process and on one whose tokens ranks share."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.parallel import ShardedCache

KINDS = (StaticCache, PagedCache, RollingCache)


class Case(NamedTuple):
    """A cache and what is done with it, all from a seed."""

    seed: int
    kind: type[KVCache]
    batch: int
    kv_heads: int
    group: int
    sizes: tuple[int, int]
    dtype: torch.dtype
    shared: bool
    block: int
    window: int
    first: int
    own: bool

    @classmethod
    def drawn(cls, seed: int, own: bool = False) -> Case:
        make = random.Random(seed)
        kind = KINDS[seed % 3]
        shared = make.random() < 0.25
        D = make.choice([8, 16, 24])
        V = D - 3 if shared else make.choice([8, 11])
        return cls(
            seed,
            kind,
            make.choice([1, 1, 2, 3]),
            1 if shared else make.choice([1, 2, 3, 5]),
            make.choice([1, 2, 3]),
            (D, V),
            make.choice([torch.float32] * 3 + [torch.int8, torch.bfloat16]),
            shared,
            make.choice([1, 1, 3, 16, 128]),
            make.choice([3, 40, 150]),
            make.choice([0, 0, 2, 130]),
            own,
        )

    def cache(self, sharded: bool) -> Any:
        options: dict[str, Any] = {"dtype": self.dtype, "shared": self.shared}
        if self.kind is PagedCache:
            sizes: tuple[Any, ...] = (PagePool(40, self.kv_heads, *self.sizes, **options), self.batch)
            options = {}
        else:
            sizes = (self.batch, self.kv_heads, *self.sizes)
        if self.kind is RollingCache:
            options |= {"window": self.window, "first": self.first, "chunk": 37}
        elif self.kind is StaticCache:
            options |= {"capacity": 400}
        if not sharded:
            return self.kind(*sizes, **options)
        return ShardedCache(self.kind, *sizes, block=self.block, heads="own" if self.own else "all", **options)

    def of_query(self) -> torch.dtype:
        return torch.float32 if self.dtype == torch.int8 else self.dtype


def heads_of(case: Case, rank: int, world: int) -> tuple[slice, slice]:
    """Query heads and key-value heads of a rank that passes its own."""
    H, K = case.kv_heads * case.group, case.kv_heads
    if world <= K:
        a, b = (r * K // world for r in (rank, rank + 1))
        return slice(a * case.group, b * case.group), slice(a, b)
    one = rank * K // world
    return slice(rank * H // world, (rank + 1) * H // world), slice(one, one + 1)


def run(case: Case, sharded: bool) -> list[Tensor]:
    """What every attention of the case's schedule gives; of a rank that passes its own heads, those."""
    make = random.Random(case.seed + 1000)
    cache = case.cache(sharded)
    own = sharded and case.own
    H, K, dtype = case.kv_heads * case.group, case.kv_heads, case.of_query()
    q_heads, k_heads = heads_of(case, dist.get_rank(), dist.get_world_size()) if own else (slice(H), slice(K))
    draw = torch.Generator().manual_seed(case.seed)
    outs: list[Tensor] = []

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    def step(T: int, lengths: list[int] | None, side: str) -> None:
        B = cache.batch
        query, key = tensor(B, H, T, case.sizes[0]), tensor(B, K, T, case.sizes[0])
        value, sinks, gate = tensor(B, K, T, case.sizes[1]), tensor(H).float(), tensor(B, H, T)
        mask, options = drawn_options(make, case, H)
        if make.random() < 0.4:
            options["sinks"] = sinks[q_heads]
        if make.random() < 0.2:
            options["gate"] = gate[:, q_heads]
        key, value = key[:, k_heads], None if case.shared else value[:, k_heads]
        cache.append(key, value, lengths=lengths, side=side)
        out, lse = headwise.attention(query[:, q_heads], cache, mask=mask, return_lse=True, **options)
        outs.extend([out, lse])

    step(make.choice([5, 37]), None, "right")
    for _ in range(9):
        what = make.random()
        if what < 0.5:
            step(1, None, "right")
        elif what < 0.75:
            T = make.choice([2, 17, 36])
            padded = make.random() < 0.5
            lengths = [make.randint(0, T) for _ in range(cache.batch)] if padded else None
            step(T, lengths, make.choice(["left", "right"]))
        elif what < 0.85:
            rows = [make.randrange(cache.batch) for _ in range(cache.batch)]
            cache = cache.fork().reorder(rows)
        elif case.kind is not RollingCache:
            cache.truncate([make.randint(n // 2, n) for n in cache.lengths])
    step(1, None, "right")
    return outs


def drawn_options(make: random.Random, case: Case, H: int) -> tuple[Any, dict[str, Any]]:
    """A mask and options that any cache of the case takes."""
    options: dict[str, Any] = {}
    if make.random() < 0.3:
        options["softcap"] = 7.0
    if make.random() < 0.3:
        options["scale"] = 0.2
    which = make.choice(["none", "none", "window", "alibi", "rule"])
    if which == "window" or (which != "none" and case.kind is RollingCache):
        return headwise.window(make.choice([2, 29])), options
    if which == "alibi" and not case.own:
        return headwise.alibi(torch.rand(H, generator=torch.Generator().manual_seed(case.seed))), options
    if which == "rule":
        return headwise.rule(lambda b, h, i, j: (i + 2 * j) % 7 != 0), options
    return None, options


def run_all(cases: list[Case], sharded: bool = True) -> list[list[Tensor]]:
    with torch.no_grad():
        return [run(case, sharded) for case in cases]
