"""Lengths that no path does in one piece: strips and blocks of rows join up, and memory stays linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BEST, NATIVE, attend
from mask_cases import MASKS, Sizes
from test_meaning import options_of

import headwise
from headwise.ops.reference import reference
from headwise.testing import assert_close_like_torch, largest_tensor, make_qkv

# More rows than a strip of sdpa (256) and three blocks of `blocks` (240 rows at this S); no multiple of either.
LONG = Sizes(2, 4, 2, 530, 1031, 8, 5)
TALL = Sizes(1, 2, 1, 1031, 530, 8, 5)
NAMES = ["causal", "causal_top_left", "causal (B,)", "window 3 2", "window far", "lengths start", "segments (B,)",
         "keep HTS", "keep B1T1", "bias BHTS", "alibi (B,)", "all kinds", "window & segments"]  # fmt: skip
splitting = pytest.mark.parametrize("backend", ["blocks", "sdpa", *BEST])


@pytest.mark.sweep
@pytest.mark.parametrize("n", [LONG, TALL], ids=["long", "tall"])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_strips_and_blocks_join_up(name: str | None, n: Sizes) -> None:
    """Forward and backward are those of the definition, which does all rows at once (and is tested on short rows)."""
    mask = None if name is None else MASKS[name](n).mask
    weight = make_qkv(n.B, n.H, 1, n.T, 1, n.V, 1, seed=5)[0]
    results: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    for backend, dtype in [
        ("reference", torch.float64),
        *((b, torch.float32) for b in ("reference", "blocks", "sdpa", *NATIVE)),
    ]:
        leaves = make_qkv(*n, dtype=dtype, requires_grad=True)
        out = attend(backend, *leaves, mask=mask)
        grads = torch.autograd.grad((out * weight.to(dtype)).sum(), leaves)
        results[backend, dtype] = [x.detach() for x in (out, *grads)]
    exact = results["reference", torch.float64]
    for backend in ("blocks", "sdpa", *NATIVE):
        for x, y, z, what in zip(
            results[backend, torch.float32], exact, results["reference", torch.float32],
            ("out", "query", "key", "value"), strict=True,
        ):  # fmt: skip
            assert_close_like_torch(x, y, z, values=8 * y, factor=20.0, what=f"{backend}: {what}")


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["blocks", *NATIVE])
@pytest.mark.parametrize("name", ["causal", "window 3 2", "lengths start", "keep B1T1"])
def test_options_and_lse_of_many_blocks(name: str, backend: str) -> None:
    mask, options = MASKS[name](LONG).mask, options_of("everything", LONG)
    qkv = make_qkv(*LONG)
    out, lse = attend(backend, *qkv, mask=mask, return_lse=True, **options)
    again, its = headwise.attention(*qkv, mask=mask, return_lse=True, backend="reference", **options)
    torch.testing.assert_close(out, again, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, its, rtol=1e-5, atol=1e-5)


@splitting
@pytest.mark.parametrize("name", ["causal", "window", "lengths", "segments", "alibi"])
def test_memory_is_linear(backend: str, name: str) -> None:
    """No tensor near T x S, forward or backward: twice the length, (about) twice the largest tensor."""
    largest = []
    for length in (1024, 2048):
        ids = torch.arange(length) // 100
        mask: Any = {
            "causal": headwise.causal(),
            "window": headwise.window(50),
            "lengths": headwise.lengths(torch.tensor([length - 3])),
            "segments": headwise.segments(ids),
            "alibi": headwise.causal() & headwise.alibi(torch.tensor([0.1])),
        }[name]
        leaves = make_qkv(1, 1, 1, length, length, 4, 4, requires_grad=True)
        with largest_tensor() as seen:
            attend(backend, *leaves, mask=mask).sum().backward()
        largest.append(seen.numel)
    assert largest[1] <= 2.1 * largest[0] + 1024 and largest[1] < 2048 * 2048 // 4


def test_the_memory_test_can_fail() -> None:
    leaves = make_qkv(1, 1, 1, 2048, 2048, 4, 4)
    with largest_tensor() as seen:
        headwise.attention(*leaves, mask=headwise.causal(), backend="reference")
    assert seen.numel >= 2048 * 2048


@splitting
def test_poison_far_from_its_strip(backend: str) -> None:
    """A NaN key of the last strip leaves all earlier rows alone, bit for bit, and shows in those after it."""
    q, k, v = make_qkv(1, 2, 1, 700, 700, 8, 8)
    clean = attend(backend, q, k, v, mask=headwise.causal())
    for x in (k, v):
        x[:, :, 600] = torch.nan
    out = attend(backend, q, k, v, mask=headwise.causal())
    assert torch.equal(out[:, :, :600], clean[:, :, :600]) and bool(out[:, :, 600:].isnan().all())


def test_a_mask_that_is_the_same_for_all_rows() -> None:
    """Padding: one row of the mask serves all, also where a text has no key at all."""
    q, k, v = make_qkv(3, 6, 2, 37, 41, 8, 16)
    padding = headwise.lengths(torch.tensor([41, 0, 17])) & headwise.bias(torch.randn(6, 1, 41))
    assert padding.is_same_for_rows
    assert headwise.keep(torch.ones(3, 1, 1, 41, dtype=torch.bool)).is_same_for_rows
    assert not (padding & headwise.causal()).is_same_for_rows
    assert not headwise.keep(torch.ones(37, 41, dtype=torch.bool)).is_same_for_rows
    assert not headwise.alibi(torch.ones(6)).is_same_for_rows
    out = headwise.attention(q, k, v, mask=padding, backend="sdpa")
    wanted, _ = reference(q.double(), k.double(), v.double(), mask=padding)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=2e-6)
    assert bool((out[1] == 0).all())
