"""Every score of a look on transformers models, against loops over the matrices of their own eager attention."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import BY_NAME, VOCAB
from look_definitions import (
    Expected,
    Sums,
    far_offset,
    gathered,
    of_copies,
    of_links,
    of_text,
)
from look_matrices import Call, calls_of, read_by

import headwise.hf  # noqa: F401  # lets look see transformers models
from headwise import look
from headwise.look import ROLES, Look, Passage, Vocabulary
from headwise.look.collect import text as collect
from headwise.look.inputs.needles import needles

pytestmark = pytest.mark.unchecked  # the models are transformers' own, and the checker slows them down

FAMILIES = ("Llama GQA", "GPT-2", "BERT", "Gemma3 text", "T5")
MARKS = {5: ".", 6: ",", 7: ";", 8: "(", 9: "[SEP]"}
LENGTH = 40  # even, so that a key stands at exactly half
CLOSE = 5e-6
"""Scores are rounded to 1e-6; the rest is what float32 attention differs by between two ways of computing it."""


def names_of(ids: Sequence[int]) -> list[str]:
    return [MARKS.get(i, f"w{i}") for i in ids]


def drawn_ids(length: int, seed: int) -> list[int]:
    """A text with marks of each kind, none of them early: so some queries of a decoder see none."""
    dice = random.Random(seed)
    ids = [dice.randrange(10, VOCAB) for _ in range(length)]
    for place, mark in zip((5, 7, 8, 11, 13, 17, 22, 30), (6, 7, 9, 5, 8, 6, 5, 9), strict=True):
        ids[place] = mark
    return [1, *ids[1:]]


def sentence(length: int, seed: int, text: int) -> Passage:
    """A passage with random links of every kind that a role reads."""
    dice = random.Random(seed)
    ids = [1, *(dice.randrange(10, 16) for _ in range(length - 1))]  # few words, so that some stand twice
    ids[length // 2] = 2

    def some(share: float, most: int) -> list[list[int]]:
        there = [i for i in range(length) if dice.random() < share]
        return [sorted(dice.sample(range(length), dice.randint(1, most)) if i in there else []) for i in range(length)]

    mentions = [sorted(dice.sample(range(i), min(i, dice.randint(1, 4)))) for i in range(length)]
    links = {
        "same word class": some(0.6, 5),
        "nsubj to head": some(0.5, 2), "head to obj": some(0.3, 1), "mentions": mentions,
        "coreference": [keys[: dice.randint(0, 2)] for keys in mentions],
        "nearest noun": [keys[-1:] for keys in mentions],
    }  # fmt: skip
    return Passage(ids, links=links, text=text)


@dataclass
class Seen:
    """A look with what it has to say, and with whatever has to be evidence where every head plays every role."""

    look: Look
    expected: Expected
    calls: list[Call]


def expected_of(model: Any, passes: Sequence[dict[str, torch.Tensor]], words: Vocabulary, known: Any) -> Any:
    """By role of all passes that a look made, told apart by their ids."""
    texts, readings = known
    by_ids = {tuple(one.ids): (kind, one) for kind, many in readings.items() for one in many}
    groups: dict[str, list[list[Call]]] = {"text": [], "copies": [], "sentences": [], "needles": []}
    for read in passes:
        rows = [tuple(row) for row in read["input_ids"].tolist()]
        if all(row in by_ids for row in rows):
            kind, passages = by_ids[rows[0]][0], [by_ids[row][1] for row in rows]
        elif all(row in texts for row in rows):
            kind, passages = "text", [Passage(row, text=texts.index(row)) for row in rows]
        else:
            kind, passages = "copies", [Passage(row, text=n) for n, row in enumerate(rows)]
        groups[kind].append(calls_of(model, read, passages))
    avoided = words.special | words.delimiters | {1}
    made = [
        gathered(groups["text"], lambda call: of_text(call, words)),
        gathered(groups["copies"], lambda call: of_copies(call, avoided)),
        *(gathered(groups[kind], lambda call, kind=kind: of_links(call, words, readings[kind]))  # type: ignore[misc]
          for kind in ("sentences", "needles")),
    ]  # fmt: skip
    return {
        place: {name: sums for one in made for name, sums in one.get(place, {}).items() if sums.count}
        for place in {place for one in made for place in one}
    }


def built(name: str) -> Any:
    """A random model whose heads differ: weights large enough that no row is nearly even."""
    torch.manual_seed(11)
    model = BY_NAME[name].build()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(1.6 if "emb" not in key and "wte" not in key and "wpe" not in key else 1)
    model.set_attn_implementation("eager")
    return model.eval()


def words_of(model: Any, ids: Sequence[int]) -> Vocabulary:
    """What the ids are, by their names and the model's config."""
    config = model.config
    kinds = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "decoder_start")
    values = [getattr(config, f"{kind}_token_id", None) for kind in kinds]
    special = frozenset(i for i in values if isinstance(i, int) and 0 <= i < VOCAB)
    there = {mark: frozenset(i for i in ids if MARKS.get(i) == mark) for mark in MARKS.values()}
    delimiters = there["."] | there[","] | there[";"]
    sep = getattr(config, "sep_token_id", None)
    separators = there["[SEP]"] | ({sep} if isinstance(sep, int) else set())
    return Vocabulary(delimiters, delimiters | there["("], special, there["."], there[","], frozenset(separators))


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """One look with all readings, in which every head plays every role that it has a score above 0 in."""
    model = built(request.param)
    ids = drawn_ids(LENGTH, seed=3)
    readings = {
        "sentences": [sentence(n, seed, text) for text, (n, seed) in enumerate(((23, 1), (31, 2), (23, 3)))],
        "needles": needles(ids[20:], range(10, VOCAB), count=3, length=4, around=29),
    }
    with pytest.MonkeyPatch.context() as patch, read_by(model) as passes:
        free: dict[str, Any] = {"threshold": 0.0, "times": 0.0, "plus": 0.0, "least": 1}
        roles = (replace(role, **free, mass=None if role.mass is None else -1.0) for role in ROLES)
        patch.setattr(collect, "ROLES", tuple(roles))
        got = look.at(model, ids, tokens=names_of(ids), readings=readings)
    words = words_of(model, ids)
    expected = expected_of(model, passes, words, ([tuple(ids)], readings))
    calls = calls_of(model, passes[0], [Passage(ids)])
    for head in got.heads:  # of distances that as many queries have, any may be told
        score = head.scores.get("far offset")
        if score is not None and score.detail:
            told = far_offset(calls[head.layer], 0, head.head, int(score.detail))
            sums = Sums()
            sums.add(0, told, calls[head.layer].p[0, head.head])
            assert told.total == expected[head.layer, head.head]["far offset"].by_text[0].total
            expected[head.layer, head.head]["far offset"] = sums
    yield Seen(got, expected, calls)


def differing(seen: Seen) -> list[Any]:
    """The scores that are not those of their definitions."""
    faults: list[Any] = []
    for head in seen.look.heads:
        expected = seen.expected[head.layer, head.head]
        assert {*head.scores} == {*expected}
        for name, sums in expected.items():
            score, ends = head.scores[name], sums.interval() or (None, None)
            told = (score.value, score.null, score.low, score.high, score.mass)
            wanted = (sums.value, sums.null, *ends, sums.mass)
            close = all(
                a is b if a is None or b is None else abs(a - b) <= CLOSE for a, b in zip(told, wanted, strict=True)
            )
            if not close or score.count != sums.count:
                faults.append((head.layer, head.head, name, (*told, score.count), (*wanted, sums.count)))
    return faults


def test_scores_are_those_of_their_definitions(seen: Seen) -> None:
    assert [head.part for head in seen.look.heads] == [call.part for call in seen.calls for _ in call.p[0]]
    assert differing(seen) == []


def test_evidence_is_the_queries_of_largest_weight_that_show_the_role(seen: Seen) -> None:
    faults = []
    for head in seen.look.heads:
        for name, sums in seen.expected[head.layer, head.head].items():
            score = head.scores[name]
            chance = -1.0 if score.null is None or score.low is None else score.null
            assert score.plays == (score.value > 0 and (score.value if score.low is None else score.low) > chance), name
            shown = {(one.text, one.query, one.key): one.weight for one in score.evidence}
            if name == "broad" or not score.plays:
                assert not shown, name
                continue
            wanted = sorted(sums.weights.values(), reverse=True)[:3]
            there = [sums.weights.get(place, -1.0) for place in shown]
            for weights in (shown.values(), there):
                if [*weights] != pytest.approx(wanted, abs=1e-4):  # they are told to four digits
                    faults.append((head.layer, head.head, name, shown, sums.weights))
    assert not faults


def test_several_texts_are_one_sum() -> None:
    """Texts of equal length pass the model together; a score is the mean over the queries of all of them."""
    model = built("GPT-2")
    texts = [drawn_ids(n, seed) for n, seed in ((40, 1), (37, 2), (40, 3), (31, 4))]
    texts[1] = [i if i not in MARKS else 20 for i in texts[1]]  # a text without marks
    words = words_of(model, [i for ids in texts for i in ids])
    with read_by(model) as passes:
        got = look.over(model, texts, words=words, repeats=look.Repeats(sequences=3, length=31))
    expected = expected_of(model, passes, words, ([tuple(ids) for ids in texts], {"sentences": [], "needles": []}))
    for place in expected:
        del expected[place]["far offset"]  # of which each text may take one of several distances
    heads = tuple(
        replace(head, scores={name: score for name, score in head.scores.items() if name != "far offset"})
        for head in got.heads
    )
    assert differing(Seen(replace(got, heads=heads), expected, [])) == []
    rows = sum(map(len, texts))
    for layer in range(got.num_layers):
        ps = [calls_of(model, {"input_ids": torch.tensor([ids])}, [Passage(ids)])[layer].p[0] for ids in texts]
        for h in range(got.num_heads):
            head = got.head(layer, h)
            logs = sum(float(-(p[h][p[h] > 0] * np.log(p[h][p[h] > 0])).sum()) for p in ps)
            away = sum(abs(i - j) * w for p in ps for (i, j), w in np.ndenumerate(p[h]))
            assert head.entropy == pytest.approx(logs / rows, abs=CLOSE)
            assert head.largest == pytest.approx(sum(p[h].max(-1).sum() for p in ps) / rows, abs=CLOSE)
            assert head.distance == pytest.approx(away / rows, abs=40 * CLOSE)
            for k in range(9):
                mass = sum(p[h].diagonal(-k).sum() for p in ps)
                assert head.offsets[k] == pytest.approx(mass / sum(len(ids) - k for ids in texts), abs=CLOSE)
