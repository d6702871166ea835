"""The native linear layer for few rows: its numbers against float64, its bits, what may influence it, its refusals."""

from __future__ import annotations

import math

import pytest
import torch
from backends import instructions, natives, needs_native
from test_invariance import threads
from torch import Tensor

from headwise.testing import assert_same_bits

pytestmark = needs_native
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 7, 16, 31, 67, 257)  # about the steps of 16, 32 and 64 elements
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def made(rows: int, width: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(rows * 1009 + width * 13 + count)
    shapes = ((rows, width), (count, width), (count,))
    x, weight, bias = (torch.randn(*shape, generator=source).to(dtype) for shape in shapes)
    return x, weight, bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.headwise.linear(x, weight, bias)
    return out


@natives
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", (False, True))
def test_the_numbers(backend: str, dtype: torch.dtype, with_bias: bool) -> None:
    with instructions(backend):
        for rows in range(1, 9):
            for width in WIDTHS:
                for count in (1, 5, 8, 37, 263):  # less than a run, runs with and without a rest, two items
                    x, weight, bias = made(rows, width, count, dtype)
                    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
                    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
                    # rounded once to the dtype, after `width` sums in float32
                    allowed = ROUNDING[dtype] * exact.abs() + (width + 3) * 2.0**-24 * size
                    out = linear(x, weight, bias if with_bias else None)
                    assert out.dtype == dtype and out.shape == (rows, count)
                    assert ((out.double() - exact).abs() <= allowed).all(), (rows, width, count)


@natives
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_its_bits_whatever_is_beside_it(backend: str, dtype: torch.dtype) -> None:
    x, weight, bias = made(8, 331, 1013, dtype)
    with instructions(backend):
        whole = linear(x, weight, bias)
        for rows in (1, 2, 3, 5, 7):
            assert_same_bits(linear(x[8 - rows :], weight, bias), whole[8 - rows :])
        for count in (1, 2):
            with threads(count):
                assert_same_bits(linear(x, weight, bias), whole)
        assert_same_bits(linear(x, weight[17:40], bias[17:40]), whole[:, 17:40])


@natives
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_what_is_not_finite_stays_in_its_row_and_column(backend: str, dtype: torch.dtype, bad: float) -> None:
    x, weight, bias = made(5, 67, 19, dtype)
    with instructions(backend):
        clean = linear(x, weight, bias)
        x[2, 66], weight[3, 65] = bad, bad
        out = linear(x, weight, bias)
    assert not out[2].isfinite().any() and not out[:, 3].isfinite().any()
    rows, columns = [0, 1, 3, 4], [n for n in range(19) if n != 3]
    assert_same_bits(out[rows][:, columns], clean[rows][:, columns])


@natives
def test_rows_of_weights_and_inputs_may_be_apart(backend: str) -> None:
    x, weight, bias = made(3, 67, 19, torch.bfloat16)
    wide = [torch.full((n.shape[0], 71), math.nan, dtype=n.dtype) for n in (x, weight)]
    for to, n in zip(wide, (x, weight), strict=True):
        to[:, 3:70] = n
    with instructions(backend):
        assert_same_bits(linear(wide[0][:, 3:70], wide[1][:, 3:70], bias), linear(x, weight, bias))


def test_rows_may_have_any_axes_in_even_steps() -> None:
    x, weight, bias = made(8, 67, 19, torch.bfloat16)
    rows = linear(x, weight, bias)
    for shape in ((2, 4), (2, 2, 2), (1, 8), (8, 1), (1, 1, 8)):
        out = linear(x.view(*shape, 67), weight, bias)
        assert out.shape == (*shape, 19) and out.is_contiguous()
        assert_same_bits(out.view(8, 19), rows)
    assert_same_bits(linear(x.view(4, 2, 67)[:, 1:], weight, bias), rows[1::2].view(4, 1, 19))
    assert_same_bits(linear(x[3], weight, bias), rows[3])


def test_nothing_in_nothing_out() -> None:
    assert linear(torch.ones(0, 5), torch.ones(3, 5)).shape == (0, 3)
    assert linear(torch.ones(2, 5), torch.ones(0, 5)).shape == (2, 0)
    assert linear(torch.ones(2, 0), torch.ones(3, 0), torch.ones(3)).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(9, 5), torch.ones(3, 5), None), ("8", "(9, 5)")),
        ((torch.ones(2, 5), torch.ones(3, 7), None), ("(2, 5)", "(3, 7)")),
        ((torch.ones(2, 5), torch.ones(3, 5).half(), None), ("dtype",)),
        ((torch.ones(2, 5).double(), torch.ones(3, 5).double(), None), ("float32",)),
        ((torch.ones(2, 5), torch.ones(5, 3).T, None), ("contiguous",)),
        ((torch.ones(2, 5), torch.ones(3, 5), torch.ones(4)), ("bias", "(4)")),
        ((torch.ones(1, 1, 1, 1, 5), torch.ones(3, 5), None), ("input",)),
        ((torch.ones(3, 2, 5).transpose(0, 1), torch.ones(3, 5), None), ("evenly",)),
        ((torch.tensor(1.0), torch.ones(3, 5), None), ("axis",)),
    ],
)
def test_refusals(arguments: tuple[Tensor, Tensor, Tensor | None], words: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError) as error:
        linear(*arguments)
    assert all(word in str(error.value) for word in words), error.value
