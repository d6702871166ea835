"""The output as weights times values: head by head, and with a number that is none in every place."""

from __future__ import annotations

import itertools

import pytest
import torch

import headwise
from headwise.ops.statistics.weights import weighted_values

B, H, K, T, S, V = 2, 6, 2, 3, 4, 2


@pytest.mark.parametrize("causal", [False, True])
def test_a_value_that_is_no_number_reaches_the_heads_and_rows_that_read_it(causal: bool) -> None:
    weights, whole = torch.rand(B, H, T, S), torch.randn(B, K, S, V)
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else torch.ones(T, S, dtype=torch.bool)
    weights = weights.masked_fill(~seen, 0.0)
    for b, k, j in itertools.product(range(B), range(K), range(S)):
        value = whole.clone()
        value[b, k, j, 0] = torch.nan
        out = weighted_values(weights, value, headwise.causal() if causal else None)
        for row, h, i in itertools.product(range(B), range(H), range(T)):
            mine = h // (H // K)
            if row == b and mine == k and seen[i, j]:
                assert bool(out[row, h, i].isnan().all()), (b, k, j, row, h, i)
            else:
                torch.testing.assert_close(out[row, h, i], weights[row, h, i] @ whole[row, mine])
