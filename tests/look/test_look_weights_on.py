"""Measures that read single weights and positions of a call, against its matrix and against loops over its queries."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_circuits import Small
from test_name_movers import SIGNED, centred, gifts, names_of, signs_of, wanted, written
from torch import nn

import headwise
from headwise import look
from headwise.look import Passage, Vocabulary
from headwise.look.collect.reduce import measure
from headwise.look.roles.call_tokens import CallTokens
from headwise.look.roles.catalog import SENTENCES
from headwise.look.roles.measures import FAR, CallStatistics
from headwise.look.roles.text_measures import far_offset, on_far_offset
from headwise.nn import AttentionCall, probe


def tokens_of(length: int, texts: int) -> CallTokens:
    ids = torch.full((texts, length), 5)
    return CallTokens(ids, ids, False, Vocabulary(), tuple(Passage([5] * length, text=b) for b in range(texts)))


@pytest.mark.parametrize("more", [{}, {"softcap": 1.7, "scale": 0.9}, {"bias": True}], ids=str)
def test_the_weight_on_any_key_is_that_of_the_matrix(more: dict[str, Any]) -> None:
    """The key of the largest weight, key 0, no key (-1), and keys drawn; rows that attend to nothing among them."""
    B, H, T, D = 2, 4, 19, 5
    draw = torch.Generator().manual_seed(7)
    query, key = (torch.randn(B, n, T, D, generator=draw) for n in (H, 2))
    kept = torch.rand(B, 1, T, T, generator=draw) < 0.7
    kept[:, :, 3] = False
    mask = headwise.keep(kept)
    if more.get("bias"):
        mask = mask & headwise.bias(torch.randn(1, H, T, T, generator=draw))
    options = {name: value for name, value in more.items() if name != "bias"}
    call = AttentionCall("a", 0, query, key, mask=mask, **options)
    _, got = measure(call, tokens_of(T, B), [], 1)
    p = headwise.weights(query.double(), key.double(), mask=mask, **options)
    places = torch.randint(-1, T, (B, H, T), generator=draw)
    allowed = kept.expand(B, H, T, T).gather(3, places.clamp(min=0)[..., None])[..., 0]
    for keys in (
        torch.where(allowed, places, -1),
        got.rows.largest_key,
        torch.where(kept[..., 0].expand(B, H, T), 0, -1),
    ):
        exact = torch.where(keys >= 0, p.gather(3, keys.clamp(min=0)[..., None])[..., 0], 0.0)
        torch.testing.assert_close(got.weights_on(keys).double(), exact, rtol=1e-5, atol=1e-6)
        assert (exact > 0.05).sum() > 10


def test_the_far_offset_is_the_most_frequent_distance_counted_in_a_loop() -> None:
    """Some queries attend to nothing: they have no distance."""
    B, H, T = 3, 2, 37
    draw, found = torch.Generator().manual_seed(5), 0
    for _ in range(12):
        largest = torch.randint(-1, T, (B, H, T), generator=draw)
        there = torch.rand(B, H, T, generator=draw) < 0.3
        offset = 11 + int(torch.randint(5, (1,), generator=draw))
        largest = torch.where(there, (torch.arange(T) - offset).clamp(min=-1), largest)
        got: Any = object.__new__(CallStatistics)  # of which these read the largest keys alone
        call = AttentionCall("a", 0, torch.zeros(B, H, T, 3), torch.zeros(B, H, T, 3))
        got.__dict__.update(call=call, scene=tokens_of(T, B), rows=SimpleNamespace(largest_key=largest), kept={})
        sums, other = far_offset(got), torch.randint(-1, T, (B, H, T), generator=draw)
        assert sums is not None and sums.detail is not None
        shown = on_far_offset(got, largest), on_far_offset(got, other)
        for b in range(B):
            for h in range(H):
                keys = largest[b, h].tolist()
                far = Counter(j - i for i, j in enumerate(keys) if j >= 0 and abs(i - j) > FAR)
                most = max(far.values())
                best = max(offset for offset, count in far.items() if count == most)  # the nearest of those behind
                assert sums.total[b, h] == most and sums.detail(b, h) == f"{best:+}"
                for asked, on in zip((keys, other[b, h].tolist()), shown, strict=True):
                    assert on[b, h].tolist() == [j >= 0 and j - i == best for i, j in enumerate(asked)]
                able = sum(0 <= i + best < T for i in range(T))
                filled = sum(j >= 0 for j in keys)
                assert sums.count[b, h] == max(able, -(-filled // 2))
                found += most > 3
    assert found > 40


@pytest.mark.parametrize("others", [0, 1, 2])
def test_the_control_of_name_movers_is_a_mean_over_as_many_queries_as_see_another_name(others: int) -> None:
    """None, one or two queries have another name: nothing is divided by 0, and one query is a mean of its own."""
    [passage] = gifts(21, 1, 4)
    rows = [keys if i > 20 - others else [] for i, keys in enumerate([[*range(1, 19)]] * 21)]
    passage = Passage(passage.ids, links={**passage.links, "other name": rows})
    model, names = Small(nn.RMSNorm), names_of([passage])
    seen = look.at(model, passage.ids, repeats=None, readings={SENTENCES: [passage]})
    above = 0
    with torch.no_grad(), probe(model) as calls:
        model(torch.tensor([passage.ids]))
        for layer, call in enumerate(calls.calls):
            p = headwise.weights(call.query, call.key, **call.scoring)[0].double()
            assert call.value is not None
            x = centred(model.final, written(model, layer, call.value[0].double()))
            signs = signs_of(x, model.unembed.weight, passage.ids, names, {*passage.ids})
            for h in range(4):
                for name in SIGNED:
                    if name not in seen.head(layer, h).scores:
                        assert not others and name == "name suppressor"  # whose own links are the other names
                        continue
                    _, count, uniform, against = wanted(p, signs, passage, name, h)
                    null = seen.head(layer, h).scores[name].null
                    assert null == pytest.approx(max(uniform / count, against), abs=2e-5)
                    above += against > uniform / count
    assert above > 0 or not others
