"""What runs on ranks for `test_parallel_cache_lists.py`: a sharded cache beside a list of all tokens (`list_cache`)."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from list_cache import ListCache
from torch import Tensor

import headwise
from headwise.cache import RollingCache, StaticCache
from headwise.parallel import ShardedCache

K, H, D, V = 1, 2, 5, 3


class Rolling(NamedTuple):
    """Sizes of a rolling cache."""

    batch: int
    window: int
    first: int
    block: int
    chunk: int = 64


class Pair:
    """One cache twice: its tokens on ranks, and in lists; the same calls to both."""

    def __init__(self, sizes: Rolling, seed: int = 0, remember: int = 0, kind: Any = RollingCache) -> None:
        options: dict[str, Any] = {"dtype": torch.float64, "block": sizes.block}
        if kind is RollingCache:
            options |= {"window": sizes.window, "first": sizes.first, "chunk": sizes.chunk}
        else:
            options |= {"capacity": 2000}
        self.cache = ShardedCache(kind, sizes.batch, K, D, V, **options)
        if remember:
            self.cache.remember(remember)
        window = sizes.window if kind is RollingCache else None
        self.lists = ListCache(sizes.batch, window, sizes.first if window is not None else 0)
        self.draw, self.batch = torch.Generator().manual_seed(seed), sizes.batch

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=torch.float64)

    def append(self, T: int, lengths: list[int] | None = None, side: Any = "right") -> None:
        B = self.batch
        key, value = self.numbers(B, K, T, D), self.numbers(B, K, T, V)
        self.cache.append(key, value, lengths=lengths, side=side)
        self.lists.append(key, value, lengths, side)

    def fill(self, lengths: list[int], piece: int = 64) -> None:
        """So many tokens for each row, a piece at a time."""
        while any(have < n for have, n in zip(self.lists.lengths, lengths, strict=True)):
            counts = [min(piece, n - have) for have, n in zip(self.lists.lengths, lengths, strict=True)]
            self.append(max(counts), None if len(set(counts)) == 1 else counts)

    def off(self, T: int, **options: Any) -> float:
        """How far the attention of T queries is from that of the lists."""
        query = self.numbers(self.batch, H, T, D)
        out, lse = headwise.attention(query, self.cache, return_lse=True, **options)
        want, of_lists = self.lists.attend(query, **options)
        gone = of_lists == -torch.inf
        if not torch.equal(lse == -torch.inf, gone) or not bool((out[gone] == 0).all()):
            return float("inf")
        lse, of_lists = lse.masked_fill(gone, 0.0), of_lists.masked_fill(gone, 0.0)
        return max(float((out - want).abs().max()), float((lse.double() - of_lists).abs().max()))


def page_edges(sizes: list[Rolling], around: int) -> dict[str, float]:
    """Steps of two tokens at all lengths about that at which the first page of a rank's tokens may go: the largest
    differences, of those lengths where there is one."""
    wrong = {}
    with torch.no_grad():
        for case in sizes:
            for length in range(around - 3 * case.block, around + 2 * case.block + 4):
                pair = Pair(case, length)
                pair.fill([length] * case.batch, case.chunk)
                pair.append(2)
                far = pair.off(2)
                if far > 1e-12:
                    wrong[f"{case}, {length} tokens"] = far
    return wrong


def ragged(cases: list[tuple[Rolling, list[int]]]) -> dict[str, float]:
    """Rows of very different lengths: what the short ones see lies far before what the long ones see."""
    wrong = {}
    with torch.no_grad():
        for case, lengths in cases:
            for T in (1, 2, 3):
                pair = Pair(case, T)
                pair.fill(lengths)
                for turn in range(2):
                    pair.append(T, None if turn else [T, *[max(T - 1, 1)] * (case.batch - 1)], "left")
                    far = pair.off(T)
                    if far > 1e-12:
                        wrong[f"{case}, {lengths}, {T} tokens, turn {turn}"] = far
    return wrong


def remembered(cases: list[tuple[Rolling, int]], most: int, step: int) -> list[str]:
    """Caches that go back as far as they remember, from every length up to `most` in steps: what was refused or off."""
    wrong = []
    with torch.no_grad():
        for case, tokens in cases:
            for length in range(step, most, step):
                pair = Pair(case, length, remember=tokens)
                pair.fill([length])
                back = max(length - tokens, 1)
                try:
                    pair.cache.truncate(back)
                except (ValueError, RuntimeError) as error:
                    wrong.append(f"{case}, from {length} to {back}: {error}")
                    continue
                pair.lists.truncate([back])
                pair.append(1)
                if pair.off(1) > 1e-12:
                    wrong.append(f"{case}, from {length} to {back}: off")
    return wrong


def schedules(seeds: list[int], world: int) -> list[str]:
    """Drawn calls, of static and rolling caches: ragged appends on both sides, rows that come in another order."""
    wrong = []
    with torch.no_grad():
        for seed in seeds:
            make = random.Random(seed)
            kind = make.choice([StaticCache, RollingCache])
            sizes = Rolling(
                make.choice([1, 2, 3]), make.choice([3, 11, 40]), make.choice([0, 2, 7]), make.choice([1, 5]), 29
            )
            pair = Pair(sizes, seed, kind=kind)
            pair.append(make.choice([4, 29]))
            for turn in range(6):
                T = make.choice([1, 1, 3, 17])
                lengths = [make.randint(0, T) for _ in range(pair.batch)] if make.random() < 0.5 else None
                if make.random() < 0.2:
                    rows = [make.randrange(pair.batch) for _ in range(pair.batch)]
                    pair.cache.reorder(rows)
                    pair.lists.reorder(rows)
                pair.append(T, lengths, make.choice(["left", "right"]))
                options: dict[str, Any] = {"softcap": 2.0} if make.random() < 0.3 else {}
                if make.random() < 0.4:
                    options["sinks"] = pair.numbers(H).float()
                far = pair.off(T, **options)
                if far > 1e-6:  # sinks are float32
                    wrong.append(f"seed {seed}, turn {turn}, {sizes}, {kind.__name__}: {far:.3g}")
    return wrong
