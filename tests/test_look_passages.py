"""Annotated sentences as links between tokens, and what random models make of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from headwise import look
from headwise.look import annotate
from headwise.look.roles import SENTENCES
from headwise.look.scene import Scene, Vocabulary
from headwise.testing.constructed import random_model

GIFT = "When Mary and John went to the store, John gave a drink to Mary."


def by_word(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """A token for each word and mark, long words in two; the first is special."""
    ids, offsets = [1], [(0, 0)]
    for found in re.finditer(r"\w+|[^\w\s]", text):
        start, end = found.span()
        middle = start + 4 if end - start > 5 else end
        for piece in ((start, middle), (middle, end)) if middle < end else ((start, end),):
            ids.append(3 + sum(map(ord, text[slice(*piece)])) % 40)
            offsets.append(piece)
    return ids, offsets


def pieces(text: str) -> list[str]:
    return ["<s>"] + [text[slice(*span)] for span in by_word(text)[1][1:]]


def linked(passage: look.Passage, text: str, name: str) -> list[tuple[str, list[str]]]:
    names = pieces(text)
    rows: Sequence[Sequence[int]] = passage.links.get(name, [])
    return [(names[i], [names[j] for j in keys]) for i, keys in enumerate(rows) if keys]


def test_links_of_a_sentence() -> None:
    document = annotate.ours()[0]
    text = document.text
    assert text == "The agent opened a pull request because its tests were green."
    [passage] = annotate.passages([document], by_word)
    assert linked(passage, text, "nsubj to head") == [("agent", ["open", "ed"]), ("tests", ["green"])]
    assert linked(passage, text, "head to det") == [("agent", ["The"]), ("est", ["a"])]
    assert linked(passage, text, "obj to head") == [("est", ["open", "ed"])]  # by its last token, to all of the other
    assert linked(passage, text, "coreference") == [("its", ["agent"])]
    assert linked(passage, text, "mentions") == [("its", ["agent"])]
    assert linked(passage, text, "nearest noun") == [("its", ["requ", "est"])]
    same = dict(linked(passage, text, "same word class"))
    assert same["agent"] == ["pull", "requ", "est", "tests"] and "." not in same
    assert not any("punct" in name for name in passage.links)


def test_links_of_a_gift() -> None:
    document = next(one for one in annotate.ours() if one.text == GIFT)
    [passage] = annotate.passages([document], by_word)
    assert linked(passage, GIFT, "name mover") == [("to", ["Mary"])]
    assert linked(passage, GIFT, "other name") == [("to", ["John", "John"])]
    [keys] = [keys for keys in passage.links["name mover"] if keys]
    assert keys == [pieces(GIFT).index("Mary")]


def test_links_ahead_are_an_encoders() -> None:
    passage = look.Passage([5, 6, 7], links={"det to head": [[1], [], []], "head to det": [[], [0], []]})
    ids = torch.tensor([[5, 6, 7]])
    for ahead, wanted in ((False, None), (True, [[[1], [-1], [-1]]])):
        scene = Scene(ids, ids, ahead, Vocabulary(), (passage,))
        links = scene.links("det to head")
        assert (None if links is None else links.tolist()) in (wanted, [[[-1], [-1], [-1]]])
        back = scene.links("head to det")
        assert back is not None and back.tolist() == [[[-1], [0], [-1]]]


def test_documents_become_one_passage_each() -> None:
    documents = annotate.ours()
    found = annotate.passages(documents, by_word)
    assert [passage.text for passage in found] == [*range(len(documents))]
    assert all(len(rows) == len(p.ids) for p in found for rows in p.links.values())


def test_random_models_know_no_syntax() -> None:
    passages = annotate.passages(annotate.ours(), by_word)
    played = heads = 0
    for seed in range(7):
        model = random_model(seed)
        V = model.facts["vocabulary"]
        read = [replace(one, ids=[i % V for i in one.ids]) for one in passages]
        seen = look.at(model, read[0].ids, full_maps=False, map_size=1, repeats=None, readings={SENTENCES: read})
        heads += len(seen.heads)
        for head in seen.heads:
            names = [score.name for score in head.roles if "head" in score.name or score.name == "coreference"]
            played += bool(names)
    assert played <= 0.02 * heads, (played, heads)
