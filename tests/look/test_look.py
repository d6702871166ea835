"""`headwise.look.at`: roles that were planted are found, and those that were not are not."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
from loops import inside
from planted import AHEAD, DELIMITERS, NAMES, PLACES, VOCABULARY, Planted, Tiny, text

import headwise
from headwise import look
from headwise.look import ROLES, HeadRecord, Look
from headwise.look.collect.finalize import records
from headwise.look.collect.sums import LayerTally
from headwise.look.inputs.repeated_tokens import draw


@pytest.fixture(scope="module")
def planted() -> Look:
    return look.at(Planted(), text(), delimiters=DELIMITERS)


def test_planted_roles_are_found_and_no_other(planted: Look) -> None:
    assert [[role.name for role in head.roles] for head in planted.heads] == [[name] for name in NAMES]


def test_planted_scores(planted: Look) -> None:
    scores = {head.roles[0].name: head.roles[0].value for head in planted.heads}
    assert all(scores[name] > 0.995 for name in NAMES)
    by_name = dict(zip(NAMES, planted.heads, strict=True))
    assert by_name["offset-3"].offsets[3] == pytest.approx(1, abs=1e-3)
    assert by_name["previous-token"].offsets[0] < 0.03 and by_name["self"].value("self") == pytest.approx(1, abs=1e-3)
    assert by_name["duplicate-token"].scores["induction"].value < 0.05
    assert by_name["induction"].scores["duplicate-token"].value < 0.05


def test_planted_roles_in_an_encoder() -> None:
    record = look.at(Planted((*NAMES, *AHEAD), ahead=True), text(), delimiters=DELIMITERS)
    assert record.kind == "encoder"
    wanted = [[name] if name != "induction" else [] for name in (*NAMES, *AHEAD)]
    assert [[role.name for role in head.roles] for head in record.heads] == wanted
    assert all(head.score("induction") is None for head in record.heads)
    following, third = record.heads[-2:]
    assert following.ahead == pytest.approx((1.0, *[0.0] * 7), abs=2e-3)  # its last query has no choice: it is uniform
    assert third.ahead[2] > 0.995 and following.roles[0].null == pytest.approx(1 / 97, abs=1e-6)


def test_a_decoder_has_nothing_ahead() -> None:
    record = look.at(Planted(AHEAD), text(), delimiters=DELIMITERS)
    assert record.kind == "decoder" and all(head.ahead == () for head in record.heads)
    assert not {*AHEAD} & {role.name for head in record.heads for role in head.roles}


def test_a_fixed_offset_is_no_induction_head() -> None:
    drawn = draw(look.Repeats(), range(4, VOCABULARY), PLACES, before=[1])
    periods = [s.ids.index(s.ids[1], 2) - 1 for s in drawn]
    impostors = [f"offset-{period - 1}" for period in periods[:4]]
    for head in look.at(Planted(impostors), text(), delimiters=DELIMITERS).heads:
        assert head.scores["induction"].value < 0.3
        assert "induction" not in [role.name for role in head.roles]


@pytest.mark.parametrize("ahead", [False, True], ids=["decoder", "encoder"])
def test_an_offset_without_a_role_of_its_own_is_far_and_says_how_far(ahead: bool) -> None:
    """Of the queries that have such a key, as `offset-k`; the nearest far offset is the first behind the named ones."""
    names = ("offset-9", "offset-13", "offset-8", *(("offset+9", "offset+11") if ahead else ()))
    heads = look.at(Planted(names, ahead=ahead), text(163), delimiters=DELIMITERS).heads
    for name, head in zip(names, heads, strict=True):
        score, far = head.scores["far offset"], abs(int(name[6:])) > 8
        assert [role.name for role in head.roles] == ["far offset" if far else name]
        assert score.detail == (name.removeprefix("offset") if far else "")
        assert score.value == pytest.approx(1 if far else 0, abs=0.02)
        assert not far or score.count == 163 - abs(int(name[6:]))
        assert score.null is not None and score.null < 0.03


def test_an_offset_that_few_queries_have_is_a_share_of_half_of_them() -> None:
    """A sink on the first token would else play it: the last query alone has its largest weight so far away."""
    names = ("offset-23", "offset-61", "first-token sink")
    near, far, sink = (head.scores["far offset"] for head in look.at(Planted(names), text(97), repeats=None).heads)
    assert (near.value, near.count, near.plays) == (1.0, 97 - 23, True)
    assert (far.count, far.plays) == (49, False) and far.value == pytest.approx((97 - 61) / 49)
    assert sink.value < 0.05 and not sink.plays and sink.count >= 49
    model = Planted(("offset-31",))
    model.mask = headwise.causal() & headwise.keep(
        (torch.arange(97) >= 50)[:, None].expand(97, 97)
    )  # the first: nothing
    score = look.at(model, text(97), repeats=None).heads[0].scores["far offset"]
    assert (score.value, score.count) == (1.0, 47)


@pytest.mark.parametrize("mask", [headwise.causal(), None], ids=["decoder", "encoder"])
def test_a_random_model_plays_no_role_but_broad(mask: headwise.Mask | None) -> None:
    record = look.at(Tiny(mask=mask), text(), delimiters=DELIMITERS)
    assert {role.name for head in record.heads for role in head.roles} <= {"broad"}
    for head in record.heads:
        assert head.scores["duplicate-token"].value < 0.15


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7])
def test_short_texts_make_no_false_roles(length: int) -> None:
    model = Planted(["broad", "broad"])  # uniform attention
    record = look.at(model, text()[:length], delimiters=(*DELIMITERS, *text()[1:2]))
    assert [head.roles for head in record.heads] == [(), ()]


def test_a_window_too_short_for_copies_is_not_measured() -> None:
    record = look.at(Tiny(mask=headwise.window(4)), text())
    assert not any({"duplicate-token", "induction"} & head.scores.keys() for head in record.heads)


@inside("role", ROLES)
def test_a_role_needs_more_than_its_threshold(role: look.Role) -> None:
    plays = functools.partial(role.plays, mass=1.0)
    assert not plays(role.threshold, 0.0, 97) and plays(role.threshold + 0.001, 0.0, 97)
    assert not plays(role.threshold + 0.001, 0.0, role.least - 1)
    assert plays(role.threshold + 0.001, None, 97, low=0.0)
    assert role.mass is None or not role.plays(role.threshold + 0.001, 0.0, 97, mass=role.mass)


@inside("role", ROLES)
def test_a_role_needs_more_than_chance(role: look.Role) -> None:
    null = 0.45
    bar = max(role.times * null + role.plus, role.threshold)
    plays = functools.partial(role.plays, mass=1.0)
    assert not plays(bar, null, 97) and plays(bar + 0.01, null, 97)
    assert not plays(bar + 0.01, null, 97, low=null) and plays(bar + 0.01, null, 97, low=null + 0.01)


def test_the_most_specific_role_names_a_head_and_states_stand_beside_it() -> None:
    """Whatever the values: an induction head sees the first token most of the time, and finds needles, too."""
    tally = LayerTally({"module": "a", "call": 0, "part": "decoder"}, 2)
    numbers: dict[str, Any] = {name: np.ones(2) for name in ("entropy", "largest", "distance")}
    numbers |= {"rows": np.ones(2), "offset rows": np.ones((2, 1)), "offsets": np.zeros((2, 17)), "ahead": 0.0}
    tally.add({**numbers, "map 1 1": np.ones((2, 1, 1)), "map rows 1 1": np.ones((2, 1, 1))})
    for name, values in (
        ("broad", (0.99, 0.99)), ("first-token sink", (0.95, 0.9)), ("previous-token", (0.97, 0.1)),
        ("retrieval", (0.9, 0.0)), ("induction", (0.5, 0.1)),
    ):  # fmt: skip
        total = 50 * np.array([values])
        tally.role(name).add([0], total, np.full((1, 2), 50.0), np.zeros((1, 2)), None, total)
    head, resting = records([tally], ROLES)
    assert [score.name for score in head.roles] == [
        "induction", "retrieval", "previous-token", "first-token sink", "broad",
    ]  # fmt: skip
    assert (head.role, head.states) == ("induction", ("first-token sink", "broad"))
    assert (resting.role, resting.states) == ("-", ("first-token sink", "broad"))
    assert [HeadRecord.from_dict(json.loads(json.dumps(one.to_dict()))) for one in (head, resting)] == [head, resting]
    for wrong in ({"role": "coreference"}, {"states": ["self"]}):
        with pytest.raises(ValueError, match=r"(role|states\[0\]) is a role that the head plays; got '"):
            HeadRecord.from_dict({**head.to_dict(), **wrong})


def test_names_of_roles_are_unique_and_tell_their_source() -> None:
    resting = {"first-token sink", "sink elsewhere", "[CLS] sink", "register sink", "patch sink", "broad"}
    assert {role.name for role in ROLES if role.state} == resting
    assert len({role.name for role in ROLES}) == len(ROLES)
    assert all(role.source and role.formula and 0 < role.threshold < 1 for role in ROLES)
