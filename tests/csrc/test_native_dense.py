"""Masks and biases that are tensors, as the native kernel reads them: eight bytes, or a vector of numbers, at a time.

Lengths lie on both sides of its vectors (4, 8, 16), of the words of a mask (32) and of its tiles (128); one query has
the keys in the lanes, more have the rows there. Then what -inf means beside NaN and +inf, in a bias and in a score.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from backends import NATIVE, attend, instructions, natives
from draw import drawn
from mask_cases import Sizes
from native_cases import DTYPES, Answer, answer_of, check, collected, native_dtypes
from torch import Tensor

import headwise
from headwise import Mask
from headwise.testing import assert_same_bits, make_qkv

pytestmark = pytest.mark.unchecked

ROWS = (1, 3, 17, 50)
KEYS = (1, 4, 7, 8, 9, 16, 31, 32, 33, 127, 128, 129, 257)
SHAPES = ("BHTS", "B1TS", "1H1S", "111S")


def shape_of(letters: str, n: Sizes) -> tuple[int, ...]:
    return tuple(1 if letter == "1" else getattr(n, letter) for letter in letters)


def sizes(T: int, S: int) -> Sizes:
    return Sizes(2, 4, 2, T, S, 8, 8)


# -- every length ------------------------------------------------------------------------------------------------------


@cache
def answers(T: int, dtype: torch.dtype) -> list[tuple[str, Answer]]:
    """A mask and a bias of each dtype in each form, some of it -inf."""
    cases = []
    for S, letters, kind in itertools.product(KEYS, SHAPES, (torch.bool, torch.float64, *DTYPES)):
        n, source = sizes(T, S), torch.Generator().manual_seed(S)
        part = torch.rand(shape_of(letters, n), generator=source)
        mask = headwise.keep(part > 0.4) if kind == torch.bool else headwise.bias(
            (3 * part - 1).masked_fill(part < 0.2, -math.inf).to(kind)
        )  # fmt: skip
        cases.append((f"{kind} {letters}, {S} keys", answer_of(make_qkv(*n, dtype=dtype), mask=mask)))
    return cases


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("T", ROWS)
def test_every_length(backend: str, dtype: torch.dtype, T: int) -> None:
    cases = answers(T, dtype)
    if dtype != torch.float32:  # a third, others on another instruction set and in the other dtype
        cases = cases[(NATIVE.index(backend) + DTYPES.index(dtype)) % 3 :: 3]
    with collected() as attempt:
        for what, wanted in drawn(cases):
            attempt(what, check, backend, wanted)


def spread(data: Tensor, step: int) -> Tensor:
    """Every so many bytes of a longer tensor, with 1 between them; or with the last two axes swapped in memory."""
    if step == 0:
        return data.mT.contiguous().mT
    wide = torch.ones((*data.shape[:3], step * data.shape[3]), dtype=data.dtype)
    return wide[..., ::step].copy_(data)


@pytest.mark.slow
@natives
@pytest.mark.parametrize("T", ROWS)
def test_every_byte_but_zero_is_true(backend: str, T: int) -> None:
    """As in torch: `x.view(torch.bool)` of bytes. Tiles that are empty, mixed and full, in every layout."""
    some = torch.tensor([1, 2, 0x7F, 0x80, 0xFE, 0xFF], dtype=torch.uint8)
    with collected() as attempt:
        for S, letters in itertools.product(KEYS, SHAPES):
            n, source = sizes(T, S), torch.Generator().manual_seed(S)
            qkv, shape = make_qkv(*n), shape_of(letters, n)
            on = some[torch.randint(len(some), shape, generator=source)]
            keys = torch.arange(S)
            masks = {
                "all": on,
                "none": on * 0,
                "mixed": on * (torch.rand(shape, generator=source) > 0.5),
                "one off": on * (keys != S - 1),
                "one on": on * (keys == S // 2),
                "tiles": on * (keys % 256 >= 128),
            }
            for name, data in masks.items():
                plain = attend(backend, *qkv, mask=headwise.keep(data != 0), return_lse=True)
                for step in (1, 2, 3, 0):
                    odd = spread(data, step).view(torch.bool)
                    ours = attend(backend, *qkv, mask=headwise.keep(odd), return_lse=True)
                    for x, y in zip(ours, plain, strict=True):
                        attempt(f"{name} {letters}, {S} keys, step {step}", assert_same_bits, x, y)


# -- what -inf means ---------------------------------------------------------------------------------------------------

FORMS = [(1, 7), (1, 131), (3, 33), (50, 131)]
forms = pytest.mark.parametrize(("T", "S"), FORMS)


def answer_and_gradients(backend: str, mask: Mask, grad_out: Tensor, *qkv: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    with instructions(backend):
        out, lse = headwise.attention(*leaves, mask=mask, return_lse=True, backend="native")
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for x, y, what in zip(ours, theirs, ("out", "lse", "query", "key", "value"), strict=True):
        assert_same_bits(x, y, what=what)
        assert not bool(x.isnan().any()), f"{what} is NaN"


@natives
@forms
def test_minus_infinity_stays_whatever_another_bias_has(backend: str, T: int, S: int) -> None:
    n, source = sizes(T, S), torch.Generator().manual_seed(T)
    qkv, grad_out = make_qkv(*n), torch.randn(2, 4, T, 8, generator=source)
    with collected() as attempt:
        for letters, dtype in itertools.product(SHAPES, (torch.float64, *DTYPES)):
            shape = shape_of(letters, n)
            where, added = torch.rand(shape, generator=source) < 0.3, torch.randn(shape, generator=source)
            first = headwise.bias(torch.randn(shape, generator=source).masked_fill(where, -math.inf).to(dtype))
            for what, swapped in itertools.product((math.nan, math.inf), (False, True)):
                second, plain = (headwise.bias(x.to(dtype)) for x in (added.masked_fill(where, what), added))
                masks = [other & first if swapped else first & other for other in (second, plain)]
                ours, theirs = (answer_and_gradients(backend, mask, grad_out, *qkv) for mask in masks)
                attempt(f"{letters} {dtype}, {what} {'before' if swapped else 'after'}", same, ours, theirs)


@natives
@forms
@pytest.mark.parametrize("score", [math.inf, -math.inf])
def test_a_bias_of_minus_infinity_forbids_whatever_the_score(backend: str, T: int, S: int, score: float) -> None:
    """All numbers of queries and keys are finite; the product of one key with any query is not."""
    n, source = sizes(T, S), torch.Generator().manual_seed(T)
    grad_out = torch.randn(2, 4, T, 8, generator=source)
    q, k, v = make_qkv(*n)
    q[..., :2], k[..., :2] = 1e30, 0.0
    large = k.clone()
    large[:, :, S // 2, 0] = math.copysign(1e30, score)
    assert bool((q[:, :1] @ large[:, :1, S // 2, :, None] == score).all())
    with collected() as attempt:
        for letters, dtype in itertools.product(SHAPES, (torch.float64, *DTYPES)):
            bias = torch.randn(shape_of(letters, n), generator=source).to(dtype)
            bias[..., S // 2] = -math.inf
            ours, theirs = (answer_and_gradients(backend, headwise.bias(bias), grad_out, q, x, v) for x in (large, k))
            attempt(f"{letters} {dtype}", same, ours, theirs)


@natives
@forms
def test_plus_infinity_and_nan_show_where_they_may(backend: str, T: int, S: int) -> None:
    """In a bias that nothing forbids: the whole row is NaN, and no other row."""
    n, source = sizes(T, S), torch.Generator().manual_seed(T)
    qkv = make_qkv(*n)
    with collected() as attempt:
        for letters, dtype in itertools.product(SHAPES, (torch.float64, *DTYPES)):
            bias = torch.randn(shape_of(letters, n), generator=source).to(dtype)
            plain: Any = attend(backend, *qkv, mask=headwise.bias(bias), return_lse=True)
            met = torch.zeros(bias.shape[:3], dtype=torch.bool)
            met[-1, -1, -1] = True
            for what, key in itertools.product((math.nan, math.inf), (0, S // 2, S - 1)):
                bad = bias.clone()
                bad[-1, -1, -1, key] = what
                ours = attend(backend, *qkv, mask=headwise.bias(bad), return_lse=True)
                rows = met.expand(2, 4, T)
                for x, y in zip(ours, plain, strict=True):
                    attempt(f"{letters} {dtype}, {what} at {key}", assert_same_bits, x[~rows], y[~rows])
                    attempt(f"{letters} {dtype}, {what} at {key} shows", is_nan, x[rows])


def is_nan(x: Tensor) -> None:
    assert bool(x.isnan().all()), f"{int((~x.isnan()).sum())} of {x.numel()} entries are no NaN"
