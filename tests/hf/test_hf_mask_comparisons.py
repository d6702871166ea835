"""A structural mask compared with a number, as some models do with theirs: the result is that of the plain tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwise.hf import StructuralMask
from headwise.ops.masks import causal, segments

B, T, S = 2, 5, 7


def made(dtype: torch.dtype) -> StructuralMask:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])
    return StructuralMask(causal() & segments(ids[:, 2:], ids), (B, 1, T, S), dtype)


def plain(dtype: torch.dtype) -> torch.Tensor:
    """0 where a query may attend, and else the lowest number: from the ids, place by place."""
    ids = [[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]]
    out = torch.full((B, 1, T, S), torch.finfo(dtype).min, dtype=dtype)
    for b in range(B):
        for i in range(T):
            for j in range(S):
                if j <= i + S - T and ids[b][j] == ids[b][i + S - T]:
                    out[b, 0, i, j] = 0
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "other", ["lowest", "above the lowest", -1e4, -1, -1e-3, 0, 0.0, 1e-3, 3, "tensor", "nan"], ids=str
)
def test_comparisons_are_those_of_the_tensor(other: Any, dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    named = {"lowest": lowest, "above the lowest": lowest / 2, "tensor": torch.tensor(-1.0), "nan": float("nan")}
    number = named.get(other, other)
    tensor = plain(dtype)
    assert torch.equal(made(dtype) + 0, tensor)
    below = made(dtype) < number
    assert below.shape == (B, 1, T, S) and below.dtype == torch.bool
    assert torch.equal(below | torch.zeros_like(tensor, dtype=torch.bool), tensor < number)
