"""A letter and a color for each role: the same in the notebook, in figures and in the report.

The colors begin with Okabe and Ito's palette, which is distinguishable with any color vision; similar colors differ
by their letters.
"""

from __future__ import annotations

import string

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b15396",
    "#e69f00",
    "#56b4e9",
    "#8a8f00",
    "#5d3a9b",
    "#7fcdbb",
    "#a6611a",
    "#c51b7d",
    "#4d4d4d",
    "#7a7f8c",
)
"""The colors by number; the last one is for unknown roles."""

GREY = len(COLOURS) - 1
"""The number of the last color."""

NONE = "#e4e7ed"
"""The color of a head without a role."""

_LOOKS = {
    "previous-token": ("P", 0),
    "induction": ("I", 1),
    "duplicate-token": ("D", 2),
    "first-token sink": ("S", 3),
    "delimiter": (".", 4),
    "self": ("=", 5),
    "broad": ("B", 6),
    "next-token": ("N", 7),
    "sink elsewhere": ("s", 3),
    "punctuation": (",", 4),
    "special tokens": ("#", 4),
    "local band": ("L", 8),
    "far offset": ("F", 8),
    "same word class": ("W", 9),
    "coreference": ("C", 10),
    "name mover": ("M", 11),
    "copying": ("K", 11),
    "retrieval": ("T", 11),
    "alignment": ("A", 10),
    "alignment, next": ("a", 10),
    "[SEP]": ("]", 4),
    "full stop": ("f", 4),
    "comma": ("m", 4),
    "first to second": (">", 10),
    "second to first": ("<", 10),
    "left neighbour": ("\u2190", 0),
    "right neighbour": ("\u2192", 6),
    "upper neighbour": ("\u2191", 2),
    "lower neighbour": ("\u2193", 1),
    "surroundings": ("o", 8),
    "same row": ("-", 7),
    "same column": ("|", 9),
    "[CLS] sink": ("c", 3),
    "register sink": ("g", 3),
    "patch sink": ("p", 3),
}


def letter_and_colour(name: str) -> tuple[str, int]:
    """Return a role's letter and color number; offsets have a digit, grammatical relations an r, others an initial.

    >>> letter_and_colour("induction"), letter_and_colour("offset-2"), letter_and_colour("nsubj to head")
    (('I', 1), ('2', 8), ('r', 9))
    """
    if name in _LOOKS:
        return _LOOKS[name]
    if name.startswith(("offset-", "offset+")):
        return (name[7:][:1] or "o"), (8 if name[6] == "-" else 7)
    if name.endswith(" to head") or name.startswith("head to "):
        return ("r" if name.endswith(" to head") else "R"), 9
    return next((c for c in name if c in string.ascii_letters), "?"), GREY


def letter(name: str) -> str:
    """Return a role's letter."""
    return letter_and_colour(name)[0]


def colour(name: str) -> str:
    """Return a role's color, ``#rrggbb``."""
    return COLOURS[letter_and_colour(name)[1]]


def ink(background: str) -> str:
    """Return black or white, whichever has more contrast to the color (relative luminance of WCAG).

    >>> ink("#0072b2"), ink("#e69f00")
    ('#ffffff', '#000000')
    """
    shares = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"
