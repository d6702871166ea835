"""Caches against lists of tokens (`list_cache.py`) in every case of a small size: padding on both sides in appends that
follow one another, memories of unequal length, rows whose number changes, and caches that are emptied and used again.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from backends import needs_native
from draw import slow_except
from list_cache import ListCache
from torch import Tensor

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache

H, K, D, V = 4, 2, 5, 3
WINDOW, FIRST = 40, 3
pytestmark = pytest.mark.unchecked
KINDS = ("static", "paged", "rolling")


def made(kind: str, rows: int, **more: Any) -> tuple[Any, ListCache]:
    """An empty cache and an empty list cache with the same rules."""
    lists = ListCache(rows, *((WINDOW, FIRST) if kind == "rolling" else (None, 0)), causal=more.get("causal", True))
    if kind == "static":
        return StaticCache(rows, K, D, V, capacity=900, **more), lists
    if kind == "paged":
        return PagedCache(PagePool(40, K, D, V), rows, **more), lists
    return RollingCache(rows, K, D, V, window=WINDOW, first=FIRST, chunk=100, **more), lists


def tokens(rows: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, H, T, D), torch.randn(rows, K, T, D), torch.randn(rows, K, T, V)


def far(cache: Any, lists: ListCache, query: Tensor, out: Tensor | None = None) -> float:
    """The largest difference of the outputs; infinite where the lengths differ or an empty row has a number."""
    out = headwise.attention(query, cache) if out is None else out
    want, lse = lists.attend(query)
    if cache.lengths != lists.lengths or bool((out[lse == -torch.inf] != 0).any()):
        return torch.inf
    return float((out - want).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("kind", slow_except(KINDS, ("static", "rolling")))
def test_every_padding_of_two_appends_and_a_step(kind: str) -> None:
    """Two rows, two tokens: every number of real tokens in either append, on both sides, and then one token each."""
    torch.manual_seed(1)
    wrong, counts = [], list(itertools.product(range(3), repeat=2))
    for one, two, side in itertools.product(counts, counts, ("right", "left")):
        cache, lists = made(kind, 2)
        for some in (one, two):
            query, key, value = tokens(2, 2)
            cache.append(key, value, lengths=list(some), side=side)
            lists.append(key, value, list(some), side)
            if any(lists.lengths) and not far(cache, lists, query) < 1e-5:
                wrong.append((one, two, side, some))
        query, key, value = tokens(2, 1)
        out = cache.step(query, key, value) if cache.takes_steps() else None
        if out is None:
            cache.append(key, value)
        lists.append(key, value)
        if not far(cache, lists, query, out) < 1e-5 or not far(cache, lists, query) < 1e-5:
            wrong.append((one, two, side, "a token"))
    assert not wrong, wrong


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("T", [1, 5])
def test_every_length_of_a_memory(kind: str, T: int) -> None:
    """Queries of cross-attention attend all keys of their own row, and none of a longer row's room."""
    torch.manual_seed(2)
    for counts in itertools.product(range(4), repeat=2):
        if any(counts):
            cache, lists = made(kind, 2, causal=False)
            _, key, value = tokens(2, 3)
            cache.append(key, value, lengths=list(counts))
            lists.append(key, value, list(counts))
            assert far(cache, lists, torch.randn(2, H, T, D)) < 1e-5, counts


@torch.no_grad()
def test_a_memory_is_not_continued_by_a_step() -> None:
    """A cache of cross-attention takes no step: a module reads it and adds nothing to it."""
    mha = headwise.MultiHeadAttention(12, H, num_kv_heads=K).eval()
    memory, x = torch.randn(2, 6, 12), torch.randn(2, 3, 12)
    cache = StaticCache(2, K, 3, capacity=9, causal=False)
    first, _ = mha(x[:, :2], memory, cache=cache)
    assert not cache.takes_steps()
    last, _ = mha(x[:, 2:], cache=cache)
    assert cache.lengths == [6, 6]
    torch.testing.assert_close(torch.cat([first, last], 1), mha(x, memory))


def _emptied(cache: Any, lists: ListCache) -> None:
    if hasattr(cache, "release"):
        cache.release()
    else:
        cache.truncate(0)
    lists.truncate([0] * len(lists.rows))


def _of_more_rows(cache: Any, lists: ListCache) -> None:
    cache.reorder([1, 0, 1, 1, 0])
    lists.reorder([1, 0, 1, 1, 0])


def _of_one_row(cache: Any, lists: ListCache) -> None:
    cache.reorder([1])
    lists.reorder([1])


@torch.no_grad()
@pytest.mark.parametrize("change", [_emptied, _of_more_rows, _of_one_row])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_goes_on_after_a_change(kind: str, ragged: bool, change: Any) -> None:
    """Over several pages before the change and after it."""
    torch.manual_seed(3)
    cache, lists = made(kind, 2)
    for turn in range(12):
        if turn == 6:
            change(cache, lists)
        rows = len(lists.rows)
        _, key, value = tokens(rows, 70)
        counts = [70 - 9 * b for b in range(rows)] if ragged else None
        cache.append(key, value, lengths=counts)
        lists.append(key, value, counts)
        if turn in (5, 6, 11):
            query, key, value = tokens(rows, 2)
            cache.append(key, value)
            lists.append(key, value)
            assert far(cache, lists, query) < 1e-5, turn


def test_bytes_are_those_of_the_pages_each_once() -> None:
    pool = PagePool(12, K, D, V)
    _, key, value = tokens(1, 300)
    cache = PagedCache(pool, 1).append(key, value)
    assert cache.nbytes == 3 * pool.page_nbytes
    many = cache.fork().reorder([0, 0, 0])
    assert many.nbytes == 3 * pool.page_nbytes
    _, key, value = tokens(3, 1)
    assert many.append(key, value).nbytes == (2 + 3) * pool.page_nbytes


@needs_native
@torch.no_grad()
def test_keys_of_int8_have_the_dtype_of_a_step() -> None:
    x = torch.randn(1, K, 4, D)
    cache = StaticCache(1, K, D, capacity=9, dtype=torch.int8).append(x, x)
    assert cache.keys.dtype == torch.float32
    one = x[:, :, :1].bfloat16()
    assert cache.step(torch.randn(1, H, 1, D).bfloat16(), one, one) is not None
    assert cache.keys.dtype == torch.bfloat16


@needs_native
@torch.no_grad()
def test_a_full_cache_takes_no_step() -> None:
    """Nor does one whose page is shared while the pool has none left for a copy; with room for one token it does."""
    shared = PagedCache(PagePool(1, K, D, V), 1)
    full = {
        "static": (StaticCache(2, K, D, V, capacity=3), 2),
        "paged": (PagedCache(PagePool(2, K, D, V), 2), 127),
        "shared": (shared.append(*tokens(1, 1)[1:]).fork(), 0),
    }
    for name, (cache, room) in full.items():
        if room:
            cache.append(*tokens(2, room)[1:])
            assert cache.takes_steps(), name
            assert cache.step(*tokens(2, 1)) is not None
        before = list(cache.lengths)
        assert not cache.takes_steps(), name
        with pytest.raises(ValueError):
            cache.append(*tokens(len(before), 1)[1:])
        assert cache.lengths == before


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_fork_leaves_the_other_as_it_is(kind: str) -> None:
    cache, lists = made(kind, 2)
    query, key, value = tokens(2, 5)
    lists.append(key, value)
    other = cache.append(key, value).fork()
    for one in (other, other, cache.fork()):
        assert one.takes_steps() and one.step(*tokens(2, 1)) is not None
    assert (cache.lengths, other.lengths) == ([5, 5], [7, 7])
    assert far(cache, lists, query) < 1e-5


@torch.no_grad()
def test_every_row_of_a_window_is_settled() -> None:
    """At once what the next append does first: pages that no later token sees are free."""
    cache, _ = made("rolling", 3)
    for T in (100, 100, 100, 100, 40):
        cache.append(*tokens(3, T)[1:])
    before, free = list(cache.dropped), cache.pool.free
    cache.settle()
    assert before == [128, 128, 128] and cache.dropped == [256, 256, 256]
    assert cache.pool.free == free + 3
