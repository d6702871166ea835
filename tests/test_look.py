"""`headwise.look.at`: roles that were planted are found, those that were not are not; records; what it refuses."""

from __future__ import annotations

import html.parser
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planted import DELIMITERS, NAMES, PLACES, VOCABULARY, Planted, check_against, text
from torch import Tensor, nn

import headwise
from headwise import look
from headwise.look import ROLES, HeadMap, HeadRecord, Look, Repeats, RoleScore
from headwise.look.measure import Uniform
from headwise.look.repeats import as_tensors, draw, targets
from headwise.look.roles import find
from headwise.nn import AttentionCall, probe
from headwise.ops.reference import reference_weights
from headwise.testing import largest_tensor


class Tiny(nn.Module):
    """A random model of two layers: token and place embeddings, residual attention."""

    def __init__(self, *, mask: headwise.Mask | None = None, heads: int = 3, kv_heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mask = mask
        self.embed, self.place = nn.Embedding(VOCABULARY, 24), nn.Embedding(PLACES, 24)
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(
            headwise.MultiHeadAttention(24, heads, num_kv_heads=kv_heads, head_dim=8) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = x + layer(3 * x, mask=self.mask)
        return x


@pytest.fixture(scope="module")
def planted() -> Look:
    return look.at(Planted(), text(), delimiters=DELIMITERS)


# --- roles ----------------------------------------------------------------------------------------------------------


def test_planted_roles_are_found_and_no_other(planted: Look) -> None:
    assert [[role.name for role in head.roles] for head in planted.heads] == [[name] for name in NAMES]


def test_planted_scores(planted: Look) -> None:
    scores = {head.role: head.roles[0].score for head in planted.heads}
    before_the_first_delimiter = 4 / 97
    assert scores["delimiter"] == pytest.approx(1 - before_the_first_delimiter, abs=1e-3)
    assert all(scores[name] > 0.995 for name in NAMES if name != "delimiter")
    by_name = dict(zip(NAMES, planted.heads, strict=True))
    assert by_name["offset-3"].offsets[3] == pytest.approx(1, abs=1e-3)
    assert by_name["previous-token"].offsets[0] < 0.03 and by_name["self"].self_mass == pytest.approx(1, abs=1e-3)
    assert by_name["duplicate-token"].induction is not None and by_name["duplicate-token"].induction < 0.05
    assert by_name["induction"].duplicate is not None and by_name["induction"].duplicate < 0.05


def test_planted_roles_in_an_encoder() -> None:
    found = look.at(Planted(ahead=True), text(), delimiters=DELIMITERS)
    assert found.kind == "encoder"
    wanted = [[name] if name != "induction" else [] for name in NAMES]
    assert [[role.name for role in head.roles] for head in found.heads] == wanted
    assert all(head.induction is None for head in found.heads)


def test_a_fixed_offset_is_no_induction_head() -> None:
    drawn = draw(look.Repeats(), range(4, VOCABULARY), PLACES, before=[1])
    periods = [s.ids.index(s.ids[1], 2) - 1 for s in drawn]
    impostors = [f"offset-{period - 1}" for period in periods[:4]]
    for head in look.at(Planted(impostors), text(), delimiters=DELIMITERS).heads:
        assert head.induction is not None and head.induction < 0.25
        assert "induction" not in [role.name for role in head.roles]


@pytest.mark.parametrize("mask", [headwise.causal(), None], ids=["decoder", "encoder"])
def test_a_random_model_plays_no_role_but_broad(mask: headwise.Mask | None) -> None:
    found = look.at(Tiny(mask=mask), text(), delimiters=DELIMITERS)
    assert {role.name for head in found.heads for role in head.roles} <= {"broad"}
    for head in found.heads:
        assert head.duplicate is not None and head.duplicate < 0.15


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7])
def test_short_texts_make_no_false_roles(length: int) -> None:
    model = Planted(["broad", "broad"])  # uniform attention
    found = look.at(model, text()[:length], delimiters=(*DELIMITERS, *text()[1:2]))
    assert [head.roles for head in found.heads] == [(), ()]


def test_a_window_too_short_for_copies_is_not_measured() -> None:
    found = look.at(Tiny(mask=headwise.window(4)), text())
    assert all(head.duplicate is None and head.induction is None for head in found.heads)


def numbers(**changed: Any) -> HeadRecord:
    given: dict[str, Any] = dict(
        module="a", call=0, layer=0, head=0, entropy=1.0, largest=0.5, distance=2.0, sink=0.0, delimiter=0.0,
        self_mass=0.0, offsets=(0.0,) * 9, duplicate=None, induction=None, roles=(), map=(), evenness=0.0,
        queries=97, keys=97,
    )  # fmt: skip
    return HeadRecord(**given | changed)


def names(head: HeadRecord, uniform: HeadRecord | None = None) -> list[str]:
    return [role.name for role in find(head, uniform)]


FIELDS = {"first-token sink": "sink", "delimiter": "delimiter", "broad": "evenness", "duplicate-token": "duplicate"}
FIELDS |= {"induction": "induction"}
PLACE = {"self": 0, "previous-token": 1} | {f"offset-{k}": k for k in range(2, 9)}


def scoring(role: str, score: float) -> HeadRecord:
    """A head that has this score and no other."""
    if role in FIELDS:
        return numbers(**{FIELDS[role]: score})
    return numbers(offsets=tuple(score * (k == PLACE[role]) for k in range(9)))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_needs_more_than_its_threshold(role: look.Role) -> None:
    assert names(scoring(role.name, role.threshold)) == []
    [found] = find(scoring(role.name, role.threshold + 0.001))
    assert found == RoleScore(role.name, role.threshold + 0.001, role.threshold, role.source)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_needs_twice_the_score_of_uniform_attention(role: look.Role) -> None:
    half = scoring(role.name, 0.45)
    if role.name == "broad":  # uniform attention is broad
        assert names(scoring(role.name, 0.89), scoring(role.name, 1.0)) == ["broad"]
    else:
        assert names(scoring(role.name, 0.9), half) == []
        assert names(scoring(role.name, 0.91), half) == [role.name]
        assert find(scoring(role.name, 0.91), half)[0].baseline == 0.45


def test_roles_come_strongest_first() -> None:
    both = numbers(sink=0.6, offsets=(0.0, 0.75))  # (0.6 - 0.3) / (1 - 0.3) < (0.75 - 0.5) / (1 - 0.5)
    assert names(both) == ["previous-token", "first-token sink"]
    assert names(replace(both, offsets=(0.0, 0.7))) == ["first-token sink", "previous-token"]


def test_places_mean_nothing_in_cross_attention() -> None:
    head = numbers(sink=0.9, offsets=(0.9, 0.9), induction=0.9, queries=5)
    assert names(head) == ["first-token sink"]


def test_names_of_roles_are_unique_and_tell_their_source() -> None:
    assert len({role.name for role in ROLES}) == len(ROLES)
    assert all(role.source and role.formula and 0 < role.threshold < 1 for role in ROLES)


# --- numbers --------------------------------------------------------------------------------------------------------


def matrices(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The float64 attention matrix (B, H, T, S) of every call."""
    with torch.no_grad(), probe(model.eval()) as seen:
        model(ids)
    return [reference_weights(call.query.double(), call.key.double(), mask=call.mask)[0] for call in seen.calls]


@pytest.mark.parametrize("length", [5, 31, 131, 163])
@pytest.mark.parametrize("mask", [headwise.causal(), headwise.window(11), None], ids=["causal", "window", "all"])
def test_numbers_against_the_matrix(mask: headwise.Mask | None, length: int) -> None:
    model, ids = Tiny(mask=mask), text(length)
    found = look.at(model, ids, delimiters=DELIMITERS, repeats=None)
    marks = torch.isin(torch.tensor(ids), torch.tensor(DELIMITERS))
    ps = [p[0, h] for p in matrices(model, torch.tensor([ids])) for h in range(3)]
    for head, large, p in zip(found.heads, found.maps, ps, strict=True):
        check_against(head, p, marks)
        side = min(length, 128)
        bins = torch.nn.functional.one_hot(torch.arange(length) * side // length).double()
        exact = (bins.mT @ p @ bins) / bins.sum(0)[:, None]
        assert (large.rows, large.columns) == (side, side)
        assert torch.allclose(torch.tensor(large.weights(), dtype=torch.float64), exact, atol=0.004)


def test_copies_against_the_matrix() -> None:
    model = Tiny(mask=headwise.causal())
    repeats = Repeats(sequences=3, length=71, seed=4)
    found = look.at(model, text(), delimiters=DELIMITERS, repeats=repeats)
    avoided = {*DELIMITERS, 1}
    drawn = draw(repeats, [i for i in range(VOCABULARY) if i not in avoided], 71, before=[1])
    ps = matrices(model, torch.tensor([s.ids for s in drawn]))
    for head, (layer, h) in zip(found.heads, itertools.product(range(2), range(3)), strict=True):
        for name in ("duplicate", "induction"):
            means = []
            for b, sequence in enumerate(drawn):
                lists = targets(sequence, ahead=False)[name]
                rows = [ps[layer][b, h, i, keys].sum() for i, keys in enumerate(lists) if keys]
                means.append(torch.stack(rows).mean())
            assert getattr(head, name) == pytest.approx(float(torch.stack(means).mean()), abs=2e-5)


@pytest.mark.parametrize("make", [headwise.keep, lambda kept: headwise.bias(torch.where(kept, 0.5, -math.inf))])
def test_masks_that_differ_from_head_to_head(make: Callable[[Tensor], headwise.Mask]) -> None:
    kept = torch.ones(3, 31, 31).tril().bool()
    kept[1, :, 1:] &= torch.eye(31)[:, 1:].bool()  # head 1 sees itself and the first
    model = Tiny(mask=make(kept))
    found = look.at(model, text(31), delimiters=DELIMITERS, repeats=None)
    marks = torch.isin(torch.tensor(text(31)), torch.tensor(DELIMITERS))
    ps = [p[0, h] for p in matrices(model, torch.tensor([text(31)])) for h in range(3)]
    for head, p in zip(found.heads, ps, strict=True):
        check_against(head, p, marks)
    sink = next(role for role in found.heads[1].roles if role.name == "first-token sink")
    assert sink.baseline == pytest.approx(sum(1 / n for n in range(2, 32)) / 30, abs=1e-6)  # of all heads together


def test_rows_that_see_nothing_count_nowhere() -> None:
    kept = torch.ones(31, 31).tril().bool() & (torch.arange(31) % 7 != 3)[:, None]
    model = Tiny(mask=headwise.keep(kept))
    found = look.at(model, text(31), delimiters=DELIMITERS, repeats=None)
    marks = torch.isin(torch.tensor(text(31)), torch.tensor(DELIMITERS))
    ps = [p[0, h] for p in matrices(model, torch.tensor([text(31)])) for h in range(3)]
    for head, p in zip(found.heads, ps, strict=True):
        check_against(head, p, marks)


def test_uniform_attention_is_measured_once_a_mask() -> None:
    uniform = Uniform()
    q = torch.zeros(1, 2, 5, 3)
    first, same, other = (
        uniform.of(AttentionCall("a", 0, q, q, mask=mask), {}, {})
        for mask in (headwise.causal(), headwise.causal() & headwise.alibi(torch.ones(2)), headwise.window(2))
    )
    assert first is same and first is not other
    lengths = [headwise.lengths(torch.tensor([n])) for n in (3, 4)]  # their repr may be cut short, so never kept
    rows = [uniform.of(AttentionCall("a", 0, q, q, mask=mask), {}, {}).keys[0, 0, 0].item() for mask in lengths]
    assert rows == [3, 4] and len(uniform.known) == 2


def test_a_first_token_that_sees_only_itself_does_not_make_a_decoder() -> None:
    ids = torch.tensor([0] + [1] * 30)
    found = look.at(Tiny(mask=headwise.segments(ids)), text(31), repeats=None)
    assert found.kind == "encoder"


def test_a_map_of_another_size() -> None:
    model, ids = Tiny(mask=headwise.causal()), text(163)
    [p, *_] = matrices(model, torch.tensor([ids]))
    found = look.at(model, ids, map_size=7, repeats=None)
    bins = torch.nn.functional.one_hot(torch.arange(163) * 7 // 163).double()
    exact = (bins.mT @ p[0, 0] @ bins) / bins.sum(0)[:, None]
    assert torch.allclose(torch.tensor(found.heads[0].map, dtype=torch.float64), exact, atol=2e-5)
    assert found.maps[0].rows == 126  # the multiple of 7 below 128
    assert look.at(model, ids, full_maps=False, repeats=None).maps == ()


class Reader(nn.Module):
    """Cross-attention: T queries of a text read S places of a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory = nn.Embedding(VOCABULARY, 12), nn.Parameter(torch.randn(7, 12))
        self.self_attend, self.attend = (headwise.MultiHeadAttention(12, 2) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.self_attend(self.embed(ids), mask=headwise.causal())
        return self.attend(x, self.memory.expand(len(ids), -1, -1))


def test_cross_attention_is_measured_where_it_can_be() -> None:
    found = look.at(Reader(), text(13), delimiters=DELIMITERS)
    assert found.kind == "encoder-decoder" and found.num_layers == 2
    cross = found.heads[2]
    assert (cross.queries, cross.keys) == (13, 7) and len(cross.map) == 13 and len(cross.map[0]) == 7
    assert cross.duplicate is None and cross.delimiter == 0.0 and found.heads[0].duplicate is not None


class Twice(nn.Module):
    """One module called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(VOCABULARY, 12), headwise.MultiHeadAttention(12, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.attend(self.attend(self.embed(ids), mask=headwise.causal()), mask=headwise.causal())


def test_a_shared_module_is_two_layers() -> None:
    found = look.at(Twice(), text(13))
    assert [(head.module, head.call, head.layer, head.head) for head in found.heads] == [
        ("attend", call, call, head) for call in (0, 1) for head in (0, 1)
    ]


def test_the_same_look_twice_is_the_same() -> None:
    model = Tiny(mask=headwise.causal())
    first, second = (look.at(model, text(), delimiters=DELIMITERS) for _ in range(2))
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)


def test_no_matrix_is_made() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend = nn.Embedding(VOCABULARY, 4), headwise.MultiHeadAttention(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.attend(self.embed(ids), mask=headwise.causal())

    n = 4096
    with largest_tensor() as seen:
        look.at(Long(), text(n))
    assert seen.numel <= n * n / 16, seen.shape


# --- the model ------------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    model = Tiny(mask=headwise.causal()).train()
    model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    look.at(model, text())
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    model(torch.tensor([text()])).sum().backward()  # no inference tensor was left behind


def test_dropout_is_off_while_looking() -> None:
    model = Tiny(mask=headwise.causal())
    first = look.at(model.train(), text(), repeats=None)
    assert first.heads == look.at(model.eval(), text(), repeats=None).heads


def test_modes_are_put_back_after_an_error() -> None:
    class Broken(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            super().forward(ids)
            raise RuntimeError("broken")

    model = Broken().train()
    with pytest.raises(RuntimeError, match="broken"):
        look.at(model, text())
    assert model.training and model.drop.training


def test_progress_counts_calls() -> None:
    steps: list[tuple[int, int]] = []
    look.at(Tiny(), text(), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    look.at(Twice(), text(), progress=lambda done, total: steps.append((done, total)), repeats=None)
    assert steps[4:] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    "ids",
    [torch.tensor(text(7)), torch.tensor([text(7)]), np.array(text(7), np.int32), text(7), tuple(text(7)), [text(7)]],
)
def test_ids_in_every_form(ids: Any) -> None:
    found = look.at(Tiny(), ids, repeats=None)
    assert found.length == 7 and found.tokens == tuple(str(i) for i in text(7))


def test_delimiters_are_read_from_the_tokens() -> None:
    tokens = [" .", " .", "b", "\n", "", " "]
    model, ids = Planted(["delimiter"]), [2, 2, 5, 3, 6, 7]  # attends 2 and 3; the first key is the sink's, not counted
    found = look.at(model, ids, tokens=tokens, repeats=None)
    assert found.heads[0].delimiter == pytest.approx((0 + 1 / 2 + 1 / 2 + 2 / 3 + 2 / 3 + 2 / 3) / 6, abs=1e-4)
    assert look.at(model, ids, repeats=None).heads[0].delimiter == 0.0


class Overflowing(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](torch.full((1, ids.shape[1], 24), math.nan), mask=self.mask)


class Folded(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.embed(ids.view(2, -1)))


class Configured(Tiny):
    """A model that tells its sizes as many libraries' models do."""

    class config:
        vocab_size, max_position_embeddings, name_or_path = 47, 19, "somebody/model"
        bos_token_id, eos_token_id, pad_token_id, unk_token_id, mask_token_id = 1, [44, 45], None, 20, 21


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("model", "ids", "options", "error", "message"),
    [
        (Tiny(), [], {}, ValueError, "at least one token, got ids of shape (0,); give a longer text"),
        (Tiny(), torch.zeros(1, 0).long(), {}, ValueError, "at least one token, got ids of shape (1, 0)"),
        (Tiny(), torch.zeros(2, 7).long(), {}, ValueError, "ids (T,) or (1, T); got (2, 7); look at each"),
        (Tiny(), torch.tensor(3), {}, ValueError, "one text at a time, ids (T,) or (1, T); got ()"),
        (Tiny(), torch.zeros(5), {}, TypeError, "the integers a tokenizer gives; got torch.float32; convert"),
        (Tiny(), "a text", {}, TypeError, "got str; pass tokenizer(text)['input_ids']"),
        (Tiny(), [1, 61], {}, ValueError, "ids of this model are 0 to 60; got 61 at place 1 (1 of 2 ids do not fit)"),
        (Tiny(), [-1, 2], {}, ValueError, "got -1 at place 0"),
        (Configured(), [1, 47], {}, ValueError, "ids of this model are 0 to 46; got 47 at place 1"),
        (Configured(), [1] * 20, {}, ValueError, "20 tokens, but the model takes 19 positions; give a shorter"),
        (Tiny(), [1, 2], {"tokens": ["a"]}, ValueError, "got 1 tokens for 2 ids; give one each"),
        (Tiny(), [1, 2], {"map_size": 0}, ValueError, "cells a side of a map, at least 1; got 0"),
        (Tiny(), [1, 2], {"repeats": Repeats(vocabulary=[4, 61])}, ValueError, "0 to 60; got 61 at place 1"),
        (nn.Linear(2, 2), [1], {}, TypeError, "Linear holds no headwise.MultiHeadAttention"),
        (Overflowing(), [1, 2], {}, ValueError, "layer 0 ('layers.0') has scores that are NaN or infinite in float32"),
        (Folded(), [1, 2], {}, ValueError, "module 'layers.0' made 2 rows of one text"),
    ],
)  # fmt: skip
def test_errors(model: nn.Module, ids: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        look.at(model, ids, **options)


def test_what_a_config_tells_is_used() -> None:
    seen: list[Tensor] = []

    class Watching(Configured):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(ids)
            assert not torch.is_grad_enabled()
            return super().forward(ids)

    found = look.at(Watching(mask=headwise.causal()), [1, 5, 6, 44], delimiters=[9, 10])
    assert found.model == "somebody/model" and look.at(Tiny(), [1], name="mine").model == "mine"
    copies = seen[1]
    assert copies.shape == (8, 19) and copies[:, 0].eq(1).all() and copies.max() < 47
    assert not torch.isin(copies[:, 1:], torch.tensor([1, 44, 20, 21, 9, 10])).any()
    look.at(Watching(), [5, 6, 7, 44], delimiters=[9, 10])
    assert seen[3][:, 0].eq(1).all() and seen[3][:, -1].eq(44).all()


# --- repeated random tokens -----------------------------------------------------------------------------------------


def test_drawn_sequences() -> None:
    drawn = draw(Repeats(), range(100, 400), 999, before=[7], after=[8])
    periods = []
    for sequence in drawn:
        assert len(sequence.ids) == 160 and sequence.ids[0] == 7 and sequence.ids[-1] == 8
        body = sequence.ids[1:-1]
        period = len(sequence.drawn)
        periods.append(period)
        assert len(set(body[:period])) == period and all(100 <= i < 400 for i in body)
        assert body == (body[:period] * 9)[:158] and sequence.opener == body[0]
    assert len(set(periods)) == 8 and min(periods) >= 158 // 5 and max(periods) <= 2 * 158 // 5
    assert draw(Repeats(), range(100, 400), 999, before=[7]) == draw(Repeats(), range(100, 400), 999, before=[7])
    assert draw(Repeats(seed=1), range(100, 400), 999) != draw(Repeats(seed=2), range(100, 400), 999)


def test_few_positions_and_few_ids() -> None:
    assert draw(Repeats(), range(50), 8, before=[1]) == []
    assert len(draw(Repeats(), range(50), 9, before=[1])) == 8
    assert draw(Repeats(), [3], 99) == []
    assert set(draw(Repeats(), [3, 4], 99)[0].ids) == {3, 4}
    with pytest.raises(ValueError, match=re.escape("got sequences=0, length=160; repeats=None leaves them out")):
        Repeats(sequences=0)


@pytest.mark.parametrize("ahead", [False, True])
def test_targets_by_their_definition(ahead: bool) -> None:
    [sequence] = draw(Repeats(sequences=1, seed=2), [5, 6, 7, 8, 9], 41, before=[1])
    ids = sequence.ids
    found = as_tensors([sequence], ahead=ahead)
    assert found["duplicate"].shape[:2] == found["induction"].shape[:2] == (1, 41)
    for i in range(41):
        same = {j for j in range(1, 41) if ids[j] == ids[i] and (j < i or (ahead and j != i))}
        after = {j for j in range(2, i) if ids[j - 1] == ids[i]}
        after = set() if ahead or ids[i] == sequence.opener else after
        assert set(found["duplicate"][0, i].tolist()) - {-1} == (same if i else set())
        assert set(found["induction"][0, i].tolist()) - {-1} == (after if i else set())


# --- records --------------------------------------------------------------------------------------------------------


def test_a_look_survives_the_trip_through_json(planted: Look) -> None:
    assert Look.from_dict(json.loads(planted.to_json(maps=True))) == planted
    without = json.loads(planted.to_json())
    assert "maps" not in without and Look.from_dict(without) == replace(planted, maps=())
    assert Look.from_dict(planted.to_dict()) == planted
    with pytest.raises(ValueError, match=re.escape("a look is read from format 1, got 99; write it again")):
        Look.from_dict(planted.to_dict() | {"format": 99})


def test_records_are_plain_numbers(planted: Look) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(plain(v) for v in value.values())
        if isinstance(value, (list, tuple)):
            return all(plain(v) for v in value)
        return value is None or type(value) in (int, float, str)

    assert plain(planted.to_dict())


def test_rows_of_maps_sum_to_one(planted: Look) -> None:
    for head in planted.heads:
        assert [sum(row) for row in head.map] == pytest.approx([1.0] * 32, abs=1e-3)


def test_a_look_prints_as_a_table(planted: Look) -> None:
    lines = str(planted).splitlines()
    assert lines[0] == "Planted: 1 layers x 8 heads, decoder, 97 tokens"
    assert lines[1].split()[:4] == ["layer", "head", "entropy", "largest"] and lines[1].endswith("role")
    assert lines[2].split()[:2] == ["0", "0"] and lines[2].endswith("previous-token 1.00")
    assert len(lines) == 2 + len(planted.heads)
    unmeasured = replace(planted, heads=(numbers(offsets=(0.25,)),), maps=())
    assert str(unmeasured).splitlines()[2].split()[6:] == ["-", "0.00", "0.00", "-", "-", "-"]


def test_a_look_makes_a_rich_table(planted: Look) -> None:
    from rich.console import Console

    hostile = replace(planted, model="[red]x[/red]")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(hostile.table())
    printed = console.export_text()
    assert "[red]x[/red]" in printed and "duplicate-token 1.00" in printed
    assert planted.table().row_count == len(planted.heads)


def test_a_look_shows_in_a_notebook_without_markup_of_others(planted: Look) -> None:
    class Tags(html.parser.HTMLParser):
        seen: set[str] = set()  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.seen.add(tag)

    page = replace(planted, model="<script>alert(1)</script>")._repr_html_()
    parser = Tags()
    parser.feed(page)
    assert parser.seen == {"table", "caption", "tr", "th", "td"}
    assert "&lt;script&gt;" in page


def test_a_look_makes_a_frame(planted: Look) -> None:
    frame = planted.to_frame()
    assert len(frame) == len(planted.heads) and frame["role"].tolist() == list(NAMES)
    assert frame.loc[0, "offset_1"] == planted.heads[0].offsets[1] and "map" not in frame.columns


@pytest.mark.parametrize(("library", "method"), [("pandas", "to_frame"), ("rich", "table")])
def test_missing_libraries(planted: Look, library: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    expected = rf"{method}\(\) needs {library}, which is not installed; pip install {library}, or"
    with pytest.raises(ImportError, match=expected):
        getattr(planted, method)()


def test_heads_of_a_role(planted: Look) -> None:
    assert planted.with_role("induction") == (planted.heads[-1],)
    assert planted.with_role("nothing") == ()
    assert planted.heads[0].score("previous-token") == planted.heads[0].roles[0]
    assert planted.heads[0].score("induction") is None and numbers().role == "-"
    weaker = replace(planted.heads[-1], roles=(replace(planted.heads[-1].roles[0], score=0.5),))
    both = replace(planted, heads=(weaker, planted.heads[-1]), maps=())
    assert both.with_role("induction") == (planted.heads[-1], weaker)


def test_maps_are_checked(planted: Look) -> None:
    with pytest.raises(ValueError, match=re.escape("a map of 2 x 3 cells needs 6 bytes, got 5; give one byte a cell")):
        HeadMap(2, 3, bytes(5))
    with pytest.raises(ValueError, match=re.escape("got 1 maps for 8 heads; give one map a head, or none")):
        replace(planted, maps=planted.maps[:1])
