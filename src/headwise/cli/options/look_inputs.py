"""Inputs of `headwise look` other than one text: a corpus, annotated sentences, texts with needles, pictures, sound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import typer

from headwise.files.atomic_file import check_destination

from .. import errors
from . import ranks
from .media import read_image, read_sound
from .texts import check_corpus, check_named

STATE = "headwise-look.state"
AT_ONCE = 64
"""Documents that are tokenized in one call."""

NEEDLE = 7
"""Tokens of a needle, which its text contains twice."""


class More(NamedTuple):
    """The options for inputs in addition to the text, or in its place."""

    corpus: str | None = None
    length: int | None = None
    state: str | None = None
    sentences: str | None = None
    needles: bool = False
    importance: bool = False
    image: str | None = None
    audio: str | None = None
    target: str | None = None
    pair: str | None = None

    @property
    def beside(self) -> dict[str, str]:
        """The given options for inputs in addition to the text, with their values."""
        named = (("image", self.image), ("audio", self.audio), ("target", self.target), ("pair", self.pair))
        return {name: value for name, value in named if value is not None}


def checked(more: More, text: str | None, file: str | None) -> More:
    """Return the options after checking that they fit together; raise BadParameter otherwise."""
    for name in more.beside:
        others = (("corpus", more.corpus), ("sentences", more.sentences), ("needles", more.needles or None))
        for other, there in (*others, ("importance", more.importance or None)):
            if there is not None:
                raise typer.BadParameter(f"--{other} needs a text; give it without --{name}")
    for name, path in (("--sentences", more.sentences), ("--state", more.state)):
        check_named(name, path)
    for name in ("target", "pair"):
        if name in more.beside and not more.beside[name].strip():
            raise typer.BadParameter(f"--{name}: the text is empty; give at least a few words")
    if more.corpus is None:
        if ranks.process_count() > 1:
            raise typer.BadParameter(
                f"torchrun started {ranks.process_count()} processes, which share a --corpus; give --corpus, or start "
                "headwise without torchrun"
            )
        for name, option in (("length", more.length), ("state", more.state)):
            if option is not None:
                raise typer.BadParameter(f"--{name} applies to a corpus; give --corpus as well")
        return more
    if text is not None or file is not None:
        raise typer.BadParameter("give --corpus, or one text with --text or --file, not both")
    if more.importance:
        raise typer.BadParameter("--importance is measured on one text; give it without --corpus")
    if more.length is not None and more.length < 2:
        raise typer.BadParameter(f"--length is at least 2 tokens; got {more.length}")
    check_corpus(more.corpus)
    state = STATE if more.state is None else more.state
    if ranks.is_first():  # only this process writes the state
        check_destination(state)
    return more._replace(state=state)


def readings(loaded: Any, more: More, ids: Sequence[int]) -> dict[str, Any]:
    """Return the annotated sentences and the needles that the options request."""
    from headwise.look import annotate, needles

    result: dict[str, Any] = {}
    if more.sentences is not None:
        documents = annotate.ours() if more.sentences in ("builtin", "ours") else annotate.read(more.sentences)
        loaded.encode_all([one.text for one in documents])  # raises if the tokenizer would take too long
        result["sentences"] = annotate.passages(documents, loaded.tokenizer, length=loaded.max_positions)
        if not result["sentences"]:
            most = loaded.max_positions
            raise typer.BadParameter(
                f"--sentences {more.sentences}: contains no sentence{f' of at most {most} tokens' if most else ''}; "
                "give other sentences, or omit the option"
            )
    if more.needles:
        special = {*loaded.tokenizer.all_special_ids}
        vocabulary = [i for i, name in enumerate(loaded.names()) if name and i not in special]
        room = 512 if loaded.max_positions is None else loaded.max_positions - 2 * NEEDLE
        if room < 1:
            raise typer.BadParameter(
                f"--needles: a text with a needle has at least {2 * NEEDLE + 1} tokens, but the model supports "
                f"{loaded.max_positions} positions; omit the option"
            )
        result["needles"] = needles(ids, vocabulary, length=NEEDLE, around=min(121, room))
    return result


def reads_text(more: More, text: str | None, file: str | None) -> bool:
    """Return whether one text is read: not with a corpus, and not with only a picture or a sound."""
    return more.corpus is None and (text is not None or file is not None or (more.image is None and more.audio is None))


def opened(more: More) -> dict[str, Any]:
    """Return the picture and the sound of the options; they are read before any model."""
    image = None if more.image is None else read_image(more.image)
    return {"image": image, "sound": None if more.audio is None else read_sound(more.audio)}


def look_beside(
    loaded: Any, text: str | None, more: More, media: Mapping[str, Any], name: str, show: Callable[..., object]
) -> Any:
    """Return the look at the heads on a picture, a sound, a pair of sentences, or with a text for the decoder."""
    from dataclasses import replace

    from headwise.hf import prepared
    from headwise.look import at

    read = prepared(loaded, text, **media, target=more.target, pair=more.pair)
    seen = at(
        loaded.model,
        read.values,
        tokens=read.tokens,
        delimiters=loaded.delimiters if loaded.tokenizer is not None else None,
        name=name,
        progress=show,
    )
    if read.seconds is None:
        return seen
    pictures = (replace(one, seconds=read.seconds) if one.kind == "sound" else one for one in seen.pictures)
    return replace(seen, pictures=tuple(pictures))


def look_over(loaded: Any, more: More, name: str, show: Callable[..., object]) -> Any:
    """Return the look at the heads on a corpus."""
    from headwise.look import Vocabulary, documents, over

    assert more.corpus is not None
    size = _size(Path(more.corpus))
    special = {*loaded.tokenizer.all_special_ids}
    words = Vocabulary.of(loaded.names(), delimiters=loaded.delimiters, special=special)
    most = min(filter(None, (more.length, loaded.max_positions)), default=2048)
    done = [0]

    def bytes_read(text: str) -> str:
        done[0] += len(text.encode())
        return text

    rows = _rows(loaded, map(bytes_read, documents(more.corpus)), most)

    def begin() -> tuple[list[int], dict[str, Any]]:
        first = next(rows, None)
        if first is None:
            raise typer.BadParameter(f"--corpus {more.corpus}: contains no text; give files with at least a few words")
        return first, readings(loaded, more, first)

    first, read = errors.together(begin)
    result = over(
        loaded.model,
        chain([first], rows),
        words=words,
        name=name,
        readings=read,
        state=more.state,
        progress=lambda texts, _: show(min(done[0], size), size),
        group=ranks.processes().group,
    )
    if ranks.is_first():
        Path(more.state or STATE).unlink(missing_ok=True)
    return result


def with_more(loaded: Any, result: Any, ids: Any, read: Mapping[str, Any], more: More) -> Any:
    """Return the look with the tokens around its evidence, and with the importance and output of heads if requested."""
    from headwise.look.collect.excerpts import with_excerpts
    from headwise.look.collect.text import repeats_of

    ahead = result.kind == "encoder"
    copies = repeats_of(loaded.model, ids, result.tokens, loaded.delimiters, ahead=ahead)
    result = with_excerpts(result, {"copies": copies, **read}, speller(loaded))
    if not more.importance:
        return result
    from headwise.look import circuits, importance
    from headwise.look.records.head import by_layer

    worth = importance(loaded.model, ids, by="gradient", mask_id=loaded.mask_id).scores("gradient")
    heads = circuits(loaded.model, ids, most=1).heads
    numbers: dict[str, Any] = {"importance (gradient)": worth}
    for name, label in (("norm", "writes (norm)"), ("share", "share of the layer"), ("copying", "copying")):
        numbers[label] = [[getattr(head, name) for head in row] for row in by_layer(heads).values()]
    return result.with_extras(**numbers)


def speller(loaded: Any) -> Callable[[int], str]:
    """Return a function that gives the text of an id as it continues a text, with its space, by the tokenizer itself.

    A tokenizer decides in its decoding whether a space stands before a token: one whose tokens mark the inside of a
    word (WordPiece) has no mark for the beginning of one. So an id is decoded behind a word, and the word taken off.
    """
    word = loaded.tokenizer("a", add_special_tokens=False).input_ids[-1:]
    before: str = loaded.tokenizer.decode(word)

    @cache
    def spell(one: int) -> str:
        text: str = loaded.tokenizer.decode([*word, one])
        return text[len(before) :] if word and text.startswith(before) else loaded.decode(one)

    return spell


def _rows(loaded: Any, texts: Iterable[str], most: int) -> Iterator[list[int]]:
    """Yield the ids of each text; long texts are cut into parts."""
    from headwise.look.collect.corpus import cut

    texts = iter(texts)
    while block := list(islice(texts, AT_ONCE)):
        for ids, _ in loaded.encode_all(block):
            if ids:
                yield from cut(ids, most, opener=loaded.bos_id)


def _size(path: Path) -> int:
    """Return the bytes of all files of a corpus."""
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.suffix in (".txt", ".jsonl") and one.is_file())
    return path.stat().st_size
