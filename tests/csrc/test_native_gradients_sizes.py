"""The native backward at every size: each length, each head dim, both sides of each of its switches, huge counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backends import NATIVE, natives
from draw import drawn
from gradient_cases import Case, Leaves, check, gradients
from mask_cases import Sizes
from native_cases import DTYPES, collected, native_dtypes
from test_native_sizes import far_apart
from torch import Tensor

from headwise.testing import assert_same_bits

pytestmark = pytest.mark.unchecked  # tens of thousands of calls: the shape checker would take most of the time

LENGTHS = (*range(1, 131), 255, 256, 257, 1023, 1024, 1025)


def some(sizes: Sequence[Any], backend: str, dtype: torch.dtype) -> Sequence[Any]:
    """All of them in float32; in the half dtypes a third, others on another instruction set and in the other dtype."""
    if dtype == torch.float32:
        return sizes
    return sizes[(NATIVE.index(backend) + DTYPES.index(dtype)) % 3 :: 3]


def run(backend: str, cases: list[Case]) -> None:
    with collected() as attempt:
        for case in drawn(cases):
            attempt(f"{case.n}, {case.mask}", check, backend, case)


@native_dtypes
def test_every_number_of_keys(backend: str, dtype: torch.dtype) -> None:
    forms = [(1, None), (50, "causal")]
    run(
        backend,
        [Case(Sizes(1, 2, 1, T, S, 8, 8), dtype, mask) for S in some(LENGTHS, backend, dtype) for T, mask in forms],
    )


@native_dtypes
def test_every_number_of_queries(backend: str, dtype: torch.dtype) -> None:
    forms = [(1, 70, None), (3, 33, "causal")]
    run(
        backend,
        [Case(Sizes(1, G, 1, T, S, 8, 8), dtype, mask) for T in some(LENGTHS, backend, dtype) for G, S, mask in forms],
    )


@native_dtypes
def test_every_square_length(backend: str, dtype: torch.dtype) -> None:
    run(backend, [Case(Sizes(1, 1, 1, n, n, 8, 8), dtype, "causal") for n in some(LENGTHS, backend, dtype)])


@native_dtypes
def test_every_head_dim(backend: str, dtype: torch.dtype) -> None:
    """1 to 320, for keys and values alike and unlike; a query, and several."""
    sizes = []
    for D in some(range(1, 321), backend, dtype):
        sizes += [Sizes(1, 1, 1, 11, 37, D, D), Sizes(1, 2, 1, 1 + D % 9, 19, D, 321 - D)]
    run(backend, [Case(n, dtype) for n in sizes])


@native_dtypes
def test_multi_head_latent_attention(backend: str, dtype: torch.dtype) -> None:
    """Head dims 576 and 512, one key head for all; and other tall ones."""
    sizes = [Sizes(1, G, 1, T, 131, 576, 512) for G, T in ((128, 1), (7, 1), (16, 5), (1, 1), (1, 67))]
    sizes += [Sizes(1, 2, 1, T, 67, D, V) for T in (1, 17) for D, V in ((512, 512), (1024, 1024), (1, 1031), (1031, 1))]
    run(backend, [Case(n, dtype, mask) for n in sizes for mask in (None, "causal")])


@native_dtypes
def test_rows_and_keys_on_both_sides_of_every_block(backend: str, dtype: torch.dtype) -> None:
    """G heads of T queries are T * G rows of one tile; blocks of 16, 32, 48, 64 and 128, and several of them."""
    edges = (
        15,
        16,
        17,
        31,
        32,
        33,
        47,
        48,
        49,
        63,
        64,
        65,
        95,
        96,
        97,
        127,
        128,
        129,
        143,
        144,
        145,
        191,
        192,
        193,
        385,
    )
    sizes = [Sizes(1, G, 1, rows // G, 67, 8, 8) for rows in edges for G in (1, 2, 3, 5) if rows % G == 0]
    sizes += [Sizes(1, G, 1, 2, S, 8, 8) for G, S in itertools.product((1, 4), edges)]
    run(backend, [Case(n, dtype, mask) for n in sizes for mask in (None, "causal")])


@native_dtypes
def test_few_keys_on_both_sides_of_a_tile(backend: str, dtype: torch.dtype) -> None:
    """Rows that reach 16 keys and fewer, in one tile of 64, have a way of their own; here some reach the next."""
    masks = ("window 3", "window 3 2")
    sizes = [Sizes(1, 2, 1, T, S, 8, 8) for T in (1, 11) for S in range(63, 73)]
    run(backend, [Case(n, dtype, mask) for n in sizes for mask in masks])


@native_dtypes
def test_primes(backend: str, dtype: torch.dtype) -> None:
    sizes = [
        Sizes(3, 35, 7, 67, 131, 59, 37),
        Sizes(2, 3, 3, 113, 211, 111, 97),
        Sizes(2, 13, 1, 17, 257, 31, 61),
        Sizes(7, 5, 1, 1, 509, 53, 47),
        Sizes(1, 1, 1, 239, 1021, 7, 3),
    ]
    run(backend, [Case(n, dtype, mask) for n in sizes for mask in (None, "causal", "window 3 2")])


@pytest.mark.sweep
@natives
@pytest.mark.parametrize(("H", "K", "T"), [(2, 1, 1), (2, 2, 2)])
def test_seventy_thousand_heads(backend: str, H: int, K: int, T: int) -> None:
    check(backend, Case(Sizes(70_000 // H, H, K, T, 3, 2, 2), mask=None, sinks=True))


@pytest.mark.sweep
@natives
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("T", [2, 53])
def test_offsets_beyond_2_to_the_31(backend: str, dtype: torch.dtype, T: int) -> None:
    """Of any tensor along any of its axes: the same bits as near by."""
    case = Case(Sizes(2, 4, 2, T, 19, 8, 8), dtype, "causal", bias=(2, 4, T, 19))
    leaves, grad_out = case.leaves(), case.upstream()[0]
    near = {**leaves, "grad_out": grad_out}

    def call(**change: Tensor) -> Leaves:
        arguments: dict[str, Any] = {**near, **change}
        return gradients(backend, case, {name: arguments[name] for name in leaves}, arguments["grad_out"])

    def same(name: str, dim: int, plain: Leaves) -> None:
        for leaf, x in call(**{name: far_apart(near[name], dim)}).items():
            assert_same_bits(x, plain[leaf], what=leaf)

    with collected() as attempt:
        for name, dim in itertools.product(near, range(4)):
            attempt(f"{name}, axis {dim}", same, name, dim, call())
