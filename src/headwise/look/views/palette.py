"""A letter, a color and a plain label for each role: the same in the terminal, the notebook, figures and the report.

The colors begin with Okabe and Ito's palette, which is distinguishable with any color vision. There are more roles
than colors that the eye can tell apart, so roles of one family (such as all sinks) share a color; their letters differ.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from ..roles.catalog import ROLES

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#626e84",
    "#e69f00",
    "#56b4e9",
    "#efe96a",
    "#5d3a9b",
    "#7fcdbb",
    "#8c4a12",
    "#c51b7d",
    "#333333",
    "#7a7f8c",
    "#a21ff9",
    "#94b464",
    "#c3c9d4",
)
"""The colors by number."""

GREY = 12
"""The number of the color of unknown roles."""

NONE = "#e4e7ed"
"""The color of a head without a role."""

_LOOKS = {
    "previous-token": ("P", 0),
    "induction": ("I", 1),
    "duplicate-token": ("D", 2),
    "first-token sink": ("S", 3),
    "delimiter": (".", 4),
    "self": ("=", 5),
    "broad": ("B", 15),
    "next-token": ("N", 7),
    "sink elsewhere": ("s", 3),
    "punctuation": ("!", 4),
    "special tokens": ("#", 4),
    "local band": ("L", 8),
    "far offset": ("F", 8),
    "same word class": ("W", 5),
    "coreference": ("C", 10),
    "name mover": ("M", 11),
    "negative name mover": ("m", 11),
    "name suppressor": ("x", 11),
    "name mover by attention": ("n", 11),
    "copying": ("K", 11),
    "retrieval": ("T", 7),
    "alignment": ("A", 10),
    "alignment, next": ("a", 10),
    "[SEP]": ("]", 4),
    "full stop": ("f", 4),
    "comma": (",", 4),
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

_RELATIONS = {
    "nsubj": ("subject", "verb", "sv", 6),
    "nsubj:pass": ("passive subject", "verb", "pv", 6),
    "obj": ("object", "verb", "ov", 6),
    "iobj": ("indirect object", "verb", "iv", 6),
    "obl": ("oblique noun", "verb", "lv", 6),
    "nmod": ("modifying noun", "noun", "mn", 9),
    "nmod:poss": ("possessor", "noun", "gn", 9),
    "amod": ("adjective", "noun", "an", 9),
    "det": ("determiner", "noun", "dn", 9),
    "case": ("preposition", "noun", "pn", 9),
    "compound": ("compound part", "noun", "kn", 9),
    "nummod": ("number", "noun", "#n", 9),
    "mark": ("subordinator", "verb", "mv", 13),
    "aux": ("auxiliary", "verb", "xv", 13),
    "aux:pass": ("passive auxiliary", "verb", "yv", 13),
    "cop": ("copula", "predicate", "bv", 13),
    "advmod": ("adverb", "verb", "av", 13),
    "conj": ("later conjunct", "first conjunct", "jc", 14),
    "cc": ("and/or", "conjunct", "&c", 14),
    "acl": ("noun's clause", "noun", "cn", 14),
    "acl:relcl": ("relative clause", "noun", "wn", 14),
    "advcl": ("adverbial clause", "verb", "tv", 14),
    "xcomp": ("infinitive", "verb", "uv", 14),
    "ccomp": ("that-clause", "verb", "hv", 14),
}
"""By the name of Universal Dependencies: the dependent, what it depends on, the letter of the role, and its color."""

_STATES = frozenset(role.name for role in ROLES if role.state)
_PLACE = {role.name: place for place, role in enumerate(ROLES)}


def in_order(names: Iterable[str]) -> list[str]:
    """Return roles in the order of the catalog, from what few heads do to what many do; unknown ones, then states.

    >>> in_order(["broad", "self", "my role", "name mover", "induction"])
    ['induction', 'name mover', 'self', 'my role', 'broad']
    """
    return sorted(names, key=lambda name: (name in _STATES, _PLACE.get(name, len(_PLACE)), name))


def _relation(name: str) -> tuple[str, bool] | None:
    """Return the relation of a role of grammar, and whether its queries are the dependents; None for other roles."""
    for relation, upward in ((name.removesuffix(" to head"), True), (name.removeprefix("head to "), False)):
        if relation != name and relation in _RELATIONS:
            return relation, upward
    return None


def label(name: str) -> str:
    """Return the name of a role for readers: a relation of grammar as an arrow from the query's word to the key's.

    >>> label("nsubj to head"), label("head to obj"), label("induction")
    ('subject -> verb', 'verb -> object', 'induction')
    """
    words = relation_words(name)
    return name if words is None else f"{words[0]} -> {words[1]}"


def relation_words(name: str) -> tuple[str, str] | None:
    """Return the words of a relation of grammar, the query's and the key's; None for other roles.

    >>> relation_words("det to head"), relation_words("self")
    (('determiner', 'noun'), None)
    """
    found = _relation(name)
    if found is None:
        return None
    dependent, head, *_ = _RELATIONS[found[0]]
    return (dependent, head) if found[1] else (head, dependent)


def letter_and_colour(name: str) -> tuple[str, int]:
    """Return a role's letter and color number; a relation has two letters, of its words; unknown roles an initial.

    >>> letter_and_colour("induction"), letter_and_colour("offset-2"), letter_and_colour("nsubj to head")
    (('I', 1), ('-2', 8), ('sv', 6))
    """
    if name in _LOOKS:
        return _LOOKS[name]
    if name.startswith(("offset-", "offset+")):
        return (name[6:8] if name[7:] else "o"), (8 if name[6] == "-" else 7)
    found = _relation(name)
    if found is not None:
        *_, letters, number = _RELATIONS[found[0]]
        return (letters if found[1] else letters[::-1]), number
    return next((c for c in name if c in string.ascii_letters), "?"), GREY


def letter(name: str) -> str:
    """Return a role's letter."""
    return letter_and_colour(name)[0]


def colour(name: str) -> str:
    """Return a role's color, ``#rrggbb``."""
    return COLOURS[letter_and_colour(name)[1]]


def mark(name: str) -> str:
    """Return how a state is drawn over a head's role: ``"dot"`` for sinks, ``"ring"`` for broad; empty for roles.

    >>> mark("first-token sink"), mark("broad"), mark("induction")
    ('dot', 'ring', '')
    """
    return "" if name not in _STATES else "ring" if name == "broad" else "dot"


def ink(background: str) -> str:
    """Return black or white, whichever has more contrast to the color (relative luminance of WCAG).

    >>> ink("#0072b2"), ink("#e69f00")
    ('#ffffff', '#000000')
    """
    linear = linear_rgb(background)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def linear_rgb(color: str) -> tuple[float, ...]:
    """Return red, green and blue of ``#rrggbb`` as light, from 0 to 1.

    >>> linear_rgb("#ff0000")
    (1.0, 0.0, 0.0)
    """
    shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
