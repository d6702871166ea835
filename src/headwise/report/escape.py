"""The rendering boundary: every string of a look is untrusted, and is escaped here before it reaches a page."""

from __future__ import annotations

import json
from typing import Any

_HTML_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def json_for_html(value: Any) -> str:
    r"""Return JSON that is safe inside a ``<script>`` element for any strings.

    It is pure ASCII, so it contains no lone surrogates or bidi controls; ``<``, ``>`` and ``&`` are escaped, so no
    string can close the element or open a comment.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot represent.

    >>> print(json_for_html({"token": "</script>\u2028"}))
    {"token":"\u003c/script\u003e\u2028"}
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_HTML_UNSAFE)


def cut(text: str, limit: int = 200) -> str:
    """Return the text, or its beginning and an ellipsis, so that a long name cannot fill the page."""
    return text if len(text) <= limit else text[:limit] + "\u2026"
