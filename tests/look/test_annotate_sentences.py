"""The sentences that come with headwise, held to the rules of Universal Dependencies v2 and of CorefUD.

The rules are from https://universaldependencies.org/guidelines.html, as far as they can be checked without knowing
what a sentence means; each is a function from a sentence to its faults, and for each a planted fault must be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("conllu", reason="the extra [look] is not installed")

from headwise.look import annotate
from headwise.look.annotate import Document, Sentence

UPOS = {
    "ADJ",
    "ADP",
    "ADV",
    "AUX",
    "CCONJ",
    "DET",
    "INTJ",
    "NOUN",
    "NUM",
    "PART",
    "PRON",
    "PROPN",
    "PUNCT",
    "SCONJ",
    "SYM",
    "VERB",
    "X",
}
RELATIONS = {
    "acl",
    "acl:relcl",
    "advcl",
    "advmod",
    "amod",
    "appos",
    "aux",
    "aux:pass",
    "case",
    "cc",
    "cc:preconj",
    "ccomp",
    "clf",
    "compound",
    "compound:prt",
    "conj",
    "cop",
    "csubj",
    "csubj:pass",
    "dep",
    "det",
    "det:predet",
    "discourse",
    "dislocated",
    "expl",
    "fixed",
    "flat",
    "goeswith",
    "iobj",
    "list",
    "mark",
    "nmod",
    "nmod:poss",
    "nsubj",
    "nsubj:pass",
    "nummod",
    "obj",
    "obl",
    "orphan",
    "parataxis",
    "punct",
    "reparandum",
    "root",
    "vocative",
    "xcomp",
}
NOMINAL = {"NOUN", "PROPN", "PRON", "NUM"}
CLASSES = {  # the word classes of the dependents in a relation
    "det": {"DET"}, "det:predet": {"DET"}, "case": {"ADP", "PART"}, "amod": {"ADJ"}, "nummod": {"NUM"}, "aux": {"AUX"},
    "aux:pass": {"AUX"}, "cop": {"AUX"}, "cc": {"CCONJ"}, "cc:preconj": {"CCONJ"}, "mark": {"SCONJ", "PART"},
    "nmod:poss": NOMINAL, "obj": NOMINAL, "iobj": NOMINAL, "nsubj": NOMINAL, "nsubj:pass": NOMINAL, "expl": {"PRON"},
    "advmod": {"ADV", "PART"}, "compound:prt": {"ADP"}, "discourse": {"INTJ"}, "punct": {"PUNCT"}, "obl": NOMINAL,
    "nmod": NOMINAL, "compound": {"NOUN"}, "flat": {"PROPN"}, "appos": NOMINAL, "acl:relcl": {"VERB", "ADJ"},
}  # fmt: skip
OF_NOMINALS = {
    "det",
    "amod",
    "nummod",
    "nmod",
    "nmod:poss",
    "compound",
    "flat",
    "appos",
    "acl:relcl",
    "case",
    "det:predet",
}
OF_CLAUSES = {"nsubj", "nsubj:pass", "obj", "iobj", "aux", "aux:pass", "mark", "expl", "ccomp", "xcomp", "advcl", "obl"}


def tree(sentence: Sentence) -> list[str]:
    """One root, heads in the sentence, no circle."""
    roots = [w.text for w in sentence.words if w.relation == "root"]
    loose = [w.text for w in sentence.words if (w.head is None) != (w.relation == "root")]
    faults = [f"{len(roots)} roots"] * (len(roots) != 1) + [f"{text} has no head, or a root has" for text in loose]
    for i, word in enumerate(sentence.words):
        above, at = set(), word.head
        while at is not None and at not in above:
            above.add(at)
            at = sentence.words[at].head
        faults += [f"{word.text} lies on a circle"] * (i in above)
    return faults


def covered(sentence: Sentence, i: int) -> set[int]:
    """A word and all below it."""
    below = {i}
    while more := {n for n, w in enumerate(sentence.words) if w.head in below} - below:
        below |= more
    return below


def projective(sentence: Sentence) -> list[str]:
    """What lies below a word has no gap, or a note says so."""
    if tree(sentence):
        return []
    gaps = []
    for i, word in enumerate(sentence.words):
        below = covered(sentence, i)
        gaps += [f"{word.text} covers a gap"] * (max(below) - min(below) + 1 > len(below))
    noted = sentence.notes.get("nonprojective") == "yes"
    return [] if noted and gaps else ["noted as not projective, and is"] if noted else gaps


def labels(sentence: Sentence) -> list[str]:
    """Word classes and relations are those of UD v2, and go together."""
    faults = [f"UPOS {w.upos}" for w in sentence.words if w.upos not in UPOS]
    faults += [f"DEPREL {w.relation}" for w in sentence.words if w.relation not in RELATIONS]
    for word in sentence.words:
        if word.upos not in CLASSES.get(word.relation, UPOS):
            faults.append(f"{word.text} is {word.upos} and {word.relation}")
        faults += [f"{word.text} is PUNCT and {word.relation}"] * (word.upos == "PUNCT" and word.relation != "punct")
    return faults


def attachments(sentence: Sentence) -> list[str]:
    """Determiners and adjectives hang on nominals, arguments on predicates, nothing on function words."""
    faults = []
    predicates = {w.head for w in sentence.words if w.relation in ("cop", "nsubj", "nsubj:pass")}
    for word in sentence.words:
        if word.head is None:
            continue
        head = sentence.words[word.head]
        if word.relation in OF_NOMINALS and head.upos not in NOMINAL:
            faults.append(f"{word.relation} {word.text} hangs on {head.upos} {head.text}")
        if word.relation in OF_CLAUSES and head.upos not in ("VERB", "ADJ") and word.head not in predicates:
            faults.append(f"{word.relation} {word.text} hangs on {head.upos} {head.text}, no predicate")
        if head.relation in ("punct", "case", "det", "aux", "aux:pass", "cop", "cc", "mark", "expl"):
            faults.append(f"{word.text} hangs on the {head.relation} {head.text}")
    return faults


def clauses(sentence: Sentence) -> list[str]:
    """A predicate has one subject, one object, and a passive subject exactly with a passive auxiliary."""
    faults = []
    for i, word in enumerate(sentence.words):
        below = Counter(w.relation for w in sentence.words if w.head == i)
        several = [
            name for name in ("nsubj", "nsubj:pass", "obj", "iobj", "cop", "det", "nmod:poss") if below[name] > 1
        ]
        faults += [f"{word.text} has several of {name}" for name in several]
        if (below["nsubj:pass"] and not below["aux:pass"]) or (below["aux:pass"] and (below["nsubj"] or below["obj"])):
            faults.append(f"{word.text} is half passive")
        chain = [
            w.text for n, w in enumerate(sentence.words) if w.head == i and w.relation in ("conj", "flat") and n < i
        ]
        faults += [f"{text} comes before its head {word.text}" for text in chain]
        cc = [w for n, w in enumerate(sentence.words) if w.head == i and w.relation == "cc" and n > i]
        faults += [f"{w.text} comes after its head {word.text}" for w in cc]
        if below["cc"] and word.relation != "conj":
            faults.append(f"{word.text} has a cc and is no conj")
    return faults


def spelling(sentence: Sentence) -> list[str]:
    """The text is its words, with a space between them unless the next is joined on; it ends with a mark."""
    faults = [f"{w.text} is not at {w.start}" for w in sentence.words if sentence.text[w.start : w.end] != w.text]
    gaps = {sentence.text[a.end : b.start] for a, b in zip(sentence.words, sentence.words[1:], strict=False)}
    faults += [f"between words: {gap!r}" for gap in gaps - {"", " "}]
    ends = sentence.words[-1].text in (".", "?") and sentence.words[-1].end == len(sentence.text)
    return faults + ["no mark at the end"] * (not ends) + ["no capital"] * (not sentence.text[0].isupper())


def mentions(sentence: Sentence) -> list[str]:
    """A mention is headed by one word that is a nominal; mentions nest or stay apart; no entity contains itself."""
    faults = []
    for n, mention in enumerate(sentence.mentions):
        inside = set(mention.words)
        tops = [i for i in mention.words if sentence.words[i].head not in inside]
        text = " ".join(sentence.words[i].text for i in mention.words)
        faults += [f"{text!r} has {len(tops)} heads"] * (len(tops) != 1)
        faults += [f"{text!r} is headed by no nominal"] * (sentence.words[tops[0]].upos not in NOMINAL)
        faults += [f"{text!r} has no kind"] * (not mention.kind)
        for other in sentence.mentions[n + 1 :]:
            shared = inside & set(other.words)
            if shared and shared not in (inside, set(other.words)):
                faults.append(f"{text!r} crosses another mention")
            if shared == inside == set(other.words):
                faults.append(f"{text!r} is two mentions")
            if shared and mention.entity == other.entity:
                faults.append(f"{text!r} contains itself")
    return faults


RULES: tuple[Callable[[Sentence], list[str]], ...] = (
    tree, projective, labels, attachments, clauses, spelling, mentions
)  # fmt: skip


@pytest.fixture(scope="module")
def documents() -> tuple[Document, ...]:
    return annotate.ours()


def test_every_sentence_keeps_every_rule(documents: tuple[Document, ...]) -> None:
    faults = [
        f"{sentence.notes['sent_id']}, {rule.__name__}: {fault}"
        for document in documents
        for sentence in document.sentences
        for rule in RULES
        for fault in rule(sentence)
    ]
    assert faults == []


def changed(sentence: Sentence, i: int, **fields: object) -> Sentence:
    return replace(
        sentence, words=(*sentence.words[:i], replace(sentence.words[i], **fields), *sentence.words[i + 1 :])
    )


def test_planted_faults_are_seen(documents: tuple[Document, ...]) -> None:
    """In: The agent opened a pull request because its tests were green."""
    [sentence] = documents[0].sentences
    assert sentence.text == "The agent opened a pull request because its tests were green."
    first, second, third = sentence.mentions
    planted = [
        (tree, changed(sentence, 0, head=None)),
        (tree, changed(sentence, 2, head=10, relation="advcl")),
        (projective, changed(sentence, 7, head=1)),
        (projective, replace(sentence, notes={"nonprojective": "yes"})),
        (labels, changed(sentence, 1, upos="NN")),
        (labels, changed(sentence, 1, relation="subj")),
        (labels, changed(sentence, 0, upos="ADJ")),
        (labels, changed(sentence, 11, relation="dep")),
        (attachments, changed(sentence, 0, head=2)),
        (attachments, changed(sentence, 6, head=7)),
        (attachments, changed(sentence, 8, head=9)),
        (clauses, changed(sentence, 8, head=2)),
        (clauses, changed(sentence, 1, relation="nsubj:pass")),
        (clauses, changed(sentence, 6, relation="cc")),
        (clauses, changed(sentence, 1, relation="conj")),
        (spelling, changed(sentence, 3, start=16)),
        (spelling, replace(sentence, text=sentence.text.replace("pull request", "pull  request"))),
        (spelling, replace(sentence, words=sentence.words[:-1])),
        (mentions, replace(sentence, mentions=(replace(first, words=(0, 1, 2, 3)),))),
        (mentions, replace(sentence, mentions=(replace(first, words=(0, 1, 2)),))),
        (mentions, replace(sentence, mentions=(first, replace(first, words=(1, 2, 3, 4, 5))))),
        (mentions, replace(sentence, mentions=(first, first))),
        (mentions, replace(sentence, mentions=(second, replace(third, entity="e2")))),
    ]
    for n, (rule, wrong) in enumerate(planted):
        assert rule(wrong), (n, rule.__name__)
        assert rule(sentence) == []


def test_there_is_enough_of_everything(documents: tuple[Document, ...]) -> None:
    sentences = [sentence for document in documents for sentence in document.sentences]
    assert len(sentences) >= 60 and len({s.notes["sent_id"] for s in sentences}) == len(sentences)
    assert len({s.text for s in sentences}) == len(sentences)
    counts = Counter(w.relation for s in sentences for w in s.words)
    least = {
        "det": 150, "nsubj": 100, "obj": 60, "case": 80, "amod": 15, "nmod:poss": 12, "nsubj:pass": 6, "aux:pass": 6,
        "nummod": 10, "conj": 40, "advcl": 40, "mark": 40, "iobj": 4, "acl:relcl": 10, "ccomp": 5, "xcomp": 4,
        "cop": 15,
    }  # fmt: skip
    assert {name: counts[name] for name, n in least.items() if counts[name] < n} == {}
    several = [s for s in sentences if sum(w.relation in ("advcl", "ccomp", "acl:relcl", "conj") for w in s.words) > 2]
    assert len(several) >= 10
    longer = [d for d in documents if len(d.sentences) > 1]
    assert len(longer) >= 5
    for document in longer:  # an entity of one sentence comes again in another
        where = Counter(entity for s in document.sentences for entity in {m.entity for m in s.mentions})
        assert max(where.values()) > 1, document.name
    assert any(m.last - m.first + 1 > len(m.words) for s in sentences for m in s.mentions)


def test_pronouns_are_resolved(documents: tuple[Document, ...]) -> None:
    """Every personal pronoun of the third person is a mention, and its entity has another one before or after it."""
    free = {"it", "they", "them"}  # it rains
    for document in documents:
        entities = Counter(m.entity for s in document.sentences for m in s.mentions)
        for s in document.sentences:
            for i, word in enumerate(s.words):
                if word.text.lower() in ("he", "him", "his", "she", "her", "it", "its", "they", "them", "their"):
                    own = [m for m in s.mentions if m.words == (i,)]
                    lone = word.text in free and s.words[word.head or 0].text == "rain"
                    assert lone or (own and entities[own[0].entity] > 1), (s.text, word.text)


def test_two_names_and_a_gift(documents: tuple[Document, ...]) -> None:
    """The answer ends the sentence and occurs once before; the other name occurs twice."""
    gifts = [s for d in documents for s in d.sentences if "answer" in s.notes]
    assert len(gifts) >= 12
    for sentence in gifts:
        answer, other = sentence.notes["answer"], sentence.notes["other"]
        names = [w.text for w in sentence.words if w.upos == "PROPN"]
        assert names[-1] == answer and sorted(names) == sorted([answer] * 2 + [other] * 2)
        assert sentence.text.endswith(f" to {answer}.")
        of = {w: {m.entity for m in sentence.mentions for i in m.words if sentence.words[i].text == w} for w in names}
        assert all(len(entities) == 1 for entities in of.values()) and of[answer] != of[other]
    firsts = Counter(next(w.text for w in s.words if w.upos == "PROPN") == s.notes["answer"] for s in gifts)
    assert min(firsts.values()) >= 4  # the answer is the first name or the second


def test_pairs_differ_in_who_is_meant(documents: tuple[Document, ...]) -> None:
    pairs: dict[str, list[str]] = {}
    for document in documents:
        if document.name.startswith("pair-"):
            [sentence] = document.sentences
            [pronoun] = [m for m in sentence.mentions if sentence.words[m.first].upos == "PRON"]
            pairs.setdefault(document.name[:-2], []).append(pronoun.entity)
    assert len(pairs) >= 5 and all(sorted(meant) == ["e1", "e2"] for meant in pairs.values())
