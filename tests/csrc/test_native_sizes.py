"""The native kernel at every size: each length, each head dim, both sides of each of its switches, huge counts.

Decoding (few rows), the kernel for many rows, its tiles and its splits over keys each have edges of their own; a
length that is wrong by one is seen nowhere else. See `native_cases.check` for what is held against float64.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
import torch
from backends import attend, natives
from draw import drawn
from mask_cases import SHORT, Sizes, as_tensor
from native_cases import answer, answer_of, check, check_out, collected, dtypes, exact, native_dtypes
from torch import Tensor

import headwise
from headwise.testing import assert_same_bits, make_qkv, oracle

pytestmark = pytest.mark.unchecked  # tens of thousands of calls: the shape checker would take most of the time

LENGTHS = (*range(1, 131), 255, 256, 257, 511, 512, 513, 1023, 1024, 1025)
SPLITS = (*LENGTHS, 1535, 1536, 1537, 2047, 2048, 2049, 4095, 4096, 4097)  # keys are split over threads


def run(backend: str, dtype: torch.dtype, sizes: list[tuple[Sizes, str | None]]) -> None:
    with collected() as attempt:
        for n, mask in drawn(sizes):
            attempt(f"{n}, {mask}", check, backend, answer(n, dtype, mask))


def test_the_answers_are_the_oracles() -> None:
    """The float64 answers of these tests, all rows at once, beside the definition row by row."""
    for name in (None, "causal", "bias BHTS", "all kinds", "window far"):
        wanted = answer(SHORT, torch.float32, name)
        out, lse = oracle(*wanted.qkv, mask=None if name is None else as_tensor(name, SHORT))
        torch.testing.assert_close(wanted.out, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(wanted.lse, lse, rtol=1e-12, atol=1e-12)
    sinks = torch.randn(SHORT.H)
    more = {"sinks": sinks, "softcap": 0.7, "scale": -0.4}
    for ours, theirs in zip(exact(*wanted.qkv, **more), oracle(*wanted.qkv, **more), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@native_dtypes
def test_every_number_of_keys(backend: str, dtype: torch.dtype) -> None:
    forms = [
        lambda S: (Sizes(2, 1, 1, 1, S, 16, 16), None),  # decoding, a key head each
        lambda S: (Sizes(1, 4, 1, 1, S, 16, 16), None),  # decoding, a group
        lambda S: (Sizes(1, 2, 1, 3, S, 16, 16), "causal"),  # a few rows
    ]
    run(backend, dtype, [form(S) for S in SPLITS for form in forms])


@native_dtypes
def test_every_number_of_keys_under_many_rows(backend: str, dtype: torch.dtype) -> None:
    forms = [lambda S: (Sizes(1, 2, 1, 11, S, 16, 16), None), lambda S: (Sizes(1, 1, 1, 50, S, 16, 16), "causal")]
    run(backend, dtype, [form(S) for S in LENGTHS for form in forms])


@native_dtypes
def test_every_number_of_queries(backend: str, dtype: torch.dtype) -> None:
    forms = [
        lambda T: (Sizes(1, 1, 1, T, 70, 16, 16), "causal"),
        lambda T: (Sizes(1, 3, 1, T, 33, 16, 16), None),
        lambda T: (Sizes(1, 2, 2, T, 129, 16, 16), "window 3 2"),
    ]
    run(backend, dtype, [form(T) for T in LENGTHS for form in forms])


@native_dtypes
def test_every_square_length(backend: str, dtype: torch.dtype) -> None:
    run(backend, dtype, [(Sizes(1, 2, 1, n, n, 16, 16), "causal") for n in LENGTHS])


@native_dtypes
def test_every_head_dim(backend: str, dtype: torch.dtype) -> None:
    """1 to 320, for keys and values alike and unlike; decoding with every small group, and many rows."""
    sizes = []
    for D in range(1, 321):
        G = 1 + D % 8
        sizes += [
            Sizes(1, 1, 1, 1, 37, D, D),
            Sizes(1, G, 1, 1, 19, D, 321 - D),
            Sizes(1, 2, 1, 11, 37, D, D),
            Sizes(1, 1, 1, 9, 19, D, 321 - D),
        ]
    run(backend, dtype, [(n, None) for n in sizes])


@native_dtypes
def test_multi_head_latent_attention(backend: str, dtype: torch.dtype) -> None:
    """Head dims 576 and 512, one key head for all; and other tall ones."""
    rows = [(128, 1), (16, 1), (7, 1), (16, 5), (1, 1), (1, 67)]
    sizes = [Sizes(1, G, 1, T, 131, 576, 512) for G, T in rows]
    sizes += [Sizes(1, 2, 1, T, 67, D, V) for T in (1, 17) for D, V in ((512, 512), (1024, 1024), (1, 1031), (1031, 1))]
    run(backend, dtype, [(n, mask) for n in sizes for mask in (None, "causal")])


@native_dtypes
def test_groups_on_both_sides_of_every_switch(backend: str, dtype: torch.dtype) -> None:
    """G heads of T queries are T * G rows of one tile: few rows take one kernel, many another, 48 fill a block."""
    groups = (*range(1, 10), 16, 32, 128)
    sizes = [Sizes(1, 2 * G, 2, T, 70, 16, 24) for G, T in itertools.product(groups, (*range(1, 12), 16, 17, 48, 49))]
    sizes += [Sizes(1, G, 1, T, S, 16, 24) for G in groups for T in (1, 2, 9) for S in (511, 1025)]
    for rows in (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 143, 144, 145, 191, 192, 193, 385):
        sizes += [Sizes(1, G, 1, rows // G, 67, 16, 16) for G in (1, 2, 3, 4, 5, 8) if rows % G == 0]
    run(backend, dtype, [(n, "causal") for n in sizes])


@native_dtypes
def test_decoding_at_the_widths_of_models(backend: str, dtype: torch.dtype) -> None:
    """One token of up to 8 heads a group: head dims whose queries stay in registers, keys that no tile divides."""
    with collected() as attempt:
        for G, D, S in itertools.product((1, 3, 4, 7, 8), (64, 83, 96, 128), (129, 131)):
            n = Sizes(1, 2 * G, 2, 1, S, D, 128)
            attempt(f"{n}", check, backend, answer(n, dtype, None))


@native_dtypes
def test_primes(backend: str, dtype: torch.dtype) -> None:
    sizes = [
        Sizes(3, 35, 7, 67, 131, 59, 37),
        Sizes(5, 3, 3, 113, 211, 111, 97),
        Sizes(2, 13, 1, 17, 257, 31, 61),
        Sizes(7, 5, 1, 1, 509, 53, 47),
        Sizes(1, 11, 11, 1, 1031, 89, 83),
        Sizes(1, 1, 1, 239, 1021, 7, 3),
    ]
    run(backend, dtype, [(n, mask) for n in sizes for mask in (None, "causal", "window 3 2")])


@pytest.mark.sweep
@natives
@pytest.mark.parametrize(("H", "K", "T"), [(2, 1, 1), (2, 2, 1), (2, 1, 9)])
def test_seventy_thousand_heads(backend: str, H: int, K: int, T: int) -> None:
    check(backend, answer_of(make_qkv(70_000 // H, H, K, T, 3, 2, 2), mask=headwise.causal()))


# -- offsets beyond 2^31 ---------------------------------------------------------------------------------------------


def far_apart(x: Tensor, dim: int) -> Tensor:
    """The same values, index by index of `dim` so far apart that the last lies more than 2^31 elements on.

    Only the pages that are touched exist.
    """
    others = [d for d in range(4) if d != dim]
    strides, packed = [0] * 4, 1
    for d in reversed(others):
        strides[d] = packed
        packed *= x.shape[d]
    strides[dim] = (1 << 31) // (x.shape[dim] - 1) + packed
    memory = torch.empty((x.shape[dim] - 1) * strides[dim] + packed, dtype=x.dtype)
    return memory.as_strided(x.shape, strides).copy_(x)


@native_dtypes
@pytest.mark.parametrize("T", [2, 13])
def test_offsets_beyond_2_to_the_31(backend: str, dtype: torch.dtype, T: int) -> None:
    """Of any tensor along any of its axes: the same bits as near by."""
    B, H, S = 2, 4, 19
    near = dict(zip(("query", "key", "value"), make_qkv(B, H, 2, T, S, 8, 8, dtype=dtype), strict=True))
    masks: dict[str, Tensor] = {"keep": torch.rand(B, H, T, S) > 0.4, "bias": torch.randn(B, H, T, S, dtype=dtype)}
    gate = torch.randn(B, H, T, 8, dtype=dtype)

    def call(**change: Any) -> Tensor:
        tensors = {**near, **masks, "gate": gate, **change}
        mask = headwise.keep(tensors.pop("keep")) & headwise.bias(tensors.pop("bias"))
        return attend(backend, **tensors, mask=mask)

    plain = call()
    with collected() as attempt:
        for name, x in {**near, **masks, "gate": gate}.items():
            for dim in range(4):
                attempt(
                    f"{name}, axis {dim}",
                    lambda n=name, d=dim, y=x: assert_same_bits(call(**{n: far_apart(y, d)}), plain),
                )


@dtypes
def test_one_key_of_thousands_would_be_seen(dtype: torch.dtype) -> None:
    """The budgets tell an answer that leaves the last key out, at every length; in bfloat16 at nearly every one."""
    missed = []
    for S in SPLITS[1:]:
        whole = answer(Sizes(1, 4, 1, 1, S, 16, 16), dtype)
        q, k, v = whole.qkv
        less, _ = exact(q, k[:, :, :-1], v[:, :, :-1])
        with suppress(AssertionError):
            check_out(less.to(dtype), whole)
            missed.append(S)
    assert len(missed) <= (8 if dtype == torch.bfloat16 else 0), missed
