"""The draws behind the controls of a look, and scores that lie exactly on a boundary."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import DELIMITERS, Tiny, text
from torch import Tensor

import headwise
from headwise import look
from headwise.look import Passage, Vocabulary
from headwise.look.collect.reduce import add_roles, measure
from headwise.look.collect.sums import LayerTally
from headwise.look.records.axes import MIXED, NOWHERE, Axis
from headwise.look.roles.call_tokens import CallTokens
from headwise.look.roles.catalog import ROLES
from headwise.look.roles.controls import other_queries, shuffled
from headwise.look.roles.measures import CallStatistics, Measure, OnLinks, ScoreSums
from headwise.look.roles.role import Role
from headwise.nn import AttentionCall

BY_NAME = {role.name: role for role in ROLES}


def scene(T: int, texts: int, *, ahead: bool, **more: Any) -> CallTokens:
    ids = torch.full((texts, T), 5)
    return CallTokens(ids, ids, ahead, Vocabulary(), tuple(Passage([5] * T, text=b) for b in range(texts)), **more)


def linked(T: int, texts: int, *, ahead: bool) -> Tensor:
    """Two links a query at most, to other places; of a decoder before it; every third query has none."""
    draw = torch.Generator().manual_seed(T)
    links = torch.full((texts, T, 2), -1)
    for b in range(texts):
        for i in range(T):
            places = [j for j in range(T) if j < i or (ahead and j != i)]
            for n in range(2):
                if i % 3 and places:
                    links[b, i, n] = places[int(torch.randint(len(places), (1,), generator=draw))]
    return links


@pytest.mark.parametrize("ahead", [False, True], ids=["decoder", "encoder"])
def test_another_query_is_another_that_may_attend_the_links(ahead: bool) -> None:
    """Every such query is drawn by some text, and no other one; where there is none, the query itself stands."""
    T, texts = 7, 400
    links = linked(T, 1, ahead=ahead).expand(texts, -1, -1)
    drawn = other_queries(links, scene(T, texts, ahead=ahead))
    for i in range(T):
        keys = [j for j in links[0, i].tolist() if j >= 0]
        able = {q for q in range(T) if q != i and (ahead or not keys or q > max(keys))}
        assert {*drawn[:, i].tolist()} == (able or {i}), i


@pytest.mark.parametrize("ahead", [False, True], ids=["decoder", "encoder"])
def test_shuffled_links_are_as_many_and_lie_where_the_query_may_look(ahead: bool) -> None:
    T, texts = 7, 400
    links = linked(T, 1, ahead=ahead).expand(texts, -1, -1)
    drawn = shuffled(links, scene(T, texts, ahead=ahead))
    for i in range(T):
        for n in range(2):
            able = {*range(T if ahead else i + 1)} if links[0, i, n] >= 0 else {-1}
            assert {*drawn[:, i, n].tolist()} == able, (i, n)


@pytest.mark.parametrize(("T", "S"), [(5, 9), (9, 5), (7, 7)])
def test_shuffled_links_of_cross_attention_lie_anywhere_among_its_keys(T: int, S: int) -> None:
    """Positions of two texts have no order, also where they are as many."""
    queries, keys = (torch.full((400, n), 5) for n in (T, S))
    across = CallTokens(queries, keys, None, Vocabulary(), tuple(Passage([5] * S, text=b) for b in range(400)))
    drawn = shuffled(torch.zeros(400, T, 1, dtype=torch.long), across)
    assert [{*drawn[:, i, 0].tolist()} for i in range(T)] == [{*range(S)}] * T


# --- on a boundary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "k", "counts"), [(40, 20, True), (40, 21, False), (41, 20, True), (41, 21, False)])
def test_a_sink_may_lie_at_half_of_the_text_and_no_later(T: int, k: int, counts: bool) -> None:
    """Queries before k see themselves alone, and all others the key k alone."""
    kept = torch.eye(T, dtype=torch.bool)
    kept[k:] = torch.arange(T) == k
    record = look.at(Tiny(mask=headwise.keep(kept)), text(T), delimiters=DELIMITERS, repeats=None)
    for head in record.heads:
        score = head.scores["sink elsewhere"]
        assert score.value == (1.0 if counts else pytest.approx(1 / (T - k + 1), abs=1e-6))
        assert score.count == T - 1


@pytest.mark.parametrize(("value", "shown"), [(0.5, False), (0.5 + 1 / 64, True)])
def test_evidence_comes_from_texts_above_the_threshold(value: float, shown: bool) -> None:
    """As a head plays a role above its threshold, and not at it."""

    class Given(Measure):
        def read(self, name: str, got: Any) -> ScoreSums:
            return ScoreSums(torch.tensor([[value * 64]]).double(), torch.tensor([[64.0]]).double(), None)

        def counts(self, name: str, got: Any, keys: Tensor) -> Tensor:
            return torch.tensor([[[True, True, False]]])

    role = Role("given", "", 0.5, "", "", Given())
    tally = LayerTally({"module": "a", "call": 0, "part": "decoder"}, 1)
    got = object.__new__(CallStatistics)  # of which this reads the texts and the largest weights alone
    rows = SimpleNamespace(
        largest=torch.tensor([[[0.75, 0.25, 0.5]]]),
        largest_key=torch.tensor([[[0, 1, 0]]]),
        keys=torch.full((1, 1, 3), 2),
    )
    got.__dict__.update(scene=scene(3, 1, ahead=False), rows=rows, kept={})
    add_roles(got, [role], tally)
    assert tally.shown == ({("given", 0): [(-0.75, 0, 0, 0), (-0.25, 0, 1, 1)]} if shown else {})


# --- text among pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", [None, 4], ids=["causal", "window"])
def test_of_text_among_pictures_each_role_counts_the_text_that_may_attend(reach: int | None) -> None:
    """Place 0 is text and has nothing before it; behind the patches some tokens see patches, and some do not."""
    T, draw = 23, torch.Generator().manual_seed(2)
    words = [not 3 <= i < 15 for i in range(T)]
    query, key = (3 * torch.randn(1, 2, T, 5, generator=draw) for _ in range(2))
    mask = headwise.causal() if reach is None else headwise.window(reach)
    among = torch.tensor(words)[None]
    call = AttentionCall("a", 0, query, key, mask=mask & headwise.keep(among[:, None, :, None]))
    cells = tuple(NOWHERE if word else (0, 0, i - 3) for i, word in enumerate(words))
    axis = Axis(MIXED, T, cells=cells, grids=((1, 12),))
    ids = torch.tensor([[7 if i in (2, 16) else 5 for i in range(T)]])
    here = CallTokens(
        ids, ids, False, Vocabulary(frozenset({7})), (Passage(ids[0].tolist()),), axes=(axis, axis), among=among
    )
    names = ["previous-token", *(f"offset-{k}" for k in range(2, 9)), "self", "local band", "delimiter"]
    _, got = measure(call, here, [BY_NAME[name] for name in names], 1)
    p = headwise.weights(query, key, mask=mask)[0].double()
    kept = torch.tensor([[j <= i and (reach is None or i - j < reach) for j in range(T)] for i in range(T)])
    even = (kept / kept.sum(-1, keepdim=True)).double()
    wanted: dict[str, list[tuple[int, int]]] = {
        name: [(i, i - k) for i in range(1, T) if words[i] and i >= k and kept[i, i - k]]
        for name, k in (("self", 0), ("previous-token", 1), *((f"offset-{k}", k) for k in range(2, 9)))
    }
    counts = {name: len(pairs) for name, pairs in wanted.items()}
    wanted["local band"] = [pair for pairs in wanted.values() for pair in pairs]
    counts["local band"] = sum(words[1:])  # place 0 may attend itself alone
    wanted["delimiter"] = [(i, j) for i in range(T) if words[i] and i >= 2 for j in (2, 16) if kept[i, j]]
    counts["delimiter"] = sum(words[2:])
    for name, pairs in wanted.items():
        sums = BY_NAME[name].measure.read(name, got)
        assert sums is not None
        count = sums.count.expand(1, 2)
        if not counts[name]:
            assert not bool(count.any()), name
            continue
        assert count.tolist() == [[counts[name]] * 2], name
        assert sums.null is not None
        for h in range(2):
            total = sum(float(p[h, i, j]) for i, j in pairs)
            means = [sum(float(p[h, i, j]) for i, j in wanted[one]) / max(counts[one], 1) for one in names[:-2]]
            if name == "local band" and max(means) > 0.5:
                total = 0.0
            assert float(sums.total[0, h]) == pytest.approx(total, abs=1e-5), name
        assert float(sums.null[0, 0]) == pytest.approx(sum(float(even[i, j]) for i, j in pairs), abs=1e-5), name


@pytest.mark.parametrize("reach", [None, 5], ids=["causal", "window"])
def test_the_control_of_links_is_a_mean_over_the_queries_that_may_attend_them(reach: int | None) -> None:
    """Under a window most of the drawn keys are hidden: those queries say nothing of chance."""
    T, draw = 29, torch.Generator().manual_seed(4)
    query, key = (3 * torch.randn(1, 2, T, 5, generator=draw) for _ in range(2))
    mask = headwise.causal() if reach is None else headwise.window(reach)
    lists = [[j for j in (i - 1, i - 3) if j > 0] if i % 4 else [] for i in range(T)]
    passage = Passage(list(range(T)), links={"name mover": lists})
    here = CallTokens(torch.arange(T)[None], torch.arange(T)[None], False, Vocabulary(), (passage,))
    one = OnLinks(lambda scene: scene.links("name mover"))
    role = replace(BY_NAME["name mover"], name="linked", measure=one)
    _, got = measure(AttentionCall("a", 0, query, key, mask=mask), here, [role], 1)
    sums, links = one.read("linked", got), here.links("name mover")
    assert sums is not None and sums.against is not None and links is not None
    drawn = shuffled(links, here)[0].tolist()
    p = headwise.weights(query, key, mask=mask)[0].double()
    near = T if reach is None else reach
    other = [[j for j in keys if j >= 0 and i - j < near] for i, keys in enumerate(drawn)]
    linked_rows = sum(any(i - j < near for j in keys) for i, keys in enumerate(lists))
    assert reach is None or sum(map(bool, other)) < linked_rows
    for h in range(2):
        mean = sum(float(p[h, i, j]) for i, keys in enumerate(other) for j in keys) / sum(map(bool, other))
        assert float(sums.against[0, h]) == pytest.approx(mean * linked_rows, abs=1e-5)
