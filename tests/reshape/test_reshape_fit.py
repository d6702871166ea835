"""What fits of weights rest on, computed another way: turned queries, written values, tried rotations, whole tokens."""

from __future__ import annotations

import math

import pytest
import torch
from reshape_cases import ROTATIONS, layer, project, text
from torch import Tensor

from headwise.nn.rotary import rotate
from headwise.reshape.regrouping.alignment import nearest_orthogonal, orthogonal_rotations
from headwise.reshape.regrouping.least_squares import output_uses, query_uses
from headwise.reshape.repair.moments import Moments
from headwise.reshape.repair.ridge import RIDGES, NormalEquations, best


@pytest.mark.parametrize("rotation", ["none", "halves", "interleaved", "partial-interleaved"])
def test_queries_use_keys_as_they_do_on_average_over_distances(rotation: str) -> None:
    """The squared products of a query at every angle with a key, for the queries of the key's group."""
    rotary = ROTATIONS[rotation]
    weights, x = layer(6, 3, rotary=rotary), text()
    query, key, value = project(weights, x)
    moments = Moments.like(weights)
    moments.add(query, key, value)
    assert moments.tokens == x.shape[0] * x.shape[1]
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


# --- ridge regression from sums ---------------------------------------------------------------------------------------


def summed(x: Tensor, y: Tensor) -> NormalEquations:
    made = NormalEquations(x.shape[-1], y.shape[-1])
    made.add(x, y)
    return made


def nearest_map(x: Tensor, y: Tensor, start: Tensor, ridge: float) -> Tensor:
    """The ridge regression as plain least squares: rows below the tokens' that ask for `start`, as hard as they may."""
    weight = (ridge * x.square().sum(0)).sqrt().diag()
    return torch.linalg.lstsq(torch.cat([x, weight]), torch.cat([y, weight @ start])).solution


def drawn_tokens(tokens: int, W: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.randn(tokens, W.shape[0], dtype=torch.float64) * torch.logspace(-1, 1, W.shape[0], dtype=torch.float64)
    return x, x @ W + 0.4 * torch.randn(tokens, W.shape[1], dtype=torch.float64)


def test_a_map_is_fitted_to_all_tokens_with_the_ridge_that_does_best_on_those_held_out() -> None:
    W, start = torch.randn(2, 6, 3, dtype=torch.float64)
    fit, check = drawn_tokens(17, W), drawn_tokens(29, W)

    def left(W: Tensor) -> float:
        return float((check[0] @ W - check[1]).square().sum())

    expected = min(RIDGES, key=lambda ridge: left(nearest_map(*fit, start, ridge)))
    made, ridge = best(summed(*fit), summed(*check), start)
    assert ridge == expected
    x, y = (torch.cat(both) for both in zip(fit, check, strict=True))
    torch.testing.assert_close(made, nearest_map(x, y, start, expected), rtol=1e-5, atol=1e-6)
    kept, none = best(summed(*fit), summed(check[0], check[0] @ start), start)
    assert kept is start and none is None


def test_sums_of_two_parts_are_those_of_all_tokens() -> None:
    W = torch.randn(6, 3, dtype=torch.float64)
    one, other = drawn_tokens(17, W), drawn_tokens(29, W)
    both = summed(*one) + summed(*other)
    x, y = (torch.cat(parts) for parts in zip(one, other, strict=True))
    far = W + torch.randn(6, 3, dtype=torch.float64)
    for tried in (W, far):
        assert both.error(tried) == pytest.approx(float((x @ tried - y).square().sum() / y.square().sum()))
