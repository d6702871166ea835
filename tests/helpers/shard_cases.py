"""Schedules of a key-value cache, drawn: the same on a cache of one process and on one whose tokens ranks share."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import dirty_memory
import torch
import torch.distributed as dist
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.ops.sharding.heads import Share
from headwise.parallel import ShardedCache, tensor_parallel

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
    own: int

    @classmethod
    def drawn(cls, seed: int, world: int = 0) -> Case:
        make = random.Random(seed)
        kind = KINDS[seed % 3]
        shared = make.random() < 0.25
        D = make.choice([8, 16, 24])
        V = D - 3 if shared else make.choice([8, 11])
        kv_heads, group = 1 if shared else make.choice([1, 2, 3, 5]), make.choice([1, 2, 3])
        group *= world // math.gcd(world, kv_heads * group) if world else 1
        return cls(
            seed,
            kind,
            make.choice([1, 1, 2, 3]),
            kv_heads,
            group,
            (D, V),
            make.choice([torch.float32] * 3 + [torch.int8, torch.bfloat16, torch.float64]),
            shared,
            make.choice([1, 1, 3, 16, 128]),
            make.choice([3, 40, 150]),
            make.choice([0, 0, 2, 130]),
            kv_heads * group if world else 0,
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
        return ShardedCache(self.kind, *sizes, block=self.block, own_heads=self.own or None, **options)

    def of_query(self) -> torch.dtype:
        return torch.float32 if self.dtype == torch.int8 else self.dtype


def share_of(case: Case, rank: int, world: int) -> Share:
    """Query heads and key-value heads of a rank that passes its own."""
    return Share(case.kv_heads * case.group, case.kv_heads, world, rank)


def run(case: Case, sharded: bool) -> list[Tensor]:
    """What every attention of the case's schedule gives; of a rank that passes its own heads, those."""
    make = random.Random(case.seed + 1000)
    cache = case.cache(sharded)
    own = sharded and case.own > 0
    H, K, dtype = case.kv_heads * case.group, case.kv_heads, case.of_query()
    share = share_of(case, dist.get_rank(), dist.get_world_size()) if own else Share(H, K, 1, 0)
    q_heads, k_heads = share.heads, list(share.keys)
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
    for _ in range(7):
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


def ragged(kind: type[KVCache], dtype: torch.dtype, sharded: bool) -> list[Tensor]:
    """What rows of unlike lengths give beside columns that were never written: many queries, then one."""
    make = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, 2, 129, 8, generator=make) for _ in range(3))
    options: dict[str, Any] = {"dtype": dtype}
    sizes: tuple[Any, ...] = (2, 2, 8)
    if kind is PagedCache:
        options, sizes = {}, (PagePool(40, 2, 8, dtype=dtype), 2)
    elif kind is RollingCache:
        options["window"] = 2
    else:
        options["capacity"] = 150
    cache = ShardedCache(kind, *sizes, block=3, **options) if sharded else kind(*sizes, **options)
    query, key, value = (x.to(dtype if dtype.is_floating_point else torch.float32) for x in (query, key, value))
    outs = []
    with torch.no_grad():
        for part, lengths in ((slice(0, 128), [117, 4]), (slice(128, 129), None)):
            cache.append(key[:, :, part], value[:, :, part], lengths=lengths)
            outs += headwise.attention(query[:, :, part], cache, return_lse=True)
    return outs


def reads_what_was_never_written(kind: type[KVCache], dtype: torch.dtype, sharded: bool = True) -> bool:
    """Whether results depend on what a cache's memory held before it was the cache's."""
    with dirty_memory.clean():
        expected = ragged(kind, dtype, sharded)
    return not all(map(torch.equal, ragged(kind, dtype, sharded), expected)) or any(
        bool(x.isnan().any()) for x in expected
    )


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


def sent(length: int, window: int, block: int) -> tuple[int, int, int]:
    """Of each rank the bytes of partial outputs at a step with a rolling cache, its tokens, and its bytes in memory."""
    cache = ShardedCache(RollingCache, 1, 2, 8, window=window, block=block, chunk=64)
    x = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(1))
    for first in range(0, length, 64):
        cache.append(x[:, :, : min(64, length - first)], x[:, :, : min(64, length - first)])
    before = cache.comm.sent["cache parts"]
    with torch.no_grad():
        headwise.attention(torch.randn(1, 6, 1, 8, generator=torch.Generator().manual_seed(2)), cache)
    static = ShardedCache(StaticCache, 1, 2, 8, capacity=600)
    static.append(*[torch.randn(1, 2, 301, 8)] * 2)
    return cache.comm.sent["cache parts"] - before, static.nbytes, static.local.lengths[0]


def refusals(which: str) -> tuple[str, list[int], list[int]]:
    """What a rank says of a call that cannot be, and that nothing has changed."""
    rank, x = dist.get_rank(), torch.zeros(1, 2, 5, 8)
    cache = ShardedCache(StaticCache, 1, 2, 8, capacity=7, own_heads=4 if which.startswith("own") else None)
    query = torch.zeros(1, 4, 5, 8)
    if not which.startswith("own"):
        cache.append(x, x)
    try:
        match which:
            case "full":
                cache.append(x, x)
            case "pool":
                cache = ShardedCache(PagedCache, PagePool(2 - rank, 2, 8), 1)
                big = torch.zeros(1, 2, 250, 8)
                cache.append(big, big).append(big, big)
            case "lengths":
                cache.truncate(5 - rank)
                headwise.attention(query, cache)
            case "rows":
                cache.reorder([0] * (1 + rank)).reorder([0])
                headwise.attention(query, cache)
            case "query":
                headwise.attention(query[..., : 8 - rank], cache)
            case "sinks":
                headwise.attention(query, cache, sinks=torch.full((4,), float(rank)))
            case "mask":
                headwise.attention(query, cache, mask=headwise.window(2 + rank))
            case "gradient":
                headwise.attention(query.requires_grad_(), cache)
            case "dropout":
                headwise.attention(query, cache, dropout=0.1)
            case "view":
                cache.view()
            case "rolling mask":
                cache = ShardedCache(RollingCache, 1, 2, 8, window=7).append(x, x)
                headwise.attention(query, cache, mask=headwise.blocks(2))
            case "rolled back":
                cache = ShardedCache(RollingCache, 1, 2, 8, window=7, chunk=400)
                cache.append(*[torch.zeros(1, 2, 400, 8)] * 2).append(*[torch.zeros(1, 2, 399, 8)] * 2).append(x, x)
                cache.truncate(300)
            case "own heads":
                cache.append(torch.zeros(1, 1 + rank, 5, 8), torch.zeros(1, 1 + rank, 5, 8))
            case "own mask":
                cache.append(x[:, :1], x[:, :1])
                headwise.attention(query[:, :2], cache, mask=headwise.alibi(torch.ones(2)))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", cache.lengths, cache.local.lengths
    return "nothing", cache.lengths, cache.local.lengths


def modules() -> list[Tensor]:
    """What a module of each kind makes of a prompt and four tokens, with a sharded cache and with one of its own."""
    torch.manual_seed(5)
    mha = headwise.MultiHeadAttention(24, 6, num_kv_heads=2, rotary=headwise.nn.Rotary(4))
    mla = headwise.LatentAttention(24, 3, kv_lora_rank=16, nope_dim=8, rope_dim=4, value_dim=7)
    x = torch.randn(2, 13, 24)
    outputs = []
    with torch.no_grad():
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for module, sizes, options in ((mha, (2, 2, 4), {}), (mla, (2, 1, 20, 16), {"shared": True})):
            caches = [ShardedCache(StaticCache, *sizes, capacity=13, **options)]
            caches += [StaticCache(*sizes, capacity=13, **options)]
            for cache in caches:
                outs = [module(part, cache=cache)[0] for part in x.split([9, 1, 1, 1, 1], dim=1)]
                outputs.append(torch.cat(outs, dim=1))
            outputs.append(outputs[-1])
            own = ShardedCache(StaticCache, *sizes, capacity=13, own_heads=module.num_heads, **options)
            split = tensor_parallel(module, mesh)
            outputs.insert(
                -1, torch.cat([split(part, cache=own)[0] for part in x.split([9, 1, 1, 1, 1], dim=1)], dim=1)
            )
    return outputs


def back_and_forth() -> list[float]:
    """Rolling caches that go on for a thousand tokens, and back as far as they remember, against one process's."""
    x = torch.randn(1, 2, 1000, 8, generator=torch.Generator().manual_seed(3))
    far = []
    with torch.no_grad():
        for window, remember, steps in ((190, 0, ((0, 10),)), (70, 300, ((0, 10), (700, 2), (650, 1)))):
            caches: list[Any] = [
                ShardedCache(RollingCache, 1, 2, 8, window=window, chunk=100).remember(remember),
                RollingCache(1, 2, 8, window=window, chunk=100).remember(remember),
            ]
            for length, parts in steps:
                for cache in caches:
                    cache.truncate(length)
                for part in x[:, :, length : length + 100 * parts].split(100, dim=2):
                    outs = [headwise.attention(part, cache.append(part, part)) for cache in caches]
                    far.append(float((outs[0] - outs[1]).abs().max() / outs[1].abs().max()))
    return far
