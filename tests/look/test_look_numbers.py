"""The numbers of `headwise.look.at` against the attention matrix, which it never makes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from planted import DELIMITERS, VOCABULARY, Mixed, Planted, Tiny, Twice, check_against, text
from torch import Tensor, nn

import headwise
from headwise import look
from headwise.look import Repeats, Vocabulary
from headwise.look.collect.reduce import looks_ahead, uniform
from headwise.look.inputs.repeated_tokens import draw, targets
from headwise.look.roles.call_tokens import CallTokens
from headwise.look.roles.measures import NOTHING
from headwise.look.views.tables import rows as rows_of
from headwise.nn import AttentionCall, probe
from headwise.ops.reference import reference_weights
from headwise.testing import largest_tensor


def matrices(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The float64 attention matrix (B, H, T, S) of every call."""
    with torch.no_grad(), probe(model.eval()) as seen:
        model(ids)
    return [reference_weights(call.query.double(), call.key.double(), mask=call.mask)[0] for call in seen.calls]


@pytest.mark.parametrize("length", [5, 31, 131, 163])
@pytest.mark.parametrize("mask", [headwise.causal(), headwise.window(11), None], ids=["causal", "window", "all"])
def test_numbers_against_the_matrix(mask: headwise.Mask | None, length: int) -> None:
    model, ids = Tiny(mask=mask), text(length)
    record = look.at(model, ids, delimiters=DELIMITERS, repeats=None)
    marks = torch.isin(torch.tensor(ids), torch.tensor(DELIMITERS))
    ps = [p[0, h] for p in matrices(model, torch.tensor([ids])) for h in range(3)]
    for head, large, p in zip(record.heads, record.maps, ps, strict=True):
        check_against(head, p, marks)
        side = min(length, 128)
        bins = torch.nn.functional.one_hot(torch.arange(length) * side // length).double()
        exact = (bins.mT @ p @ bins) / bins.sum(0)[:, None]
        assert (large.rows, large.columns) == (side, side)
        assert torch.allclose(torch.tensor(large.weights(), dtype=torch.float64), exact, atol=0.004)


def test_copies_against_the_matrix() -> None:
    model = Tiny(mask=headwise.causal())
    repeats = Repeats(sequences=3, length=71, seed=4)
    record = look.at(model, text(), delimiters=DELIMITERS, repeats=repeats)
    avoided = {*DELIMITERS, 1}
    drawn = draw(repeats, [i for i in range(VOCABULARY) if i not in avoided], 71, before=[1])
    ps = matrices(model, torch.tensor([s.ids for s in drawn]))
    for head, (layer, h) in zip(record.heads, itertools.product(range(2), range(3)), strict=True):
        for role, name in (("duplicate-token", "duplicate"), ("induction", "induction")):
            rows = [
                ps[layer][b, h, i, keys].sum()
                for b, sequence in enumerate(drawn)
                for i, keys in enumerate(targets(sequence, ahead=False)[name])
                if keys
            ]
            score = head.scores[role]
            assert score.value == pytest.approx(float(torch.stack(rows).mean()), abs=2e-5)
            assert score.count == len(rows) and score.low is not None and score.low <= score.value <= score.high


def test_the_null_of_copies_is_uniform_attention_or_more() -> None:
    repeats = Repeats(sequences=3, length=31, seed=4)
    record = look.at(Planted(["duplicate-token", "induction"]), text(), delimiters=DELIMITERS, repeats=repeats)
    drawn = draw(repeats, [i for i in range(VOCABULARY) if i not in {*DELIMITERS, 1}], 31, before=[1])
    for head, name in zip(record.heads, ("duplicate", "induction"), strict=True):
        shares = [
            len(keys) / (i + 1)
            for sequence in drawn
            for i, keys in enumerate(targets(sequence, ahead=False)[name])
            if keys
        ]
        uniform = sum(shares) / len(shares)
        [score] = head.roles
        assert uniform > 0.05 and score.null is not None and uniform - 2e-6 <= score.null < 0.25


@pytest.mark.parametrize("make", [headwise.keep, lambda kept: headwise.bias(torch.where(kept, 0.5, -math.inf))])
def test_masks_that_differ_from_head_to_head(make: Callable[[Tensor], headwise.Mask]) -> None:
    kept = torch.ones(3, 31, 31).tril().bool()
    kept[1, :, 1:] &= torch.eye(31)[:, 1:].bool()  # head 1 sees itself and the first
    model = Tiny(mask=make(kept))
    record = look.at(model, text(31), delimiters=DELIMITERS, repeats=None)
    marks = torch.isin(torch.tensor(text(31)), torch.tensor(DELIMITERS))
    ps = [p[0, h] for p in matrices(model, torch.tensor([text(31)])) for h in range(3)]
    for head, p in zip(record.heads, ps, strict=True):
        check_against(head, p, marks)
    sink = record.heads[1].scores["first-token sink"]
    assert sink.plays and sink.null == pytest.approx(
        sum(1 / n for n in range(2, 32)) / 30, abs=1e-6
    )  # of all heads together


def test_rows_that_see_nothing_count_nowhere() -> None:
    kept = torch.ones(31, 31).tril().bool() & (torch.arange(31) % 7 != 3)[:, None]
    model = Tiny(mask=headwise.keep(kept))
    record = look.at(model, text(31), delimiters=DELIMITERS, repeats=None)
    marks = torch.isin(torch.tensor(text(31)), torch.tensor(DELIMITERS))
    ps = [p[0, h] for p in matrices(model, torch.tensor([text(31)])) for h in range(3)]
    for head, p in zip(record.heads, ps, strict=True):
        check_against(head, p, marks)


def test_uniform_attention_is_measured_once_a_mask() -> None:
    ids = torch.zeros(1, 5, dtype=torch.long)
    scene = CallTokens(ids, ids, False, Vocabulary(), ())
    q = torch.zeros(1, 2, 5, 3)
    biased = headwise.causal() & headwise.bias(torch.randn(5, 5))  # forbids nothing more
    first, same, again, other = (
        uniform(AttentionCall("a", 0, q, q, mask=mask), scene, NOTHING)
        for mask in (headwise.causal(), headwise.causal() & headwise.alibi(torch.ones(2)), biased, headwise.window(2))
    )
    assert first is same is again and first is not other
    lengths = [headwise.lengths(torch.tensor([n])) for n in (3, 4)]  # their repr may be cut short, so never kept
    rows = [uniform(AttentionCall("a", 0, q, q, mask=mask), scene, NOTHING).keys[0, 0, 0].item() for mask in lengths]
    assert rows == [3, 4] and len(scene.kept) == 2
    for B, T, S in ((1, 5, 9), (1, 5, 4), (1, 3, 9), (2, 5, 9)):  # cross-attention to memories of two lengths
        query, memory = torch.zeros(B, 2, T, 3), torch.zeros(B, 2, S, 3)
        assert uniform(AttentionCall("a", 0, query, memory), scene, NOTHING).keys.tolist() == [[[S] * T]] * B


def test_a_first_token_that_sees_only_itself_does_not_make_a_decoder() -> None:
    ids = torch.tensor([0] + [1] * 30)
    record = look.at(Tiny(mask=headwise.segments(ids)), text(31), repeats=None)
    assert record.kind == "encoder"


@pytest.mark.parametrize(("prefix", "kind"), [(3, "encoder"), (1, "decoder"), (0, "decoder")])
def test_a_prefix_that_looks_ahead_makes_an_encoder(prefix: int, kind: str) -> None:
    kept = torch.ones(8, 8).tril().bool() | (torch.arange(8) < prefix)
    model = Tiny(mask=headwise.keep(kept))
    record = look.at(model, text(8), delimiters=DELIMITERS, repeats=None)
    assert record.kind == kind
    marks = torch.isin(torch.tensor(text(8)), torch.tensor(DELIMITERS))
    ps = [p[0, h] for p in matrices(model, torch.tensor([text(8)])) for h in range(3)]
    for head, p in zip(record.heads, ps, strict=True):
        check_against(head, p, marks)
        assert head.ahead == () if kind == "decoder" else len(head.ahead) == 8 and not any(head.ahead[prefix - 1 :])


def test_a_map_of_another_size() -> None:
    model, ids = Tiny(mask=headwise.causal()), text(163)
    [p, *_] = matrices(model, torch.tensor([ids]))
    record = look.at(model, ids, map_size=7, repeats=None)
    bins = torch.nn.functional.one_hot(torch.arange(163) * 7 // 163).double()
    exact = (bins.mT @ p[0, 0] @ bins) / bins.sum(0)[:, None]
    assert torch.allclose(torch.tensor(record.heads[0].map, dtype=torch.float64), exact, atol=2e-5)
    assert record.maps[0].rows == 126  # the multiple of 7 below 128
    assert look.at(model, ids, full_maps=False, repeats=None).maps == ()


@pytest.mark.parametrize("order", [1, -1])
def test_one_layer_that_looks_ahead_makes_an_encoder(order: int) -> None:
    record = look.at(Mixed(*[headwise.causal(), None][::order]), text(13), repeats=None)
    assert record.kind == "encoder" and record.num_heads == 3 and record.num_layers == 2
    assert [(head.layer, head.head, len(head.ahead)) for head in record.heads] == [
        (layer, h, 8 * (layer == (1 if order == 1 else 0))) for layer, n in ((0, 2), (1, 3)) for h in range(n)
    ]
    assert look.at(Mixed(None, None, heads=1), text(13), repeats=None).num_heads == 2


def test_a_small_map_larger_than_the_large_one() -> None:
    record = look.at(Tiny(), text(163), map_size=151, repeats=None)
    assert len(record.heads[0].map) == record.maps[0].rows == 151
    assert len(look.at(Tiny(), text(163), full_maps=False, repeats=None).heads[0].map) == 32


def test_nothing_is_more_even_than_uniform_attention() -> None:
    [head] = look.at(Planted(["broad"]), text(163), delimiters=DELIMITERS, repeats=None).heads
    assert head.value("broad") == 1.0 and head.entropy == pytest.approx(
        sum(map(math.log, range(1, 164))) / 163, abs=1e-5
    )


def test_a_single_token_looks_nowhere() -> None:
    record = look.at(Tiny(), [1], repeats=None)
    assert record.kind == "decoder" and record.heads[0].ahead == () and record.heads[0].offsets == (1.0, *[0.0] * 8)


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
    record = look.at(Reader(), text(13), delimiters=DELIMITERS)
    assert record.kind == "encoder-decoder" and record.num_layers == 2
    cross = record.heads[2]
    assert (cross.queries, cross.keys) == (13, 7) and len(cross.map) == 13 and len(cross.map[0]) == 7
    assert cross.part == "cross" and record.heads[0].part == "decoder" and "duplicate-token" in record.heads[0].scores
    assert {*cross.scores} <= {"first-token sink", "broad", "delimiter"}  # nothing that compares positions


def test_whether_cross_attention_looks_ahead_is_unknown() -> None:
    mha = headwise.MultiHeadAttention(12, 3)
    with headwise.nn.probe(mha) as seen:
        mha(torch.randn(1, 5, 12), torch.randn(1, 3, 12))
        mha(torch.randn(1, 5, 12))
    assert [looks_ahead(call) for call in seen.calls] == [None, True]


def test_cross_attention_has_no_distances() -> None:
    """Positions of two texts are not compared, neither in the record nor in what is printed and compared."""
    record = look.at(Reader(), text(13), delimiters=DELIMITERS)
    cross, own = record.heads[2], record.heads[0]
    assert (cross.distance, cross.offsets, cross.ahead) == (None, (), ())
    assert own.distance and len(own.offsets) == 9
    assert look.Look.from_dict(json.loads(record.to_json())) == record
    rows = [line.split() for line in str(record).splitlines()[1:]]
    assert [row[rows[0].index("distance")] == "-" for row in rows[1:]] == [False, False, True, True]
    flat = rows_of(record)[2]
    assert flat["distance"] is None and "offset_0" not in flat
    other = look.compare(record, record).heads
    assert [(head.moved, head.near) for head in other] == [(0.0, 0.0)] * 2 + [(0.0, None)] * 2


def test_a_shared_module_is_two_layers() -> None:
    record = look.at(Twice(), text(13))
    assert [(head.module, head.call, head.layer, head.head) for head in record.heads] == [
        ("attend", call, call, head) for call in (0, 1) for head in (0, 1)
    ]


def test_the_same_look_twice_is_the_same() -> None:
    model = Tiny(mask=headwise.causal())
    first, second = (look.at(model, text(), delimiters=DELIMITERS) for _ in range(2))
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)


def test_the_default_dtype_changes_no_number() -> None:
    """What chance gives is drawn in float32, whatever other numbers are by default."""
    model = Tiny(mask=headwise.causal())
    first = look.at(model, text(), delimiters=DELIMITERS)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        second = look.at(model, text(), delimiters=DELIMITERS)
    finally:
        torch.set_default_dtype(before)
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
