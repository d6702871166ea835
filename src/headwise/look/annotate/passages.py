"""Passages for a model from annotated documents and a tokenizer: token ids, and links between tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...shapes.arguments import check_counts, shown
from ..roles.call_tokens import Passage
from .words import Document, Sentence, aligned

NO_CLASS = {"", "PUNCT", "SYM", "X"}
"""Word classes that carry no information about the word."""

PARTS = {"compound", "flat", "fixed", "goeswith"}
"""Relations of words that are parts of another word's name."""


def passages(
    documents: Sequence[Document], tokenizer: Callable[..., Any], *, length: int | None = None
) -> list[Passage]:
    """Return a passage for each document, for ``readings={"sentences": ...}`` of `headwise.look.at` and `over`.

    As a query a word is its last token, the first that can attend to the whole word; as a key it is all its tokens.
    The links are

    - ``"nsubj to head"``, ``"head to nsubj"`` and so on: a word and its syntactic head, in both directions;
    - ``"same word class"``: a word and all others of its class (UPOS), without punctuation;
    - ``"coreference"``: the head of a mention and the heads of earlier mentions of its entity. Mentions are left out
      if an antecedent is the same word, which a duplicate-token head would find, or if there is no other earlier
      candidate. ``"mentions"`` are all candidates: the earlier nouns, names and mentions; ``"nearest noun"`` is the
      last of them that is a noun or a name;
    - ``"name mover"``: in sentences with the notes ``answer`` and ``other``, which become passages of their own, cut
      before the answer: the last token and the answer's name. ``"other name"`` is the name that does not come next.

    Args:
        documents: from `read`, `parse`, `from_spacy` or `ours`.
        tokenizer: the model's tokenizer. Like the fast ones of transformers,
            ``tokenizer(text, return_offsets_mapping=True)`` returns a mapping with ``input_ids`` and
            ``offset_mapping``.
        length: the most tokens of a passage; a longer document is divided between its sentences, and a longer
            sentence is left out.

    Raises:
        TypeError: documents of another type, or a tokenizer that cannot be called.
        ValueError: the tokenizer returns no offsets, like the slow ones.

    Example:
        >>> from headwise.look.annotate import Word
        >>> words = (Word("It", 0, 2, "PRON", 1, "nsubj"), Word("works", 3, 8, "VERB", None, "root"))
        >>> def tokenizer(text, return_offsets_mapping):
        ...     return {"input_ids": [1, 11, 13, 17], "offset_mapping": [(0, 0), (0, 2), (2, 6), (6, 8)]}
        >>> [passage] = passages([Document((Sentence("It works", words),))], tokenizer)
        >>> passage.links["head to nsubj"], passage.links["nsubj to head"]
        ([[], [], [], [1]], [[], [2, 3], [], []])
    """
    if length is not None:
        check_counts(1, length=length)
    if not callable(tokenizer):
        raise TypeError(f"tokenizer is called as tokenizer(text, return_offsets_mapping=True); got {shown(tokenizer)}")
    if not isinstance(documents, (list, tuple)):
        raise TypeError(f"documents are a list of headwise.look.annotate.Document; got {shown(documents)}")
    made = []
    for document in documents:
        if not isinstance(document, Document):
            raise TypeError(f"passages are made of headwise.look.annotate.Document; got {shown(document)}")
        for text in _fitting(document, tokenizer, length):
            made.append(Passage(text.ids, links=_links(text)))
        for sentence in document.sentences:
            prompt = _prompt(sentence, tokenizer, length) if {"answer", "other"} <= {*sentence.notes} else None
            if prompt is not None:
                made.append(prompt)
    return made


@dataclass(frozen=True)
class _Tokens:
    """A tokenized text: token ids, and the tokens of each word."""

    sentence: Sentence
    ids: list[int]
    of: list[list[int]]

    @classmethod
    def read(cls, source: Sentence | Document, tokenizer: Callable[..., Any]) -> _Tokens:
        """Tokenize a text and find the tokens of each word."""
        try:
            encoded = tokenizer(source.text, return_offsets_mapping=True)
            ids, offsets = [int(i) for i in encoded["input_ids"]], encoded["offset_mapping"]
        except (NotImplementedError, KeyError, TypeError) as error:
            said = " ".join(str(error).split())[:120]
            raise ValueError(
                f"the tokenizer {type(tokenizer).__name__} gives no offsets ({said}); take the fast one: "
                "AutoTokenizer.from_pretrained(name, use_fast=True)"
            ) from None
        sentence = source.joined() if isinstance(source, Document) else source
        of: list[list[int]] = [[] for _ in sentence.words]
        for token, word in enumerate(aligned(sentence, offsets)):
            if word is not None:
                of[word].append(token)
        return cls(sentence, ids, of)

    def linked(self, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
        """Return the linked tokens of each token, from pairs of words; words without tokens are left out."""
        rows: list[set[int]] = [set() for _ in self.ids]
        for query, key in pairs:
            if self.of[query]:
                rows[self.of[query][-1]].update(self.of[key])
        return [sorted(row) for row in rows]


def _fitting(document: Document, tokenizer: Callable[..., Any], length: int | None) -> list[_Tokens]:
    """Return the document, divided into parts that fit `length`."""
    if not document.sentences:
        return []
    text = _Tokens.read(document, tokenizer)
    if length is None or len(text.ids) <= length:
        return [text]
    half = len(document.sentences) // 2
    if half == 0:
        return []
    parts = (document.sentences[:half], document.sentences[half:])
    return [text for part in parts for text in _fitting(replace(document, sentences=part), tokenizer, length)]


def _links(text: _Tokens) -> Mapping[str, Sequence[Sequence[int]]]:
    """Return all links of an annotated text, without empty ones."""
    words = text.sentence.words
    pairs: dict[str, list[tuple[int, int]]] = {}
    for i, word in enumerate(words):
        if word.head is not None:
            pairs.setdefault(f"{word.relation} to head", []).append((i, word.head))
            pairs.setdefault(f"head to {word.relation}", []).append((word.head, i))
    classes: dict[str, list[int]] = {}
    for i, word in enumerate(words):
        if word.upos not in NO_CLASS:
            classes.setdefault(word.upos, []).append(i)
    pairs["same word class"] = [(i, j) for same in classes.values() for i in same for j in same if i != j]
    links = {name: text.linked(some) for name, some in {**pairs, **_antecedents(text.sentence)}.items()}
    if "nearest noun" in links:
        links["nearest noun"] = [row[-1:] for row in links["nearest noun"]]
    return {name: rows for name, rows in links.items() if any(rows)}


def _antecedents(sentence: Sentence) -> dict[str, list[tuple[int, int]]]:
    """Return pairs of words: a mention's head with its antecedents, with all candidates, and with the nearest noun."""
    words = sentence.words
    heads: dict[int, set[str]] = {}
    inside: dict[int, set[int]] = {}
    for mention in sentence.mentions:
        head = sentence.head_of(mention)
        heads.setdefault(head, set()).add(mention.entity)
        inside.setdefault(head, set()).update(mention.words)
    nouns = [i for i, word in enumerate(words) if word.upos in ("NOUN", "PROPN") and word.relation not in PARTS]
    links: dict[str, list[tuple[int, int]]] = {"coreference": [], "mentions": [], "nearest noun": []}
    for head, entities in heads.items():
        before = [i for i in sorted({*nouns, *heads}) if i < head and i not in inside[head]]
        right = [i for i in before if heads.get(i, set()) & entities]
        repeated = any(words[i].text.lower() == words[head].text.lower() for i in right)
        if right and len(right) < len(before) and not repeated:
            links["coreference"] += [(head, i) for i in right]
            links["mentions"] += [(head, i) for i in before]
            links["nearest noun"] += [(head, i) for i in before if i in nouns][-1:]
    return links


def _prompt(sentence: Sentence, tokenizer: Callable[..., Any], length: int | None) -> Passage | None:
    """Return the sentence up to its answer, the last token linked to the names; None if a name does not occur."""
    answer, other = sentence.notes["answer"], sentence.notes["other"]
    places = [i for i, word in enumerate(sentence.words) if word.text == answer]
    if len(places) < 2:
        return None
    words = sentence.words[: places[-1]]
    text = _Tokens.read(Sentence(sentence.text[: words[-1].end], words), tokenizer)
    if length is not None and len(text.ids) > length:
        return None
    last = len(words) - 1
    names = {"name mover": answer, "other name": other}
    links = {
        name: text.linked((last, i) for i, word in enumerate(words) if word.text == of) for name, of in names.items()
    }
    return Passage(text.ids, links=links) if all(any(rows) for rows in links.values()) else None
