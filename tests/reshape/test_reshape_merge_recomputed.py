"""How heads share keys and values, computed a second way: every grouping, and loops over the tokens of ragged texts.

The table `CHECKS` lists what is compared, on layers of MHA, GQA and MQA with biases, values of another size than keys,
and rotary positions of every kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from reshape_cases import ROTATIONS, layer, output, project
from torch import Tensor

import headwise
from headwise.reshape.regrouping import grouping
from headwise.reshape.regrouping.alignment import aligned_differences
from headwise.reshape.regrouping.grouping import grouped
from headwise.reshape.regrouping.least_squares import fitted_differences
from headwise.reshape.regrouping.merge import METHODS, merge
from headwise.reshape.repair.moments import Moments

LAYERS = [
    (4, 4, None),
    (6, 3, None),
    (6, 2, "halves"),
    (3, 3, "partial-interleaved"),
    (8, 4, "interleaved"),
    (5, 1, None),
]


def groups_of(count: int, groups: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to divide heads into groups of equal size."""
    seen = set()
    for order in itertools.permutations(range(count)):
        size = count // groups
        made = tuple(sorted(tuple(sorted(order[n : n + size])) for n in range(0, count, size)))
        if made not in seen:
            seen.add(made)
            yield [*made]


def tokens(weights: Any, *lengths: int) -> tuple[Moments, Tensor, Tensor, Tensor]:
    """Moments of texts of several lengths, and query (H, N, D), key (K, N, D) and value (K, N, V) of all tokens."""
    moments, parts = Moments.like(weights), []
    for length in lengths:
        x = torch.randn(2, length, 29, dtype=torch.float64)
        parts.append(project(weights, x))
        moments.add(*parts[-1])
    query, key, value = (
        torch.cat([part.transpose(0, 1).flatten(1, 2) for part in some], 1) for some in zip(*parts, strict=True)
    )
    return moments, query, key, value


def check_moments(seed: int) -> None:
    for H, K, rotation in LAYERS:
        weights = layer(H, K, rotary=ROTATIONS[rotation or "none"])
        moments, query, key, value = tokens(weights, 7, 3)
        assert moments.tokens == 20
        for made, rows in ((moments.key, key), (moments.value, value)):
            expected = torch.stack([torch.stack([a.T @ b for b in rows], 1) for a in rows])
            torch.testing.assert_close(made, expected)
        torch.testing.assert_close(moments.query, torch.stack([q.T @ q for q in query]))
        moments.add(query[None, :, :2], key[None, :, :5], value[None, :, :5])
        assert moments.tokens == 25, "of keys, of which cross-attention has other numbers than queries"
        plain = Moments.of_weights(weights)  # of one input for each number of the residual stream, without biases
        expected = torch.stack([torch.stack([a @ b.T for b in weights.value], 1) for a in weights.value])
        torch.testing.assert_close(plain.value, expected)
        torch.testing.assert_close(plain.query, torch.stack([q @ q.T for q in weights.query]))


def turned_squares(weights: Any, query: Tensor, errors: Tensor) -> float:
    """The squared products of errors of a key with the queries that read it, at every angle of each rotary pair."""
    first, second = weights.rotary.pairs() if weights.rotary else (torch.empty(0).long(),) * 2
    rest = [n for n in range(14) if n not in first and n not in second]
    total = 0.0
    for q in query:
        plain = q[:, rest].T @ q[:, rest]
        total += float(torch.einsum("na,ab,nb->", errors[:, rest], plain, errors[:, rest]))
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            size = float(q[:, [a, b]].square().sum()) / 2  # the mean over angles of the square of a turned product
            total += size * float(errors[:, [a, b]].square().sum())
    return total


def check_lost(seed: int) -> None:
    """The shares that are lost of keys and values, token by token."""
    for (H, K, rotation), method in itertools.product(LAYERS, METHODS):
        weights = layer(H, K, rotary=ROTATIONS[rotation or "none"])
        moments, query, key, value = tokens(weights, 11, 5)
        shared = 1 if K % 2 else 2
        made, G = merge(weights, shared, method=method, moments=moments), H // K  # type: ignore[arg-type]
        sums = {"key": [0.0, 0.0], "value": [0.0, 0.0]}
        for group in made.groups:
            for what, rows, maps in (("key", key, made.keys), ("value", value, made.values)):
                middle = sum(rows[i] @ maps.write[i].T for i in group)
                for i in group:
                    for n, error in enumerate((rows[i] - middle @ maps.read[i].T, rows[i])):
                        readers = slice(i * G, (i + 1) * G)
                        if what == "key":
                            sums[what][n] += turned_squares(weights, query[readers], error)
                        else:
                            written = torch.einsum("nv,mhv->nhm", error, weights.output[:, readers])
                            sums[what][n] += float(written.square().sum())
        expected = tuple(lost / whole for lost, whole in sums.values())
        assert made.lost == pytest.approx(expected, rel=1e-6, abs=1e-10), (H, K, rotation, method)


def check_merged_layer(seed: int) -> None:
    """The merged layer attends with the keys and values that its groups recover, head by head."""
    for (H, K, rotation), method in itertools.product(LAYERS, METHODS):
        weights = layer(H, K, rotary=ROTATIONS[rotation or "none"])
        x = torch.randn(1, 13, 29, dtype=torch.float64)
        query, key, value = project(weights, x)
        moments = Moments.like(weights)
        moments.add(query, key, value)
        made, G = merge(weights, 1 if K % 2 else 2, method=method, moments=moments), H // K  # type: ignore[arg-type]
        after = made.apply(weights)
        assert (after.num_heads, after.num_kv_heads) == (H, len(made.groups))
        near = []
        for rows, maps in ((key[0], made.keys), (value[0], made.values)):
            middle = {i: sum(rows[j] @ maps.write[j].T for j in group) for group in made.groups for i in group}
            near.append(torch.stack([middle[i] @ maps.read[i].T for i in range(K)])[None])
        heads = headwise.attention(query, *near, mask=headwise.causal(), sinks=weights.sinks, scale=0.3)
        expected = torch.einsum("bhtv,mhv->btm", heads, weights.output) + weights.output_bias
        torch.testing.assert_close(output(after, x), expected)
        order = [kv * G + n for group in made.groups for kv in group for n in range(G)]
        assert made.heads(G) == tuple(order)
        torch.testing.assert_close(after.sinks, weights.sinks[order])  # type: ignore[index]


def check_groups(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for count, groups in ((4, 2), (6, 3), (6, 2), (8, 4)):
        differ = draw.random((count, count))  # not symmetric: both directions count
        costs = {
            tuple(made): sum(differ[i, j] + differ[j, i] for g in made for i, j in itertools.combinations(g, 2))
            for made in groups_of(count, groups)
        }
        assert len(costs) == grouping.partitions(count, count // groups)
        assert grouped(torch.from_numpy(differ), groups) == min(costs, key=lambda made: costs[made])
        with pytest.MonkeyPatch.context() as patch:  # the search: no swap of two heads is better
            patch.setattr(grouping, "MOST_PARTITIONS", 0)
            found = grouped(torch.from_numpy(differ), groups, seed)
        for a, b in itertools.combinations(range(count), 2):
            swap = {a: b, b: a}
            other = tuple(sorted(tuple(sorted(swap.get(i, i) for i in group)) for group in found))
            assert costs[found] <= costs[other] + 1e-12


def tail(rows: list[Tensor], weighed: list[Tensor]) -> float:
    """The squares that are lost when some heads' rows (N, V), each times a matrix, share as many numbers as one has."""
    whole = torch.cat([a @ b for a, b in zip(rows, weighed, strict=True)], 1)
    return float(torch.linalg.svdvals(whole)[rows[0].shape[1] :].square().sum())


def check_fitted(seed: int) -> None:
    """Values that share the first principal components of their weighted rows: no maps lose less."""
    weights = layer(6, 3)
    moments, query, key, value = tokens(weights, 41, 19)
    roots = [  # R with |e R| = what the heads that read the value write of an error e
        torch.linalg.cholesky(sum(weights.output[:, h].T @ weights.output[:, h] for h in (2 * i, 2 * i + 1)))
        for i in range(3)
    ]
    keyed = [torch.linalg.cholesky(sum(query[h].T @ query[h] for h in (2 * i, 2 * i + 1))) for i in range(3)]
    whole = [
        sum(float((rows[i] @ some[i]).square().sum()) for i in range(3))
        for rows, some in ((key, keyed), (value, roots))
    ]
    made = merge(weights, 1, moments=moments)
    lost = [tail([*rows], some) for rows, some in ((key, keyed), (value, roots))]
    assert made.lost == pytest.approx([a / b for a, b in zip(lost, whole, strict=True)], rel=1e-6)
    apart = fitted_differences(weights, moments)
    for i, j in itertools.product(range(3), repeat=2):
        expected = sum(
            tail([rows[i], rows[j]], [some[i], some[j]]) / all_of
            for rows, some, all_of in zip((key, value), (keyed, roots), whole, strict=True)
        )
        assert float(apart[i, j]) == pytest.approx(expected if i != j else 0.0, rel=1e-6, abs=1e-12)


def far(a: Tensor, b: Tensor) -> float:
    """The squared distance of two heads' rows after the best rotation of one."""
    U, _, V = torch.linalg.svd(a.T @ b)
    return float((a @ (U @ V) - b).square().sum())


def check_normed(seed: int) -> None:
    """Keys behind a norm are aligned, whatever is fitted: their distances count beside what values lose."""
    norms = {"query_norm": torch.full((14,), 1.3).double(), "key_norm": torch.full((14,), 0.7).double()}
    weights = layer(3, 3, **norms)
    moments, _, key, value = tokens(weights, 41)
    roots = [torch.linalg.cholesky(weights.output[:, h].T @ weights.output[:, h]) for h in range(3)]
    whole = sum(float((value[i] @ roots[i]).square().sum()) for i in range(3))
    apart = fitted_differences(weights, moments)
    for i, j in itertools.combinations(range(3), 2):
        values = tail([value[i], value[j]], [roots[i], roots[j]]) / whole
        expected = values + far(key[i], key[j]) / float(key.square().sum())
        assert float(apart[i, j]) == pytest.approx(expected, rel=1e-6)


def check_select(seed: int) -> None:
    """Heads in another order bring all that is theirs, head by head; nothing of the other heads is left."""
    own = {"query_norm": torch.rand(6, 14).double(), "key_norm": torch.rand(3, 14).double()}
    weights = layer(6, 3, **own, per_head={"slopes": torch.randn(6, 2).double()})
    for heads, kv in (([4, 5, 2, 3, 0, 1], [2, 1, 0]), ([3, 0], [1, 0])):
        chosen = dict(weights.select(heads).tensors())
        for name, part in weights.tensors():
            places = kv if name.startswith(("key", "value")) else heads
            if name == "output":
                expected = torch.stack([part[:, h] for h in heads], 1)
            else:
                expected = part if name == "output_bias" else torch.stack([part[n] for n in places])
            assert torch.equal(chosen[name], expected), name


def check_aligned(seed: int) -> None:
    """Distances after the best rotation: Procrustes of the rows for values, every angle of every pair for keys."""
    uneven = torch.ones(14).double()
    uneven[2] = 0.6  # of one pair alone, and of one norm alone: this pair may change its sign only
    norms = {"query_norm": torch.full((14,), 1.3).double(), "key_norm": uneven}
    for rotation, more in (("none", {}), ("halves", {}), ("partial", {}), ("halves", norms)):
        weights = layer(4, 4, rotary=ROTATIONS[rotation], **more)
        moments, _, key, value = tokens(weights, 23)
        apart = aligned_differences(weights, moments)
        first, second = weights.rotary.pairs() if weights.rotary else (torch.empty(0).long(),) * 2
        rest = [n for n in range(14) if n not in first and n not in second]
        for i, j in itertools.combinations(range(4), 2):
            keys = far(key[i][:, rest], key[j][:, rest]) if rest else 0.0
            for a, b in zip(first.tolist(), second.tolist(), strict=True):
                one, other = (torch.complex(key[n][:, a], key[n][:, b]) for n in (i, j))
                steps = 3 if more and 2 in (a, b) else 3001
                angles = torch.exp(1j * torch.linspace(0, 2 * math.pi, steps, dtype=torch.float64))
                keys += float((one[:, None] * angles - other[:, None]).abs().square().sum(0).min())
            expected = keys / float(key.square().sum()) + far(value[i], value[j]) / float(value.square().sum())
            assert [float(apart[i, j]), float(apart[j, i])] == pytest.approx([expected] * 2, rel=1e-4)


CHECKS: dict[str, Callable[[int], None]] = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}


@pytest.mark.parametrize("name", CHECKS)
def test_numbers_are_those_of_a_second_way(name: str) -> None:
    torch.manual_seed(17)
    CHECKS[name](17)
