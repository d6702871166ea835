"""Memory of caches: on pages of 2 MiB, where Linux gives them to those who ask.

A step of decoding reads all keys and values. On pages of 4 KiB it waits for their addresses, and the CPU's own
prefetching ends with each of them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

HUGE = 2 << 20
"""Bytes of a huge page."""

_LEAST = 2 * HUGE


def reserve(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """As `torch.empty`, but from 4 MiB on, on a CPU under Linux, in memory of its own that begins with a huge page.

    It goes with the tensor, so that what `on_huge_pages` asks for reaches no other memory.
    """
    probe = torch.empty(0, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    if size >= _LEAST and hasattr(mmap, "MADV_HUGEPAGE") and _is_plain(probe):
        try:
            memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):  # too much, as torch will say
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        start = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=-start % HUGE).view(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def on_huge_pages(x: Tensor) -> None:
    """Asks for huge pages behind a tensor of 4 MiB and more on a CPU under Linux; nothing happens elsewhere.

    Pages that are there stay as they are until the system joins them. The others come 2 MiB at a time when they are
    first written to, so ask when so much will be used.
    """
    if x.nbytes < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE") or not _is_plain(x) or not x.is_contiguous():
        return
    start, end = -(-x.data_ptr() // HUGE) * HUGE, (x.data_ptr() + x.nbytes) // HUGE * HUGE
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_HUGEPAGE))  # or refuses


def _is_plain(x: Tensor) -> bool:
    """Whether it is in this process's memory, and no compiler looks on."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
