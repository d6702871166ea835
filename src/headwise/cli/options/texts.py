"""The text to look at: from an option, a file or stdin, and checked before any model is read."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import typer

from . import ranks as several

MAX_FILE = 64_000_000


def check_named(option: str, value: str | None, *, give: str = "a file") -> None:
    """Raise where an option that takes a path has an empty one, as a shell gives of a variable that is not set.

    A Path makes "." of it, the folder one stands in.
    """
    if value == "":
        raise typer.BadParameter(f"{option}: the name is empty; give {give}")


def read_text(text: str | None, file: str | None) -> str:
    """Return the text of the options; the default text where there is neither."""
    if text is not None and file is not None:
        raise typer.BadParameter("give --text or --file, not both")
    if text is not None:
        where, content = "--text", _decode(_typed(text), "--text")
    elif file is not None:
        where, content = f"--file {file}", _decode(_read(file), f"--file {file}")
    else:
        from headwise.models import default_text

        return default_text()
    if not content.strip():
        raise typer.BadParameter(f"{where}: the text is empty; give a few words at least")
    return content


def fitting(loaded: Any, text: str) -> str:
    """The text; of the default text as much as the model takes, which stderr says. A user's own text is never cut."""
    from headwise.models import default_text

    if text != default_text() or loaded.tokenizer is None or loaded.max_positions is None:
        return text
    from headwise.files.text import visible
    from headwise.hf.load import tokenizer as tokens

    part = tokens.beginning(loaded.tokenizer, text, loaded.max_positions)
    if not part or part == text.rstrip():
        return text
    if several.speaks():
        takes = f"{visible(loaded.name, limit=100)} takes {loaded.max_positions:,} tokens"
        read = f"{len(part):,} of {len(text):,} characters"
        print(
            f"headwise: {takes}, so the default text is cut ({read}); --text or --file gives another", file=sys.stderr
        )
    return part


def check_corpus(corpus: str) -> None:
    """Raise where there is nothing to read; a folder that may not be read would look like one without texts."""
    check_named("--corpus", corpus, give="a file or a folder of texts")
    if not Path(corpus).exists():
        raise typer.BadParameter(f"--corpus {corpus}: no such file or folder")
    if not os.access(corpus, os.R_OK):
        raise typer.BadParameter(f"--corpus {corpus}: may not be read; check its permissions")


def _typed(text: str) -> bytes:
    """Return the bytes that were typed. Python decodes them by the locale, and in LC_ALL=C it knows ASCII alone."""
    try:
        return os.fsencode(text) if any("\udc80" <= c <= "\udcff" for c in text) else text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("--text: holds half of a surrogate pair; give UTF-8 text") from None


def _read(file: str) -> bytes:
    check_named("--file", file)
    try:
        with open(file, "rb") if file != "-" else contextlib.nullcontext(sys.stdin.buffer) as source:
            content: bytes = source.read(MAX_FILE + 1)
    except OSError as error:
        raise typer.BadParameter(f"--file {file}: cannot be read ({error.strerror or error})") from None
    if len(content) > MAX_FILE:
        raise typer.BadParameter(f"--file {file}: more than {MAX_FILE // 1_000_000} MB; give a shorter text")
    return content


def _decode(content: bytes, where: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{where}: not UTF-8 text (byte {error.start}); convert it first") from None
    if "\0" in text:
        raise typer.BadParameter(f"{where}: holds NUL bytes, so it is no text; give plain text")
    return text
