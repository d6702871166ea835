"""Memory of caches and weights on pages of 2 MiB, if Linux provides them on request.

A decode step reads all keys, values and weights. With pages of 4 KiB it waits for address translation, and hardware
prefetching stops at the end of each page.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

HUGE = 2 << 20
"""Bytes of a huge page."""

_LEAST = 2 * HUGE
_PART = 32 * HUGE
_NEIGHBOURS = 2 * mmap.PAGESIZE  # an allocator's header and its alignment are shorter
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1 and newer; Python has no name for it


def reserve(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return an empty tensor; from 4 MiB on, on a CPU under Linux, its memory begins at a huge page boundary.

    That memory belongs to this tensor only, so that `on_huge_pages` affects no other memory. A tensor made in inference
    mode cannot be written to outside of it, so this one is made outside, wherever the caller is.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return reserve(shape, dtype, device)
    probe = torch.empty(0, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    if size >= _LEAST and hasattr(mmap, "MADV_HUGEPAGE") and _is_plain(probe):
        with suppress(OSError, OverflowError):  # too large; torch raises its own error
            memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
            return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=-start % HUGE).view(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def on_huge_pages(x: Tensor) -> None:
    """Request huge pages for a tensor of at least 4 MiB on a CPU under Linux; do nothing for others.

    Existing pages do not change until the system joins them. New pages are allocated 2 MiB at a time when they are
    first written to, so call this only when that much memory will be used.
    """
    if x.nbytes < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE") or not _is_plain(x) or not x.is_contiguous():
        return
    _advise(*_filled(x.data_ptr(), x.data_ptr() + x.nbytes), mmap.MADV_HUGEPAGE)


def huge_parts(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the addresses (start, end) of the huge pages that tensors fill, in parts of at most 64 MiB.

    Memory of neighbours counts together. The list is empty where the system has no huge pages on request.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return []
    joined: list[tuple[int, int]] = []
    for start, end in sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors):
        if joined and start - joined[-1][1] < _NEIGHBOURS:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    filled = [_filled(start, end) for start, end in joined]
    return [(at, min(at + _PART, end)) for start, end in filled for at in range(start, end, _PART)]


def collapse(start: int, end: int) -> bool:
    """Move a part of the memory to huge pages now, at the same addresses; return False if the system refuses."""
    return _advise(start, end, _COLLAPSE)


def _filled(start: int, end: int) -> tuple[int, int]:
    """Return where the huge pages begin and end that lie within a part of the memory as a whole."""
    return -(-start // HUGE) * HUGE, end // HUGE * HUGE


def _advise(start: int, end: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise
    return madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(advice)) == 0


def _is_plain(x: Tensor) -> bool:
    """Return True if a tensor is in the memory of this process and no compiler traces it."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
