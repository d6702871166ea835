"""The tokens around evidence that a report shows: every place of every text is asked whether it is near enough."""

from __future__ import annotations

import random
from dataclasses import replace

from headwise import look
from headwise.look import HeadRecord, Passage
from headwise.look.collect.excerpts import around, with_excerpts
from headwise.look.records.scores import Evidence, Score
from headwise.look.roles.catalog import ROLES
from headwise.testing.constructed import NAMES, constructed

READS = {role.name: role.reads for role in ROLES}


def head_with(score: Score) -> HeadRecord:
    return HeadRecord("layer", 0, 0, 0, "decoder", 0.0, 0.0, 0.0, (), (), {score.name: score}, role=score.name)


def test_the_tokens_shown_are_those_at_most_six_from_a_query_or_its_key() -> None:
    """At both ends of a text, in texts shorter than that, and of evidence whose text is not among the passages."""
    dice, shown = random.Random(3), 0
    for name in ("induction", "coreference", "retrieval", "previous-token"):
        for _ in range(8):
            texts = [Passage([dice.randrange(90) for _ in range(dice.choice([1, 5, 23]))]) for _ in range(3)]
            places = [(text, len(one.ids)) for text, one in enumerate(texts)] + [(3, 7)]  # of a fourth, there is none
            pieces = tuple(Evidence(text, dice.randrange(n), dice.randrange(n), 0.5) for text, n in places)
            score = Score(name, 0.9, None, 0.5, 11, plays=True, evidence=pieces)
            found = around([head_with(score)], {READS[name]: texts}, lambda token: f"<{token}>")
            wanted: dict[str, dict[int, str]] = {}
            for text, one in enumerate(texts):
                query, key = pieces[text].query, pieces[text].key
                near = [p for p in range(len(one.ids)) if abs(p - query) <= 6 or abs(p - key) <= 6]
                wanted[f"{READS[name]} {text}"] = {p: f"<{one.ids[p]}>" for p in near}
            assert found == wanted
            shown += sum(map(len, found.values()))
            assert not around([head_with(score)], {"another reading": texts}, str)
    assert shown > 200


def test_a_head_shows_only_the_roles_that_it_plays() -> None:
    score = Score("induction", 0.9, None, 0.5, 11, evidence=(Evidence(0, 5, 2, 0.5),))
    assert not around([head_with(score)], {READS["induction"]: [Passage(range(7))]}, str)


def test_excerpts_of_further_readings_join_those_that_a_look_has() -> None:
    model = constructed(NAMES)[0]
    [ids] = model.sample(31, seed=2).tolist()
    before = {"copies 0": {3: "kept"}, "needles 1": {0: "kept too"}}
    seen = replace(look.at(model, ids, repeats=None), excerpts=before)
    score = Score("coreference", 0.9, None, 0.5, 11, plays=True, evidence=(Evidence(0, 4, 1, 0.5),))
    heads = (replace(seen.heads[0], scores={score.name: score}),)
    reads, passage = READS[score.name], Passage(range(7, 18))
    joined = with_excerpts(replace(seen, heads=heads, maps=(), moved=()), {reads: [passage]}, str)
    assert joined.excerpts == {**before, f"{reads} 0": {place: str(7 + place) for place in range(11)}}
    assert with_excerpts(seen, {}, str).excerpts == before
