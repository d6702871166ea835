"""Sums of statistics and weights counted another way: many rows in float64, rows and heads in any order."""

from __future__ import annotations

import random

import pytest
import torch
from backends import instructions, natives
from draw import slow_except
from mask_cases import LONG, MASKS, SHORT, UNEQUAL, Sizes
from native_cases import collected
from test_weights import OPTIONS, STAGES, stages
from torch import Tensor

import headwise
from headwise.ops.statistics import statistics

pytestmark = pytest.mark.unchecked


@natives
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_keys_receive_from_very_many_rows_is_summed_in_float64(backend: str, dtype: torch.dtype) -> None:
    """Of 65,537 rows each key gets a third of each, whose float32 sums would be off in the fifth digit; and of drawn
    queries as many as the matrix says. The exponential of bfloat16 inputs is off by 2.6e-6 where the CPU multiplies in
    bfloat16, and every row alike if all scores are 0."""
    T, S = 65_537, 3
    near = 5e-6 if dtype == torch.bfloat16 else 2e-6
    with instructions(backend):
        got = statistics(torch.zeros(1, 1, T, 2, dtype=dtype), torch.zeros(1, 1, S, 2, dtype=dtype)).received
        torch.testing.assert_close(got, torch.full((1, 1, S), 1 / 3), rtol=near, atol=0.0)
        query, key = torch.randn(1, 2, T, 3).to(dtype), torch.randn(1, 1, S, 3).to(dtype)
        want = torch.softmax(query.double() @ key.double().mT * 3**-0.5, -1).mean(-2)
        got = statistics(query, key, scale=3**-0.5).received
        torch.testing.assert_close(got.double(), want, rtol=near, atol=0.0)


@pytest.mark.parametrize("n", slow_except((SHORT, LONG, *UNEQUAL), (SHORT, LONG)), ids=str)
def test_chosen_rows_and_heads_in_any_order_are_those_of_the_matrix(n: Sizes) -> None:
    """Under every mask: which keys some rows see follows from the rows, not from their order."""
    make = random.Random(sum(n))
    q, k = _inputs(n)
    with collected() as attempt:
        for name in MASKS:
            exact = stages(name, n)
            rows = [make.randrange(n.T) for _ in range(make.randint(1, 4))]
            heads = [make.randrange(n.H) for _ in range(make.randint(1, 3))]
            for order in (rows, sorted(rows, reverse=True), [r - n.T for r in sorted(rows)]):
                for stage in STAGES:
                    options = {"mask": MASKS[name](n).mask, "stage": stage, **OPTIONS}
                    ours = headwise.weights(q, k, rows=order, heads=heads, **options)
                    want = exact[stage][:, heads][:, :, order]
                    near = {"rtol": 2e-6, "atol": 2e-6}
                    attempt((name, order, heads, stage), torch.testing.assert_close, ours.double(), want, **near)


def _inputs(n: Sizes) -> tuple[Tensor, Tensor]:
    q, k, _ = headwise.testing.make_qkv(*n)
    return q, k


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_every_offset_is_a_diagonal_of_the_matrix(shape: tuple[int, int]) -> None:
    """Also where there are more queries than keys: the first queries then stand before the first key."""
    T, S = shape
    query, key = torch.randn(1, 1, T, 4), torch.randn(1, 1, S, 4)
    P, offsets = headwise.weights(query, key)[0, 0], range(-T - S, T + S + 1)
    got = statistics(query, key, offsets=offsets).offsets[0, 0]
    for offset, mass in zip(offsets, got.tolist(), strict=True):
        cells = [float(P[i, i + S - T + offset]) for i in range(T) if 0 <= i + S - T + offset < S]
        assert mass == pytest.approx(sum(cells) / max(len(cells), 1), abs=1e-6), offset
