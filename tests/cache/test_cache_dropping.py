"""Tokens dropped by score: each cache against a plain list of keys for every head, whose tokens know their position."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import needs_native
from draw import drawn
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache, quantize
from headwise.ops.masks import as_mask

B, H, K, D, V = 3, 6, 2, 16, 11
TOLERANCE = {torch.float32: 2e-5, torch.int8: 2e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}
# int8 is compared with the dequantised numbers; the others are a rounding of float32 or bfloat16 over a short row.


def make(kind: str, dtype: torch.dtype) -> KVCache:
    if kind == "static":
        cache: KVCache = StaticCache(B, K, D, V, capacity=600, dtype=dtype)
        store: Any = cache._store  # type: ignore[attr-defined]
    else:
        cache = PagedCache(PagePool(60, K, D, V, dtype=dtype), B)
        store = cache.pool.store
    for x in (store.key, store.value, store.key_scale, store.value_scale):
        if x is not None and x.is_floating_point():
            x.fill_(torch.nan)  # what was never written may not be read
    return cache


class Lists:
    """For each row and key-value head a list of (position, key, value)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows: list[list[list[tuple[int, Tensor, Tensor]]]] = [[[] for _ in range(K)] for _ in range(B)]
        self.lengths, self.dtype = [0] * B, dtype

    def as_kept(self, x: Tensor) -> Tensor:
        if self.dtype != torch.int8:
            return x.double()
        small = quantize(x)
        return small.data.double() * small.scale.double()[..., None]

    def append(self, key: Tensor, value: Tensor, counts: list[int]) -> None:
        key, value = self.as_kept(key), self.as_kept(value)
        for b, n in enumerate(counts):
            for h in range(K):
                self.rows[b][h] += [(self.lengths[b] + t, key[b, h, t], value[b, h, t]) for t in range(n)]
            self.lengths[b] += n

    def keep(self, columns: Callable[[int, int], list[int]]) -> None:
        """Row b's head h keeps the tokens at columns(b, h)."""
        self.rows = [
            [[head[j] for j in sorted(set(columns(b, h)))] for h, head in enumerate(row)]
            for b, row in enumerate(self.rows)
        ]

    def truncate(self, lengths: list[int]) -> None:
        self.rows = [[[x for x in head if x[0] < n] for head in row] for row, n in zip(self.rows, lengths, strict=True)]
        self.lengths = list(lengths)

    def reorder(self, rows: list[int]) -> None:
        self.rows = [[list(head) for head in self.rows[r]] for r in rows]
        self.lengths = [self.lengths[r] for r in rows]

    def attend(
        self, query: Tensor, counts: list[int], window: int | None, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Out and lse of the queries of the last counts[b] tokens of each row, in float64; padding gives 0."""
        T = query.shape[2]
        out, lse = torch.zeros(B, H, T, V).double(), torch.full((B, H, T), -torch.inf).double()
        for b, n in enumerate(counts):
            for h in range(H):
                tokens = self.rows[b][h // (H // K)]
                if not tokens or n == 0:
                    continue
                places, keys, values = (
                    torch.stack(x) for x in zip(*((torch.tensor(at), *kv) for at, *kv in tokens), strict=True)
                )
                ages = torch.arange(self.lengths[b] - n, self.lengths[b])[:, None] - places
                scores = query[b, h, :n].double() @ keys.mT / D**0.5
                if slopes is not None:
                    scores = scores - slopes[h].double() * ages
                seen = (ages >= 0) & (ages < (torch.inf if window is None else window))
                scores = scores.masked_fill(~seen, -torch.inf)
                out[b, h, :n] = torch.softmax(scores, -1).nan_to_num(0.0) @ values
                lse[b, h, :n] = torch.logsumexp(scores, -1)
        return out, lse


def check(cache: KVCache, truth: Lists, draw: random.Random, counts: list[int], T: int) -> None:
    assert cache.lengths == truth.lengths
    assert cache.columns == [len(row[0]) for row in truth.rows]
    assert [n - gone for n, gone in zip(cache.lengths, cache.dropped, strict=True)] == cache.columns
    places = cache.column_positions()
    for b, row in enumerate(truth.rows):
        for h, head in enumerate(row):
            its = places[b, h if places.shape[1] > 1 else 0].tolist()
            assert its == [x[0] for x in head] + [-1] * (len(its) - len(head)), "positions of the columns"
    if not any(cache.columns):
        return
    window, slopes = draw.choice([None, None, 3, 40]), torch.rand(H) / 8 if draw.random() < 0.3 else None
    mask = None if window is None else headwise.window(window)
    if slopes is not None:
        mask = headwise.alibi(slopes) if mask is None else mask & headwise.alibi(slopes)
    query = torch.randn(B, H, T, D)
    if cache.dtype in (torch.bfloat16, torch.float64):
        query = query.to(cache.dtype)
    out, lse = headwise.attention(query, cache, mask=mask, return_lse=True)
    true_out, true_lse = truth.attend(query, counts, window, slopes)
    tolerance = TOLERANCE[cache.dtype]
    torch.testing.assert_close(out.double(), true_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), true_lse, rtol=tolerance, atol=tolerance)


def forget_some(cache: KVCache, truth: Lists, draw: random.Random) -> None:
    """Keep or drop some columns, drawn for each head of each row, or for all."""
    columns = cache.columns
    each = draw.random() < 0.5
    left = [draw.randint(0, n) for n in columns] if each or len(set(columns)) > 1 else [draw.randint(0, columns[0])] * B
    some = [
        [sorted(draw.sample(range(n), m)) for _ in range(K if each else 1)] for n, m in zip(columns, left, strict=True)
    ]
    keeps = draw.random() < 0.5
    if not keeps:
        some = [
            [[j for j in range(n) if j not in set(head)] for head in row] for n, row in zip(columns, some, strict=True)
        ]
    most = max(len(row[0]) for row in some)
    padded = torch.tensor([[draw.sample(head, len(head)) + [-1] * (most - len(head)) for head in row] for row in some])
    indices = padded.long() if each else padded[:, 0].long()
    cache.keep(indices) if keeps else cache.drop(indices)

    def kept(b: int, h: int) -> list[int]:
        listed = some[b][h if each else 0]
        return listed if keeps else [j for j in range(columns[b]) if j not in set(listed)]

    truth.keep(kept)


def live(kind: str, dtype: torch.dtype, seed: int, steps: int = 14) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    cache, truth = make(kind, dtype), Lists(dtype)
    last: tuple[int, list[int]] | None = None
    others: list[tuple[KVCache, list[int], list[int]]] = []
    for _ in range(steps):
        what = draw.choice(["append", "append", "append", "drop", "drop", "truncate", "reorder", "fork"])
        if what == "append":
            T = draw.choice([1, 1, 2, 17, 65])
            counts = [T] * B if draw.random() < 0.6 else [draw.randint(0, T) for _ in range(B)]
            key, value = torch.randn(B, K, T, D), torch.randn(B, K, T, V)
            if dtype != torch.int8:
                key, value = key.to(dtype), value.to(dtype)
            cache.append(key, value, lengths=counts)
            truth.append(key, value, counts)
            last = T, counts
        elif what == "drop" and max(cache.columns):
            forget_some(cache, truth, draw)
        elif what == "truncate":
            lengths = [draw.randint(n // 2, n) for n in cache.lengths]
            before = cache.columns
            try:
                cache.truncate(lengths)
            except ValueError as error:
                assert "fork()" in str(error) and cache.columns == before
            else:
                truth.truncate(lengths)
                last = None
        elif what == "reorder":
            rows = [draw.randrange(B) for _ in range(B)]
            cache.reorder(rows)
            truth.reorder(rows)
            last = None if last is None else (last[0], [last[1][r] for r in rows])
        elif what == "fork":
            others.append((cache, cache.columns, cache.lengths))
            cache = cache.fork()
        T, counts = last or (1, [1] * B)
        if last is None and min(cache.lengths) == 0:
            continue
        check(cache, truth, draw, counts, T)
    for other, columns, lengths in others:
        assert other.columns == columns and other.lengths == lengths, "a fork changed the cache it is from"


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16, torch.float64])
def test_lives_with_drops(kind: str, dtype: torch.dtype) -> None:
    for seed in drawn(range(32)):
        live(kind, dtype, seed)


@needs_native
def test_a_window_is_no_step_after_a_drop() -> None:
    """A step has its window in columns, and a window is one of positions."""
    cache = StaticCache(1, K, D, V, capacity=9).append(torch.randn(1, K, 7, D), torch.randn(1, K, 7, V))
    with torch.no_grad():
        assert cache.takes_steps(headwise.window(3))
        assert not cache.drop([2]).takes_steps(headwise.window(3)) and cache.takes_steps()


@needs_native
@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_decode_step_after_a_drop(kind: str, dtype: torch.dtype) -> None:
    """A step in one kernel call has the bits of append and attend, and both are right; also where rows differ."""
    draw = random.Random(3)
    for counts in ([37, 37, 37], [37, 11, 29]):
        cache, truth = make(kind, dtype), Lists(dtype)
        key, value = torch.randn(B, K, 37, D), torch.randn(B, K, 37, V)
        cache.append(key, value, lengths=counts)
        truth.append(key, value, counts)
        forget_some(cache, truth, draw)
        with torch.no_grad():
            for _ in range(3):
                query, key, value = torch.randn(B, H, 1, D), torch.randn(B, K, 1, D), torch.randn(B, K, 1, V)
                both = headwise.attention(query, cache.fork().append(key, value))
                assert cache.takes_steps()
                out = cache.step(query, key, value)
                truth.append(key, value, [1] * B)
                assert out is not None and torch.equal(out, both)
                true = truth.attend(query, [1] * B, None, None)[0]
                torch.testing.assert_close(out.double(), true, rtol=2e-5, atol=2e-5)  # float32 over short rows


def test_dropping_is_masking() -> None:
    """What every mask allows after a drop is what it allowed before, without the tokens that are gone."""
    q, k, v = torch.randn(1, 2, 23, 8), torch.randn(1, 2, 23, 8), torch.randn(1, 2, 23, 8)
    gone = torch.tensor([0, 3, 4, 11, 21])
    left = torch.ones(23, dtype=torch.bool).index_fill(0, gone, False)
    masks = {
        "nothing": None,
        "window": headwise.window(5),
        "dilated": headwise.dilated(3),
        "blocks": headwise.blocks(4),
        "union": headwise.window(3) | headwise.prefix(2),
        "complement": ~headwise.window(4),
        "tensor": torch.rand(7, 23) > 0.4,
        "bias": torch.randn(1, 2, 7, 23),
        "segments": headwise.segments(torch.arange(7) // 3, torch.arange(23) // 5 % 3),
        "rule": headwise.rule(lambda b, h, i, j: (i + j + h) % 3 > 0),
        "alibi": headwise.alibi(torch.tensor([0.5, 0.1])),
    }
    for name, mask in masks.items():
        for T in (1, 7):
            if T == 1 and name in ("tensor", "bias", "segments"):
                continue
            cache = StaticCache(1, 2, 8, capacity=30).append(k, v)
            rules = headwise.causal() & headwise.keep(left)
            rules = rules if mask is None else rules & as_mask(mask)
            true = headwise.attention(q[:, :, -T:], k, v, mask=rules)
            out = headwise.attention(q[:, :, -T:], cache.drop(gone), mask=mask)
            torch.testing.assert_close(out, true, rtol=1e-5, atol=1e-6, msg=name)  # another order of float32 sums


def test_gradients_flow_to_what_is_left() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    left = torch.tensor([[[1, 2, 7], [0, 5, 8]]])
    cache = StaticCache(1, 2, 8, capacity=12, dtype=torch.float64).append(k, v)
    headwise.attention(q[:, :, -1:], cache.keep(left)).square().sum().backward()
    ours = [x.grad.clone() for x in (q, k, v)]  # type: ignore[union-attr]
    seen = torch.zeros(1, 2, 1, 9, dtype=torch.bool).scatter_(3, left[:, :, None], True)
    grads = torch.autograd.grad(headwise.attention(q[:, :, -1:], k, v, mask=seen).square().sum(), (q, k, v))
    for one, true in zip(ours, grads, strict=True):
        torch.testing.assert_close(one, true)


def test_pages_go_back_and_a_shared_beginning_stays_shared() -> None:
    pool = PagePool(12, K, D, V)
    cache = PagedCache(pool, 1).append(torch.randn(1, K, 640, D), torch.randn(1, K, 640, V))
    two = cache.fork().reorder([0, 0])
    assert pool.free == 7
    before = two.column_positions()
    pool.require(7)
    left, keys = torch.cat([torch.arange(300), torch.tensor([500, 639])]), cache.keys
    two.keep(left)  # 2 pages as they were, and a part of a third
    assert torch.equal(two.keys, keys[:, :, left].expand(2, -1, -1, -1)) and torch.equal(cache.keys, keys)
    assert pool.free == 5 and [table[:2] for table in two.tables] == [cache.tables[0][:2]] * 2
    assert cache.columns == [640] and before.shape == (2, 1, 640)
    cache.drop([0]).drop(torch.arange(1, 639))
    assert torch.equal(cache.keys, keys[:, :, 1:2]) and cache.columns == [1] and pool.free == 12 - 2 - 2 - 1


def test_a_full_pool_refuses_and_nothing_changes() -> None:
    pool = PagePool(2, K, D, V)
    cache = PagedCache(pool, 1).append(torch.randn(1, K, 200, D), torch.randn(1, K, 200, V))
    other, key = cache.fork(), cache.keys
    with pytest.raises(ValueError, match="pages has 0 free"):
        cache.drop([3])
    assert cache.columns == [200] and torch.equal(cache.keys, key) and cache.dropped == [0]
    other.release()
    assert cache.drop([3]).columns == [199]


def test_room_comes_back() -> None:
    cache = StaticCache(1, K, D, V, capacity=10).append(torch.randn(1, K, 10, D), torch.randn(1, K, 10, V))
    one = torch.randn(1, K, 1, D), torch.randn(1, K, 1, V)
    with pytest.raises(ValueError, match=r"drop\(\)"):
        cache.append(*one)
    assert cache.drop([2, 5]).append(*one).columns == [9] and cache.positions(1).tolist() == [11]


@pytest.mark.unchecked
def test_what_is_refused() -> None:
    cache = make("static", torch.float32).append(torch.randn(B, K, 7, D), torch.randn(B, K, 7, V), lengths=[7, 4, 7])
    for bad, error, text in (
        ([9], ValueError, r"columns 0 <= j < \[7, 4, 7\]"),
        ([5], ValueError, "9|5"),
        ([-2], ValueError, "-1 for none"),
        (torch.tensor([1.0]), TypeError, "integer tensor"),
        (torch.zeros(2, 2).long(), ValueError, r"B = 3, K = 2"),
        (torch.tensor(1), ValueError, r"\(n,\)"),
        (torch.tensor([[[0, 1], [2, 2]]]), ValueError, r"same number of tokens; row 0 would have \[2, 1\]"),
        ("ab", TypeError, "whole numbers"),
    ):
        with pytest.raises(error, match=text):
            cache.keep(bad)  # type: ignore[arg-type]
        assert cache.columns == [7, 4, 7]
    rolling = RollingCache(1, K, D, window=5).append(torch.randn(1, K, 3, D), torch.randn(1, K, 3, D))
    with pytest.raises(ValueError, match=r"by its window of 5.*StaticCache"):
        rolling.drop([0])


def test_saved_and_loaded(tmp_path: Any) -> None:
    for kind in ("static", "paged"):
        cache = make(kind, torch.float32).append(torch.randn(B, K, 9, D), torch.randn(B, K, 9, V))
        cache.keep(torch.tensor([[[0, 2, 8], [1, 3, 4]]] * B))
        torch.save(cache, tmp_path / kind)
        again = torch.load(tmp_path / kind)
        assert torch.equal(again.column_positions(), cache.column_positions()) and again.columns == [3] * B
        query = torch.randn(B, H, 1, D)
        assert torch.equal(headwise.attention(query, again), headwise.attention(query, cache))


def test_modules_decode_on_after_a_drop() -> None:
    """A module's next tokens have the positions that follow the dropped ones, and its latents are not expanded."""
    torch.manual_seed(0)
    for attention, cache in (
        (
            headwise.MultiHeadAttention(24, 4, num_kv_heads=2, rotary=headwise.nn.Rotary(6)),
            StaticCache(1, 2, 6, capacity=40),
        ),
        (
            headwise.LatentAttention(24, 3, kv_lora_rank=8, nope_dim=6, rope_dim=4, value_dim=5),
            StaticCache(1, 1, 12, 8, capacity=40, shared=True),
        ),
    ):
        x = torch.randn(1, 20, 24)
        left = [0, 1, 7, 13, 14, 17]
        seen = torch.zeros(20, 20, dtype=torch.bool)
        seen[:, [*left, 18, 19]] = True
        seen[:18] = True
        with torch.no_grad():
            true = attention(x, mask=headwise.causal() & headwise.keep(seen))[:, 18:]
            _, cache = attention(x[:, :18], cache=cache)
            cache.keep(left)
            first, cache = attention(x[:, 18:19], cache=cache)
            second, cache = attention(x[:, 19:], cache=cache)
        torch.testing.assert_close(torch.cat([first, second], 1), true, rtol=1e-4, atol=1e-5)  # other forms and orders


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_truncated_after_a_drop(kind: str) -> None:
    """Heads that dropped different tokens are truncated together or not at all; before all drops, nothing is gone."""
    key, value = torch.randn(B, K, 7, D), torch.randn(B, K, 7, V)
    cache = make(kind, torch.float32).append(key, value)
    cache.keep(torch.tensor([[[0, 2, 5], [1, 2, 3]]] * B))
    with pytest.raises(ValueError, match=r"row 0 would have \[2, 3\] at length 4: fork\(\)"):
        cache.truncate(4)
    assert cache.columns == [3] * B and cache.lengths == [7] * B
    cache.truncate(3)
    assert cache.columns == [2] * B and cache.column_positions()[0].tolist() == [[0, 2], [1, 2]]

    cache, mask = make(kind, torch.float32).append(key, value), headwise.window(2)
    cache.drop([3]).truncate(3)
    assert cache.dropped == [0] * B and cache.columns == cache.lengths == [3] * B
    fresh = make(kind, torch.float32).append(key[:, :, :3], value[:, :, :3])
    query = torch.randn(B, H, 1, D)
    assert torch.equal(cache.attend(query, mask=mask), fresh.attend(query, mask=mask))
    with torch.no_grad():  # after a drop, a step takes no mask
        assert cache.takes_steps(mask) == fresh.takes_steps(mask)
