"""The same bits for the same input: whatever the thread count, whatever else is in the batch, however often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backends import BEST, MUST, NATIVE, attend
from draw import drawn
from mask_cases import Sizes
from torch import Tensor

import headwise
from headwise.testing import assert_same_bits, make_qkv

# The shape checker takes a third of the time of thousands of calls; it sees their kind in test_meaning.py.
pytestmark = pytest.mark.unchecked

every = pytest.mark.parametrize("backend", [*MUST, "sdpa", *NATIVE])
# Decoding steps (torch's fused kernel rounds by thread count below four rows a key head), a short text, an odd middle
# length, one head, a length of many blocks.
SHAPES = [
    Sizes(5, 4, 4, 1, 64, 64, 64),
    Sizes(5, 2, 2, 3, 301, 16, 16),
    Sizes(5, 4, 2, 1, 300, 64, 64),
    Sizes(5, 6, 3, 7, 7, 11, 13),
    Sizes(5, 8, 2, 67, 131, 32, 24),
    Sizes(5, 1, 1, 33, 65, 16, 16),
    Sizes(3, 2, 2, 150, 517, 40, 40),
]
NAMES = ["one row", "three rows", "decode", "short", "middle", "one head", "long"]
shapes = pytest.mark.parametrize("n", SHAPES, ids=NAMES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def masks(n: Sizes) -> dict[str, Any]:
    """No mask; a band; one that differs from row to row of the batch; a dense one."""
    return {
        "none": lambda rows: None,
        "window": lambda rows: headwise.window(20, 3),
        "lengths": lambda rows: headwise.causal() & headwise.lengths(torch.arange(n.S, n.S - n.B, -1)[rows]),
        "keep": lambda rows: headwise.keep(
            (torch.rand(n.B, 1, n.T, n.S, generator=torch.Generator().manual_seed(3)) > 0.3)[rows]
        ),
    }


def forward_and_backward(backend: str, qkv: list[Tensor], mask: Any) -> list[Tensor] | None:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(backend, *leaves, mask=mask)
    if out is None:
        return None
    grad_out = torch.linspace(-1, 1, out[0].numel()).view_as(out[0]).to(out.dtype).expand_as(out)
    return [out, *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.sweep
@every
@shapes
@dtypes
def test_a_row_alone_and_in_a_batch(backend: str, n: Sizes, dtype: torch.dtype) -> None:
    qkv = make_qkv(*n, dtype=dtype)
    for name, make in drawn([*masks(n).items()]):
        whole = forward_and_backward(backend, list(qkv), make(slice(None)))
        for rows in (slice(0, 1), slice(n.B - 1, n.B), slice(1, 3)):
            part = forward_and_backward(backend, [x[rows] for x in qkv], make(rows))
            for x, y, what in zip(part or (), whole or (), ("out", "dq", "dk", "dv"), strict=True):
                assert_same_bits(x, y[rows], what=f"{what} of rows {rows.start}..{rows.stop}, mask {name}")


@pytest.mark.sweep
@every
@shapes
@dtypes
def test_any_number_of_threads(backend: str, n: Sizes, dtype: torch.dtype) -> None:
    qkv = make_qkv(*n, dtype=dtype)
    for name, make in drawn([*masks(n).items()]):
        results = []
        for count in (1, 2, 3, 4):
            with threads(count):
                results.append(forward_and_backward(backend, list(qkv), make(slice(None))))
        for count, result in zip((2, 3, 4), results[1:], strict=True):
            for x, y, what in zip(result or (), results[0] or (), ("out", "dq", "dk", "dv"), strict=True):
                if backend == "sdpa" and what != "out":  # torch's own: other bits on some CPUs, as `explain` says
                    torch.testing.assert_close(x, y, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
                else:
                    assert_same_bits(x, y, what=f"{what} with {count} threads, mask {name}")


@every
def test_a_hundred_times(backend: str) -> None:
    n = Sizes(2, 6, 3, 17, 31, 11, 13)
    qkv, mask = list(make_qkv(*n)), headwise.causal()
    first = forward_and_backward(backend, qkv, mask)
    for _ in range(100):
        for x, y in zip(forward_and_backward(backend, qkv, mask) or (), first or (), strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("backend", [*MUST, *BEST])
def test_lse_and_weights_too(backend: str) -> None:
    n = Sizes(5, 4, 2, 9, 31, 16, 8)
    q, k, v = make_qkv(*n)
    mask = headwise.window(7)
    out, lse = attend(backend, q, k, v, mask=mask, return_lse=True)
    probabilities = headwise.weights(q, k, mask=mask)
    for b in range(n.B):
        row = slice(b, b + 1)
        one, its = attend(backend, q[row], k[row], v[row], mask=mask, return_lse=True)
        assert_same_bits(one, out[row])
        assert_same_bits(its, lse[row])
        assert_same_bits(headwise.weights(q[row], k[row], mask=mask), probabilities[row])


@every
def test_a_neighbour_that_is_nan(backend: str) -> None:
    """The neighbour in the batch is all NaN: its own trouble."""
    q, k, v = make_qkv(2, 4, 2, 5, 9, 8, 8)
    alone = forward_and_backward(backend, [x[:1] for x in (q, k, v)], headwise.causal())
    for x in (q, k, v):
        x[1] = torch.nan
    both = forward_and_backward(backend, [q, k, v], headwise.causal())
    for x, y, what in zip(both or (), alone or (), ("out", "dq", "dk", "dv"), strict=True):
        assert_same_bits(x[:1], y, what=what)


@every
def test_padding_at_the_end_changes_nothing_much(backend: str) -> None:
    """More keys than a row has, masked, may change the order of a sum, but no more than that."""
    q, k, v = make_qkv(2, 4, 2, 5, 40, 16, 8)
    short = attend(backend, q, k[:, :, :29], v[:, :, :29])
    padded = attend(backend, q, k, v, mask=headwise.lengths(torch.tensor([29, 29])))
    if short is not None:
        torch.testing.assert_close(padded, short, rtol=1e-6, atol=1e-6)
