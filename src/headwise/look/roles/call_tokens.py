"""The input of one forward pass, and the tokens at the queries and keys of a call."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...nn.hooks.probe import AttentionCall
from ...shapes.arguments import shown, whole_numbers
from ..inputs.repeated_tokens import Repeated
from ..records.axes import TEXT, Axis

T = TypeVar("T")

Links = Mapping[str, Sequence[Sequence[int]]]
"""name -> for each token the positions of its linked tokens."""


@dataclass(frozen=True)
class Passage:
    """One text for the model.

    Attributes:
        ids: the token ids, special ones included.
        links: by name, for each token, the positions of the tokens that a head of that role would attend to.
        classes: by name, the positions of the tokens of a class.
        copies: the repetitions of its ids, for repeated random tokens.
        text: the index of the text, from 0; the bootstrap draws texts.
    """

    ids: Sequence[int]
    links: Links = field(default_factory=dict)
    classes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    copies: Repeated | None = None
    text: int = 0


@dataclass(frozen=True)
class Vocabulary:
    """Classes of token ids, independent of their positions in a text.

    Attributes:
        delimiters: ids that separate clauses: ``. , ; : ! ?`` and newlines, or the caller's choice.
        punctuation: ids whose text is only punctuation.
        special: the special ids of the model's config or tokenizer: [CLS], [SEP], <s>, ...
        stops: ids whose text is ``.``.
        commas: ids whose text is ``,``.
        separators: ids that end a sentence for the model: [SEP].
    """

    delimiters: frozenset[int] = frozenset()
    punctuation: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    stops: frozenset[int] = field(default=frozenset(), repr=False)
    commas: frozenset[int] = field(default=frozenset(), repr=False)
    separators: frozenset[int] = field(default=frozenset(), repr=False)

    @classmethod
    def of(
        cls, names: Sequence[str], *, delimiters: Collection[int] | None = None, special: Collection[int] = ()
    ) -> Vocabulary:
        """Return the vocabulary of a tokenizer from the tokens of its ids, in order.

        Raises:
            TypeError: the names are not strings, or the ids are not integers.

        >>> Vocabulary.of(["<s>", "a", "\u0120.", "(", "\u010a"], special=[0])
        Vocabulary(delimiters=frozenset({2}), punctuation=frozenset({2, 3}), special=frozenset({0}))
        """
        if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
            raise TypeError(f"names are what a tokenizer calls its ids, a list of strings; got {shown(names)}")
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"names are strings, one an id; got {shown(names)}")
        return classes_of([*enumerate(names)], delimiters, id_set("special", special))


def classes_of(
    pairs: Sequence[tuple[int, str]], delimiters: Collection[int] | None, special: frozenset[int]
) -> Vocabulary:
    """Return the classes of ids from (id, token); without `delimiters`, those are `MARKS`."""

    def spelt(marks: Collection[str]) -> frozenset[int]:
        return frozenset(i for i, token in pairs if token.strip(BLANKS) in marks)

    chosen = spelt(MARKS) if delimiters is None else id_set("delimiters", delimiters)
    punctuation = frozenset(i for i, token in pairs if i not in special and is_punctuation(token))
    named = frozenset(i for i, token in pairs if token == "[SEP]")
    return Vocabulary(chosen, punctuation, special, spelt({"."}), spelt({","}), (chosen & special) | named)


def id_set(name: str, ids: Collection[int]) -> frozenset[int]:
    """Return a collection of ids, of any type, as a frozenset."""
    return frozenset(whole_numbers(name, [*ids] if isinstance(ids, Set) else ids))


TEXTS = Axis(TEXT, 0)
"""The axis of any text."""

FIRST, SECOND = "first sentence", "second sentence"
"""The classes of the tokens in a pair of sentences."""

MARKS = frozenset(".,;:!?\n")
BLANKS = " \u0120\u2581"
"""A blank, and its marks in byte-level and SentencePiece tokenizers."""


def is_punctuation(token: str) -> bool:
    """Return whether a token's text is only punctuation, apart from blanks.

    >>> is_punctuation(" ("), is_punctuation("x)"), is_punctuation(" ")
    (True, False, False)
    """
    text = token.strip(BLANKS)
    return bool(text) and all(unicodedata.category(letter).startswith("P") for letter in text)


NameSigns = Callable[[AttentionCall, Tensor], Tensor | None]
"""Returns (B, H, S) for the keys of a call with these tokens: 1 where a value raises the name's logit, -1 where it
lowers it; None if that is not known.
"""


class Kept:
    """What is computed once and kept under a name, in the field `kept`."""

    kept: dict[object, Any]

    def once(self, name: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed at the first time."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


@dataclass(frozen=True)
class CallTokens(Kept):
    """The tokens at the queries and keys of a call; `once` computes for all layers of the forward pass."""

    queries: Tensor  # (B, T) ids
    keys: Tensor  # (B, S) ids
    ahead: bool | None  # whether a query may attend to later positions; None in cross-attention, of two texts
    words: Vocabulary
    passages: tuple[Passage, ...]  # the B texts
    moved: tuple[int, int] = (0, 0)  # the shifts of queries and keys from the passage: 1 behind a decoder's start token
    known: bool = True  # whether the queries and keys are the passages' tokens; some models attend to other inputs
    usual: Mapping[str, int] = field(default_factory=dict)  # `usual_distances` over all passages
    axes: tuple[Axis, Axis] = (TEXTS, TEXTS)
    among: Tensor | None = None  # (B, T) bool: the queries that count; None for all of them
    copying: NameSigns | None = None  # what heads do to the logits of the names in the passages, if that is known
    kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the query and key axes."""
        return frozenset(axis.kind for axis in self.axes)

    def count(self, rows: Tensor) -> Tensor:
        """Return the number of the given queries, (B, T) bool, that count: (B, 1)."""
        return (rows if self.among is None else rows & self.among).sum(-1, keepdim=True).double()

    def of_class(self, name: str) -> Tensor:
        """Return (B, S) bool: the positions of a class, if the queries are the passages' tokens."""
        chosen = torch.zeros(self.queries.shape, dtype=torch.bool, device="cpu")
        for b, passage in enumerate(self.passages if self.known else ()):
            chosen[b, [*passage.classes.get(name, ())]] = True
        return chosen

    @property
    def cross(self) -> bool:
        """True for cross-attention."""
        return self.ahead is None

    def keys_in(self, ids: frozenset[int]) -> Tensor:
        """Return (B, S) bool: the keys whose ids are in `ids`, without the first key, which is often a sink."""
        chosen = torch.isin(self.keys, torch.tensor(sorted(ids), dtype=self.keys.dtype, device="cpu"))
        chosen[:, :1] = False
        return chosen

    def links(self, name: str) -> Tensor | None:
        """Return the keys of each query by a link's name, (B, T, n) long, padded with -1; None without links.

        Key 0 is left out: in a model without a special first token the first word is the sink of most heads.
        """

        def make() -> Tensor | None:
            lists = [passage.links.get(name, ()) for passage in self.passages]
            if not self.known or not any(any(row) for row in lists):
                return None
            T, S = self.queries.shape[1], self.keys.shape[1]
            behind, before = self.moved
            rows: list[list[list[int]]] = [[[] for _ in range(T)] for _ in lists]
            for b, row in enumerate(lists):
                for i, keys in enumerate(row[: T - behind]):
                    kept = (j + before for j in keys if self.ahead is not False or j <= i)
                    rows[b][i + behind] = [j for j in kept if 0 < j < S]
            return padded(rows, max(len(keys) for row in lists for keys in row))

        return self.once(("links", name), make)


def padded(lists: Sequence[Sequence[Sequence[int]]], width: int | None = None) -> Tensor:
    """Return the keys of each query as (B, T, width) long, with -1 behind the last; the default is the widest."""
    width = max((len(keys) for rows in lists for keys in rows), default=0) if width is None else width
    rows = [[[*keys, *[-1] * (width - len(keys))] for keys in one] for one in lists]
    return torch.tensor(rows, dtype=torch.long, device="cpu").view(len(lists), len(lists[0]), width)


def usual_distances(passages: Sequence[Passage]) -> dict[str, int]:
    """Return by link the most frequent distance, query minus key; on ties the nearer, then the backward one.

    The entry ``"NAME, earlier"`` counts only earlier keys, for models whose queries only attend backward.

    >>> usual_distances([Passage([5, 6, 7], links={"object": [[1, 2], [2], [1]]})])
    {'object': -1, 'object, earlier': 1}
    """
    counts: dict[str, Counter[int]] = {}
    for passage in passages:
        for name, rows in passage.links.items():
            for i, keys in enumerate(rows):
                distances = [i - j for j in keys if i != j]
                counts.setdefault(name, Counter()).update(distances)
                counts.setdefault(f"{name}, earlier", Counter()).update(d for d in distances if d > 0)
    return {name: max(c, key=lambda d: (c[d], -abs(d), d)) for name, c in counts.items() if c}
