"""Memory of caches: huge pages where much is used, small ones where little is, the same numbers on both."""

from __future__ import annotations

import copy
import mmap
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backends import needs_native
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.cache.huge_pages import HUGE, collapse, huge_parts, on_huge_pages, reserve
from headwise.testing import assert_same_bits

SMAPS, SWITCH = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells what is resident")
needs_huge = pytest.mark.skipif(
    not (SMAPS.exists() and SWITCH.exists() and "[never]" not in SWITCH.read_text()),
    reason="this system gives no huge pages",
)
D, S = 64, 16384  # 4 MiB of float32


def section(x: Tensor, what: str) -> str:
    """A line of smaps on the mapping in which a tensor begins."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(place[1], 16) <= x.data_ptr() < int(place[2], 16)
        elif inside and line.startswith(f"{what}:"):
            return line
    return ""


def resident(x: Tensor) -> int:
    """Bytes of a tensor's pages that are in memory: bit 63 of their entries in pagemap."""
    page = mmap.PAGESIZE
    first, last = x.data_ptr() // page, -(-(x.data_ptr() + x.nbytes) // page)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(first * 8)
        return sum(entry >> 63 for entry in memoryview(pages.read((last - first) * 8)).cast("Q")) * page


def tokens(T: int) -> tuple[Tensor, Tensor]:
    x = torch.arange(T * D, dtype=torch.float32).view(1, 1, T, D)
    return x, -x


CACHES: dict[str, Callable[[], KVCache]] = {
    "static": lambda: StaticCache(1, 1, D, capacity=S),
    "paged": lambda: PagedCache(PagePool(S // 128 + 3, 1, D), 1),
    "rolling": lambda: RollingCache(1, 1, D, window=S - 128, chunk=S),
}


def stored(cache: KVCache) -> Tensor:
    return cache._store.key if isinstance(cache, StaticCache) else cache.pool.store.key  # type: ignore[attr-defined]


@needs_huge
@pytest.mark.parametrize("kind", CACHES)
def test_a_full_cache_lies_on_huge_pages(kind: str) -> None:
    key = stored(CACHES[kind]().append(*tokens(S)))
    assert key.data_ptr() % HUGE == 0
    assert int(section(key, "AnonHugePages").split()[1]) * 1024 >= S * D * 4


@needs_smaps
def test_what_is_reserved_and_not_used_is_not_resident() -> None:
    """Of 32 MiB a head few tokens take a few small pages; from half a huge page of them on at most that much more."""
    half = HUGE // 2 // (4 * D)
    cache = StaticCache(1, 2, D, capacity=32 * half)
    some, key = torch.ones(1, 2, half - 1, D), stored(cache)
    cache.append(some[:, :, :3], some[:, :, :3])
    assert resident(key) <= 2 * mmap.PAGESIZE
    cache.append(some[:, :, 3:], some[:, :, 3:])
    assert "hg" not in section(key, "VmFlags")
    assert resident(key) <= HUGE
    cache.append(some, some)
    assert resident(key) <= 2 * 2 * HUGE


@needs_native
@needs_huge
def test_a_step_asks_for_them_too() -> None:
    half = HUGE // 2 // (4 * D)
    cache = StaticCache(1, 1, D, capacity=32 * half)
    x = torch.ones(1, 1, half - 1, D)
    cache.append(x, x).attend(x[:, :, :1])
    with torch.no_grad():
        assert cache.step(x[:, :, :1], x[:, :, :1], x[:, :, :1]) is not None
    assert "hg" in section(stored(cache), "VmFlags")


def test_heads_shorter_than_a_huge_page_share_them() -> None:
    """From half of the capacity on: so many heads fill one."""
    cache = StaticCache(3, 5, D, capacity=1000)
    assert cache._small == 500


@pytest.mark.parametrize("kind", CACHES)
def test_copies_have_the_same_numbers(kind: str) -> None:
    """A copy of Python's is in plain memory, a fork in such as the cache's own; both go on alone."""
    cache = CACHES[kind]().append(*tokens(S - 5))
    seen = cache.attend(torch.ones(1, 1, 1, D))
    for other in (cache.fork(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_same_bits(other.attend(torch.ones(1, 1, 1, D)), seen)
        other.append(*tokens(3))
    assert_same_bits(cache.attend(torch.ones(1, 1, 1, D)), seen)


def test_rows_are_taken_over_and_room_is_added() -> None:
    """`reorder` and pools that grow copy what is there, whole."""
    key = torch.randn(3, 1, 7, D)
    cache = StaticCache(3, 1, D, capacity=S).append(key, -key).reorder([2, 0, 2, 1])
    assert_same_bits(cache.keys, key[[2, 0, 2, 1]])
    assert stored(cache).data_ptr() % HUGE == 0 or not SMAPS.exists()
    pool = PagePool(3, 1, D)
    before = pool.store.key.uniform_().clone()
    pool.grow(S // 128)
    assert_same_bits(pool.store.key[:3], before)
    assert pool.store.key.shape == (3 + S // 128, 1, 128, D)


def never(*args: object) -> mmap.mmap:
    raise AssertionError("memory was mapped")


def refused(*args: object) -> mmap.mmap:
    raise OSError(12, "Cannot allocate memory")


def test_parts_are_the_whole_huge_pages_of_neighbours() -> None:
    x = reserve((40 * HUGE,), torch.int8)
    at = x.data_ptr()
    pieces = [x[2 * HUGE + 100 : 4 * HUGE + 7], x[: 2 * HUGE + 1], x[4 * HUGE + HUGE // 2 : 40 * HUGE], x[5:9]]
    parts = huge_parts(pieces) if hasattr(mmap, "MADV_HUGEPAGE") else None
    assert parts in (None, [(at, at + 4 * HUGE), (at + 5 * HUGE, at + 37 * HUGE), (at + 37 * HUGE, at + 40 * HUGE)])
    assert huge_parts([]) == huge_parts([x[1:HUGE]]) == huge_parts([torch.ones(3), torch.ones(5, 7)]) == []


@needs_huge
def test_memory_that_is_collapsed_keeps_its_place_and_numbers() -> None:
    x = reserve((3 * HUGE // 4,), torch.float32).normal_()
    before, at = x.clone(), x.data_ptr()
    if not all(collapse(*part) for part in huge_parts([x])):
        pytest.skip("a kernel before Linux 6.1")
    assert int(section(x, "AnonHugePages").split()[1]) * 1024 >= 3 * HUGE
    assert x.data_ptr() == at and torch.equal(x, before)


def test_small_tensors_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", never)
    on_huge_pages(reserve((HUGE // 2 - 1,), torch.float32))
    with pytest.raises(AssertionError, match="mapped"):
        reserve((HUGE // 2,), torch.float64)


def test_where_there_are_none_memory_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system; a mapping that is refused; no memory of this process; a program that is traced."""
    shape = (3, HUGE)
    with monkeypatch.context() as other:
        other.setattr(mmap, "mmap", refused)
        assert reserve(shape, torch.bfloat16).shape == shape
    monkeypatch.setattr(mmap, "mmap", never)
    assert reserve(shape, torch.int8, "meta").is_meta
    with FakeTensorMode():
        on_huge_pages(reserve(shape, torch.int8))
    with monkeypatch.context() as traced:
        traced.setattr(torch.compiler, "is_compiling", lambda: True)
        on_huge_pages(reserve(shape, torch.int8))
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    on_huge_pages(reserve(shape, torch.int8))
    assert huge_parts([torch.empty(shape)]) == []
