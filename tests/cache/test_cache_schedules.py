"""Random lives of a cache, each step equal to attention without one: prefill, chunks, steps, roll back, reorder, fork,
padding, windows; and what no token was written to is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draw import drawn
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache, quantize

H, K, D, V = 6, 2, 16, 11
WINDOW, FIRST = 150, 5
SCHEDULES = 500


def poison(cache: KVCache) -> None:
    """NaN wherever nothing has been written; in int8's scales."""
    store: Any = cache.pool.store if isinstance(cache, PagedCache) else cache._store  # type: ignore[attr-defined]
    for x in (store.key, store.value, store.key_scale, store.value_scale):
        if x is not None and x.is_floating_point():
            x.fill_(torch.nan)


def make(kind: str, rows: int, dtype: torch.dtype, shared: bool) -> KVCache:
    values = 9 if shared else V
    sizes: dict[str, Any] = {"dtype": dtype, "shared": shared}
    if kind == "static":
        cache: KVCache = StaticCache(rows, K, D, values, capacity=700, **sizes)
    elif kind == "paged":
        cache = PagedCache(PagePool(80, K, D, values, **sizes), rows)
    else:
        first = FIRST if kind == "rolling first" else 0
        cache = RollingCache(rows, K, D, values, window=WINDOW, first=first, chunk=64, **sizes)
    poison(cache)
    return cache


class Truth:
    """The tokens of each row, in order, as they come back from where they are kept."""

    def __init__(self, cache: KVCache, kind: str) -> None:
        self.cache, self.kind = cache, kind
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(cache.batch)]
        self.last: tuple[int, list[int], str] | None = None  # T of the last append, how many were real, on which side

    def as_kept(self, x: Tensor) -> Tensor:
        if self.cache.dtype != torch.int8:
            return x.double()
        small = quantize(x)
        return small.data.double() * small.scale.double()[..., None]

    def append(self, key: Tensor, value: Tensor | None, counts: list[int], side: str) -> None:
        T = key.shape[2]
        key = self.as_kept(key)
        value = key[..., : self.cache.value_dim] if value is None else self.as_kept(value)
        for b, n in enumerate(counts):
            start = T - n if side == "left" else 0
            self.rows[b] += [(key[b, :, j], value[b, :, j]) for j in range(start, start + n)]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The definition for one row, (H, n, V) and lse (H, n): the last n tokens are those of the queries."""
        n, S = query.shape[1], key.shape[1]
        i, j = torch.arange(S - n, S)[:, None], torch.arange(S)
        seen = (j <= i) & (j > i - (window or S))
        if self.kind.startswith("rolling"):
            seen = seen & ((j > i - WINDOW) | (j < (FIRST if self.kind == "rolling first" else 0)))
        key, value = (x.repeat_interleave(H // K, dim=0) for x in (key, value))
        scores = query @ key.mT / D**0.5
        if slopes is not None:
            scores = scores - slopes.double()[:, None, None] * (i - j).abs()
        scores = scores.masked_fill(~seen, -torch.inf)
        return torch.softmax(scores, dim=-1) @ value, torch.logsumexp(scores, dim=-1)

    def check(self, draw: random.Random, query: Tensor, counts: list[int], side: str) -> None:
        """The queries' attention, under a mask that is drawn, of which so many of each row are real."""
        T, rolling = query.shape[2], self.kind.startswith("rolling")
        window = None if rolling else draw.choice([None, None, 3, 100])
        # Under ALiBi a rolling cache counts its distances among the keys it holds: the first ones come nearer.
        slopes = torch.rand(H) / 8 if draw.random() < 0.4 and self.kind != "rolling first" else None
        mask = None if window is None else headwise.window(window)
        if slopes is not None:
            mask = headwise.alibi(slopes) if mask is None else mask & headwise.alibi(slopes)
        out, lse = headwise.attention(query, self.cache, mask=mask, return_lse=True)
        tolerance = {torch.bfloat16: 2e-2}.get(query.dtype, 2e-5)
        for b, n in enumerate(counts):
            start = T - n if side == "left" else 0
            real = slice(start, start + n)
            padding = torch.ones(T, dtype=torch.bool)
            padding[real] = False
            assert bool((out[b, :, padding] == 0).all()), "a query of padding gave something"
            assert bool((lse[b, :, padding] == -torch.inf).all()), "a query of padding has an lse"
            if n == 0:
                continue
            key, value = (torch.stack([token[i] for token in self.rows[b]], dim=1) for i in (0, 1))
            truth, exact = self.attention(query[b, :, real].double(), key, value, window, slopes)
            torch.testing.assert_close(out[b, :, real].double(), truth, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse[b, :, real].double(), exact, rtol=tolerance, atol=tolerance)


def step(cache: KVCache, truth: Truth, draw: random.Random, dtype: torch.dtype, shared: bool) -> None:
    T = draw.choice([1, 1, 1, 2, 7, 40, 64, 63])
    if not cache.pool.free if isinstance(cache, PagedCache) and truth.kind == "paged" else False:
        return
    counts, side = [T] * cache.batch, draw.choice(["right", "left"])
    padded = draw.random() < 0.5
    if padded:
        counts = [draw.randint(0, T) for _ in counts]
    key, query = torch.randn(cache.batch, K, T, D).to(dtype), torch.randn(cache.batch, H, T, D).to(dtype)
    value = None if shared else torch.randn(cache.batch, K, T, V).to(dtype)
    before = list(cache.lengths)
    try:
        cache.append(key, value, lengths=counts if padded else None, side=side)  # type: ignore[arg-type]
    except ValueError as error:
        assert "room" in str(error) or "pool" in str(error)
        assert cache.lengths == before
        return
    truth.append(key, value, counts, side)
    truth.last = (T, counts, side)
    if max(cache.lengths) > 0:
        truth.check(draw, query, counts, side)


def attend_again(truth: Truth, draw: random.Random, dtype: torch.dtype) -> None:
    """The queries of the last append once more; where tokens of it are gone, those of the last ones that are left."""
    cache = truth.cache
    if max(cache.lengths) == 0:
        return
    if truth.last is not None:
        T, counts, side = truth.last
    elif truth.kind.startswith("rolling"):
        return  # it keeps what the next token sees, which the last one that is left may not
    else:
        T, side = draw.choice([1, 2, 7]), "left"
        counts = [min(T, n) for n in cache.lengths]
    truth.check(draw, torch.randn(cache.batch, H, T, D).to(dtype), counts, side)


def roll_back(cache: KVCache, truth: Truth, draw: random.Random, dtype: torch.dtype) -> None:
    """By some tokens; or by none; or as far as a rolling cache lets us, and not one token farther."""
    wanted = [n - draw.randint(0, min(n, 90)) for n in cache.lengths]
    edges = [shortest(cache, b) for b in range(cache.batch)]
    if draw.random() < 0.3:
        wanted = edges
    if draw.random() < 0.1:
        wanted = list(cache.lengths)
    if any(n < edge for n, edge in zip(wanted, edges, strict=True)):
        with pytest.raises(ValueError, match="cannot go back"):
            cache.truncate(wanted)
        return
    gone = cache.truncate(wanted).lengths != [len(row) for row in truth.rows]
    truth.rows = [row[:n] for row, n in zip(truth.rows, wanted, strict=True)]
    truth.last = None if gone else truth.last
    attend_again(truth, draw, dtype)


def shortest(cache: KVCache, b: int) -> int:
    """The shortest length that row b can go back to: what the next token sees begins with the oldest that is held."""
    if not isinstance(cache, RollingCache) or not cache.dropped[b]:
        return 0
    pages_of_first = -(-cache.first // 128)
    return min(cache.lengths[b], pages_of_first * 128 + cache.dropped[b] + cache.window - 1)


def reorder(cache: KVCache, truth: Truth, draw: random.Random, dtype: torch.dtype) -> None:
    rows = [draw.randrange(cache.batch) for _ in range(draw.randint(1, 4))]
    cache.reorder(torch.tensor(rows))
    truth.rows = [list(truth.rows[r]) for r in rows]
    if truth.last is not None:
        T, counts, side = truth.last
        truth.last = (T, [counts[r] for r in rows], side)
    attend_again(truth, draw, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["static", "rolling", "rolling first", "paged"])
def test_drawn_schedules(kind: str, dtype: torch.dtype) -> None:
    for seed in drawn(range(SCHEDULES // 12 + 1)):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        shared = draw.random() < 0.3
        cache = make(kind, draw.randint(1, 3), dtype, shared)
        truth = Truth(cache, kind)
        model = torch.float32 if dtype == torch.int8 else dtype
        for _ in range(draw.randint(3, 9)):
            what = draw.random()
            if what < 0.6:
                step(cache, truth, draw, model, shared)
            elif what < 0.75:
                roll_back(cache, truth, draw, model)
            elif what < 0.9:
                reorder(cache, truth, draw, model)
            else:
                cache = go_on_with_a_fork(cache, truth, draw, model, shared)


def go_on_with_a_fork(cache: KVCache, truth: Truth, draw: random.Random, dtype: torch.dtype, shared: bool) -> KVCache:
    """The two go their own ways: what one writes the other does not see."""
    fork = cache.fork()
    other = Truth(fork, truth.kind)
    other.rows, other.last = [list(row) for row in truth.rows], truth.last
    first: Callable[[], None] = lambda: step(cache, truth, draw, dtype, shared)  # noqa: E731
    second: Callable[[], None] = lambda: step(fork, other, draw, dtype, shared)  # noqa: E731
    for go in draw.sample([first, second, first, second], 4):
        go()
    truth.cache, truth.rows, truth.last = fork, other.rows, other.last
    if isinstance(cache, PagedCache):
        cache.release()
    return fork
