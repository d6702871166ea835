"""The text to read, from an option, a file or stdin; it is checked before any model is read."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import ranks

Text = Annotated[str | None, typer.Option(help="The text to read.", show_default="a short program")]
File = Annotated[str | None, typer.Option(help="The text from a file (UTF-8), or - for stdin.")]
MAX_FILE = 64_000_000


def check_named(option: str, value: str | None, *, give: str = "a file") -> None:
    """Raise BadParameter if an option for a path is empty, as from an unset shell variable.

    Path("") would mean the current folder.
    """
    if value == "":
        raise typer.BadParameter(f"{option}: the name is empty; give {give}")


def read_text(text: str | None, file: str | None) -> str:
    """Return the text of the options, or the default text without them."""
    if text is not None and file is not None:
        raise typer.BadParameter("give --text or --file, not both")
    if text is not None:
        return typed_text(text)
    if file is None:
        from headwise.models import default_text

        return default_text()
    content = read_file("--file", file, "give a shorter text", stdin=True)
    return _with_words(_decode(content, f"--file {file}"), f"--file {file}")


def typed_text(text: str, option: str = "--text") -> str:
    """Return a text that was typed as an option; raise BadParameter if it is empty, or no UTF-8 text."""
    return _with_words(_decode(_typed(text, option), option), option)


def typed_token(text: str, option: str) -> str:
    """Return a token that was typed as an option, which may be a space; raise BadParameter if empty or not UTF-8."""
    if text == "":
        raise typer.BadParameter(f"{option}: the token is empty; give one with the space that belongs to it: ' Mary'")
    return _decode(_typed(text, option), option)


def _with_words(content: str, where: str) -> str:
    if not content.strip():
        raise typer.BadParameter(f"{where}: the text is empty; give at least a few words")
    return content


def cut_default_text(loaded: Any, text: str) -> str:
    """Return the text; the default text is cut to the model's length, with a note on stderr. Other texts stay whole."""
    from headwise.models import default_text

    if text != default_text() or loaded.tokenizer is None or loaded.max_positions is None:
        return text
    from headwise.files.text import visible
    from headwise.hf.loading import tokenizer as tokens

    part = tokens.beginning(loaded.tokenizer, text, loaded.max_positions)
    if not part or part == text.rstrip():
        return text
    if ranks.is_first():
        takes = f"{visible(loaded.name, limit=100)} supports {loaded.max_positions:,} tokens"
        read = f"{len(part):,} of {len(text):,} characters"
        print(
            f"headwise: note: {takes}, so the default text is cut ({read}); --text or --file replaces it",
            file=sys.stderr,
        )
    return part


def check_corpus(corpus: str) -> None:
    """Raise BadParameter if the corpus cannot be read; an unreadable folder would look like one without texts."""
    check_named("--corpus", corpus, give="a file or a folder of texts")
    if not Path(corpus).exists():
        raise typer.BadParameter(f"--corpus {corpus}: no such file or folder")
    if not os.access(corpus, os.R_OK):
        raise typer.BadParameter(f"--corpus {corpus}: no permission to read it; check its permissions")


def _typed(text: str, option: str) -> bytes:
    """Return the bytes of a typed text; with LC_ALL=C Python decodes only ASCII and keeps the rest as surrogates."""
    try:
        return os.fsencode(text) if any("\udc80" <= c <= "\udcff" for c in text) else text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{option}: contains half of a surrogate pair; give UTF-8 text") from None


def read_file(option: str, path: str, instead: str, *, stdin: bool = False) -> bytes:
    """Return the bytes of an option's file, or of stdin for - if `stdin`; raise BadParameter if it is too large."""
    check_named(option, path)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if stdin and path == "-" else open(path, "rb") as source:
            content: bytes = source.read(MAX_FILE + 1)
    except OSError as error:
        raise typer.BadParameter(f"{option} {path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # a NUL in the name
        raise typer.BadParameter(f"{option}: not a file name ({error})") from None
    if len(content) > MAX_FILE:
        raise typer.BadParameter(f"{option} {path}: more than {MAX_FILE // 10**6} MB; {instead}")
    return content


def _decode(content: bytes, where: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{where}: not UTF-8 text (byte {error.start}); convert it first") from None
    if "\0" in text:
        raise typer.BadParameter(f"{where}: contains NUL bytes, so it is not text; give plain text")
    return text
