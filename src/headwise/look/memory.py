"""Memory that long forward passes free, kept for their next tensors until they are over.

glibc hands a large block back to the system as soon as it is freed, and the next tensor waits for fresh pages, each of
them zeroed. Where a model's activation is written out in steps, that is a tenth to a third of a forward's time at 8,192
tokens.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

PASSES = range(512, 16385)
"""Tokens of the passes whose memory is kept. Small tensors of fewer are kept by glibc itself; of more tokens attention
takes the time, and the holes between the tensors, up to a quarter of their memory, would cost more than pages do."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # as in malloc.h

_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
"""No block of its own for a large tensor, and the end of the heap stays."""

_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
"""glibc's thresholds follow the blocks that are freed, up to these. Once set they stay, so they end at the highest."""

_lock = threading.Lock()
_open = 0
_alone = ContextVar("alone", default=False)


@contextmanager
def kept(tokens: int) -> Iterator[None]:
    """Inside the with block nothing that is freed goes back to the system, if `tokens` are in `PASSES`; then all does.

    On glibc alone, and not where the user has set its malloc by ``MALLOC_...`` or ``GLIBC_TUNABLES``. Blocks may be
    nested and run in several threads: the last one that ends gives back. Threads other than the main one have heaps of
    64 MiB; larger tensors go back from there as ever.
    """
    libc = _glibc() if tokens in PASSES and not _alone.get() else None
    if libc is None:
        yield
        return
    _begin(libc)
    try:
        yield
    finally:
        _end(libc)


@contextmanager
def left_alone() -> Iterator[None]:
    """Inside the with block nothing is kept: a training around it would take its pages anew after each look."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def _begin(libc: ctypes.CDLL) -> None:
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            _set(libc, _KEEP)


def _end(libc: ctypes.CDLL) -> None:
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            _set(libc, _USUAL)
            libc.malloc_trim(ctypes.c_size_t(0))


def _set(libc: ctypes.CDLL, options: Mapping[int, int]) -> None:
    for option, value in options.items():
        libc.mallopt(option, value)


def _glibc() -> ctypes.CDLL | None:
    """glibc, whose malloc nobody has set otherwise; None on other systems."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):  # Windows, musl, macOS
        return None
    return ctypes.CDLL(None) if version else None
