"""Evidence is what the score counted: every role, on drawn models, against whole attention matrices."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from draw import drawn
from torch import Tensor

import headwise
from headwise import look
from headwise.look import Passage
from headwise.look.collect import forward
from headwise.look.roles.catalog import NEEDLES, SENTENCES
from headwise.look.roles.choice_measures import Argmax
from headwise.look.roles.measures import CallStatistics, OfRows
from headwise.look.roles.role import Role
from headwise.testing.constructed import constructed_pair, random_model
from headwise.testing.pictures import JOBS, constructed_picture

MARKS = {3: ".", 4: ",", 5: ";", 6: "[SEP]"}


@dataclass
class Checked:
    """What was compared: by role the heads with a score, and with evidence."""

    scored: Counter[str] = field(default_factory=Counter)
    shown: Counter[str] = field(default_factory=Counter)

    def call(self, got: CallStatistics, roles: Sequence[Role], _: object) -> None:
        """Compare all roles of a call, in place of adding them to the sums."""
        call = got.call
        p = headwise.weights(call.query, call.key, **call.scoring).double()
        for role in roles:
            sums = role.measure.read(role.name, got)
            if sums is not None and bool(sums.count.any()):
                self.role(role, got, sums.total.expand(p.shape[:2]), p)

    def role(self, role: Role, got: CallStatistics, total: Tensor, p: Tensor) -> None:
        """The pairs that a role counts make its sum, and evidence is among them."""
        (B, H, T, S), measure = p.shape, role.measure
        every = [measure.counts(role.name, got, torch.full((B, H, T), j)) for j in range(S)]
        pairs = torch.stack(every, -1)
        judged, evidence = measure.judged(got), measure.evidence(role.name, got)
        right = pairs.gather(3, judged.clamp(min=0)[..., None])[..., 0] & (judged >= 0)
        if isinstance(measure, Argmax) or role.name == "far offset":
            assert total.tolist() == right.sum(-1).tolist(), role.name
        elif isinstance(measure, OfRows):
            assert bool(((total > 0) == right.any(-1)).all()) or role.name == "broad", role.name
        else:
            mass = (p * pairs).sum((-1, -2))
            assert bool((((total - mass).abs() < 1e-4 * T) | (total == 0)).all()), (role.name, total, mass)
        there = evidence >= 0
        assert bool(pairs.gather(3, evidence.clamp(min=0)[..., None])[..., 0][there].all()), role.name
        forced = (p > 0).sum(-1) == 1
        assert not bool((there & forced).any()), role.name
        self.scored[role.name] += int((total > 0).sum())
        self.shown[role.name] += int(there.any(-1).sum())


def linked(length: int, seed: int) -> Passage:
    """A passage with random links of every kind that a role reads; few words, so that some stand twice."""
    dice = random.Random(seed)

    def some(share: float, most: int) -> list[list[int]]:
        rows = [dice.sample(range(length), dice.randint(1, most)) for _ in range(length)]
        return [sorted(row) if dice.random() < share else [] for row in rows]

    mentions = [sorted(dice.sample(range(i), min(i, dice.randint(1, 4)))) for i in range(length)]
    links = {
        "same word class": some(0.6, 5), "name mover": some(0.2, 1), "other name": some(0.3, 1),
        "nsubj to head": some(0.9, 3), "head to obj": some(0.9, 3), "mentions": mentions,
        "coreference": [keys[: dice.randint(0, 2)] for keys in mentions], "retrieval": some(0.9, 3),
        "nearest noun": [keys[-1:] for keys in mentions],
    }  # fmt: skip
    ids = [1, *(dice.randrange(10, 16) for _ in range(length - 1))]
    ids[length // 2] = 2
    return Passage(ids, links=links, classes={"first sentence": range(1, 6), "second sentence": range(8, 13)})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Every call of a look, compared."""
    seen = Checked()
    monkeypatch.setattr(forward, "add_roles", seen.call)
    return seen


def read(model: Any, seed: int) -> None:
    """A text with marks, and both kinds of annotated passages."""
    dice = random.Random(seed)
    ids = [1, *(dice.choice((3, 4, 5, 6, *range(10, 40))) for _ in range(28))]
    readings = {SENTENCES: [linked(19, seed), linked(19, seed + 1)], NEEDLES: [linked(23, seed + 2)]}
    repeats = look.Repeats(sequences=2, length=31)
    look.at(model, ids, tokens=[MARKS.get(i, f"w{i}") for i in ids], repeats=repeats, readings=readings)


def test_evidence_of_drawn_models_is_what_their_scores_count(checked: Checked) -> None:
    for seed in drawn(range(24)):
        read(random_model(seed), seed)
    for name in (
        "self",
        "previous-token",
        "local band",
        "nsubj to head",
        "coreference",
        "same word class",
        "induction",
    ):
        assert checked.shown[name] > 0, (name, checked)


def test_evidence_of_a_decoder_that_reads_another_text(checked: Checked) -> None:
    read(constructed_pair()[0], 3)
    assert checked.shown["alignment"] and checked.shown["alignment, next"]


def test_evidence_on_pictures_is_what_the_scores_count(checked: Checked) -> None:
    model, _ = constructed_picture([JOBS], (5, 7), registers=2)
    look.at(model, {"pixel_values": model.sample()})
    named = {"left neighbour", "surroundings", "same row", "[CLS] sink", "register sink", "patch sink"}
    assert named <= {name for name, count in checked.shown.items() if count}


def test_a_query_without_a_choice_is_no_evidence_and_does_not_count() -> None:
    """Query 0 of a decoder has the whole weight on itself, whatever the head does."""
    for head in look.at(random_model(0), [1, *range(10, 30)], repeats=None).heads:
        for name in ("self", "local band"):
            assert head.scores[name].count == 20
            assert all(one.query > 0 for one in head.scores[name].evidence)
