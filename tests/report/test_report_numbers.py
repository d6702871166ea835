"""What the page embeds against the records it is made of: order and bytes of vectors, pooled maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from looks import calls, full_look, playing
from reports import Elements, inflated, numbers

from headwise import report
from headwise.look import Look, Score
from headwise.look.records.head import HeadMap
from headwise.look.records.vectors import vectors_of
from headwise.report import maps, vectors


def with_strengths(look: Look, values: dict[tuple[int, int], float]) -> Look:
    """The look in which these heads alone play a role, at these values."""
    heads = []
    for head in look.heads:
        value = values.get((head.layer, head.head))
        heads.append(playing(head, *(() if value is None else (Score("self", value, 0.1, 0.5, 9, plays=True),))))
    return replace(look, heads=tuple(heads))


@pytest.mark.parametrize(
    ("values", "order"),
    [
        ({}, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        ({(1, 3): 0.9}, [(1, 1), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]),  # its group's second head
        ({(0, 0): 0.6, (2, 1): 0.9, (1, 2): 0.7}, [(2, 0), (1, 1), (0, 0), (0, 1), (1, 0), (2, 1)]),
        ({(0, 2): 0.6, (0, 3): 0.9, (1, 0): 0.8, (1, 1): 0.6}, [(0, 1), (1, 0), (0, 0), (1, 1), (2, 0), (2, 1)]),
    ],
)
def test_groups_are_ordered_by_the_strongest_of_their_heads(
    values: dict[tuple[int, int], float], order: list[tuple[int, int]]
) -> None:
    look, _ = full_look()
    data = Elements(report.render(with_strengths(look, values))).data
    assert [tuple(group) for group in data["vectors"]["groups"]] == order


@pytest.mark.parametrize("plays", [None, False])
def test_a_role_that_is_not_played_counts_for_nothing(plays: bool | None) -> None:
    """A record made by hand may name a role that it does not play, or that was not measured; files refuse both."""
    look = with_strengths(full_look()[0], {(2, 1): 0.6})
    scores = {} if plays is None else {"induction": Score("induction", 0.9, 0.1, 0.5, 9, plays=plays)}
    wrong = replace(look.heads[4], scores=scores, role="induction")
    data = Elements(report.render(replace(look, heads=(*look.heads[:4], wrong, *look.heads[5:])))).data
    assert [tuple(group) for group in data["vectors"]["groups"]][:2] == [(2, 0), (0, 0)]
    assert numbers(data)["roles"][4] == []


def test_each_group_holds_its_own_vectors() -> None:
    """Steps and bytes of queries, of keys, of values; each as long as it is told, and times each other the vectors."""
    look, made = full_look(heads=6)
    look = with_strengths(look, {(1, 4): 0.9, (2, 0): 0.7})
    data = Elements(report.render(look)).data["vectors"]
    raw, at = inflated({"vectors": data}, "vectors"), 0

    def taken(shape: tuple[int, ...]) -> Any:
        nonlocal at
        rows = int(np.prod(shape[:-1]))
        steps = np.frombuffer(raw, "<f4", rows, at).reshape(shape[:-1])
        at += 4 * rows
        codes = np.frombuffer(raw, np.int8, rows * shape[-1], at).reshape(shape)
        at += rows * shape[-1]
        return steps[..., None] * codes, steps

    for c, k in data["groups"]:
        about, call = data["calls"][c], made[c]
        G = about["group"]
        assert (G, about["dims"], about["value"], about["queries"], about["keys"]) == (2, 7, 5, 29, 29)
        parts = [(call.query[0, k * G : (k + 1) * G], 7), (call.key[0, k : k + 1], 7), (call.value[0, k : k + 1], 5)]
        for exact, width in parts:
            vector, steps = taken((len(exact), 29, width))
            assert (np.abs(vector - exact.numpy()) <= 0.5001 * steps[..., None]).all(), (c, k)
    assert at == len(raw)


def test_where_not_all_fit_the_strongest_groups_are_there() -> None:
    made = [vectors_of(call) for call in calls(3, 4, 29)]
    look = with_strengths(full_look()[0], {(2, 3): 0.9, (1, 0): 0.8})
    seen = set()
    for budget in range(0, 9000, 250):
        packed = vectors.packed(made, look.heads, budget, weights=False)
        kept = [tuple(group) for group in packed["groups"]]
        assert kept == [(2, 1), (1, 0), (0, 0), (0, 1), (1, 1), (2, 0)][: len(kept)]
        assert len(packed["data"]) <= budget and bool(packed["data"]) == bool(kept)
        seen.add(len(kept))
    assert {0, 1, 2, 6} <= seen


@pytest.mark.parametrize(("rows", "columns", "side"), [(13, 7, 5), (7, 13, 5), (5, 17, 8), (17, 5, 8), (16, 16, 8)])
def test_a_pooled_map_sums_over_keys_and_averages_over_queries(rows: int, columns: int, side: int) -> None:
    """Index i of n is in cell i * side // n."""
    weights = np.random.default_rng(rows).dirichlet(np.ones(columns), size=rows)
    codes = np.rint(255 * np.sqrt(weights)).astype(np.uint8)
    small = maps.pooled(HeadMap(rows, columns, codes.tobytes()), side)
    R, C = min(rows, side), min(columns, side)
    total, count = np.zeros((R, C)), np.zeros(R)
    for i in range(rows):
        count[i * R // rows] += 1
        for j in range(columns):
            total[i * R // rows, j * C // columns] += (codes[i, j] / 255) ** 2
    assert (small.rows, small.columns) == (R, C)
    np.testing.assert_array_equal(
        np.frombuffer(small.data, np.uint8).reshape(R, C),
        np.rint(255 * np.sqrt(np.clip(total / count[:, None], 0, 1))),
    )


def test_levels_are_spread_evenly_over_the_bytes() -> None:
    for levels in (256, 128, 64, 32, 16, 8):
        drawn = maps.in_levels(bytes(range(256)), levels)
        exact = np.arange(256) * (levels - 1) / 255
        assert (np.abs(np.frombuffer(drawn, np.uint8) - exact) <= 0.5).all()
