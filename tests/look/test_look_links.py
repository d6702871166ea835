"""Links between tokens in a scene, and what random models make of annotated sentences."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from draw import drawn
from hf_models import BY_NAME
from planted import Tiny, text
from test_look_numbers import matrices

import headwise
from headwise import look
from headwise.look import annotate
from headwise.look.roles.call_tokens import CallTokens, Vocabulary
from headwise.look.roles.catalog import ROLES, SENTENCES
from headwise.look.roles.controls import shuffled
from headwise.testing.constructed import random_model


def by_word(text: str, return_offsets_mapping: bool) -> dict[str, Any]:
    """A token for each word and mark, long words in two; the first is special."""
    ids, offsets = [1], [(0, 0)]
    for match in re.finditer(r"\w+|[^\w\s]", text):
        start, end = match.span()
        middle = start + 4 if end - start > 5 else end
        for piece in ((start, middle), (middle, end)) if middle < end else ((start, end),):
            ids.append(3 + sum(map(ord, text[slice(*piece)])) % 40)
            offsets.append(piece)
    return {"input_ids": ids, "offset_mapping": offsets}


def test_links_of_a_cross_attention_begin_behind_the_start_token_of_the_decoder() -> None:
    """The decoder reads a start token and then the text, so token i of the text is its query i + 1."""
    ids = [11, 23, 29, 31, 37, 41, 43]
    links = [[], [3, 5], [4], [1, 6], [2], [], [1]]
    passages = tuple(look.Passage(ids, links={"same word class": links}, text=n) for n in range(2))
    model = BY_NAME["T5"].build().eval()
    seen = look.at(model, ids, repeats=None, readings={SENTENCES: passages})
    with torch.no_grad(), headwise.nn.probe(model) as calls:
        model(torch.tensor([ids]), decoder_input_ids=torch.tensor([[1, *ids[:-1]]]))
    across = 0
    for call, (part, behind) in zip(
        calls.calls, ([("encoder", 0)] * 2 + [("decoder", 1), ("cross", 1)] * 2), strict=True
    ):
        weights = headwise.weights(call.query, call.key, **call.scoring)[0].double()
        for h in range(len(weights)):
            head = seen.head(call.order, h)
            before = behind if part == "decoder" else 0
            rows = {i + behind: [j + before for j in keys] for i, keys in enumerate(links) if i + behind < len(ids)}
            if part == "decoder":
                rows = {i: [j for j in keys if j <= i] for i, keys in rows.items()}
            masses = [float(weights[h, i, keys].sum()) for i, keys in rows.items() if keys]
            score = head.scores["same word class"]
            assert head.part == part and score.count == 2 * len(masses)
            assert score.value == pytest.approx(sum(masses) / len(masses), abs=2e-5)
            across += part == "cross"
    assert across == 8


def test_links_ahead_are_an_encoders() -> None:
    passage = look.Passage([5, 6, 7], links={"det to head": [[1], [], []], "head to det": [[], [], [0, 1]]})
    ids = torch.tensor([[5, 6, 7]])
    for ahead, wanted in ((False, None), (True, [[[1], [-1], [-1]]])):
        scene = CallTokens(ids, ids, ahead, Vocabulary(), (passage,))
        links = scene.links("det to head")
        assert (None if links is None else links.tolist()) in (wanted, [[[-1], [-1], [-1]]])
        back = scene.links("head to det")
        assert back is not None and back[..., :1].tolist() == [[[-1], [-1], [1]]]  # never key 0, often a sink
        assert back[..., 1:].eq(-1).all()


@pytest.mark.parametrize("ahead", [False, True], ids=["decoder", "encoder"])
def test_shuffled_links_are_drawn_from_all_that_a_query_may_attend(ahead: bool) -> None:
    ids = torch.arange(7)[None]
    scene = CallTokens(ids, ids, ahead, Vocabulary(), ())
    linked = torch.zeros(1, 7, 900, dtype=torch.long)
    linked[:, :, 0] = -1
    [rows] = shuffled(linked, scene)
    assert bool((rows[:, 0] == -1).all())
    assert [set(row[1:].tolist()) for row in rows] == [set(range(7 if ahead else i + 1)) for i in range(7)]


@pytest.mark.slow
def test_random_models_know_no_syntax() -> None:
    passages = annotate.passages(annotate.ours(), by_word)
    played = heads = 0
    for seed in drawn(range(7), most=4):
        model = random_model(seed)
        V = model.facts["vocabulary"]
        read = [replace(one, ids=[i % V for i in one.ids]) for one in passages]
        seen = look.at(model, read[0].ids, full_maps=False, map_size=1, repeats=None, readings={SENTENCES: read})
        heads += len(seen.heads)
        for head in seen.heads:
            names = [score.name for score in head.roles if "head" in score.name or score.name == "coreference"]
            played += bool(names)
    assert played <= 0.02 * heads, (played, heads)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"links": {"coreference": [[], [3]]}},
            "places of a passage of 3 tokens are 0 to 2; links['coreference'] names 3",
        ),
        ({"links": {"retrieval": [[-1]]}}, "links['retrieval'] names -1"),
        (
            {"links": {"retrieval": [[]] * 4}},
            "links['retrieval'] lists the places linked to each token, and the passage",
        ),
        ({"classes": {"first sentence": [0, 3]}}, "classes['first sentence'] names 3"),
        ({"classes": {"first sentence": [-1]}}, "classes['first sentence'] names -1"),
    ],
)
def test_readings_name_places_of_their_passage(changed: dict[str, Any], message: str) -> None:
    passage = look.Passage([5, 6, 7], **changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        look.at(Tiny(), text(7), readings={"sentences": [passage]}, repeats=None)
    inside = look.Passage([5, 6, 7], links={"coreference": [[], [0], [1, 2]]}, classes={"first sentence": [0, 2]})
    assert look.at(Tiny(), text(7), readings={"sentences": [inside]}, repeats=None).length == 7


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"links": {"coreference": [3]}}, "places in links['coreference'] are whole numbers: a sequence of ints"),
        ({"links": {"coreference": 3}}, "links['coreference'] is a list of places for each token; got 3"),
        ({"links": {"coreference": "012"}}, "links['coreference'] is a list of places for each token; got '012'"),
        ({"links": {"coreference": [["1"]]}}, "of one axis; got ['1']"),
        ({"links": {"coreference": ["1"]}}, "of one axis; got '1'"),
        ({"links": {"coreference": [[1.5]]}}, "of one axis; got [1.5]"),
        ({"links": {"coreference": [[True]]}}, "of one axis; got [True]"),
        ({"links": [[0]]}, "links of a passage are a dict, name -> places; got [[0]]"),
        ({"classes": {"first sentence": 1}}, "places in classes['first sentence'] are whole numbers"),
        ({"classes": {"first sentence": [1.0]}}, "of one axis; got [1.0]"),
        ({"classes": [1]}, "classes of a passage are a dict, name -> places; got [1]"),
    ],
)
def test_readings_hold_lists_of_places(changed: dict[str, Any], message: str) -> None:
    passage = look.Passage([5, 6, 7], **changed)
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        look.at(Tiny(), text(7), readings={"sentences": [passage]}, repeats=None)
    assert str(caught.value).startswith("readings['sentences']: ")


def test_the_right_one_of_few_mentions_is_told_with_its_weight() -> None:
    """A head that is right on every mention says nothing where it gives the mentions almost no weight."""
    ids, model = text(31), Tiny(mask=headwise.causal())
    p = matrices(model, torch.tensor([ids]))[0][0, 0]
    pairs = [[i - 3, i - 2] if i >= 5 else [] for i in range(31)]
    best = [max(keys, key=lambda j, i=i: float(p[i, j]), default=-1) for i, keys in enumerate(pairs)]  # type: ignore[misc]
    links = {"mentions": pairs, "coreference": [[j] if j >= 0 and i % 3 else [] for i, j in enumerate(best)]}
    links["coreference"][5] = [pairs[5][best[5] == pairs[5][0]]]  # the wrong one of the two
    passage = look.Passage(ids, links=links)
    score = look.at(model, ids, readings={SENTENCES: [passage]}, repeats=None).heads[0].scores["coreference"]
    queries = [i for i, keys in enumerate(links["coreference"]) if keys]
    held = sum(float(p[i, best[i]]) for i in queries if i != 5)
    assert score.count == len(queries) and score.value == pytest.approx(1 - 1 / len(queries), abs=1e-6)
    assert score.mass == pytest.approx(held / len(queries), abs=1e-6)
    assert score.mass < 0.2 and not score.plays


@pytest.mark.parametrize("name", [role.name for role in ROLES if role.mass is not None])
def test_a_role_of_a_choice_asks_for_right_choices_and_for_weight(name: str) -> None:
    role = next(role for role in ROLES if role.name == name)
    assert role.mass == 0.2
    for value, mass, plays in ((0.9, 0.3, True), (0.9, 0.03, False), (0.05, 0.3, False), (0.9, None, False)):
        assert role.plays(value, 0.1 * value, 99, mass=mass) is plays
