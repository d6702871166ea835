"""Text from untrusted sources, made safe to print, and whether a path is UTF-8."""

from __future__ import annotations

import os


def visible(text: str, *, limit: int = 200) -> str:
    r"""Return the text without characters that a terminal or a title bar would interpret.

    Control characters (escape sequences begin with one), bidi marks, zero-width characters, lone surrogates, spaces
    other than the plain space and all others that Python calls not printable become a visible ``\x1b``. A text longer
    than `limit` is cut, and its length is added.

    Example:
        >>> print(visible("\x1b[2Jmodel\u202e"))
        \x1b[2Jmodel\u202e
    """
    shown = "".join(c if c.isprintable() else _escape(c) for c in text[:limit])
    return shown if len(text) <= limit else f"{shown}... ({len(text):,} characters)"


def is_utf8(path: str | os.PathLike[str]) -> bool:
    r"""Return whether a path is valid UTF-8; the safetensors and tokenizers libraries open no other.

    Example:
        >>> is_utf8("models/Größe"), is_utf8("models/\udcff")
        (True, False)
    """
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeError:
        return False
    return True


def one_line(error: BaseException, *, limit: int = 200) -> str:
    r"""Return the message of another library's error as one short line; it may quote an untrusted file.

    Example:
        >>> print(one_line(ValueError("no header\n\n  in \x1b[2J")))
        no header in \x1b[2J
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return visible(" ".join(lines[:2]) if lines else type(error).__name__, limit=limit)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
