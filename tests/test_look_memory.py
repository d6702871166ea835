"""`headwise.look.memory`: what a pass frees is kept for its next tensors while a look lasts, and then given back."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import fresh
import pytest
from torch import Tensor, nn

import headwise
from headwise import look
from headwise.look.memory import PASSES, kept

# The fixture `libc` puts a function in the place of ctypes.CDLL, which annotations name: where the checker reads them
# first under it, it takes that for the annotation.
pytestmark = pytest.mark.unchecked
STATM = Path("/proc/self/statm")
BLOCK = 80  # MiB; glibc keeps 64 at most of its own accord
KEEP = [("mmap_max", 0), ("trim_threshold", -1)]
END = [("mmap_max", 65536), ("mmap_threshold", 2**25), ("trim_threshold", 2**26), ("malloc_trim", 0)]
NAMES = {-1: "trim_threshold", -3: "mmap_threshold", -4: "mmap_max"}


def version() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):
        return None


class Libc(ctypes.CDLL):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def mallopt(self, option: int, value: int) -> int:
        self.calls.append((NAMES[option], value))
        return 1

    def malloc_trim(self, left: ctypes.c_size_t) -> int:
        self.calls.append(("malloc_trim", left.value))
        return 1


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has set malloc."""
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Libc:
    noted, real = Libc(), ctypes.CDLL
    # Libraries by name, headwise's own among them, are loaded as ever.
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name, *more, **as_is: noted if name is None else real(name, *more, **as_is)
    )
    monkeypatch.setattr(os, "confstr", {"CS_GNU_LIBC_VERSION": "glibc 2.36"}.get)
    return noted


# In a process of its own, for what others have freed would be taken again, and is there already: nothing would show.
ALONE = f"""
import ctypes, os
from pathlib import Path
import torch
from headwise.look.memory import PASSES, kept

def resident():  # MiB, without what is mapped from files
    _, all_pages, of_files, *_ = map(int, Path("{STATM}").read_text().split())
    return (all_pages - of_files) * os.sysconf("SC_PAGE_SIZE") >> 20

for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
    del os.environ[name]
ctypes.CDLL(None).malloc_trim(0)  # what the imports have freed
before = resident()
with kept(PASSES[0]):
    torch.ones({BLOCK} << 18)
    print(resident() - before)
    left = resident()
    smaller = torch.ones({BLOCK} // 2 << 18)
    print(resident() - left)
    del smaller
    torch.ones(2 * {BLOCK} << 18)
    print(resident() - before)
print(resident() - before)
"""


@pytest.mark.skipif(not STATM.exists() or version() is None, reason="needs glibc's malloc and /proc")
def test_what_is_freed_stays_inside_and_goes_back_at_the_end() -> None:
    done = fresh.run(ALONE)
    assert done.returncode == 0, done.stderr
    first, smaller, larger, end = map(int, done.stdout.split())
    assert first > BLOCK // 2 and larger > BLOCK and end < BLOCK // 2
    assert smaller < BLOCK // 4, "it lies where the first one lay"


def test_the_last_block_that_ends_gives_back(libc: Libc) -> None:
    with kept(PASSES[0]):
        with kept(PASSES[-1]):
            assert libc.calls == KEEP
        assert libc.calls == KEEP
    assert libc.calls == KEEP + END


def test_it_goes_back_after_an_error(libc: Libc) -> None:
    with pytest.raises(KeyError), kept(PASSES[0]):
        raise KeyError
    assert libc.calls == KEEP + END


@pytest.mark.parametrize("tokens", [PASSES[0] - 1, PASSES[-1] + 1])
def test_other_lengths_leave_malloc_alone(tokens: int, libc: Libc) -> None:
    with kept(tokens):
        pass
    assert libc.calls == []


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=65536")]
)
def test_what_the_user_has_set_stays(name: str, value: str, libc: Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with kept(PASSES[0]):
        pass
    assert libc.calls == []


@pytest.mark.parametrize("error", [AttributeError, OSError, ValueError, None])
def test_other_systems_are_left_alone(
    error: type[Exception] | None, libc: Libc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confstr(name: str) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(os, "confstr", confstr)
    with kept(PASSES[0]):
        pass
    assert libc.calls == []


class Reader(nn.Module):
    """Notes how malloc is set while it runs."""

    def __init__(self, libc: Libc) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(97, 8), headwise.MultiHeadAttention(8, 1)
        self.libc, self.noted = libc, [("never", 0)]

    def forward(self, ids: Tensor) -> Tensor:
        self.noted = self.libc.calls[:]
        return self.attend(self.embed(ids), mask=headwise.causal())


@pytest.mark.parametrize(("tokens", "during", "after"), [(PASSES[0] - 1, [], []), (PASSES[0], KEEP, KEEP + END)])
def test_a_look_keeps_what_long_passes_free(
    tokens: int, during: list[tuple[str, int]], after: list[tuple[str, int]], libc: Libc
) -> None:
    reader = Reader(libc)
    look.at(reader, [n % 97 for n in range(tokens)], repeats=None)
    assert (reader.noted, libc.calls) == (during, after)
    libc.calls.clear()
    look.over(reader, [[1, 2, 3]], batch=tokens, repeats=None)
    assert (reader.noted, libc.calls) == (during, after)


def test_a_look_within_a_training_keeps_nothing(libc: Libc) -> None:
    reader = Reader(libc)
    look.Watch(reader, [n % 97 for n in range(PASSES[0])], repeats=None).measure(1)
    assert libc.calls == []
    with kept(PASSES[0]):
        assert libc.calls == KEEP
