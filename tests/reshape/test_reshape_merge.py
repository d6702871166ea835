"""Fewer key-value heads: what turning heads leaves as it was, and what merging loses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from reshape_cases import ROTATIONS, layer, orthogonal, output, project, text
from torch import Tensor

from headwise.reshape.layout.head_weights import HeadWeights
from headwise.reshape.regrouping.alignment import KeyBasis, aligned_differences, orthogonal_rotations, phases, unlike
from headwise.reshape.regrouping.grouping import MOST_PARTITIONS, contiguous, cost, grouped, partitions
from headwise.reshape.regrouping.head_maps import HeadMaps, merged_heads
from headwise.reshape.regrouping.least_squares import basis, fitted_differences
from headwise.reshape.regrouping.merge import METHODS, merge
from headwise.reshape.repair.moments import Moments

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
    made.add(*project(weights, x))
    return made


def mapped(weights: HeadWeights, keys: Tensor, values: Tensor) -> HeadWeights:
    """The same layer in other numbers: ``keys[k]`` and ``values[k]`` read the new ones, their inverses write them."""
    alone = [[k] for k in range(weights.num_kv_heads)]
    return merged_heads(weights, HeadMaps(keys.inverse(), keys), HeadMaps(values.inverse(), values), alone)


def far(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.sweep
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_turning_heads_into_one_frame_changes_no_output(rotation: str, norm: str) -> None:
    weights = layer(6, 3, rotary=ROTATIONS[rotation], **norms(NORMS[norm], 3))
    x = text()
    known = moments(weights, x)
    turned = mapped(weights, KeyBasis(weights).rotations(known.key), orthogonal_rotations(known.value))
    assert far(output(turned, x), output(weights, x)) < 1e-12
    assert far(turned.value, weights.value) > 0.1, "nothing was turned"
    moved = far(turned.key, weights.key)
    assert moved == 0 if norm == "layer" else moved > 0.1


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_two_heads_agree_as_far_as_turning_them_reaches(rotation: str, norm: str) -> None:
    weights = layer(8, 4, rotary=ROTATIONS[rotation], **norms(NORMS[norm], 4))
    frame, known = KeyBasis(weights), moments(weights, text()).key
    agreement = frame.agreement(known)
    for pair in itertools.combinations(range(4), 2):
        of_pair = known[list(pair)][:, :, list(pair)]
        one, other = frame.rotations(of_pair)
        reached = (one.T @ of_pair[0, :, 1] @ other).trace()
        torch.testing.assert_close(reached, agreement[pair])


@pytest.mark.parametrize("plant", ["turns", "scales"])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_planted_maps_are_undone(rotation: str, plant: str) -> None:
    """Heads that are turns of one head in keys and values: aligned loses nothing; that are any map of it: fitted."""
    base = layer(6, 3, rotary=ROTATIONS[rotation])
    names = ("key", "value", "key_bias", "value_bias")
    weights = replace(base, **{name: getattr(base, name)[[0, 0, 0]] for name in names})
    keys = torch.stack([planted(weights, plant) for _ in range(3)])
    values = torch.stack([orthogonal(11) + (plant == "scales") * torch.randn(11, 11) for _ in range(3)])
    x = text()
    wanted, made = output(weights, x), mapped(weights, keys, values)
    known = moments(made, x)
    for method, exact in (("mean", False), ("aligned", plant == "turns"), ("fitted", True)):
        merged = merge(made, 1, method=method, moments=known)
        error = far(output(merged.apply(made), x), wanted)
        assert (error < 1e-6 and max(merged.lost) < 1e-9) if exact else (error > 0.05 and min(merged.lost) > 0.05)


def planted(weights: HeadWeights, plant: str) -> Tensor:
    """A map of D numbers that the layer's rotary positions commute with: of turns alone, or of any size."""
    made = torch.eye(14, dtype=torch.float64)
    frame = KeyBasis(weights)
    pairs, rest = len(frame.first), len(frame.rest)
    size = torch.ones(pairs) if plant == "turns" else torch.rand(pairs) + 0.3
    frame.put_pairs(made[None], torch.polar(size.double(), 6.3 * torch.rand(pairs).double())[None])
    matrix = orthogonal(rest) + (plant == "scales") * torch.randn(rest, rest)
    made[frame.rest[:, None], frame.rest] = matrix
    return made


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_are_the_same_become_one_without_a_trace(method: Any) -> None:
    weights = layer(8, 2, rotary=ROTATIONS["halves"]).to(torch.float32)
    x = text().float()
    double = weights.expanded().select([0, 1, 2, 3, 4, 5, 6, 7])
    merged = merge(double, 2, method=method, moments=moments(double, x))
    assert merged.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and merged.heads(1) == tuple(range(8))
    whole = merged.apply(double)
    assert far(output(whole, x), output(weights, x)) < 1e-5
    if method in ("first", "mean"):
        assert torch.equal(whole.key, weights.key) and torch.equal(whole.value, weights.value)


@pytest.mark.parametrize("norm", ["rms", "across"])
def test_the_first_head_brings_the_weights_of_its_own_norm(norm: str) -> None:
    """What stands for the group is its first head's key as queries meet it: normed by its own weights, no mean."""
    weights = layer(
        6, 6, rotary=ROTATIONS["partial"], **norms({"query_norm": "alike", "key_norm": "own", "norm": norm}, 6)
    )
    x = text()
    firsts = [0, 0, 0, 3, 3, 3]
    names = ("key", "value", "key_bias", "value_bias", "key_norm")
    wanted = output(replace(weights, **{name: getattr(weights, name)[firsts] for name in names}), x)
    merged = merge(weights, 2, method="first").apply(weights)
    assert far(output(merged, x), wanted) < 1e-12
    assert merged.key_norm is not None and torch.equal(merged.key_norm, weights.key_norm[[0, 3]])
    averaged = merge(weights, 2, method="mean").apply(weights).key_norm
    torch.testing.assert_close(averaged, weights.key_norm.unflatten(0, (2, 3)).mean(1))


def test_as_many_heads_as_before_change_nothing() -> None:
    weights = layer(6, 3)
    assert all(merge(weights, 3, method=method).apply(weights) is weights for method in METHODS)


def test_query_heads_go_with_their_keys() -> None:
    """Heads 0 and 2 are alike, and 1 and 3: neighbours after merging, sinks and output with them."""
    base = layer(8, 4, rotary=ROTATIONS["partial"])
    weights = replace(base, **{
        name: getattr(base, name)[[0, 1, 0, 1]] for name in ("key", "value", "key_bias", "value_bias")
    })  # fmt: skip
    x = text()
    merged = merge(weights, 2, moments=moments(weights, x))
    assert merged.groups == ((0, 2), (1, 3))
    assert merged.heads(2) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert torch.equal(merged.apply(weights).sinks, weights.sinks[[0, 1, 4, 5, 2, 3, 6, 7]])
    assert far(output(merged.apply(weights), x), output(weights, x)) < 1e-6


def test_what_is_lost_is_what_the_shared_heads_miss() -> None:
    weights = layer(6, 6)
    x = text()
    _, key, value = project(weights, x)
    groups = [[0, 4, 5], [3, 2, 1]]
    order = [0, 4, 5, 3, 2, 1]
    for method in METHODS:
        merged = merge(weights, 2, method=method, moments=moments(weights, x), groups=groups)
        after = merged.apply(weights)
        new_query, new_key, new_value = project(after, x)
        query = project(weights, x)[0][:, order]
        seen = torch.einsum("bhtv,mhv->bhtm", value[:, order], weights.output[:, order])
        left = seen - torch.einsum("bhtv,mhv->bhtm", new_value.repeat_interleave(3, 1), after.output)
        assert float(left.square().sum() / seen.square().sum()) == pytest.approx(merged.lost[1], rel=1e-9), method
        # Queries of one text meet keys of the other in the moments, too.
        every = torch.einsum("bhtd,chsd->hbtcs", query, key[:, order])
        got = torch.einsum("bhtd,chsd->hbtcs", new_query, new_key.repeat_interleave(3, 1))
        assert float((every - got).square().sum() / every.square().sum()) == pytest.approx(merged.lost[0], rel=1e-9)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_the_better_method_loses_less(rotation: str) -> None:
    weights = layer(8, 8, rotary=ROTATIONS[rotation])
    known, groups = moments(weights, text()), contiguous(8, 2)
    lost = {method: merge(weights, 2, method=method, moments=known, groups=groups).lost for method in METHODS}
    for n in (0, 1):
        assert lost["fitted"][n] < lost["aligned"][n] < lost["mean"][n] < lost["first"][n]


def test_a_norm_leaves_keys_to_be_aligned() -> None:
    weights = layer(6, 3, rotary=ROTATIONS["partial"], **norms(NORMS["rms, weights of pairs alike"], 3))
    known = moments(weights, text())
    aligned, fitted = (merge(weights, 1, method=method, moments=known) for method in ("aligned", "fitted"))
    assert torch.equal(aligned.apply(weights).key, fitted.apply(weights).key)
    assert aligned.lost[1] > fitted.lost[1]


def test_the_basis_is_the_best_of_many() -> None:
    """Weighed least squares: no step in any direction does better, and directions that nothing reads do not count."""
    n, d = 3, 4
    rows = torch.randn(97, n, d, dtype=torch.float64)
    uses = torch.randn(n, d, d, dtype=torch.float64)
    uses = uses @ uses.mT
    uses[1, :2] = uses[1, :, :2] = 0
    products = torch.einsum("tix,tjy->ixjy", rows, rows)
    write, read = basis(products, uses)

    def loss(write: Tensor, read: Tensor) -> Tensor:
        e = rows - torch.einsum("ixa,jay,tjy->tix", read, write, rows)
        return torch.einsum("tix,ixy,tiy->", e, uses, e)

    least = loss(write, read)
    for _ in range(50):
        steps = (1e-3 * torch.randn(n, d, d, dtype=torch.float64) for _ in range(2))
        assert loss(write + next(steps), read + next(steps)) > least
    m = torch.einsum("jay,tjy->ta", write, rows)
    assert float(m.square().sum()) == pytest.approx(float(rows.square().sum() / n))


def test_phases_and_turns_are_the_best_of_many() -> None:
    """No other turn of one head does better: a stationary point in each head."""
    weights = layer(3, 3, rotary=ROTATIONS["halves"])
    known = moments(weights, text())
    blocks = known.value.transpose(1, 2)
    Q = orthogonal_rotations(known.value)
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
    every = torch.cartesian_prod(grid[:1], grid, grid)
    assert (torch.einsum("ni,pij,nj->pn", every.conj(), pairs[:4], every).real <= best[:4, None] + 1e-9).all()


def test_the_search_finds_the_least_where_it_tries_all() -> None:
    for _ in range(20):
        d = torch.rand(8, 8, dtype=torch.float64)
        d = d + d.T
        every = [cost(d.tolist(), made) for made in all_pairs(list(range(8)))]
        assert len(every) == partitions(8, 2) == 105
        assert cost(d.tolist(), grouped(d, 4)) == pytest.approx(min(every))


def test_the_search_comes_close_where_it_cannot_try_all() -> None:
    """Groups that are there are found; where there are none, no two heads that change places would help."""
    assert partitions(24, 4) > MOST_PARTITIONS
    hidden = torch.arange(24)[torch.randperm(24)] % 6  # six groups of four, drawn
    apart = (hidden[:, None] != hidden).double() + 0.1 * torch.rand(24, 24, dtype=torch.float64)
    grouping = grouped(apart, 6)
    assert all(len({int(hidden[h]) for h in group}) == 1 for group in grouping)
    assert grouping == grouped(apart, 6)
    noise = torch.rand(24, 24, dtype=torch.float64)
    d = (noise + noise.T).tolist()
    groups = [list(group) for group in grouped(noise + noise.T, 6)]
    least = cost(d, groups)
    for one, other in itertools.combinations(range(6), 2):
        for a, b in itertools.product(range(4), range(4)):
            swapped = [list(group) for group in groups]
            swapped[one][a], swapped[other][b] = groups[other][b], groups[one][a]
            assert cost(d, swapped) >= least - 1e-9


def all_pairs(heads: list[int]) -> list[list[tuple[int, int]]]:
    if not heads:
        return [[]]
    first = heads[0]
    return [
        [(first, other), *rest]
        for other in heads[1:]
        for rest in all_pairs([head for head in heads if head not in (first, other)])
    ]


@pytest.mark.parametrize(("differences", "plant"), [(aligned_differences, "turns"), (fitted_differences, "scales")])
def test_differences_are_zero_for_mapped_copies_alone(differences: Any, plant: str) -> None:
    base = layer(3, 3, rotary=ROTATIONS["partial"])
    weights = replace(base, key=base.key[[0, 1, 0]], value=base.value[[0, 1, 0]], key_bias=None, value_bias=None)
    keys, values = (torch.eye(n, dtype=torch.float64).repeat(3, 1, 1) for n in (14, 11))
    keys[2], values[2] = planted(weights, plant), orthogonal(11) * (3 if plant == "scales" else 1)
    made = mapped(weights, keys, values)
    apart = differences(made, moments(made, text()))
    assert apart[0, 2] < 1e-10 < 0.1 < min(apart[0, 1], apart[1, 2])
    assert torch.allclose(apart, apart.T)


def test_without_text_the_weights_tell() -> None:
    weights = layer(4, 4, key_bias=None, value_bias=None)
    known = Moments.of_weights(weights)
    many = moments(weights, torch.eye(29, dtype=torch.float64)[None])
    assert torch.allclose(known.key, many.key) and torch.allclose(known.value, many.value)
    assert merge(weights, 2).groups == merge(weights, 2, moments=known).groups


@pytest.mark.parametrize("method", ["aligned", "fitted"])
def test_the_groups_are_those_that_lose_least_by_the_method(method: Any) -> None:
    """Each of the three ways to pair four heads is tried; the two methods do not agree on all of these layers."""
    pairings = list(all_pairs([0, 1, 2, 3]))
    others = 0
    for seed in (0, 2, 3, 7):
        torch.manual_seed(seed)
        weights = layer(4, 4, key_bias=None, value_bias=None)
        lost = {
            name: [sum(merge(weights, 2, method=name, groups=g).lost) for g in pairings]
            for name in ("aligned", "fitted")
        }
        least = {name: pairings[sums.index(min(sums))] for name, sums in lost.items()}
        assert merge(weights, 2, method=method).groups == tuple(map(tuple, least[method])), seed
        others += least["aligned"] != least["fitted"]
    assert others > 1


def test_what_the_text_does_not_tell_stays_as_it_is() -> None:
    """Values that never differ from 0 in some numbers: those are not turned."""
    few = torch.randn(7, 3, dtype=torch.float64)
    products = (few @ few.T)[None, :, None].expand(2, 7, 2, 7)
    assert torch.allclose(orthogonal_rotations(products)[1], torch.eye(7, dtype=torch.float64), atol=1e-5)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"num_kv_heads": 4}, ValueError, "H = 6, K = 4 leave 2 over"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads is at least 1; got 0"),
        ({"num_kv_heads": "2"}, TypeError, "num_kv_heads is an int; got '2'"),
        ({"method": "median"}, ValueError, "method is one of first, mean, aligned, fitted; got 'median'"),
        ({"groups": [[0, 1], [2, 3, 4, 5]]}, ValueError, "groups are of equal size and hold each of the 6"),
        ({"groups": [[0, 1, 2], [2, 4, 5]]}, ValueError, "hold each of the 6 key-value heads once"),
        ({"groups": [[0, 1], [2, 3], [4, 5]]}, ValueError, "groups are num_kv_heads = 2 in number; got 3"),
    ],
)
def test_what_cannot_be_merged_is_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        merge(layer(6, 6), **{"num_kv_heads": 2, **arguments})


@pytest.mark.parametrize("part", ["query", "key", "value", "output"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(part: str, wrong: float) -> None:
    weights = layer(6, 6)
    weights = replace(weights, **{part: getattr(weights, part).clone()})
    getattr(weights, part)[2, 1, 0] = wrong
    for method in METHODS:
        with pytest.raises(ValueError, match=f"these weights: the {part} projection holds NaN or infinity"):
            merge(weights, 2, method=method)


@pytest.mark.parametrize("part", ["query", "key", "value", "output"])
def test_a_bias_that_is_not_finite_is_refused_with_its_projection(part: str) -> None:
    weights = layer(6, 6)
    bias = getattr(weights, f"{part}_bias").clone()
    bias.flatten()[3] = float("nan")
    with pytest.raises(ValueError, match=f"layer 7: the {part} projection holds NaN or infinity"):
        merge(replace(weights, **{f"{part}_bias": bias}), 2, method="mean", name="layer 7")


@pytest.mark.unchecked
def test_moments_of_another_layer_are_refused() -> None:
    weights = layer(6, 3)
    with pytest.raises(ValueError, match=r"key is \(B, 3, T, 14\) for this layer; got float64 \(2, 6, 53, 14\)"):
        Moments.like(weights).add(*project(layer(6, 6), text()))


def test_differences_are_shares_of_the_squares_of_all_heads() -> None:
    """Of keys and values alike, or the larger of the two would decide which heads share: by loops over tokens."""
    K, T, n = 3, 17, 5
    heads = torch.randn(K, T, n, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5])[:, None, None]
    products = torch.einsum("itd,jte->idje", heads, heads)
    made = unlike(products, lambda moments: torch.einsum("idjd->ij", moments))
    whole = sum(float(x) ** 2 for x in heads.flatten())
    for i, j in itertools.product(range(K), range(K)):
        apart = sum(float((heads[i, t] - heads[j, t]).square().sum()) for t in range(T))
        assert float(made[i, j]) == pytest.approx(apart / whole, abs=1e-12)


def test_differences_that_depend_on_the_order_count_both_ways() -> None:
    """One side alone would put other heads together."""
    K = 6
    d = torch.full((K, K), 1.0, dtype=torch.float64)
    for a in range(0, K, 2):  # neighbours: 0.3 in the mean of both ways; a and a + 2: 0 one way, 2 the other
        d[a, a + 1], d[a + 1, a] = 0.5, 0.1
        d[(a + 2) % K, a], d[a, (a + 2) % K] = 0.0, 2.0
    expected = ((0, 1), (2, 3), (4, 5))
    assert grouped(d, 3) == expected and grouped(d.T.clone(), 3) == expected
    lower = torch.tensor([[0.0, 9, 9, 9], [0, 0, 9, 9], [5, 5, 0, 9], [5, 5, 0, 0]], dtype=torch.float64)
    upper = torch.tensor([[0.0, 8, 0, 9], [0, 0, 9, 0], [0, 0, 0, 8], [0, 0, 0, 0]], dtype=torch.float64)
    mixed = lower.tril(-1) + upper.triu(1)  # below the diagonal 0.1 and 2.3 are nearest, in the mean 0.2 and 1.3
    assert grouped(mixed, 2) == ((0, 2), (1, 3)) == grouped(mixed.T.clone(), 2)
