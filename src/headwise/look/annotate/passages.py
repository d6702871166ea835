"""Annotated documents as passages to look at: which tokens a head of each role would attend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...shapes.kinds import shown
from ..scene import Passage
from .words import Document, Sentence, aligned

Encode = Callable[[str], tuple[Sequence[int], Sequence[Sequence[int]]]]
"""A text -> its token ids, and for each the start and end of its characters."""

NOUNS = frozenset({"NOUN", "PROPN"})
Links = dict[str, list[list[int]]]


def passages(documents: Iterable[Document], encode: Encode) -> list[Passage]:
    """Each document as one passage, with its links, for ``readings={"sentences": ...}`` of `at` and `over`.

    A word acts as a query by its last token, which has read all of it, and as a key by all its tokens. The links:

    - ``"LABEL to head"``: from a word with this relation to its head; ``"head to LABEL"``: from a head to its
      dependents with it. A decoder's heads see those alone that stand before.
    - ``"same word class"``: to the other words of a word's class, punctuation aside.
    - ``"coreference"``: from the head word of a mention to those of earlier mentions of its entity; ``"mentions"``: to
      those of all earlier mentions, among which it chooses; ``"nearest noun"``: to the last noun before.
    - ``"name mover"``: in a sentence whose notes have an ``answer``, its last word: from the token before that to the
      earlier places of the name; ``"other name"``: to those of the name in the note ``other``.

    Args:
        documents: of `headwise.look.annotate.ours`, `read`, `parse` or `from_spacy`.
        encode: the model's tokenizer as a function: ids and character offsets, special tokens included.

    Raises:
        TypeError: something else than documents; an encode that cannot be called.
        ValueError: offsets that are none of the text.

    Example:
        >>> from headwise.look.annotate import parse
        >>> dog = "1\\tA\\t_\\tDET\\t_\\t_\\t2\\tdet\\t_\\t_\\n2\\tdog\\t_\\tNOUN\\t_\\t_\\t0\\troot\\t_\\t_\\n\\n"
        >>> [passage] = passages(parse(dog), lambda text: ([7, 8, 9], [(0, 1), (1, 3), (3, 5)]))
        >>> passage.links["det to head"], passage.links["head to det"]
        ([[1, 2], [], []], [[], [], [0]])
    """
    if not callable(encode):
        raise TypeError(f"encode is called with a text and gives its ids and offsets; got {shown(encode)}")
    out = []
    for n, document in enumerate(documents):
        if not isinstance(document, Document):
            raise TypeError(f"passages are made of headwise.look.annotate.Document; got {shown(document)}")
        whole = document.sentences[0] if len(document.sentences) == 1 else document.joined()
        ids, offsets = encode(document.text)
        out.append(Passage([int(i) for i in ids], links=_links(whole, aligned(document, offsets)), text=n))
    return out


def _links(whole: Sentence, at: Sequence[int | None]) -> Links:
    """The links of one text, by its words and the word of each token."""
    tokens: list[list[int]] = [[] for _ in whole.words]
    for place, word in enumerate(at):
        if word is not None:
            tokens[word].append(place)
    made = _Maker(len(at), tokens)
    _syntax(whole, made)
    _coreference(whole, made)
    _names(whole, made)
    return made.links


class _Maker:
    """Links between words, written down as links between tokens."""

    def __init__(self, length: int, tokens: Sequence[Sequence[int]]) -> None:
        self.length, self.tokens = length, tokens
        self.links: Links = {}

    def link(self, name: str, query: int, keys: Iterable[int]) -> None:
        """From the last token of a word to all tokens of others; nothing where the tokenizer left one of them out."""
        places = [place for key in keys for place in self.tokens[key]]
        if self.tokens[query] and places:
            self.rows(name)[self.tokens[query][-1]] += places

    def rows(self, name: str) -> list[list[int]]:
        """The keys of each token."""
        return self.links.setdefault(name, [[] for _ in range(self.length)])


def _syntax(whole: Sentence, made: _Maker) -> None:
    for i, word in enumerate(whole.words):
        if word.head is not None and word.relation and word.upos != "PUNCT":
            made.link(f"{word.relation} to head", i, [word.head])
            made.link(f"head to {word.relation}", word.head, [i])
        if word.upos and word.upos != "PUNCT":
            same = [j for j, other in enumerate(whole.words) if j != i and other.upos == word.upos]
            made.link("same word class", i, same)


def _coreference(whole: Sentence, made: _Maker) -> None:
    heads = [(mention.entity, whole.head_of(mention)) for mention in whole.mentions]
    heads.sort(key=lambda pair: pair[1])
    for n, (entity, word) in enumerate(heads):
        before = [(other, place) for other, place in heads[:n] if place < word]
        antecedents = [place for other, place in before if other == entity]
        if not antecedents:
            continue
        nouns = [j for j in range(word) if whole.words[j].upos in NOUNS]
        made.link("coreference", word, antecedents)
        made.link("mentions", word, sorted({place for _, place in before}))
        if nouns:
            made.link("nearest noun", word, nouns[-1:])


def _names(whole: Sentence, made: _Maker) -> None:
    answer, other = (whole.notes.get(name, "") for name in ("answer", "other"))
    places = [i for i, word in enumerate(whole.words) if answer and word.text == answer]
    if len(places) < 2:
        return
    end = places[-1] - 1  # the word before the name that comes next
    made.link("name mover", end, places[:-1])
    made.link("other name", end, [i for i in range(end) if whole.words[i].text == other])
