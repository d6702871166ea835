"""Calls of the native kernel whose every tensor touches forbidden memory: run as a script, in a process of its own.

Each tensor lies in pages of its own, between two pages that may not be read or written, flush with the one after it
or with the one before. A read or write that is a byte too far ends the process with a signal; what is printed last
tells the case.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

import headwise
from headwise.ops.native.library import isas
from headwise.testing import make_qkv

PAGE = mmap.PAGESIZE
FORBIDDEN = 0  # PROT_NONE
libc = ctypes.CDLL(None, use_errno=True)
kept: list[Any] = []


def guarded(x: Tensor, end: bool) -> Tensor:
    """A contiguous copy that ends (or begins) at a forbidden page."""
    size = x.numel() * x.element_size()
    pages = -(-size // PAGE) * PAGE
    area = mmap.mmap(-1, pages + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for guard in (address, address + PAGE + pages):
        if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), FORBIDDEN):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = PAGE + pages - size if end else PAGE
    raw = torch.frombuffer(area, dtype=torch.uint8, count=size, offset=start)
    kept.append(area)
    return raw.view(x.dtype).view(x.shape).copy_(x)


def calls(dtype: torch.dtype, end: bool) -> None:
    sizes = [
        (1, 1, 1, 1, 1, 1, 1), (2, 2, 1, 1, 7, 3, 5), (1, 4, 2, 1, 70, 16, 24), (1, 1, 1, 1, 1030, 20, 12),
        (1, 2, 2, 3, 65, 33, 31), (2, 4, 2, 9, 67, 17, 19), (1, 2, 1, 50, 129, 64, 64), (1, 3, 1, 35, 33, 8, 40),
        (1, 8, 1, 2, 131, 40, 80), (1, 2, 1, 13, 1100, 7, 9),
    ]  # fmt: skip
    for n in sizes:
        B, H, _, T, S, _, V = n
        q, k, v = (guarded(x, end) for x in make_qkv(*n, dtype=dtype))
        masks: dict[str, Any] = {
            "none": None,
            "causal": headwise.causal(),
            "lengths": headwise.lengths(
                guarded(torch.full((B,), S), end), guarded(torch.zeros(B, dtype=torch.long), end)
            ),
            "segments": headwise.segments(
                guarded(torch.arange(T) // 5, end), guarded((torch.arange(B * S) // 9).view(B, S), end)
            ),
            "keep": headwise.keep(guarded(torch.rand(B, H, T, S) > 0.3, end)),
            "keep row": headwise.keep(guarded(torch.rand(S) > 0.3, end)),
            "bias": headwise.bias(guarded(torch.randn(H, T, S).to(dtype), end)),
            "bias column": headwise.bias(guarded(torch.randn(T, 1), end)),
            "alibi": headwise.alibi(guarded(torch.rand(B, H), end), offset=guarded(torch.full((B,), 3), end)),
        }
        extras: list[dict[str, Any]] = [
            {},
            {"return_lse": True, "sinks": guarded(torch.randn(H), end), "softcap": 2.0},
            {"gate": guarded(torch.randn(B, H, T, V).to(dtype), end)},
            {"gate": guarded(torch.randn(H), end), "dropout": 0.2},
        ]
        for (name, mask), extra in itertools.product(masks.items(), extras):
            print(dtype, end, n, name, list(extra), flush=True)
            headwise.attention(q, k, v, mask=mask, backend="native", **extra)
        for name, mask in masks.items():
            print(dtype, end, n, name, "statistics", flush=True)
            options: dict[str, Any] = {
                "mask": mask,
                "features": {f"{i}": guarded(torch.randn(B, S), end) for i in range(T % 4)},
                "targets": {"some": guarded(torch.randint(-1, S, (B, T, 2)), end)},
            }
            headwise.attention_statistics(q, k, v, **options)
            headwise.statistics(q, k, **options)
        for name, mask in masks.items():
            print(dtype, end, n, name, "backward", flush=True)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = headwise.attention(*leaves, mask=mask, backend="native")
            torch.autograd.grad(out, leaves, guarded(torch.ones(B, H, T, V, dtype=dtype), end))
        print(dtype, end, n, "strides", flush=True)
        headwise.attention(*(guarded(x.mT.contiguous(), end).mT for x in (q, k, v)), backend="native")
        kept.clear()
    pages, scales = torch.zeros(1, 1, 128, 16, dtype=torch.int8), torch.ones(1, 1, 128)
    for T in (1, 9):
        print(dtype, end, "a page of int8 that no row attends", T, flush=True)
        query, table = guarded(torch.randn(1, 1, T, 16).to(dtype), end), guarded(torch.tensor([[0]]), end)
        rules = (0.25, 0.0, None, 200, 1 << 40, *[None] * 6)
        torch.ops.headwise.attend_held(query, pages, scales, pages, scales, table, 128, *rules, None, 0.0, None)


def linear(dtype: torch.dtype, end: bool) -> None:
    for rows, width, count in itertools.product((1, 2, 3, 5, 8), (1, 7, 16, 33, 67), (1, 3, 8, 13)):
        print(f"{dtype} linear {rows, width, count} {end}", flush=True)
        x, weight, bias = torch.randn(rows, width), torch.randn(count, width), torch.randn(count)
        torch.ops.headwise.linear(*(guarded(t.to(dtype), end) for t in (x, weight, bias)))


def main(isa: str, planted: str = "") -> None:
    """All calls with this instruction set; `planted` reads a byte too far, to prove that it would be seen."""
    assert isa in isas() and torch.ops.headwise.use_isa(isa)
    if planted:
        x = guarded(torch.ones(10), end=True)
        ctypes.string_at(x.data_ptr(), 41)
    for dtype, end in itertools.product((torch.float32, torch.bfloat16, torch.float16), (True, False)):
        calls(dtype, end)
        linear(dtype, end)
    print("all done")


if __name__ == "__main__":
    main(*sys.argv[1:])
