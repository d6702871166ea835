"""Caches: sizes to the byte, what they refuse, pages shared and given back, and a stream of a million tokens."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.testing import assert_same_bits

B, H, K, D, V = 2, 6, 2, 16, 8


def tokens(T: int, rows: int = B, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, K, T, D).to(dtype), torch.randn(rows, K, T, V).to(dtype)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bytes_a_token"),
    [(torch.float32, 4 * (D + V)), (torch.bfloat16, 2 * (D + V)), (torch.int8, D + V + 2 * 4)],
    ids=str,
)
def test_bytes(dtype: torch.dtype, bytes_a_token: int) -> None:
    """Keys and values, and of int8 two float32 scales a token and head; nothing else."""
    assert StaticCache(B, K, D, V, capacity=100, dtype=dtype).nbytes == B * K * 100 * bytes_a_token
    pool = PagePool(5, K, D, V, dtype=dtype)
    assert pool.page_nbytes == K * 128 * bytes_a_token
    cache = PagedCache(pool, B).append(*tokens(129, dtype=torch.float32 if dtype == torch.int8 else dtype))
    assert cache.nbytes == 4 * pool.page_nbytes
    assert RollingCache(1, K, D, V, window=128, dtype=dtype).nbytes == 3 * pool.page_nbytes


def test_shared_values_take_no_room() -> None:
    assert StaticCache(1, 1, 576, 512, capacity=10, shared=True, dtype=torch.bfloat16).nbytes == 10 * 576 * 2


def test_appending_copies_nothing() -> None:
    cache = StaticCache(B, K, D, V, capacity=9).append(*tokens(1))
    place = cache.keys.data_ptr()
    for _ in range(8):
        cache.append(*tokens(1))
        assert cache.keys.data_ptr() == place


def test_a_million_tokens_stream_through() -> None:
    """In constant memory; the last of them sees the window and the first tokens, as if the rest had never been."""
    window, first, total = 200, 3, 1_000_000
    cache = RollingCache(1, 1, 8, window=window, first=first, dtype=torch.bfloat16)
    nbytes, pages = cache.nbytes, cache.pool.store.key.data_ptr()
    beginning = torch.randn(1, 1, 128, 8).bfloat16()
    piece = torch.randn(1, 1, 128, 8).bfloat16()
    cache.append(beginning, beginning)
    while cache.length + 128 <= total - 300:
        cache.append(piece, piece)
    ends = torch.randn(1, 1, total - cache.length, 8).bfloat16()
    for x in ends.split(1, dim=2):
        cache.append(x, x)
        out = headwise.attention(x, cache)
        assert len(cache.tables[0]) <= 4
    assert cache.length == total and cache.nbytes == nbytes and cache.pool.store.key.data_ptr() == pages
    seen = torch.cat([beginning[:, :, :first], ends[:, :, -window:]], dim=2)
    torch.testing.assert_close(out, headwise.attention(ends[:, :, -1:], seen, seen), rtol=1e-2, atol=1e-2)


# -- pages -------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_until_it_writes() -> None:
    pool = PagePool(6, K, D, V)
    one = PagedCache(pool, 1).append(*tokens(200, 1))
    other = one.fork()
    assert pool.free == 4 and other.tables == one.tables
    other.append(*tokens(1, 1))
    assert pool.free == 3 and other.tables[0][0] == one.tables[0][0] and other.tables[0][1] != one.tables[0][1]
    one.append(*tokens(1, 1))
    assert pool.free == 3, "nobody else held that page any more"
    one.release()
    assert pool.free == 4 and other.length == 201
    other.truncate(100)
    assert pool.free == 5
    other.truncate(0)
    assert pool.free == 6


def test_a_cache_that_is_dropped_gives_its_pages_back() -> None:
    pool = PagePool(6, K, D, V)
    one = PagedCache(pool, 1).append(*tokens(200, 1))
    other, same = one.fork(), copy.copy(one)
    del one
    assert pool.free == 4 and same.length == 200
    del same
    assert pool.free == 4, "the fork still has them"
    del other
    assert pool.free == 6
    around = {"cache": PagedCache(pool, 2).append(*tokens(129))}
    around["around"] = around  # type: ignore[assignment]
    del around
    gc.collect()
    assert pool.free == 6
    with pytest.raises(ValueError, match="rows"):
        PagedCache(pool, 2).append(*tokens(129)).reorder([7])
    assert pool.free == 6
    twin = copy.deepcopy(cache := PagedCache(pool, 1).append(*tokens(200, 1)))
    del cache
    assert pool.free == 6 and twin.pool.free == 4
    theirs = twin.pool
    del twin
    assert theirs.free == 6
    key, value = tokens(129)
    learning = PagedCache(PagePool(6, K, D, V), 2).append(key.requires_grad_(), value)
    with pytest.raises(RuntimeError, match="graph leaves"):  # torch's; what is left of the copy gives nothing back
        copy.deepcopy(learning)
    gc.collect()
    assert learning.pool.free == 2


def test_a_full_page_is_never_copied() -> None:
    pool = PagePool(4, K, D, V)
    one = PagedCache(pool, 1).append(*tokens(128, 1))
    other = one.fork().append(*tokens(1, 1))
    assert other.tables[0][0] == one.tables[0][0] and pool.free == 2


def test_the_bits_of_pages_are_those_of_one_piece() -> None:
    key, value = tokens(300)
    query = torch.randn(B, H, 3, D)
    static = StaticCache(B, K, D, V, capacity=300).append(key, value)
    paged = PagedCache(PagePool(7, K, D, V), B).append(key, value)
    assert_same_bits(headwise.attention(query, static), headwise.attention(query, paged))


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[KVCache], Any], type[Exception], str]] = {
    "heads": (lambda c: c.append(torch.zeros(B, 3, 1, D), torch.zeros(B, 3, 1, V)), ValueError, r"takes key \(B, K, T"),
    "rows": (lambda c: c.append(*tokens(1, 3)), ValueError, r"= \(2, 2, T, 16\); got \(3, 2, 1, 16\)"),
    "width": (lambda c: c.append(tokens(1)[0], tokens(1)[0]), ValueError, r"takes value \(B, K, T, V\)"),
    "length": (lambda c: c.append(tokens(2)[0], tokens(1)[1]), ValueError, "takes value"),
    "dtype": (lambda c: c.append(*tokens(1, dtype=torch.bfloat16)), TypeError, "stores torch.float32"),
    "no value": (lambda c: c.append(tokens(1)[0]), ValueError, "takes append\\(key, value\\); got no value"),
    "real": (lambda c: c.append(*tokens(3), lengths=[4, 1]), ValueError, "numbers from 0 to T = 3"),
    "room": (lambda c: c.append(*tokens(500)), ValueError, "has no room|are needed|at most chunk"),
    "longer": (lambda c: c.truncate(9), ValueError, "at most what is there"),
    "no row": (lambda c: c.reorder([0, 2]), ValueError, "rows are numbers from 0 to 1"),
    "query": (
        lambda c: headwise.attention(torch.zeros(3, H, 1, D), c),
        ValueError,
        r"takes query \(B, H, T, D\) = \(2, H",
    ),
    "query's heads": (lambda c: headwise.attention(torch.zeros(B, 5, 1, D), c), ValueError, "multiple"),
    "query's dim": (
        lambda c: headwise.attention(torch.zeros(B, H, 1, D + 1), c),
        ValueError,
        r"\(2, H, T, 16\); got \(2, 6, 1, 17\)",
    ),
}
KINDS: dict[str, Callable[[], KVCache]] = {
    "static": lambda: StaticCache(B, K, D, V, capacity=20),
    "paged": lambda: PagedCache(PagePool(4, K, D, V), B),
    "rolling": lambda: RollingCache(B, K, D, V, window=9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", REFUSED)
def test_refused_and_unchanged(kind: str, what: str) -> None:
    call, error, text = REFUSED[what]
    cache = KINDS[kind]().append(*tokens(5))
    query = torch.randn(B, H, 1, D)
    before, lengths = headwise.attention(query, cache), list(cache.lengths)
    with pytest.raises(error, match=text):
        call(cache)
    assert cache.lengths == lengths
    assert_same_bits(before, headwise.attention(query, cache))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: StaticCache(B, K, D, capacity=0), ValueError, "capacity is at least 1; got 0"),
        (
            lambda: StaticCache(B, K, D, capacity=1, dtype=torch.int32),
            ValueError,
            "int4, int3; got torch.int32",
        ),
        (lambda: StaticCache(B, K, D, D + 1, capacity=1, shared=True), ValueError, "columns of the keys"),
        (lambda: PagePool(3, K, D, page_size=100), ValueError, "a multiple of 128; got 100"),
        (lambda: RollingCache(B, K, D, window=0), ValueError, "window is at least 1"),
        (lambda: RollingCache(B, K, D, window=3, first=-1), ValueError, "first is at least 0; got -1"),
    ],
)
def test_what_cannot_be_made(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("first", [0, 3, 130])
@pytest.mark.parametrize("window", [1, 100, 129])
def test_a_window_goes_back_as_far_as_the_next_token_can_see(window: int, first: int) -> None:
    """To the token, and not one farther: what was gone before cannot come back."""
    key, value = tokens(1280, 1)
    cache = RollingCache(1, K, D, V, window=window, first=first)
    for part in zip(key.split(128, 2), value.split(128, 2), strict=True):
        cache.append(*part)
    kept = -(-first // 128) * 128
    shortest = kept + cache.dropped[0] + window - 1
    with pytest.raises(
        ValueError, match=f"cannot go back to {shortest - 1} tokens.*shortest length left is {shortest}"
    ):
        cache.truncate(shortest - 1)
    assert cache.length == 1280
    cache.truncate(shortest).append(key[:, :, shortest : shortest + 1], value[:, :, shortest : shortest + 1])
    seen = [n for n in range(shortest + 1) if n < first or n > shortest - window]
    query = torch.randn(1, H, 1, D)
    expected = headwise.attention(query, key[:, :, seen], value[:, :, seen])
    torch.testing.assert_close(headwise.attention(query, cache), expected, rtol=1e-5, atol=1e-6)
    assert cache.dropped[0] > 0 and len(seen) == min(window + first, shortest + 1)


def test_a_page_of_tokens_takes_one_page() -> None:
    pool = PagePool(1, K, D, V)
    cache = PagedCache(pool, 1)
    key, value = tokens(pool.page_size, 1)
    cache.append(key, value)
    assert cache.length == pool.page_size and len(cache.tables[0]) == 1


def test_what_a_window_remembers_may_take_one_page_more() -> None:
    """A query that sees itself alone, a page of new tokens and one of those that share a page: two, and then three."""
    cache = RollingCache(1, 1, 8, window=1)
    assert [cache.remember(n).pool.num_pages for n in (0, 1, 2, 129, 130)] == [2, 2, 3, 3, 4]


@pytest.mark.parametrize("first", [0, 3, 130])
@pytest.mark.parametrize(("window", "chunk", "remembered"), [(3, 128, 0), (128, 3, 0), (7, 101, 23), (130, 127, 2)])
def test_a_window_has_the_pages_of_the_worst_place_and_no_more(
    window: int, chunk: int, remembered: int, first: int
) -> None:
    """Where the oldest token in sight is the last of its page, the newest the first of its own: 128 k + 2 of them."""
    cache = RollingCache(1, K, D, V, window=window, chunk=chunk, first=first).remember(remembered)
    before = -(-first // 128) * 128 + 127 + window - 1 + remembered
    for at in range(0, before, chunk):
        cache.append(*tokens(min(chunk, before - at), 1))
    cache.append(*tokens(chunk, 1))
    assert len(cache.tables[0]) == cache.pool.num_pages


@pytest.mark.parametrize("window", [2, 9, 101])
def test_a_page_is_given_back_once_no_later_token_sees_it(window: int) -> None:
    key, value = tokens(128 + window, 1)
    cache = RollingCache(1, K, D, V, window=window)
    first = 128 + window - 2
    for part in zip(key[:, :, :first].split(128, 2), value[:, :, :first].split(128, 2), strict=True):
        cache.append(*part)
    # The token at place 127 + window - 1 sees the last of the first 128 keys, the one after it no longer does.
    for at, dropped in ((first, 0), (first + 1, 128)):
        cache.append(key[:, :, at : at + 1], value[:, :, at : at + 1])
        assert cache.dropped == [dropped]


def test_a_fork_of_a_window_gives_back_its_own_pages() -> None:
    key, value = tokens(391, 1)
    cache = RollingCache(1, K, D, V, window=7).append(key[:, :, :101], value[:, :, :101])
    fork = cache.fork()
    for part in zip(key[:, :, 101:].split(97, 2), value[:, :, 101:].split(97, 2), strict=True):
        fork.append(*part)
    query = torch.randn(1, H, 1, D)
    assert cache.dropped == [0] and fork.dropped[0] > 0
    for each, n in ((cache, 101), (fork, 391)):
        expected = headwise.attention(query, key[:, :, n - 7 : n], value[:, :, n - 7 : n])
        torch.testing.assert_close(headwise.attention(query, each), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["static", "paged", "rolling"])
def test_padding_goes_with_its_row(kind: str) -> None:
    """Which tokens of the last append were padding is known of each row, wherever it has moved."""
    cache, (key, value), query = KINDS[kind](), tokens(3), torch.randn(B, H, 3, D)
    cache.append(key, value, lengths=[3, 1])
    out = headwise.attention(query, cache.reorder([1, 0]))
    assert bool((out[0, :, 1:] == 0).all()) and bool((out[1] != 0).all())
    alone = [headwise.attention(query[b : b + 1, :, :n], key[1 - b, :, :n][None], value[1 - b, :, :n][None],
                                mask=headwise.causal()) for b, n in enumerate((1, 3))]  # fmt: skip
    torch.testing.assert_close(out[:1, :, :1], alone[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[1:], alone[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["static", "paged", "rolling"])
def test_the_padding_of_an_append_that_is_undone_is_forgotten(kind: str) -> None:
    cache, (key, value), query = KINDS[kind](), tokens(5), torch.randn(B, H, 1, D)
    cache.append(key, value)
    before = headwise.attention(query, cache)
    cache.append(*tokens(1), lengths=[1, 0])
    assert bool((headwise.attention(query, cache)[1] == 0).all()), "the second row's token is padding"
    assert_same_bits(headwise.attention(query, cache.truncate(5)), before)


@pytest.mark.parametrize("kind", ["static", "paged", "rolling"])
def test_positions_of_uneven_rows_show_in_the_lse(kind: str) -> None:
    """ALiBi counts from where each row stands: a shift that the softmax cancels, and the lse does not."""
    cache, (key, value), slopes = KINDS[kind](), tokens(6), torch.rand(H)
    counts = [6, 2]
    cache.append(key, value, lengths=counts)
    query, mask = torch.randn(B, H, 1, D), headwise.alibi(slopes)
    out, lse = headwise.attention(query, cache, mask=mask, return_lse=True)
    for b, n in enumerate(counts):
        alone = headwise.attention(
            query[b : b + 1], key[b : b + 1, :, :n], value[b : b + 1, :, :n], mask=mask, return_lse=True
        )
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["static", "paged", "rolling"])
def test_rows_of_padding_alone_give_0_whatever_else_is_in_the_batch(kind: str) -> None:
    """Also where no row has a token: as a row without one gives beside a row with some."""
    for side in ("left", "right"):
        cache = KINDS[kind]().append(*tokens(3), lengths=[0] * B, side=side)
        for T in (3, 1):
            out, lse = headwise.attention(torch.randn(B, H, T, D), cache, return_lse=True)
            assert bool((out == 0).all() and (lse == -torch.inf).all()) and out.shape[:3] == (B, H, T)
        with pytest.raises(ValueError, match="the cache is empty"):
            headwise.attention(torch.zeros(B, H, 1, D), KINDS[kind]())


def test_an_empty_cache_and_no_cache() -> None:
    with pytest.raises(ValueError, match="the cache is empty"):
        headwise.attention(torch.zeros(B, H, 1, D), KINDS["static"]())
    with pytest.raises(TypeError, match="value may be left out where key is a cache"):
        headwise.attention(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
    with pytest.raises(ValueError, match="rows of this cache have different lengths"):
        _ = KINDS["static"]().append(*tokens(3), lengths=[1, 2]).length


def test_a_cache_has_a_gradient_where_it_is_in_one_piece_and_of_floats() -> None:
    """Through the query: the tokens themselves are kept as numbers."""
    query = torch.randn(B, H, 1, D, requires_grad=True)
    for make in KINDS.values():
        out = headwise.attention(query, make().append(*tokens(7)))
        assert torch.autograd.grad(out.sum(), query)[0].abs().sum() > 0
