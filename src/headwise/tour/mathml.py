"""Formulas that look the same in every browser: MathML with its scripts, roots and tall brackets in HTML.

Browsers place the scripts of MathML by a table that only mathematical fonts have. Without such a font, an exponent is
drawn far above its letter, an index on the line, the sign of a square root hangs below what stands under it, and
brackets stay as low as their font.
"""

from __future__ import annotations

import html
import re

_HTML = r"(?:[^<]|</?(?:i|span|sub|sup)\b[^>]*>)*"
_LEAF = rf"<(?:mi|mn|mo|mtext)(?: [^>]*)?>{_HTML}</(?:mi|mn|mo|mtext)>"
_ATOM = rf"({_LEAF}|<mrow>(?:{_LEAF})*</mrow>)"
_SCRIPTS = re.compile(rf"<(msub|msup|msubsup)>{_ATOM}{_ATOM}{_ATOM}?</\1>")
_ROOT = re.compile(rf"<msqrt>({_LEAF}|<mrow>(?:{_LEAF})*</mrow>)</msqrt>")
_FENCE = re.compile(r'<mo stretchy="true"[^>]*>([^<]*)</mo>')
_PRIME = "\u2032"
_LETTER = re.compile(r"[^\W\d_]")


def scripts_in_html(mathml: str) -> str:
    """Return MathML with scripts, roots and tall brackets in HTML; the page's style has the classes used here.

    Example:
        >>> scripts_in_html("<math><msub><mi>W</mi><mi>O</mi></msub></math>")
        '<math><mi><span><i>W</i><sub><i>O</i></sub></span></mi></math>'
    """
    while (changed := _SCRIPTS.sub(_in_html, mathml)) != mathml:  # from the inside out
        mathml = changed
    mathml = _FENCE.sub(r'<mi><span class="tall">\1</span></mi>', mathml)
    return _ROOT.sub(lambda m: f'<mi><span class="root">\u221a<span>{_letters(m[1])}</span></span></mi>', mathml)


def _in_html(match: re.Match[str]) -> str:
    base, first, second = (_letters(part or "") for part in match.groups()[1:])
    lower, upper = (first, second) if match[1] != "msup" else ("", first)
    if html.unescape(upper) == _PRIME:  # the glyph of a prime is high already
        base, upper = base + _PRIME, ""
    if lower and upper:
        scripts = f'<span class="scripts"><span>{upper}</span><span>{lower}</span></span>'
    else:
        scripts = f"<sub>{lower}</sub>" if lower else f"<sup>{upper}</sup>" if upper else ""
    return f"<mi><span>{base}{scripts}</span></mi>"  # in one element, because each child of mi is a line of its own


def _letters(part: str) -> str:
    """Return a part of a formula as HTML: single letters in italics, everything else upright."""
    found = re.findall(rf"<(mi|mn|mo|mtext)(?: [^>]*)?>({_HTML})</\1>", part)
    return "".join(f"<i>{x}</i>" if kind == "mi" and _LETTER.fullmatch(html.unescape(x)) else x for kind, x in found)
