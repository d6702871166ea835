"""Caches on CUDA: the CPU's numbers, and steps in which nothing is read back or copied from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_places import assert_close, everywhere, on_cuda
from draw import slow_except
from pretend_cuda import pretend_cuda
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache

pytestmark = pytest.mark.unchecked
B, H, K, D, PROMPT, STEPS = 3, 4, 2, 16, 140, 5
Make = Callable[..., KVCache]
CACHES: dict[str, Make] = {
    "static": lambda **o: StaticCache(B, K, D, capacity=400, **o),
    "paged": lambda **o: PagedCache(PagePool(20, K, D, **o), B),
    "rolling": lambda **o: RollingCache(B, K, D, window=33, first=2, chunk=150, **o),
}
DTYPES = {"float32": torch.float32, "int8": torch.int8}
ROWS = {"even": None, "right": [140, 9, 77], "left": [140, 131, 77]}
every_cache = pytest.mark.parametrize("name", CACHES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def tokens(T: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    heads = (H, K, K)
    return tuple(torch.randn(B, n, T, D, generator=source) for n in heads)  # type: ignore[return-value]


def outputs(cache: KVCache, rows: str, move: Callable[[Any], Any]) -> list[Tensor]:
    """A prompt, some steps, rows that change places, a fork, and tokens that are taken back."""
    sides = {} if ROWS[rows] is None else {"lengths": ROWS[rows], "side": rows}
    outs = []
    q, k, v = move(tokens(PROMPT, 0))
    outs.append(headwise.attention(q, cache.append(k, v, **sides)))
    for n in range(STEPS):
        q, k, v = move(tokens(1, n + 1))
        outs.append(cache.append(k, v).attend(q, mask=headwise.window(60), softcap=20.0))
        outs.append(cache.positions(2, q.device))
    other = cache.fork().reorder([2, 0, 0]) if rows == "even" else cache.fork()
    for n in range(2):
        q, k, v = move(tokens(3, 10 + n))
        outs.append(other.append(k, v).attend(q, return_lse=True)[1])
        outs.append(cache.append(v, k).attend(q))
    cache.truncate([n - 2 for n in cache.lengths])
    outs.append(cache.append(k, v).attend(q))
    return outs


@everywhere
@pytest.mark.parametrize("rows", slow_except(ROWS, ("even", "left")))
@every_dtype
@every_cache
def test_the_numbers_of_the_cpu(name: str, dtype: str, rows: str, cuda: Any) -> None:
    with torch.no_grad():
        expected = outputs(CACHES[name](dtype=DTYPES[dtype]), rows, lambda x: x)
    with cuda():
        ours = outputs(CACHES[name](dtype=DTYPES[dtype], device="cuda"), rows, on_cuda)
        for x, y in zip(ours, expected, strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("rows", ROWS)
@every_dtype
@every_cache
def test_a_step_neither_waits_nor_copies_from_the_host(name: str, dtype: str, rows: str) -> None:
    sides = {} if ROWS[rows] is None else {"lengths": ROWS[rows], "side": rows}
    with pretend_cuda() as counts:
        cache = CACHES[name](dtype=DTYPES[dtype], device="cuda")
        steps = [on_cuda(tokens(1, n)) for n in range(4)]
        q, k, v = on_cuda(tokens(PROMPT, 0))
        headwise.attention(q, cache.append(k, v, **sides))
        for n, (q, k, v) in enumerate(steps):
            if n == 1:  # the first step makes the tensors that the others add to
                counts.clear()
            cache.append(k, v).attend(q)
            cache.positions(1, q.device)
        assert not counts.waits() and not counts.to_device.total(), counts


@pytest.mark.parametrize("name", ["paged", "rolling"])
def test_a_table_is_copied_once_for_each_new_page(name: str) -> None:
    with pretend_cuda() as counts:
        cache = CACHES[name](device="cuda")
        q, k, v = on_cuda(tokens(127, 0))
        cache.append(k, v).attend(q)
        copies = []
        for n in range(4):  # the second of these tokens begins a page in every row
            q, k, v = on_cuda(tokens(1, n))
            counts.clear()
            cache.append(k, v).attend(q)
            copies.append(counts.to_device.total())
        assert copies[1] == 1 and copies[2:] == [0, 0]


def test_numbers_that_did_not_grow_alike_are_copied_anew() -> None:
    with pretend_cuda():
        cache = StaticCache(B, K, D, capacity=9, device="cuda")
        for numbers in ([1, 2, 3], [2, 3, 4], [2, 3, 4], [2, 3, 5], [1, 2, 4], [7, 7], [7, 7, 7], [0, 0, 0]):
            kept = cache._numbers_on("columns", numbers, torch.device("cuda"))
            assert kept.tolist() == numbers and kept.device.type == "cuda"
