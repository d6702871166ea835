"""Annotated text as plain records, and the word of each token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...shapes.arguments import shown


@dataclass(frozen=True)
class Word:
    """One word of a sentence.

    Attributes:
        text: the word.
        start: its first character in the sentence's text.
        end: one past its last character. Words that were written as one ("don't") and cannot be separated have the
            same start and end.
        upos: its Universal Dependencies word class: NOUN, VERB, ...; empty without annotation.
        head: the index of its syntactic head in the sentence's words; None for the root, and without annotation.
        relation: its relation to the head: nsubj, det, ...; "root" for the root, empty without annotation.
    """

    text: str
    start: int
    end: int
    upos: str = ""
    head: int | None = None
    relation: str = ""


@dataclass(frozen=True)
class Mention:
    """Words that refer to an entity; mentions of one entity share its name within a document.

    Attributes:
        entity: the name of the entity.
        words: indices in the sentence's words, in order; with a gap if the mention has one.
        kind: the annotated kind of the entity (person, object, ...); may be empty.
    """

    entity: str
    words: tuple[int, ...]
    kind: str = ""

    @property
    def first(self) -> int:
        """The index of the first word."""
        return self.words[0]

    @property
    def last(self) -> int:
        """The index of the last word."""
        return self.words[-1]


@dataclass(frozen=True)
class Sentence:
    """One sentence of an annotated text.

    Attributes:
        text: the text as written.
        words: the words in order.
        mentions: sorted by first word, longer ones first.
        notes: the annotation of the whole sentence: CoNLL-U's comments, by name.
        after: the characters between this sentence and the next.
    """

    text: str
    words: tuple[Word, ...]
    mentions: tuple[Mention, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    after: str = " "

    def head_of(self, mention: Mention) -> int:
        """Return the index of the mention's first word whose syntactic head is outside the mention."""
        inside = set(mention.words)
        return next((i for i in mention.words if self.words[i].head not in inside), mention.first)


@dataclass(frozen=True)
class Document:
    """The sentences of one text, in which the names of entities are shared.

    Attributes:
        sentences: the sentences in order.
        name: the name of the document; may be empty.
    """

    sentences: tuple[Sentence, ...]
    name: str = ""

    @property
    def text(self) -> str:
        """The sentences and the characters between them."""
        return "".join(s.text + s.after for s in self.sentences[:-1]) + "".join(s.text for s in self.sentences[-1:])

    def joined(self) -> Sentence:
        """Return the document as one sentence, with positions and heads counted through it; several roots are possible.

        Example:
            >>> first = Sentence("A dog.", (Word("A", 0, 1, head=1), Word("dog", 2, 5), Word(".", 5, 6, head=1)))
            >>> second = Sentence("It ran.", (Word("It", 0, 2, head=1), Word("ran", 3, 6), Word(".", 6, 7, head=1)))
            >>> whole = Document((first, second)).joined()
            >>> whole.text, whole.words[3]
            ('A dog. It ran.', Word(text='It', start=7, end=9, upos='', head=4, relation=''))
        """
        words: list[Word] = []
        mentions: list[Mention] = []
        place = 0
        for sentence in self.sentences:
            by = len(words)
            words += [
                replace(w, start=w.start + place, end=w.end + place, head=None if w.head is None else w.head + by)
                for w in sentence.words
            ]
            mentions += [replace(m, words=tuple(i + by for i in m.words)) for m in sentence.mentions]
            place += len(sentence.text) + len(sentence.after)
        return Sentence(self.text, tuple(words), tuple(mentions), {"newdoc id": self.name} if self.name else {}, "")


def aligned(source: Sentence | Document, offsets: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """Return the word of each token, by the number of shared characters.

    Whitespace is not part of a word, so a token that includes the space before a word, or a mark for it, belongs to
    that word. A token inside a word belongs to the word, and so does each byte token of a divided character. A token
    across several words belongs to the word with the most shared characters, the first one on ties. A token without
    characters, such as a special token, or of whitespace only, belongs to no word.

    Args:
        source: the tokenized text: `source.text`, complete.
        offsets: the start and end of each token in the characters of the text, as tokenizers of transformers return
            them: ``tokenizer(source.text, return_offsets_mapping=True)["offset_mapping"]``.

    Returns:
        The index of the word of each token (for a document: in ``source.joined().words``), or None.

    Raises:
        TypeError: the offsets are not pairs of ints.
        ValueError: the offsets are outside this text.

    Example:
        >>> sentence = Sentence("unknown dog", (Word("unknown", 0, 7), Word("dog", 8, 11)))
        >>> aligned(sentence, [(0, 0), (0, 2), (2, 7), (7, 11), (0, 0)])
        (None, 0, 0, 1, None)
    """
    if not isinstance(source, (Sentence, Document)):
        raise TypeError(f"aligned takes a Sentence or a Document of headwise.look.annotate; got {shown(source)}")
    offsets = offsets.tolist() if hasattr(offsets, "tolist") else offsets  # a tensor, an array
    if isinstance(offsets, (str, bytes)) or not isinstance(offsets, Sequence):
        raise TypeError(f"offsets are a list with the start and end of each token; got {shown(offsets)}")
    whole = source.joined() if isinstance(source, Document) else source
    starts = [word.start for word in whole.words]
    return tuple(_word_at(whole, starts, *_span(whole.text, place, pair)) for place, pair in enumerate(offsets))


def _span(text: str, place: int, pair: Any) -> tuple[int, int]:
    """Return the start and end of a token's characters, after a check."""
    try:
        start, end = pair
    except (TypeError, ValueError):
        start = end = None
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in (start, end)):
        raise TypeError(
            f"offsets are pairs of ints, the start and end of each token; got {shown(pair)} for token {place}; call "
            "the tokenizer with return_offsets_mapping=True"
        )
    if not 0 <= start <= end <= len(text):
        raise ValueError(
            f"token {place} covers the characters {start} to {end}, but the text has {len(text)}; tokenize the text of "
            "the sentence itself"
        )
    return start, end


def _word_at(whole: Sentence, starts: Sequence[int], start: int, end: int) -> int | None:
    """Return the word that shares the most characters with the token, or None."""
    best, most = None, 0
    first = bisect_right(starts, start) - 1
    while first > 0 and whole.words[first - 1].end > start:  # words written as one share their start
        first -= 1
    for i in range(max(first, 0), len(whole.words)):
        word = whole.words[i]
        if word.start >= end:
            break
        covered = min(end, word.end) - max(start, word.start)
        if covered > most:
            best, most = i, covered
    return best
