"""CoNLL-U files, read with the library `conllu`: words, Universal Dependencies, and coreference in MISC.

The format: https://universaldependencies.org/format.html.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...extras import missing_extra
from ...shapes.arguments import check_texts, shown
from .coreference import Order, Wrong, mentions_of, order_of
from .words import Document, Sentence, Word

MAX_SIZE = 64_000_000
"""The largest file, in bytes, and the longest text, in characters, that is read."""

MAX_WORDS = 4096
"""The most words of one sentence; the longest sentences of the published treebanks have fewer than 1000."""

OURS = Path(__file__).with_name("sentences.conllu")
_FORMAT = "see https://universaldependencies.org/format.html"


def ours() -> tuple[Document, ...]:
    """Return the hand-annotated sentences included in headwise; some of them are prompts with an answer.

    These name two people and a gift: ``sentence.notes["answer"]`` is the name that ends the sentence, and
    ``notes["other"]`` is the name that does not.

    Raises:
        MissingExtra: the library conllu is not installed.
    """
    return read(OURS)


def read(path: str | os.PathLike[str]) -> tuple[Document, ...]:
    """Return the documents of a CoNLL-U file in UTF-8; `parse` describes the format.

    Raises:
        MissingExtra: the library conllu is not installed.
        ValueError: the file cannot be read, is larger than 64 MB, or is not UTF-8 or CoNLL-U (with the line number).
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
    r"""Return the documents of a CoNLL-U text: one for each ``# newdoc``, or a single one.

    The parser reads words, UPOS, HEAD and DEPREL, comments with a value (as notes), and mentions from the brackets of
    ``Entity`` in MISC, in the format of CorefUD: ``Entity=(e1-person-2`` opens a mention of e1, ``Entity=e1)`` closes
    it, ``Entity=(e1-person-1)`` does both, and ``e1[1/2]`` is the first of two parts. The positions of the words come
    from ``# text`` where present, otherwise from SpaceAfter=No. Empty nodes are skipped, and mentions of empty nodes
    only.

    Args:
        text: the text of the file.
        name: the name of the text in errors.

    Raises:
        MissingExtra: the library conllu is not installed.
        ValueError: the text is not CoNLL-U; the message has the line number.

    Example:
        >>> lines = ["1 It _ PRON _ _ 2 nsubj _ Entity=(e1-thing-1)", "2 works _ VERB _ _ 0 root _ _"]
        >>> [document] = parse("\n".join(line.replace(" ", "\t") for line in lines))
        >>> document.text, document.sentences[0].words[0].relation, document.sentences[0].mentions[0].entity
        ('It works', 'nsubj', 'e1')
    """
    check_texts(text=text, name=name)
    if len(text) > MAX_SIZE:
        raise ValueError(f"{name}: annotation is read up to {MAX_SIZE // 10**6} MB, and this is longer; split it")
    try:
        return _documents(text)
    except Wrong as error:
        raise ValueError(f"{name}, {error}") from None


def _documents(text: str) -> tuple[Document, ...]:
    """Return the documents of a text; raise Wrong with the line number for what is no CoNLL-U."""
    documents: list[tuple[str, list[Sentence]]] = []
    order = (0, 1)
    for lines in _blocks(text):
        notes: dict[str, str] = {}
        tokens: list[Any] = []
        for number, line in lines:
            if line.strip().startswith("#"):
                key, equals, value = line.strip()[1:].partition("=")
                if equals or key.strip() == "newdoc":
                    notes[key.strip()] = value.strip()
            else:
                tokens.append(_token(number, line))
        first = lines[0][0]
        if not tokens:
            raise Wrong(first, "a sentence has a line for each word, and these are comments alone; delete them")
        if len(tokens) > MAX_WORDS:
            raise Wrong(first, f"a sentence has at most {MAX_WORDS} words, got {len(tokens)}; split it")
        if not documents or "newdoc" in notes or "newdoc id" in notes:
            documents.append((notes.get("newdoc id") or notes.get("newdoc") or "", []))
        if "global.Entity" in notes:
            order = order_of(notes["global.Entity"])
        documents[-1][1].append(_sentence(tokens, notes, order))
    return tuple(Document(tuple(sentences), of) for of, sentences in documents)


def _blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the lines of each sentence with their numbers; empty lines separate the sentences."""
    numbered = enumerate(text.removeprefix("\ufeff").split("\n"), 1)
    for filled, lines in itertools.groupby(numbered, key=lambda one: bool(one[1].strip())):
        if filled:
            yield [(number, line.rstrip("\r")) for number, line in lines]


def _token(number: int, line: str) -> Any:
    """Return the library's token of one line, with the number of the line."""
    try:
        import conllu
        from conllu.exceptions import ParseException
    except ImportError as error:
        raise missing_extra("reading CoNLL-U", "look", error) from None
    columns = line.split("\t")
    if len(columns) != 10:
        rule = "a word has 10 columns with tabs between them"
        raise Wrong(number, f"{rule}, got {len(columns)}; write _ for a column without a value")
    if not all(column.strip() for column in columns) or "  " in line:
        raise Wrong(number, "a column is neither empty nor holds two spaces in a row; write _ or one space")
    try:
        [[token]] = conllu.parse(line, field_parsers={"misc": _misc})
    except (ParseException, ValueError) as error:
        said = repr(" ".join(str(error).split())[:120])[1:-1].rstrip(".")
        raise Wrong(number, f"{said}; {_FORMAT}") from None
    if token["id"] is None:
        raise Wrong(number, f"ID is 1, 2, ..., a range such as 1-2, or 1.1 for an empty node; got _; {_FORMAT}")
    token["line"] = number
    return token


def _misc(line: list[str], column: int) -> dict[str, str]:
    """Return MISC as a dict; a value may contain '='."""
    pairs = (pair.partition("=") for pair in line[column].split("|") if pair != "_")
    return {key: value for key, _, value in pairs}


def _sentence(tokens: Sequence[Any], notes: Mapping[str, str], order: Order) -> Sentence:
    """Return a sentence made from the library's tokens."""
    words = [token for token in tokens if isinstance(token["id"], int)]
    for i, token in enumerate(words, 1):
        if token["id"] != i:
            raise Wrong(token["line"], f"words are counted 1, 2, 3, ...; got {token['id']} where {i} is due")
        head = token["head"]
        if head is not None and (not 0 <= head <= len(words) or head == i):
            rule = f"HEAD is 0 for the root, or another of the {len(words)} words"
            raise Wrong(token["line"], f"{rule}; got {head} for word {i}; write _ where there is none")
    text, spans, spaced = _spans(tokens, notes)
    made = tuple(
        Word(
            token["form"],
            *span,
            _held(token["upos"]),
            token["head"] - 1 if token["head"] else None,
            _held(token["deprel"]),
        )
        for token, span in zip(words, spans, strict=True)
    )
    return Sentence(text, made, mentions_of(tokens, order), dict(notes), " " if spaced else "")


def _held(value: str) -> str:
    """Return the value of a column, or "" for '_'."""
    return "" if value == "_" else value


def _spans(tokens: Sequence[Any], notes: Mapping[str, str]) -> tuple[str, list[tuple[int, int]], bool]:
    """Return the text, the span of each word in it, and whether a space follows.

    The written forms come from the lines of words, or of ranges of words ("don't", 1-2). If the words of a range
    concatenate to its form, each gets its own part of the span; otherwise each gets the whole span.
    """
    written: list[tuple[Any, list[str]]] = []
    until = 0
    for token in tokens:
        at = token["id"]
        if isinstance(at, int) and at <= until:
            written[-1][1].append(token["form"])
        elif isinstance(at, int):
            written.append((token, [token["form"]]))
        elif at[1] == "-":
            written.append((token, []))
            until = at[2]
    spaces = [token["misc"].get("SpaceAfter") != "No" for token, _ in written]
    joined = "".join(token["form"] + " " * space for (token, _), space in zip(written, spaces, strict=True))
    text = notes.get("text") or joined.rstrip()
    spans: list[tuple[int, int]] = []
    place = 0
    for token, forms in written:
        form = token["form"]
        while place < len(text) and text[place].isspace():
            place += 1
        if not text.startswith(form, place):
            rule, follows = "the words make up '# text', in order", shown(text[place : place + 20])
            raise Wrong(token["line"], f"{rule}; got {shown(form)} where it goes on with {follows}; correct one")
        if not forms:
            raise Wrong(token["line"], f"a range of words stands before its words; {shown(form)} has none")
        end, whole = place + len(form), "".join(forms) == form
        for part in forms:
            spans.append((place, place + len(part)) if whole else (place, end))
            place += len(part) if whole else 0
        place = end
    return text, spans, bool(spaces) and spaces[-1]
