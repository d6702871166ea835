"""Caches in a file: torch.save, and torch.load as it is by default, in a process that has run nothing of headwise."""

import copy
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache, quantize
from headwise.parallel import ShardedCache
from headwise.testing import assert_same_bits

B, H, K, D, V = 3, 6, 2, 7, 5
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
READ = """
import sys, torch, headwise
saved = torch.load(sys.argv[1])
for name, cache in saved["caches"].items():
    q, k, v = (x.to(cache.dtype if cache.dtype.is_floating_point else x.dtype) for x in saved["more"])
    v = None if cache.shared else v
    out = headwise.attention(q, cache.append(k, v))
    assert torch.equal(out, saved["outs"][name]), name
    assert cache.lengths == saved["lengths"], (name, cache.lengths)
one, other = saved["caches"]["paged pair"], saved["caches"]["paged other"]
assert one.pool is other.pool
"""


def caches(dtype: torch.dtype) -> dict[str, Any]:
    """Of each kind, with rows of different lengths, the last append padded, and two that share a pool."""
    pool = PagePool(4 * B, K, D, V, dtype=dtype)
    pair = PagedCache(pool, B)
    made: dict[str, Any] = {
        "static": StaticCache(B, K, D, V, capacity=300, dtype=dtype),
        "shared": StaticCache(B, K, D, V, capacity=300, dtype=dtype, shared=True),
        "paged": PagedCache(PagePool(2 * B, K, D, V, dtype=dtype), B),
        "rolling": RollingCache(B, K, D, V, window=40, first=3, dtype=dtype).remember(7),
        "paged pair": pair,
    }
    kept = torch.float32 if dtype == torch.int8 else dtype
    for T, counts in ((90, None), (61, [61, 0, 17])):
        k, v = torch.randn(B, K, T, D).to(kept), torch.randn(B, K, T, V).to(kept)
        for cache in made.values():
            cache.append(k, None if cache.shared else v, lengths=counts)
    return made | {"paged other": pair.fork()}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_saved_cache_goes_on_in_a_fresh_process(dtype: torch.dtype, tmp_path: Path) -> None:
    made, kept = caches(dtype), torch.float32 if dtype == torch.int8 else dtype
    more = [torch.randn(B, heads, 1, size).to(kept) for heads, size in ((H, D), (K, D), (K, V))]
    q, k, v = more
    torch.save({"caches": made, "more": more}, tmp_path / "before.pt")
    outs = {name: headwise.attention(q, x.append(k, None if x.shared else v)) for name, x in made.items()}
    saved = torch.load(tmp_path / "before.pt")
    torch.save(saved | {"outs": outs, "lengths": made["static"].lengths}, tmp_path / "all.pt")
    ran = fresh.run(READ, str(tmp_path / "all.pt"))
    assert ran.returncode == 0, ran.stderr


@torch.no_grad()
def test_a_copy_has_what_the_cache_has() -> None:
    for name, cache in caches(torch.float32).items():
        for other in (copy.copy(cache), copy.deepcopy(cache)):
            assert other.lengths == cache.lengths and type(other) is type(cache), name
            assert other.handle is not cache.handle and int(other.handle) != int(cache.handle)
            assert_same_bits(other.attend(torch.ones(B, H, 1, D)), cache.attend(torch.ones(B, H, 1, D)))


def test_quantized_keys_are_loaded(tmp_path: Path) -> None:
    x = quantize(torch.randn(1, K, 3, D))
    torch.save(x, tmp_path / "keys.pt")
    ran = fresh.run(
        "import sys, torch, headwise; print(torch.load(sys.argv[1]).dequantize().shape)", str(tmp_path / "keys.pt")
    )
    assert ran.returncode == 0 and "[1, 2, 3, 7]" in ran.stdout, ran.stderr


def test_a_file_makes_nothing_but_caches() -> None:
    from headwise.cache.saved import rebuild

    with pytest.raises(ValueError, match="a saved cache is one of StaticCache"):
        rebuild("system", {})


class OwnCache(StaticCache):
    """A class of a user's own is saved as Python does it."""


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    cache = OwnCache(1, K, D, V, capacity=9).append(torch.randn(1, K, 3, D), torch.randn(1, K, 3, V))
    torch.save(cache, tmp_path / "own.pt")
    again = torch.load(tmp_path / "own.pt", weights_only=False)
    assert type(again) is OwnCache and again.lengths == [3]


def test_a_sharded_cache_says_what_to_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = object.__new__(ShardedCache)
    with pytest.raises(TypeError, match=r"save `local` and `lengths` on every rank"):
        torch.save(cache, tmp_path / "sharded.pt")
