"""`headwise.look.at`: roles that were planted are found, and those that were not are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted import AHEAD, DELIMITERS, NAMES, PLACES, VOCABULARY, Planted, Tiny, numbers, text

import headwise
from headwise import look
from headwise.look import ROLES, HeadRecord, Look, RoleScore
from headwise.look.repeats import draw
from headwise.look.roles import find


@pytest.fixture(scope="module")
def planted() -> Look:
    return look.at(Planted(), text(), delimiters=DELIMITERS)


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
    found = look.at(Planted((*NAMES, *AHEAD), ahead=True), text(), delimiters=DELIMITERS)
    assert found.kind == "encoder"
    wanted = [[name] if name != "induction" else [] for name in (*NAMES, *AHEAD)]
    assert [[role.name for role in head.roles] for head in found.heads] == wanted
    assert all(head.induction is None for head in found.heads)
    following, third = found.heads[-2:]
    assert following.ahead == pytest.approx((1.0, *[0.0] * 7), abs=2e-3)  # its last query has no choice: it is uniform
    assert third.ahead[2] > 0.995 and following.roles[0].baseline == pytest.approx(1 / 97, abs=1e-6)


def test_a_decoder_has_nothing_ahead() -> None:
    found = look.at(Planted(AHEAD), text(), delimiters=DELIMITERS)
    assert found.kind == "decoder" and all(head.ahead == () for head in found.heads)
    assert not {*AHEAD} & {role.name for head in found.heads for role in head.roles}


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


def names(head: HeadRecord, uniform: HeadRecord | None = None) -> list[str]:
    return [role.name for role in find(head, uniform)]


FIELDS = {"first-token sink": "sink", "delimiter": "delimiter", "broad": "evenness", "duplicate-token": "duplicate"}
FIELDS |= {"induction": "induction"}
PLACE = {"self": 0, "previous-token": 1, "next-token": -1} | {f"offset{k:+}": -k for k in range(-8, 9) if abs(k) > 1}


def scoring(role: str, score: float) -> HeadRecord:
    """A head that has this score and no other."""
    if role in FIELDS:
        return numbers(**{FIELDS[role]: score})
    there = {k: score * (k == PLACE[role]) for k in range(-8, 9)}
    return numbers(offsets=tuple(there[k] for k in range(9)), ahead=tuple(there[-k] for k in range(1, 9)))


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
    head = numbers(sink=0.9, offsets=(0.9, 0.9), ahead=(0.9, 0.9), induction=0.9, queries=5)
    assert names(head) == names(replace(head, queries=97, keys=5)) == ["first-token sink"]


def test_names_of_roles_are_unique_and_tell_their_source() -> None:
    assert len({role.name for role in ROLES}) == len(ROLES)
    assert all(role.source and role.formula and 0 < role.threshold < 1 for role in ROLES)
