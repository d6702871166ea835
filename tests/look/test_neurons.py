"""Vectors of the first tokens: as bytes, as JSON, in the page within its budget."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from looks import calls, full_look

import headwise
import headwise.hf
from headwise import models
from headwise.look import Look
from headwise.look.records import vectors as neurons
from headwise.look.records.vectors import ByteVectors, Neurons, rows, vectors_of
from headwise.report import pack, vectors


def test_a_byte_keeps_a_number_to_half_a_step() -> None:
    """Half of 1/127 of the vector's largest, whatever its size; NaN as 0, a vector of zeros as it is."""
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 5)[:, None]
    x[1, 2] = 0
    x[2, 4, 6] = float("nan")
    kept = rows(x)
    largest = x.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    assert kept.shape == (3, 5, 7)
    assert bool(((torch.from_numpy(kept.array()) - x.nan_to_num(0.0)).abs() <= largest / 253).all())


@pytest.mark.parametrize(("tokens", "scores"), [(11, 1 << 23), (64, 1 << 23), (64, 3 * 17 * 17), (64, 1)])
def test_the_first_tokens_of_a_call(tokens: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come from whole rows, under the mask; grouped heads keep their key; some heads at once, or one."""
    monkeypatch.setattr(neurons, "SCORES", scores)
    [call] = calls(1, 4, 17)
    n = min(tokens, 17)
    kept = vectors_of(replace(call, softcap=3.0), tokens)
    assert (kept.query.shape, kept.key.shape) == ((4, n, 7), (2, n, 7))
    assert kept.value is not None and kept.value.shape == (2, n, 5)
    wanted = headwise.weights(call.query, call.key, mask=call.mask, softcap=3.0)[0, :, :n, :n].numpy()
    weights = (np.frombuffer(kept.weights, np.uint8).reshape(4, n, n) / 255) ** 2
    np.testing.assert_allclose(weights, wanted, atol=0.004)
    assert (kept.layer, kept.scale, kept.softcap) == (0, 7**-0.5, 3.0)
    assert not (kept.biased or kept.gated or kept.sunk)


def test_what_else_acts_on_a_call_is_told() -> None:
    [call] = calls(1, 4, 5)
    dense = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    for mask, biased in ((headwise.bias(dense), False), (headwise.bias(dense + 1), True), (headwise.causal(), False)):
        assert vectors_of(replace(call, mask=mask)).biased is biased
    assert vectors_of(replace(call, mask=None, sinks=torch.zeros(4))).sunk
    assert vectors_of(replace(call, gate=torch.ones(1, 4, 5, 5))).gated
    alone = vectors_of(replace(call, value=None, scale=0.3))
    assert alone.value is None and alone.scale == 0.3
    assert Neurons.from_dict(json.loads(json.dumps(alone.to_dict()))) == alone
    kept = vectors_of(call)
    assert Neurons.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept


@pytest.mark.unchecked
def test_parts_that_do_not_belong_together_are_refused() -> None:
    kept = vectors_of(calls(1, 4, 5)[0])
    with pytest.raises(ValueError, match=r"rows of shape \(1, 2, 3\) take 6 bytes and 8 of steps; got 5 and 8; make"):
        ByteVectors((1, 2, 3), b"12345", b"12345678")
    for change in ({"weights": b""}, {"key": rows(torch.zeros(3, 5, 7))}, {"value": rows(torch.zeros(2, 4, 5))}):
        with pytest.raises(ValueError, match="the parts of a call belong together"):
            replace(kept, **change)
    with pytest.raises(ValueError, match="neurons are read from what to_dict"):
        Neurons.from_dict({"layer": 0})


# --- in the page ------------------------------------------------------------------------------------------------------


def unpacked(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each group's parts, as the page's script reads them."""
    content = zlib.decompress(base64.b64decode(data["data"]), -zlib.MAX_WBITS)
    at = 0

    def take(count: int, tokens: int, dims: int) -> Any:
        nonlocal at
        steps = np.frombuffer(content, "<f4", count * tokens, at)
        at += 4 * count * tokens
        codes = np.frombuffer(content, np.int8, count * tokens * dims, at)
        at += count * tokens * dims
        return codes.reshape(count, tokens, dims) * steps.reshape(count, tokens, 1)

    groups = []
    for c, k in data["groups"]:
        about = data["calls"][c]
        G, T, S = about["group"], about["queries"], about["keys"]
        group = {"call": c, "group": k, "query": take(G, T, about["dims"]), "key": take(1, S, about["dims"])[0]}
        group["value"] = take(1, S, about["value"])[0] if about["value"] else None
        if data["weights"]:
            group["weights"] = np.frombuffer(content, np.uint8, G * T * S, at).reshape(G, T, S)
            at += G * T * S
        groups.append(group)
    assert at == len(content)
    return groups


@pytest.mark.parametrize("weights", [False, True])
def test_every_head_comes_back_where_there_is_room(weights: bool) -> None:
    look, _ = full_look(tokens=19)
    data = vectors.packed(look.neurons, look.heads, 10**6, weights=weights)
    assert data["tokens"] == 64 and data["weights"] is weights
    groups = unpacked(data)
    assert sorted((g["call"], g["group"]) for g in groups) == [(c, k) for c in range(3) for k in range(2)]
    for group in groups:
        kept, k = look.neurons[group["call"]], group["group"]
        np.testing.assert_array_equal(group["query"], kept.query.array()[2 * k : 2 * k + 2])
        np.testing.assert_array_equal(group["key"], kept.key.array()[k])
        assert kept.value is not None
        np.testing.assert_array_equal(group["value"], kept.value.array()[k])
        if weights:
            codes = np.frombuffer(kept.weights, np.uint8).reshape(4, 19, 19)
            np.testing.assert_array_equal(group["weights"], codes[2 * k : 2 * k + 2])


def test_with_less_room_there_are_fewer_tokens_then_fewer_heads() -> None:
    """Those of the strongest roles first, and at last none."""
    look, _ = full_look(tokens=67)
    seen = []
    for budget in (10**6, 12_000, 8000, 6000, 4000, 3000, 2000, 100, 0, -5):
        data = vectors.packed(look.neurons, look.heads, budget, weights=True)
        assert len(data["data"]) <= max(budget, 0)
        seen.append((data["tokens"], len(data["groups"])))
        if data["groups"]:
            assert all(g["query"].shape[1] == data["tokens"] for g in unpacked(data))
    assert seen[0] == (64, 6) and seen[-1] == (16, 0)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) > 5
    few = vectors.packed(look.neurons, look.heads, 2000, weights=True)["groups"]
    assert 0 < len(few) < 6
    order = sorted(look.heads, key=lambda head: -(head.scores[head.role].value if head.role in head.scores else -1))
    assert tuple(few[0]) == (order[0].layer, order[0].head // 2)


def test_a_pooled_text_brings_its_single_tokens_along() -> None:
    """The first ones, for the sum and the arcs, and those around evidence; short texts have them in their cells."""
    look, _ = full_look(tokens=29)
    assert pack.page_data(look)["tokens"] == []
    long = tuple(f"t{i}" for i in range(500))
    heads = tuple(replace(head, queries=500, keys=500) for head in look.heads)
    data = pack.page_data(replace(look, tokens=long, length=500, heads=heads))
    assert data["vectors"]["weights"] is True
    places = [place for place, _ in data["tokens"]]
    assert places == list(range(max(places) + 1)) and 64 <= len(places) < 80
    assert all(text == f"t{place}" for place, text in data["tokens"])
    assert data["excerpts"] == [("copies 0", [(place, f" r{place}") for place in range(29)])]


def test_a_report_of_a_look_without_vectors_has_none() -> None:
    look, _ = full_look(tokens=7)
    bare = replace(look, neurons=(), excerpts={})
    data = pack.page_data(bare)
    assert data["vectors"]["groups"] == [] and data["vectors"]["data"] == "" and data["excerpts"] == []


def test_a_look_at_a_model_carries_vectors_and_the_tokens_around_evidence() -> None:
    """Of the text's first tokens by layer; of the random tokens, ids that the text does not spell as digits."""
    tiny = headwise.hf.load(models.tiny_path())
    ids = tiny.tokenizer(models.default_text(), return_tensors="pt").input_ids[:, :71]
    seen = headwise.look.at(tiny.model, ids, delimiters=tiny.delimiters)
    assert [call.layer for call in seen.neurons] == [0, 1, 2, 3]
    assert {call.query.shape for call in seen.neurons} == {(8, 64, 32)}
    codes = np.frombuffer(seen.neurons[3].weights, np.uint8).reshape(8, 64, 64)
    large = np.frombuffer(seen.maps[3 * 8 + 6].data, np.uint8).reshape(71, 71)
    assert np.abs(codes[6].astype(int) - large[:64, :64]).max() <= 1
    one = seen.with_role("induction")[0].scores["induction"].evidence[0]
    tokens = seen.excerpts[f"copies {one.text}"]
    assert {one.query, one.key, max(0, one.key - 6)} <= set(tokens) and tokens[one.query] == tokens[one.key - 1]
    assert Look.from_dict(json.loads(seen.to_json(maps=True))) == seen
    assert headwise.look.at(tiny.model, ids, full_maps=False, repeats=None).neurons == ()
