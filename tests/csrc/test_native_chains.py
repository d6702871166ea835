"""Prefill of bfloat16 by chains of tile products (`csrc/kernels/prefill/overlapped_softmax-inl.h`): sums relative to a
score that changes.
"""

from __future__ import annotations

import pytest
import torch
from backends import NATIVE, attend
from native_cases import collected

import headwise
from headwise.testing import assert_same_bits

BACKEND = "native-amx_bf16"
pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(BACKEND not in NATIVE, reason="needs a CPU with AMX"),
]
# How much a score is greater than the one 17 keys before: the weights of a visit are relative to the last one's score,
# or to their own, or there is but one key.
STEPS = (-3.0, 0.0, 0.25, 1.5, 40.0)


def make(step: float, T: int = 37, S: int = 211, D: int = 64, V: int = 96) -> tuple[torch.Tensor, ...]:
    """Keys whose scores grow from key to key, for each row by another factor of either sign."""
    torch.manual_seed(5)
    q, k, v = torch.randn(1, 3, T, D), torch.randn(1, 1, S, D) / 4, torch.randn(1, 1, S, V)
    q[..., 7] = torch.linspace(-1, 1, T)
    k[..., 7] = torch.arange(S) // 17 * step
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def below(error: torch.Tensor, allowed: torch.Tensor) -> None:
    assert bool((error <= allowed).all()), f"{error.max():.3g}, {(error / allowed).max():.3g} of what is allowed"


@pytest.mark.parametrize("mask", [None, headwise.causal(), headwise.window(70, 9)], ids=["none", "causal", "window"])
def test_scores_that_grow(mask: headwise.Mask | None) -> None:
    """To what rounding each weight to bfloat16 can change, and the exponential's error in lse."""
    with collected() as attempt:
        for step in STEPS:
            q, k, v = make(step)
            out, lse = attend(BACKEND, q, k, v, mask=mask, scale=1.0, return_lse=True)
            wide = q.double(), k.double(), v.double()
            right, height = attend("reference", *wide, mask=mask, scale=1.0, return_lse=True)
            size = attend("reference", *wide[:2], wide[2].abs(), mask=mask, scale=1.0)
            allowed = size * (2.0**-8 + 4e-6) + right.abs() * 2.0**-8
            attempt(step, below, (out - right).abs(), allowed)
            attempt(f"{step}, lse", below, (lse - height).abs(), 4e-6 + height.abs() * 2.0**-21)


@pytest.mark.parametrize("S", [64, 95, 211])
def test_a_key_that_other_rows_attend_changes_no_bit(S: int) -> None:
    """It moves their sums to another score, which are beside this row's in one block and one vector."""
    q, k, v = make(0.25, T=S, S=S)
    one = attend(BACKEND, q, k, v, mask=headwise.causal(), scale=1.0)
    with collected() as attempt:
        for height in (9.0, 3000.0, torch.inf, torch.nan):
            key, value = k.clone(), v.clone()
            key[:, :, S // 2 + 3] = height
            value[:, :, S // 2 + 3] = height
            other = attend(BACKEND, q, key, value, mask=headwise.causal(), scale=1.0)
            attempt(height, assert_same_bits, other[:, :, : S // 2 + 3], one[:, :, : S // 2 + 3])
            assert not torch.equal(other[:, :, S // 2 + 3 :], one[:, :, S // 2 + 3 :])


def test_one_key_with_all_the_weight() -> None:
    """Gives the bits of its value, wherever it is among the keys and however high."""
    q, k, v = make(0.0)
    with collected() as attempt:
        for j in (0, 63, 64, 127, 130, 210):
            for height in (90.0, 3000.0):
                key = k.clone()
                key[:, :, j], key[:, :, j, 9] = 0, height
                query = q.clone()
                query[..., 9] = 1
                out = attend(BACKEND, query, key, v, scale=1.0)
                attempt((j, height), assert_same_bits, out, v[:, :, j : j + 1].expand_as(out))
