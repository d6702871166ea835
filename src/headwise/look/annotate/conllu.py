"""Annotation from CoNLL-U, by the library `conllu`: words and Universal Dependencies, and coreference in MISC.

The format: https://universaldependencies.org/format.html.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...extras import missing_extra
from ...shapes.arguments import check_texts, shown
from .coreference import Order, mentions_of
from .words import Document, Sentence, Word

MAX_SIZE = 64_000_000
"""Bytes of a file, and characters of a text, that are read at most."""

MAX_WORDS = 4096
"""Words that a sentence has at most; the longest of the published treebanks have fewer than 1000."""

OURS = Path(__file__).with_name("sentences.conllu")
_FORMAT = "see https://universaldependencies.org/format.html"


def ours() -> tuple[Document, ...]:
    """Return the sentences that come with headwise, annotated by hand; those of two names and a gift have an answer.

    Of these, ``sentence.notes["answer"]`` is the name that ends them and ``notes["other"]`` the name that does not.

    Raises:
        MissingExtra: the library conllu is not installed.
    """
    return read(OURS)


def read(path: str | os.PathLike[str]) -> tuple[Document, ...]:
    """Return the documents of a CoNLL-U file, in UTF-8: see `parse`.

    Raises:
        MissingExtra: the library conllu is not installed.
        ValueError: the file cannot be read, is larger than 64 MB, no UTF-8, or no CoNLL-U: the text says in which line.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"read takes the path of a CoNLL-U file; got {shown(path)}")
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        said = getattr(error, "strerror", None) or error
        raise ValueError(f"{path!r} cannot be read ({said}); give the path of a CoNLL-U file") from None
    if len(content) > MAX_SIZE:
        raise ValueError(f"{path}: annotation is read up to {MAX_SIZE // 10**6} MB, and the file is larger; split it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: CoNLL-U is UTF-8 text, and this is not; convert the file") from None
    return parse(text, name=str(path))


def parse(text: str, *, name: str = "CoNLL-U") -> tuple[Document, ...]:
    """Return the documents of a CoNLL-U text: one for each ``# newdoc``, or a single one.

    Read are words, UPOS, HEAD and DEPREL, comments with a value (as notes), and mentions, from the brackets of
    ``Entity`` in MISC as CorefUD writes them: ``Entity=(e1-person-2`` opens a mention of e1, ``Entity=e1)`` closes it,
    ``Entity=(e1-person-1)`` does both, and ``e1[1/2]`` is the first of two parts. Where ``# text`` is, it says where
    the words are; otherwise SpaceAfter=No does. Empty nodes are left out, and mentions that consist of them alone.

    Args:
        text: of the file.
        name: what errors call it.

    Raises:
        MissingExtra: the library conllu is not installed.
        ValueError: no CoNLL-U; the text says in which line.

    Example:
        >>> lines = ["1 It _ PRON _ _ 2 nsubj _ Entity=(e1-thing-1)", "2 works _ VERB _ _ 0 root _ _"]
        >>> [document] = parse("\\n".join(line.replace(" ", "\\t") for line in lines))
        >>> document.text, document.sentences[0].words[0].relation, document.sentences[0].mentions[0].entity
        ('It works', 'nsubj', 'e1')
    """
    check_texts(text=text, name=name)
    if len(text) > MAX_SIZE:
        raise ValueError(f"{name}: annotation is read up to {MAX_SIZE // 10**6} MB, and this is longer; split it")
    documents: list[tuple[str, list[Sentence]]] = []
    order = Order()
    for block in _blocks(text, name):
        notes = block.parsed()
        if not documents or "newdoc" in notes or "newdoc id" in notes:
            documents.append((notes.get("newdoc id") or notes.get("newdoc") or "", []))
        if "global.Entity" in notes:
            order = Order.of(notes["global.Entity"])
        documents[-1][1].append(_sentence(block, notes, order))
    return tuple(Document(tuple(sentences), of) for of, sentences in documents)


@dataclass
class _Block:
    """The lines of a sentence: where they stand, and once parsed, the library's token of each with its line."""

    name: str
    first: int
    lines: list[str]
    tokens: list[tuple[int, Any]] = field(default_factory=list)

    def wrong(self, line: int, what: str) -> ValueError:
        """Return the error of a line: its number, and what is wrong with it."""
        return ValueError(f"{self.name}, line {line}: {what}")

    def parsed(self) -> dict[str, str]:
        """Fill `tokens`; the comments by their names."""
        notes: dict[str, str] = {}
        for number, line in enumerate(self.lines, self.first):
            if line.strip().startswith("#"):
                key, equals, value = line.strip()[1:].partition("=")
                if equals or key.strip() == "newdoc":
                    notes[key.strip()] = value.strip()
            else:
                self.tokens.append((number, self._token(number, line)))
        if not self.tokens:
            raise self.wrong(
                self.first, "a sentence has a line for each word, and these are comments alone; delete them"
            )
        if len(self.tokens) > MAX_WORDS:
            raise self.wrong(self.first, f"a sentence has at most {MAX_WORDS} words, got {len(self.tokens)}; split it")
        return notes

    def _token(self, number: int, line: str) -> Any:
        """Return what the library reads in a line."""
        try:
            import conllu
            from conllu.exceptions import ParseException
        except ImportError as error:
            raise missing_extra("reading CoNLL-U", "look", error) from None
        columns = line.split("\t")
        if len(columns) != 10:
            rule = "a word has 10 columns with tabs between them"
            raise self.wrong(number, f"{rule}, got {len(columns)}; write _ for a column without a value")
        if not all(column.strip() for column in columns) or "  " in line:
            raise self.wrong(number, "a column is neither empty nor holds two spaces in a row; write _ or one space")
        try:
            [[token]] = conllu.parse(line, field_parsers={"misc": _misc})
        except (ParseException, ValueError) as error:
            said = repr(" ".join(str(error).split())[:120])[1:-1].rstrip(".")
            raise self.wrong(number, f"{said}; {_FORMAT}") from None
        if token["id"] is None:
            raise self.wrong(
                number, f"ID is 1, 2, ..., a range such as 1-2, or 1.1 for an empty node; got _; {_FORMAT}"
            )
        return token


def _blocks(text: str, name: str) -> Iterator[_Block]:
    """Yield the sentences' lines: empty lines stand between them."""
    lines: list[str] = []
    for number, line in enumerate([*text.removeprefix("\ufeff").split("\n"), ""], 1):
        line = line.rstrip("\r")
        if line.strip():
            lines.append(line)
        elif lines:
            yield _Block(name, number - len(lines), lines)
            lines = []


def _misc(line: list[str], column: int) -> dict[str, str]:
    """MISC as a dict; a value may hold '='."""
    pairs = (pair.partition("=") for pair in line[column].split("|") if pair != "_")
    return {key: value for key, _, value in pairs}


def _sentence(block: _Block, notes: Mapping[str, str], order: Order) -> Sentence:
    """Return a sentence from the library's tokens."""
    words = [(number, token) for number, token in block.tokens if isinstance(token["id"], int)]
    for i, (number, token) in enumerate(words, 1):
        if token["id"] != i:
            raise block.wrong(number, f"words are counted 1, 2, 3, ...; got {token['id']} where {i} is due")
        head = token["head"]
        if head is not None and (not 0 <= head <= len(words) or head == i):
            rule = f"HEAD is 0 for the root, or another of the {len(words)} words"
            raise block.wrong(number, f"{rule}; got {head} for word {i}; write _ where there is none")
    text, spans, spaced = _spans(block, notes)
    made = tuple(
        Word(
            token["form"],
            *span,
            _held(token["upos"]),
            token["head"] - 1 if token["head"] else None,
            _held(token["deprel"]),
        )
        for (_, token), span in zip(words, spans, strict=True)
    )
    return Sentence(text, made, mentions_of(block.tokens, order, block.wrong), dict(notes), " " if spaced else "")


def _held(value: str) -> str:
    """Return a column's value, empty where it is '_'."""
    return "" if value == "_" else value


def _spans(block: _Block, notes: Mapping[str, str]) -> tuple[str, list[tuple[int, int]], bool]:
    """Return the text, where each word is in it, and whether a space follows.

    What was written stands in the lines of words, or of ranges of words ("don't", 1-2). A range whose words make it up
    one after the other is divided; otherwise each of its words has all of it.
    """
    written: list[tuple[int, Any, list[str]]] = []
    until = 0
    for number, token in block.tokens:
        at = token["id"]
        if isinstance(at, int) and at <= until:
            written[-1][2].append(token["form"])
        elif isinstance(at, int):
            written.append((number, token, [token["form"]]))
        elif at[1] == "-":
            written.append((number, token, []))
            until = at[2]
    spaces = [token["misc"].get("SpaceAfter") != "No" for _, token, _ in written]
    joined = "".join(token["form"] + " " * space for (_, token, _), space in zip(written, spaces, strict=True))
    text = notes.get("text") or joined.rstrip()
    spans: list[tuple[int, int]] = []
    place = 0
    for number, token, forms in written:
        while place < len(text) and text[place].isspace():
            place += 1
        if not text.startswith(token["form"], place):
            follows = shown(text[place : place + 20])
            rule = "the words make up '# text', in order"
            raise block.wrong(
                number, f"{rule}; got {shown(token['form'])} where it goes on with {follows}; correct one"
            )
        if not forms:
            raise block.wrong(number, f"a range of words stands before its words; {shown(token['form'])} has none")
        end, whole = place + len(token["form"]), "".join(forms) == token["form"]
        for form in forms:
            spans.append((place, place + len(form)) if whole else (place, end))
            place += len(form) if whole else 0
        place = end
    return text, spans, bool(spaces) and spaces[-1]
