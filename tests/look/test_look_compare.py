"""Two looks side by side: distances by their definition, heads that were pruned, and what cannot be compared."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import DELIMITERS, NAMES, Planted, text
from torch import Tensor

import headwise
from headwise import look
from headwise.look import HeadRecord, Look

IDS = text(29)  # no longer than a map: nothing is pooled


@pytest.fixture(scope="module")
def before() -> Look:
    return look.at(Planted(), IDS, delimiters=DELIMITERS, name="before")


@pytest.fixture(scope="module")
def after() -> Look:
    """Head 2 became a sink, the others are as they were."""
    names = [*NAMES[:2], "first-token sink", *NAMES[3:]]
    return look.at(Planted(names), IDS, delimiters=DELIMITERS, name="after")


def pruned(seen: Look, kept: list[int]) -> Look:
    heads = tuple(replace(seen.heads[h], head=n) for n, h in enumerate(kept))
    return replace(seen, heads=heads, num_heads=len(heads), maps=(), moved=())


def matrix(model: Planted, head: int) -> Tensor:
    """The whole float64 matrix of one head on the text."""
    matrices: list[Tensor] = []
    with torch.no_grad(), headwise.nn.probe(model, lambda call: matrices.append(_softmax(call)[0, head])):
        model(torch.tensor([IDS]))
    return matrices[0]


def _softmax(call: Any) -> Tensor:
    scores = call.query.double() @ call.key.double().mT * (call.scoring.get("scale") or call.query.shape[-1] ** -0.5)
    return scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf).softmax(-1)


def test_distances_are_those_of_the_whole_matrices(before: Look, after: Look) -> None:
    p, q = matrix(Planted(), 2), matrix(Planted([*NAMES[:2], "first-token sink", *NAMES[3:]]), 2)
    middle = (p + q) / 2
    divergence = sum(torch.xlogy(x, x / middle).nan_to_num().sum(-1).mean() for x in (p, q)) / 2 / math.log(2)
    change = look.compare(before, after).heads[2]
    assert change.moved == pytest.approx(float((p - q).abs().sum(-1).mean() / 2), abs=1e-4) and change.moved > 0.9
    assert change.divergence == pytest.approx(float(divergence), abs=1e-4)
    assert change.near == pytest.approx(1 - 1 / 29, abs=0.1), "its mass went from its own place to all distances"


def test_only_the_head_that_changed_did(before: Look, after: Look) -> None:
    comparison = look.compare(before, after)
    assert [head.head for head in comparison.changed] == [2] and comparison.same_text
    change = comparison.changed[0]
    assert (change.before, change.after) == (("self",), ("first-token sink",))
    assert change.scores["self"][0] > 0.99 and change.scores["self"][1] < 0.2
    assert change.largest is not None and change.largest[0] in ("self", "first-token sink")
    assert {head.distance for head in comparison.heads if head.head != 2} == {0.0}
    assert comparison.summary() == ["before against after: 1 of 8 heads changed role", "7 of 8 heads did not move"]
    assert re.search(r"^0\.2 +0\.2 .* lost self; gained first-token sink ", str(comparison), re.MULTILINE)
    assert len(str(comparison).splitlines()) == 4, "heads that did not move have no line"


def test_a_role_that_one_look_did_not_measure_is_neither_lost_nor_gained(before: Look) -> None:
    less = replace(before, heads=tuple(replace(one, scores=_without(one, "self")) for one in before.heads))
    assert before.with_role("self")
    for comparison in (look.compare(before, less), look.compare(less, before)):
        assert not comparison.changed and comparison.unshared == ("self",)
        assert "not compared, because only one of the looks measured it: self" in comparison.summary()


def test_relations_have_the_names_of_the_report() -> None:
    scores = {"head to obj": (0.9, 0.1), "induction": (0.8, 0.8)}
    change = look.HeadChange(3, 1, 3, 1, ("head to obj", "induction"), ("induction",), 0.1, 0.1, 0.1, scores)
    shown = str(look.Comparison("a", "b", True, (change,)))
    assert re.search(r"lost verb -> object +verb -> object 0\.90 -> 0\.10$", shown, re.MULTILINE)


def _without(head: HeadRecord, role: str) -> dict[str, Any]:
    return {name: score for name, score in head.scores.items() if name != role}


def test_near_sees_what_pooling_hides() -> None:
    """On a text longer than the map, the token before and the own token fall into the same cells."""
    ids = text(167)
    one, other = (
        look.at(Planted([name]), ids, delimiters=DELIMITERS, map_size=4) for name in ("previous-token", "self")
    )
    change = look.compare(one, other).heads[0]
    assert change.moved is not None and change.moved < 0.05
    assert change.near is not None and change.near > 0.95 and change.distance == change.near


@pytest.mark.parametrize("kept", [[0, 1, 3, 4, 6, 7], [5], [1, 2, 7]])
def test_pruned_heads_are_found_again(before: Look, kept: list[int]) -> None:
    small = pruned(before, kept)
    for plan, guessed in (({0: kept}, ()), ({"layers": {"0": {"keep": kept}}}, ()), (None, (0,))):
        comparison = look.compare(before, small, kept=plan)
        assert [(head.head, head.other_head) for head in comparison.heads] == [(h, n) for n, h in enumerate(kept)]
        assert {head.distance for head in comparison.heads} == {0.0} and comparison.guessed == guessed
        assert comparison.gone == tuple((0, h) for h in range(8) if h not in kept) and not comparison.new
    back = look.compare(small, before)
    assert [(head.head, head.other_head) for head in back.heads] == [(n, h) for n, h in enumerate(kept)]
    assert len(back.new) == 8 - len(kept) and not back.gone


def test_heads_that_are_gone_or_new_have_the_layer_of_their_own_look(before: Look) -> None:
    """Layers of other numbers, paired by their modules: layer 0 of one look is layer 2 of the other."""
    few = tuple(replace(one, module="b") for one in before.heads[:3])
    many = tuple(replace(one, module=name, layer=layer) for layer, name in ((1, "a"), (2, "b")) for one in before.heads)
    one, other = (
        replace(before, heads=heads, num_layers=layers, maps=(), moved=()) for heads, layers in ((few, 1), (many, 2))
    )
    ahead, back = look.compare(one, other), look.compare(other, one)
    unpaired = [*((1, h) for h in range(8)), *((2, h) for h in range(3, 8))]
    assert sorted(ahead.new) == unpaired and ahead.gone == ()
    assert sorted(back.gone) == unpaired and back.new == ()
    assert [(head.layer, head.other_layer) for head in ahead.heads] == [(0, 2)] * 3
    assert [(head.layer, head.other_layer) for head in back.heads] == [(2, 0)] * 3


def test_each_head_is_paired_once(before: Look) -> None:
    comparison = look.compare(before, pruned(before, [0, 0]))
    assert (comparison.heads[0].head, comparison.heads[0].other_head) == (0, 0) and len(comparison.gone) == 6


def test_kept_says_an_order_of_its_own(before: Look) -> None:
    comparison = look.compare(before, pruned(before, [7, 0]), kept={"0": [7, 0]})
    assert [(head.head, head.other_head, head.distance) for head in comparison.heads] == [(0, 1, 0.0), (7, 0, 0.0)]


def test_kept_names_layers_as_a_heads_plan_does(before: Look) -> None:
    """Encoder, then self- and cross-attention of a decoder, a layer each: 0, encoder.0 and cross.0."""
    parts = ("encoder", "decoder", "cross")
    heads = tuple(replace(h, layer=n, part=part, module=part) for n, part in enumerate(parts) for h in before.heads)
    whole = replace(before, heads=heads, num_layers=3, kind="encoder-decoder", maps=(), moved=(), neurons=())
    left = {"encoder": [1, 2], "decoder": [3, 4, 5], "cross": [0]}
    small = tuple(replace(h, head=left[h.part].index(h.head)) for h in heads if h.head in left[h.part])
    plan = {"layers": {"encoder.0": {"keep": [1, 2]}, "0": {"keep": [3, 4, 5]}, "cross.0": {"keep": [0]}}}
    comparison = look.compare(whole, replace(whole, heads=small), kept=plan)
    assert [(h.layer, h.head) for h in comparison.heads] == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (2, 0)]
    assert {h.distance for h in comparison.heads} == {0.0} and not comparison.guessed
    alike = tuple(replace(h, head=h.head - 6) for h in heads if h.head >= 6)
    comparison = look.compare(whole, replace(whole, heads=alike), kept={"layers": {"*": {"keep": [6, 7]}}})
    assert {h.distance for h in comparison.heads} == {0.0} and len(comparison.gone) == 18 and not comparison.guessed


def test_kept_counts_layers_without_attention(before: Look) -> None:
    """In a model of one stack a plan numbers all layers, those without attention too: here the only one is 3."""
    heads = tuple(replace(head, layer=3) for head in before.heads)
    hybrid = replace(before, heads=heads, num_layers=4, maps=(), moved=(), neurons=())
    small = replace(hybrid, heads=tuple(replace(h, head=[2, 5].index(h.head)) for h in heads if h.head in (2, 5)))
    comparison = look.compare(hybrid, small, kept={"layers": {"3": {"keep": [2, 5]}}})
    assert [(head.layer, head.head, head.other_head) for head in comparison.heads] == [(3, 2, 0), (3, 5, 1)]
    assert {head.distance for head in comparison.heads} == {0.0} and not comparison.guessed


def test_merged_key_value_heads_change_no_number(before: Look) -> None:
    assert look.compare(before, before, kept={"layers": {"0": {"kv_heads": 2}}}).guessed == ()


def test_layers_without_heads_are_paired_by_module(before: Look) -> None:
    second = tuple(replace(head, layer=1, module="later") for head in before.heads)
    two = replace(before, heads=(*before.heads, *second), num_layers=2, maps=(), moved=())
    only = replace(before, heads=tuple(replace(head, layer=0) for head in second), maps=(), moved=())
    comparison = look.compare(two, only)
    assert comparison.gone == tuple((0, h) for h in range(8)) and {head.layer for head in comparison.heads} == {1}
    other = replace(only, heads=tuple(replace(head, module="elsewhere") for head in only.heads))
    with pytest.raises(ValueError, match="looks of 2 and 1 layers cannot be paired: their modules have other names"):
        look.compare(two, other)


def test_other_texts_leave_patterns_uncompared(before: Look) -> None:
    comparison = look.compare(before, look.at(Planted(), text(31), delimiters=DELIMITERS))
    assert not comparison.same_text and {(h.moved, h.divergence, h.near) for h in comparison.heads} == {
        (None, None, None)
    }
    assert not comparison.changed and "they read other tokens: patterns are not compared" in str(comparison)


def test_records_of_other_widths_are_compared_by_what_both_have(before: Look, after: Look) -> None:
    """Such as records that were made by hand, or by a version that noted fewer offsets."""
    bare = replace(after, heads=tuple(replace(head, map=(), offsets=head.offsets[:3]) for head in after.heads))
    for a, b in ((before, bare), (bare, before)):
        comparison = look.compare(a, b)
        assert comparison.same_text and {(one.moved, one.divergence) for one in comparison.heads} == {(None, None)}
    first, second = before.heads[0], bare.heads[0]
    both = [*zip(first.offsets[:3], second.offsets, strict=True), *zip(first.ahead, second.ahead, strict=True)]
    far = abs(sum(a for a, _ in both) - sum(b for _, b in both))
    expected = (sum(abs(a - b) for a, b in both) + far) / 2
    assert look.compare(before, bare).heads[0].near == pytest.approx(expected, abs=1e-5)
    assert look.compare(before, pruned(bare, [0, 2])).guessed == (0,)


def test_records_without_offsets_or_maps_are_not_said_to_have_stayed(before: Look, after: Look) -> None:
    """What neither of them measured is None: a 0 would say that no head moved."""
    bare = replace(after, heads=tuple(replace(head, map=(), offsets=()) for head in after.heads))
    for a, b in ((before, bare), (bare, before), (bare, bare)):
        comparison = look.compare(a, b)
        assert {(one.moved, one.near, one.distance) for one in comparison.heads} == {(None, None, 0.0)}
        assert comparison.summary()[1:] == [
            "0 of 8 heads did not move",
            "8 without maps of one size or offsets to compare",
        ]
    mixed = look.compare(before, replace(before, heads=(bare.heads[0], *before.heads[1:]))).summary()
    assert mixed[1:] == ["7 of 8 heads did not move", "1 without maps of one size or offsets to compare"]
    kept, fewer = [1, 2], pruned(bare, [1, 2])
    assert [head.head for head in look.compare(before, fewer, kept={0: kept}).heads] == kept
    with pytest.raises(ValueError, match=r"^layer 0: 8 and 2 heads are paired by .* and records have neither; give k"):
        look.compare(before, fewer)
    maps = replace(before, heads=tuple(replace(head, offsets=()) for head in before.heads))
    assert [head.head for head in look.compare(maps, pruned(maps, [3, 5])).heads] == [3, 5]


@pytest.mark.unchecked
def test_what_cannot_be_compared_is_told(before: Look) -> None:
    small = pruned(before, [0, 1, 2])
    for kept, message in (
        ({0: [0, 1]}, "kept[0] lists different heads of 0 to 7, as many as the layer has after (3); got [0, 1]"),
        ({0: [0, 1, 8]}, "kept[0] lists different heads of 0 to 7"),
        ({0: [0, 1, 1]}, "kept[0] lists different heads of 0 to 7"),
        ({5: [0]}, "kept names layer 5, and the look has 0"),
        ({"a": [0]}, "kept names layer 'a', and the look has 0"),
        ({(1,): [0]}, "kept says by layer which heads are left, such as {0: [0, 1, 5]}; got (1,): [0]"),
        ({0: "abc"}, "kept says by layer which heads are left"),
        ([0, 1], "kept says by layer which heads are left"),
        ({"layers": 3}, "kept says by layer which heads are left"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            look.compare(before, small, kept=kept)  # type: ignore[arg-type]


def test_a_comparison_travels(before: Look, after: Look, tmp_path: Path) -> None:
    import pyarrow.parquet

    comparison = look.compare(before, after)
    data = json.loads(comparison.to_json())
    assert data["heads"][2]["after"] == ["first-token sink"] and len(data["heads"]) == 8
    for name in ("c.parquet", "c.csv", "c.json"):
        look.write(comparison, tmp_path / name)
    row = pyarrow.parquet.read_table(tmp_path / "c.parquet").to_pylist()[2]
    assert (row["before"], row["after"], row["changed"]) == ("self", "first-token sink", True)
    assert row["self.before"] == before.heads[2].value("self") and row["moved"] == comparison.heads[2].moved
    with pytest.raises(ValueError, match=re.escape("ends in none of .parquet .csv .json; the end says")):
        look.write(comparison, tmp_path / "c.svg")


def test_a_changed_head_is_a_plain_record(before: Look) -> None:
    [change, *_] = look.compare(before, before).heads
    assert isinstance(before.heads[0], HeadRecord) and not change.changed and change.before == ("previous-token",)
