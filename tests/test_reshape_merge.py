"""Fewer key-value heads: what turning heads leaves as it was, and what merging loses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from reshape_cases import TURNS, layer, orthogonal, output, project, text
from torch import Tensor

from headwise.reshape.align import aligned_turns, orthogonal_turns, phases, turned
from headwise.reshape.grouping import MOST_PARTITIONS, contiguous, cost, differences, grouped, partitions
from headwise.reshape.heads import HeadWeights
from headwise.reshape.merge import METHODS, merge
from headwise.reshape.moments import Moments

NORMS: dict[str, dict[str, Any]] = {
    "no norm": {},
    "rms, weights of pairs alike": {"query_norm": "alike", "key_norm": "alike"},
    "rms, weights unlike": {"query_norm": "unlike", "key_norm": "alike"},
    "own weights a head": {"query_norm": "alike", "key_norm": "own"},
    "across": {"key_norm": "unlike", "norm": "across"},
    "layer": {"query_norm": "alike", "norm": "layer"},
}


def norms(of: dict[str, Any], K: int, D: int = 14) -> dict[str, Any]:
    made = {"alike": torch.full((D,), 1.3), "unlike": torch.rand(D) + 0.5, "own": torch.rand(K, D) + 0.5}
    return {name: made[what].double() if what in made else what for name, what in of.items()}


def moments(weights: HeadWeights, x: Tensor) -> Moments:
    made = Moments.like(weights)
    _, key, value = project(weights, x)
    made.add(key, value)
    return made


def far(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("turns", TURNS)
def test_turning_heads_into_one_frame_changes_no_output(turns: str, norm: str) -> None:
    weights = layer(6, 3, turns=TURNS[turns], **norms(NORMS[norm], 3))
    x = text()
    made = aligned_turns(weights, moments(weights, x), [[0, 2, 1]])
    assert far(output(turned(weights, *made), x), output(weights, x)) < 1e-12
    assert far(turned(weights, *made).value, weights.value) > 0.1, "nothing was turned"


@pytest.mark.parametrize("turns", TURNS)
def test_planted_turns_are_undone(turns: str) -> None:
    """Heads that are turns of one head in both keys and values: aligned loses nothing, the mean does."""
    weights = layer(6, 3, turns=TURNS[turns])
    alike = weights.select([0, 1], [0])
    keys = torch.stack([torch.eye(14, dtype=torch.float64), *(planted_turn(weights) for _ in range(2))])
    values = torch.stack([torch.eye(11, dtype=torch.float64), orthogonal(11), orthogonal(11)])
    repeated = replace(weights, **{
        name: getattr(alike, name).repeat_interleave(3, 0) for name in ("key", "value", "key_bias", "value_bias")
    })  # fmt: skip
    planted = turned(repeated, keys, values)
    x = text()
    wanted, known = output(planted, x), moments(planted, x)
    merged = merge(planted, 1, moments=known)
    assert far(output(merged.weights, x), wanted) < 1e-7
    assert max(merged.lost) < 1e-9
    mean = merge(planted, 1, method="mean", moments=known)
    assert far(output(mean.weights, x), wanted) > 0.1
    assert min(mean.lost) > 0.1


def planted_turn(weights: HeadWeights) -> Tensor:
    """A turn of D numbers that the layer's rotary positions commute with."""
    made = torch.eye(14, dtype=torch.float64)
    done = 0
    if weights.turns is not None:
        done = weights.turns.rotary_dim
        first, second = weights.turns.pairs()
        angle = 6.3 * torch.rand(len(first), dtype=torch.float64)
        made[first, first] = made[second, second] = angle.cos()
        made[second, first] = angle.sin()
        made[first, second] = -angle.sin()
    made[done:, done:] = orthogonal(14 - done)
    return made


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_are_the_same_become_one_without_a_trace(method: Any) -> None:
    weights = layer(8, 2, turns=TURNS["halves"]).to(torch.float32)
    x = text().float()
    double = weights.expanded().select([0, 1, 2, 3, 4, 5, 6, 7])
    merged = merge(double, 2, method=method, moments=moments(double, x))
    assert merged.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and merged.heads == tuple(range(8))
    assert far(output(merged.weights, x), output(weights, x)) < 1e-5
    if method != "aligned":
        assert torch.equal(merged.weights.key, weights.key) and torch.equal(merged.weights.value, weights.value)


def test_query_heads_go_with_their_keys() -> None:
    """Heads 0 and 2 are alike, and 1 and 3: neighbours after merging, sinks and output with them."""
    base = layer(8, 4, turns=TURNS["partial"])
    weights = replace(base, **{
        name: getattr(base, name)[[0, 1, 0, 1]] for name in ("key", "value", "key_bias", "value_bias")
    })  # fmt: skip
    x = text()
    merged = merge(weights, 2, moments=moments(weights, x))
    assert merged.groups == ((0, 2), (1, 3))
    assert merged.heads == (0, 1, 4, 5, 2, 3, 6, 7)
    assert torch.equal(merged.weights.sinks, weights.sinks[list(merged.heads)])
    assert far(output(merged.weights, x), output(weights, x)) < 1e-6


def test_what_is_lost_is_what_the_shared_heads_miss() -> None:
    weights = layer(6, 6, turns=TURNS["interleaved"])
    x = text()
    _, key, value = project(weights, x)
    for method in METHODS:
        merged = merge(weights, 2, method=method, moments=moments(weights, x), groups=[[0, 4, 5], [3, 2, 1]])
        frame = weights
        if method == "aligned":
            frame = turned(weights, *aligned_turns(weights, moments(weights, x), merged.groups))
        for n, part in ((0, project(frame, x)[1]), (1, project(frame, x)[2])):
            shared = project(merged.weights, x)[1 + n].repeat_interleave(3, 1)
            old = part[:, [0, 4, 5, 3, 2, 1]]
            lost = (old - shared).square().sum() / old.square().sum()
            assert merged.lost[n] == pytest.approx(float(lost), rel=1e-9), (method, n)
    assert key.shape[1] == value.shape[1] == 6


def test_aligned_loses_less_than_the_mean_and_the_first() -> None:
    weights = layer(8, 8, turns=TURNS["halves"])
    known = moments(weights, text())
    lost = {method: merge(weights, 2, method=method, moments=known, groups=contiguous(8, 2)).lost for method in METHODS}
    for n in (0, 1):
        assert lost["aligned"][n] < 0.9 * lost["mean"][n] < lost["first"][n]
    assert sum(merge(weights, 2, moments=known).lost) < sum(lost["aligned"])


def test_phases_and_turns_are_the_best_of_many() -> None:
    """No other turn of one head does better: a stationary point in each head."""
    weights = layer(3, 3, turns=TURNS["halves"])
    known = moments(weights, text())
    blocks = known.value.transpose(1, 2)
    Q = orthogonal_turns(known.value)
    reached = torch.einsum("ivx,ijvw,jwx->", Q, blocks, Q)
    for i in range(3):
        for _ in range(20):
            other = Q.clone()
            step = 0.1 * torch.randn(11, 11, dtype=torch.float64)
            other[i] = Q[i] @ torch.linalg.matrix_exp(step - step.T)
            assert torch.einsum("ivx,ijvw,jwx->", other, blocks, other) < reached
    pairs = torch.randn(5, 3, 3, dtype=torch.complex128)
    pairs = pairs @ pairs.mH
    u = phases(pairs, torch.tensor([True, True, True, True, False]))
    assert torch.equal(u[0], torch.ones(5, dtype=torch.complex128)) and set(u[:, 4].real.tolist()) <= {1.0, -1.0}
    best = torch.einsum("ip,pij,jp->p", u.conj(), pairs, u).real
    grid = torch.polar(torch.ones(97, dtype=torch.float64), torch.linspace(0, 6.3, 97, dtype=torch.float64))
    for one, two in itertools.product(grid, grid):
        v = torch.stack([torch.ones_like(one), one, two])
        assert (torch.einsum("i,pij,j->p", v.conj(), pairs[:4], v).real <= best[:4] + 1e-9).all()


def test_the_search_finds_the_least_and_comes_close_where_it_cannot_try_all() -> None:
    d = torch.rand(8, 8, dtype=torch.float64)
    d = d + d.T
    every = [cost(d.tolist(), made) for made in all_pairs(list(range(8)))]
    assert len(every) == partitions(8, 2) == 105
    assert cost(d.tolist(), grouped(d, 4)) == pytest.approx(min(every))
    hidden = torch.arange(24)[torch.randperm(24)] % 6  # six groups of four, drawn
    apart = (hidden[:, None] != hidden).double() + 0.1 * torch.rand(24, 24, dtype=torch.float64)
    assert partitions(24, 4) > MOST_PARTITIONS
    found = grouped(apart, 6)
    assert all(len({int(hidden[h]) for h in group}) == 1 for group in found)
    assert found == grouped(apart, 6)


def all_pairs(heads: list[int]) -> list[list[tuple[int, int]]]:
    if not heads:
        return [[]]
    first = heads[0]
    return [
        [(first, other), *rest]
        for other in heads[1:]
        for rest in all_pairs([head for head in heads if head not in (first, other)])
    ]


def test_differences_are_zero_for_turned_copies_alone() -> None:
    weights = layer(3, 3, turns=TURNS["partial"])
    twin = replace(weights, key=weights.key[[0, 1, 0]], value=weights.value[[0, 1, 0]], key_bias=None, value_bias=None)
    eye = [torch.eye(n, dtype=torch.float64).repeat(3, 1, 1) for n in (14, 11)]
    eye[0][2], eye[1][2] = planted_turn(weights), orthogonal(11)
    made = turned(twin, *eye)
    known = moments(made, text())
    aligned, plain = differences(made, known), differences(made, known, aligned=False)
    assert aligned[0, 2] < 1e-10 < 0.1 < min(aligned[0, 1], aligned[1, 2])
    assert plain[0, 2] > 0.1


def test_without_text_the_weights_tell() -> None:
    weights = layer(4, 4, key_bias=None, value_bias=None)
    known = Moments.of_weights(weights)
    many = moments(weights, torch.eye(29, dtype=torch.float64)[None])
    assert torch.allclose(known.key, many.key) and torch.allclose(known.value, many.value)
    assert merge(weights, 2).groups == merge(weights, 2, moments=known).groups


def test_what_the_text_does_not_tell_stays_as_it_is() -> None:
    """Values that never differ from 0 in some numbers: those are not turned."""
    products = torch.zeros(2, 7, 2, 7, dtype=torch.float64)
    products[:, :3, :, :3] = torch.eye(3, dtype=torch.float64)[None, :, None]
    assert torch.allclose(orthogonal_turns(products)[1], torch.eye(7, dtype=torch.float64))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"num_kv_heads": 4}, ValueError, "H = 6, K = 4 leave 2 over"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads is at least 1; got 0"),
        ({"num_kv_heads": "2"}, TypeError, "num_kv_heads is an int; got '2'"),
        ({"method": "median"}, ValueError, "method is one of first, mean, aligned; got 'median'"),
        ({"groups": [[0, 1], [2, 3, 4, 5]]}, ValueError, "groups are of equal size and hold each of the 6"),
        ({"groups": [[0, 1, 2], [2, 4, 5]]}, ValueError, "hold each of the 6 key-value heads once"),
        ({"groups": [[0, 1], [2, 3], [4, 5]]}, ValueError, "groups are num_kv_heads = 2 in number; got 3"),
    ],
)
def test_what_cannot_be_merged_is_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        merge(layer(6, 6), **{"num_kv_heads": 2, **arguments})


@pytest.mark.unchecked
def test_moments_of_another_layer_are_refused() -> None:
    weights = layer(6, 3)
    _, key, value = project(layer(6, 6), text())
    with pytest.raises(ValueError, match=r"key is \(B, 3, S, 14\) for this layer; got float64 \(2, 6, 53, 14\)"):
        Moments.like(weights).add(key, value)
