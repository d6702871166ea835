"""From annotation to what a look reads: the links by hand, and heads that play a relation by construction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("conllu", reason="the extra [look] is not installed")

from headwise import look
from headwise.look import annotate
from headwise.look.annotate import Document, passages
from headwise.look.weights.copying import Copying
from headwise.testing.constructed import Tables, constructed

OPENER = 1


class Words:
    """A tokenizer that gives every word of every text an id of its own; words of more than `most` letters two."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.count, self.texts = most, OPENER, list[str]()

    def __call__(self, text: str, *, return_offsets_mapping: bool) -> dict[str, Any]:
        assert return_offsets_mapping
        ids, offsets = [OPENER], [(0, 0)]
        for start, end in spans(text):
            cuts = [start, start + self.most, end] if end - start > self.most else [start, end]
            for a, b in itertools.pairwise(cuts):
                self.count += 1
                ids.append(self.count)
                offsets.append((a - 1 if a and text[a - 1] == " " else a, b))
        self.texts.append(text)
        return {"input_ids": ids, "offset_mapping": offsets}


def spans(text: str) -> list[tuple[int, int]]:
    places, start = [], 0
    for piece in text.replace(".", " .").replace(",", " ,").split():
        start = text.index(piece, start)
        places.append((start, start + len(piece)))
        start += len(piece)
    return places


def named(*names: str) -> list[Document]:
    return [next(d for d in annotate.ours() if d.name == name) for name in names]


def linked(rows: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    return {i: list(row) for i, row in enumerate(rows) if row}


def test_links_by_hand() -> None:
    """The agent opened a pull request because its tests were green. ("opened", "request", "because" are two tokens)"""
    [passage] = passages(named("agent-1"), Words(most=5))
    assert passage.ids == list(range(1, 17))
    #  1 The  2 agent  3 opene 4 d  5 a  6 pull  7 reque 8 st  9 becau 10 se  11 its  12 tests  13 were  14 green  15 .
    want = {
        "nsubj to head": {2: [3, 4], 12: [14]},
        "head to nsubj": {4: [2], 14: [12]},
        "det to head": {1: [2], 5: [7, 8]},
        "head to det": {2: [1], 8: [5]},
        "obj to head": {8: [3, 4]},
        "head to obj": {4: [7, 8]},
        "compound to head": {6: [7, 8]},
        "mark to head": {10: [14]},
        "nmod:poss to head": {11: [12]},
        "head to advcl": {4: [14]},
        "head to cop": {14: [13]},
        "punct to head": {15: [3, 4]},
        "coreference": {11: [2]},
        "mentions": {11: [2, 7, 8]},
        "nearest noun": {11: [8]},
    }
    assert {name: linked(passage.links[name]) for name in want} == want
    nouns = {2: [6, 7, 8, 12], 6: [2, 7, 8, 12], 8: [2, 6, 12], 12: [2, 6, 7, 8]}
    assert linked(passage.links["same word class"]) == {1: [5], 5: [1], **nouns}  # no other class comes twice
    assert not any(name.startswith(("root", "head to root")) for name in passage.links)


def test_what_a_mention_may_mean() -> None:
    """Laura put the cake on the table. Her dog ate half of it. She was not happy."""
    [passage] = passages(named("cake"), Words())
    text = "Laura put the cake on the table . Her dog ate half of it . She was not happy ."
    places = dict(enumerate(text.split(), 1))
    words = {places[i]: [places[j] for j in row] for i, row in linked(passage.links["coreference"]).items()}
    assert words == {"Her": ["Laura"], "it": ["cake"], "She": ["Laura", "Her"]}
    choice = {places[i]: [places[j] for j in row] for i, row in linked(passage.links["mentions"]).items()}
    nouns = ["Laura", "cake", "table"]
    assert choice == {"Her": nouns, "it": [*nouns, "Her", "dog", "half"], "She": [*nouns, "Her", "dog", "half", "it"]}
    nearest = {places[i]: [places[j] for j in row] for i, row in linked(passage.links["nearest noun"]).items()}
    assert nearest == {"Her": ["table"], "it": ["half"], "She": ["half"]}


def test_repeated_words_are_no_coreference() -> None:
    """The raft sank, but the boys could swim: "the raft" and "the boys" were named so before."""
    [passage] = passages(named("raft"), Words())
    assert linked(passage.links["coreference"]) == {7: [2]}  # the first "They"
    [whole, prompt] = passages(named("gift-1"), Words())
    assert "coreference" not in whole.links and "coreference" not in prompt.links


def document(text: str, *mentions: tuple[str, int, int]) -> Document:
    """Words with a class alone: N a noun, P a pronoun, V others; each phrase hangs on its last word."""
    words = []
    for (start, end), form in zip(spans(text), text.split(), strict=True):
        name, _, upos = form.partition("/")
        words.append(annotate.Word(name, start, end, {"N": "NOUN", "P": "PRON"}.get(upos, "VERB")))
    made = tuple(annotate.Mention(entity, tuple(range(first, last + 1))) for entity, first, last in mentions)
    for _, first, last in mentions:
        words[first:last] = [replace(word, head=last) for word in words[first:last]]
    return Document((annotate.Sentence(text, tuple(words), made),))


def test_words_of_a_mention_are_none_that_it_may_mean() -> None:
    text = document("log/N grew agent/N kept its/P file/N", ("e1", 0, 0), ("e2", 2, 2), ("e2", 4, 4), ("e1", 4, 5))
    [passage] = passages([text], Words())
    assert linked(passage.links["coreference"]) == {5: [3], 6: [1]}  # its, file
    assert linked(passage.links["mentions"]) == {5: [1, 3], 6: [1, 3]}


def test_what_leaves_no_choice_is_no_coreference() -> None:
    [passage] = passages([document("log/N grew it/P", ("e1", 0, 0), ("e1", 2, 2))], Words())
    assert "coreference" not in passage.links and "mentions" not in passage.links


def test_two_names_and_a_gift() -> None:
    tokenizer = Words()
    whole, prompt = passages(named("gift-1"), tokenizer)
    assert tokenizer.texts == [
        "When Mary and John went to the store, John gave a drink to Mary.",
        "When Mary and John went to the store, John gave a drink to",
    ]
    assert "name mover" not in whole.links and "head to iobj" not in whole.links
    assert linked(prompt.links["name mover"]) == {14: [2]} and linked(prompt.links["other name"]) == {14: [4, 10]}


def test_long_documents_are_divided_between_sentences() -> None:
    documents = named("cake", "parser")
    assert [len(p.ids) for p in passages(documents, Words())] == [21, 30]
    parts = passages(documents, Words(), length=15)
    assert [len(p.ids) for p in parts] == [9, 13, 10, 10, 12]  # each begins with an opener of its own
    assert [len(p.ids) for p in passages(documents, Words(), length=10)] == [9, 8, 6, 10, 10]
    assert passages(named("gift-1"), Words(), length=10) == []
    assert passages([], Words()) == passages([Document(())], Words()) == []


@pytest.mark.unchecked
def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"tokenizer is called as tokenizer\(text, return_offsets_mapping=True\); got None"
    ):
        passages(named("cake"), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"passages are made of headwise.look.annotate.Document; got 'text'"):
        passages(["text"], Words())  # type: ignore[list-item]
    with pytest.raises(ValueError, match="length is at least 1; got 0"):
        passages(named("cake"), Words(), length=0)

    def slow(text: str, **options: object) -> dict[str, Any]:
        raise NotImplementedError("return_offset_mapping is not available when using Python tokenizers.\nTo use ...")

    with pytest.raises(
        ValueError, match=r"the tokenizer function gives no offsets \(return_offset.* To use \.\.\.\); take"
    ):
        passages(named("cake"), slow)
    with pytest.raises(ValueError, match=r"gives no offsets \('offset_mapping'\); take the fast one: AutoTokenizer"):
        passages(named("cake"), lambda text, **options: {"input_ids": [1]})


# --- a head that plays a relation, by a table of the ids --------------------------------------------------------------


def table(texts: Sequence[look.Passage], name: str) -> dict[int, int]:
    """From the id of each linked token to that of one it is linked to."""
    return {
        text.ids[i]: text.ids[row[0]] for text in texts for i, row in enumerate(text.links.get(name, ())) if row
    }  # fmt: skip


@pytest.mark.parametrize("relation", ["nsubj to head", "head to obj"])
def test_heads_that_follow_a_relation_are_found(relation: str) -> None:
    """One head looks up a relation, the other antecedents; each plays its role and no other."""
    tokenizer = Words()
    texts = passages([d for d in annotate.ours() if d.name.startswith(("refer", "pair-c"))], tokenizer)
    tables = Tables(OPENER, 0, heads=table(texts, relation), antecedents=table(texts, "coreference"))
    model, jobs = constructed(
        [["relation by id", "coreference", "idle"]],
        kind="encoder",
        tables=tables,
        vocabulary=tokenizer.count + 1,
        places=41,
    )
    words = look.Vocabulary(special=frozenset({OPENER}))
    seen = look.over(model, [text.ids for text in texts[:5]], words=words, repeats=None, readings={"sentences": texts})
    roles = {jobs[head.layer, head.head]: {score.name: score for score in head.roles} for head in seen.heads}
    assert {job: {*scores} for job, scores in roles.items()} == {
        "relation by id": {relation}, "coreference": {"coreference"}, "idle": set()
    }  # fmt: skip
    assert roles["relation by id"][relation].value == roles["coreference"]["coreference"].value == 1


def test_heads_that_attend_the_next_name_are_movers_where_copying_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Words()
    texts = passages([d for d in annotate.ours() if d.name.startswith("gift")], tokenizer)
    tables = Tables(OPENER, 0, heads=table(texts, "name mover"), antecedents=table(texts, "other name"))
    layers = [["relation by id", "coreference"]]
    model, _ = constructed(layers, tables=tables, vocabulary=tokenizer.count + 1, places=29)
    seen = look.over(model, [text.ids for text in texts[:5]], repeats=None, readings={"sentences": texts})
    assert [head.roles for head in seen.heads] == [(), ()]  # they write no name
    monkeypatch.setattr(Copying, "of", lambda *_: None)
    seen = look.over(model, [text.ids for text in texts[:5]], repeats=None, readings={"sentences": texts})
    mover, other = (head.scores["name mover by attention"] for head in seen.heads)
    assert mover.value > 0.999 and [score.name for score in seen.heads[0].roles] == ["name mover by attention"]
    assert other.value < 0.001 and not other.plays


def test_the_baseline_of_a_model_that_looks_back_knows_no_later_key() -> None:
    """Most objects follow their verbs; of those that do not, most lie three places before."""
    rows = [[], [2], [3], [4], [1], [2], []]
    ids = [1, 5, 6, 7, 8, 9, 10]
    links = {"obj to head": rows}
    [mover], other = (
        look.over(constructed([["idle"]], kind=kind)[0], [ids], repeats=None,
                  readings={"sentences": [look.Passage(ids, links=links)]}).heads
        for kind in ("decoder", "encoder")
    )  # fmt: skip
    assert (mover.scores["obj to head"].null, mover.scores["obj to head"].count) == (1.0, 2)
    assert (other[0].scores["obj to head"].null, other[0].scores["obj to head"].count) == (0.6, 5)


def test_a_query_is_no_candidate_of_its_own() -> None:
    """The head attends its own token and the copy of it alike."""
    model, _ = constructed([["same token"]], kind="encoder")
    links = {"obj to head": [[], [4], [], [], []]}
    seen = look.over(
        model, [[1, 5, 6, 7, 5]], repeats=None, readings={"sentences": [look.Passage([1, 5, 6, 7, 5], links)]}
    )
    assert (seen.heads[0].scores["obj to head"].value, seen.heads[0].scores["obj to head"].count) == (1.0, 1)
