"""Mentions from the brackets of ``Entity`` in MISC, in the format of CorefUD: https://ufal.mff.cuni.cz/corefud."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...shapes.arguments import shown
from .words import Mention

MAX_MENTIONED = 1_000_000
"""The most words that all mentions of one sentence hold in total."""

_BRACKET = re.compile(r"(\(?)([^()]+)(\)?)")
_PART = re.compile(r"(.+)\[(\d{1,4})/(\d{1,4})\]")


class Wrong(ValueError):
    """What is wrong in a line of CoNLL-U."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")


Order = tuple[int, int]
"""The positions of the entity's name and kind among the hyphen-separated fields of an opening bracket."""


def order_of(declared: str) -> Order:
    """Return the order that ``# global.Entity`` gives: eid-etype-head-..., or GRP and entity in the older form."""
    names = declared.split("-")
    entity = next((n for n, name in enumerate(names) if name.lower() in ("eid", "grp")), 0)
    return entity, next((n for n, name in enumerate(names) if name in ("etype", "entity", "type")), len(names))


@dataclass
class _Open:
    """The open brackets and the complete mentions of a sentence."""

    opened: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)  # by label: line, first word, kind
    parts: dict[str, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)  # by entity: line, parts, words
    mentions: list[Mention] = field(default_factory=list)
    size: int = 0

    def close(self, label: str, number: int, last: int) -> None:
        """End a mention, or a part of one."""
        if not self.opened.get(label):
            raise Wrong(number, f"a bracket of Entity closes {shown(label)}, which is not open; open it before")
        _, first, kind = self.opened[label].pop()
        words, entity = tuple(range(first, last + 1)), label
        cut = _PART.fullmatch(label)
        if cut is not None:
            entity, part, parts = cut[1], int(cut[2]), int(cut[3])
            _, before, earlier = self.parts.pop(entity, (0, 0, ()))
            if part != before + 1:
                raise Wrong(number, f"parts of a mention come in order; got {shown(label)} behind {before} parts")
            words = earlier + words
            if part < parts:
                self.parts[entity] = number, part, words
        self.size += len(words)
        if self.size > MAX_MENTIONED:
            raise Wrong(number, f"the mentions of a sentence hold at most {MAX_MENTIONED} words; split it")
        if words and (cut is None or part >= parts):
            self.mentions.append(Mention(entity, words, kind))

    def check_closed(self) -> None:
        """Raise ValueError if the sentence ends before one of its mentions."""
        left = [(number, label) for label, several in self.opened.items() for number, *_ in several]
        left += [(number, f"{entity}[...]") for entity, (number, *_) in self.parts.items()]
        if left:
            number, label = min(left)
            raise Wrong(number, f"a mention of {shown(label)} does not end in its sentence; close its bracket")


def mentions_of(tokens: Sequence[Any], order: Order) -> tuple[Mention, ...]:
    """Return the mentions of a sentence, sorted by first word, longer ones first, from its tokens."""
    brackets = _Open()
    done = 0  # words so far: an empty node begins at the next word and ends at the last one
    for token in tokens:
        number, real = token["line"], isinstance(token["id"], int)
        if not real and token["id"][1] == "-":
            continue
        value = token["misc"].get("Entity", "")
        matches = list(_BRACKET.finditer(value))
        if "".join(match[0] for match in matches) != value or not all(match[1] or match[3] for match in matches):
            raise Wrong(number, f"Entity is brackets such as (e1-person-2, e1) or (e1-person-1); got {shown(value)}")
        for opens, label, closes in (match.groups() for match in matches):
            kind = ""
            if opens or label not in brackets.opened:  # some corpora repeat all fields in the closing bracket
                fields = label.split("-")
                label = fields[order[0]] if order[0] < len(fields) else fields[0]
                kind = fields[order[1]] if order[1] < len(fields) else ""
            if opens:
                brackets.opened.setdefault(label, []).append((number, done, kind))
            if closes:
                brackets.close(label, number, done if real else done - 1)
        done += real
    brackets.check_closed()
    return tuple(sorted(brackets.mentions, key=lambda mention: (mention.first, -mention.last)))
