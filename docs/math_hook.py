"""Formulas as MathML, which browsers show by themselves: the pages need no script from elsewhere."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    """Replace each formula that the arithmatex extension has set apart."""
    return FORMULA.sub(lambda match: _mathml(match[2], match[1] == "div"), content)


def _mathml(formula: str, block: bool) -> str:
    return convert(html.unescape(formula).strip(), display="block" if block else "inline")
