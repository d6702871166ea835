"""The rendering boundary: every string of a look is hostile, and passes here before it reaches a page or a terminal."""

from __future__ import annotations

import json
from typing import Any

_HTML_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def json_for_html(value: Any) -> str:
    r"""JSON that may stand inside a ``<script>`` element, whatever strings it carries.

    It is pure ASCII, so a lone surrogate or a bidi control cannot upset the file either; ``<``, ``>`` and ``&`` are
    escaped, so no string can close the element or open a comment.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot say.

    >>> print(json_for_html({"token": "</script>\u2028"}))
    {"token":"\u003c/script\u003e\u2028"}
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_HTML_UNSAFE)


def cut(text: str, limit: int = 200) -> str:
    """Return the text, or its beginning and an ellipsis: a hostile name must not fill the page."""
    return text if len(text) <= limit else text[:limit] + "\u2026"
