"""What a fit of shared heads rests on, computed another way: by turning queries, writing values and trying rotations."""

from __future__ import annotations

import math

import pytest
import torch
from reshape_cases import ROTATIONS, layer, project, text

from headwise.nn.rotary import rotate
from headwise.reshape.regrouping.alignment import nearest_orthogonal, orthogonal_rotations
from headwise.reshape.regrouping.least_squares import output_uses, query_uses
from headwise.reshape.repair.moments import Moments


@pytest.mark.parametrize("rotation", ["none", "halves", "interleaved", "partial-interleaved"])
def test_queries_use_keys_as_they_do_on_average_over_distances(rotation: str) -> None:
    """The squared products of a query at every angle with a key, for the queries of the key's group."""
    rotary = ROTATIONS[rotation]
    weights, x = layer(6, 3, rotary=rotary), text()
    query, key, value = project(weights, x)
    moments = Moments.like(weights)
    moments.add(query, key, value)
    uses = query_uses(weights, moments)
    e = torch.randn(3, 14, dtype=torch.float64)
    grouped = query.transpose(0, 1).reshape(3, -1, 14)  # two query heads to a key head, side by side
    pairs = 0 if rotary is None else rotary.rotary_dim // 2
    expected, steps = torch.zeros(3, dtype=torch.float64), 4 * pairs or 1
    for step in range(steps):  # each pair turns as often as its number, so no two turn together
        angle = (step * torch.arange(1, pairs + 1, dtype=torch.float64) / steps * 2 * math.pi)[None]
        turned = grouped
        if rotary is not None:
            turned = rotate(grouped, angle.cos(), angle.sin(), interleaved=rotary.interleaved)
        expected += torch.einsum("knd,kd->kn", turned, e).square().sum(1) / steps
    told = torch.einsum("kd,kde,ke->k", e, uses, e)
    torch.testing.assert_close(told, expected)


@pytest.mark.parametrize(("H", "K"), [(6, 3), (6, 1), (4, 4)])
def test_an_error_of_a_value_counts_by_what_all_heads_that_read_it_write(H: int, K: int) -> None:
    weights = layer(H, K)
    e = torch.randn(K, 11, dtype=torch.float64)
    expected = [
        sum(float((weights.output[:, head] @ e[kv]).square().sum()) for head in range(H) if head * K // H == kv)
        for kv in range(K)
    ]
    told = torch.einsum("kv,kvw,kw->k", e, output_uses(weights), e)
    torch.testing.assert_close(told, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(8))
def test_no_head_alone_can_be_turned_nearer_to_the_others(seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randn(4, 5, 9, dtype=torch.float64) * torch.tensor([1.0, 1.0, 4.0, 0.3])[:, None, None]
    Q = orthogonal_rotations(torch.einsum("ivt,jwt->ivjw", values, values))
    turned = torch.einsum("ivx,ivt->ixt", Q, values)
    for head in range(4):
        others = turned.sum(0) - turned[head]
        best = nearest_orthogonal(values[head] @ others.T)
        reached = float((turned[head] * others).sum())
        assert float(((best.T @ values[head]) * others).sum()) <= reached + 1e-3 * abs(reached)
