"""The roles that a look measured, as the page lists them: name, letter, colour, and by whose definition."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from headwise.look.records import HeadRecord
from headwise.look.roles import ROLES

from .escape import cut

GREY = 12
"""Number of the colour that all roles of unknown name share."""

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
}
"""Letter and colour of a role, the same from report to report."""


def letter_and_colour(name: str) -> tuple[str, int]:
    """How a role is drawn: offsets by their number, relations of grammar by an arrow's end, unknown ones by initial."""
    if name in _LOOKS:
        return _LOOKS[name]
    if name.startswith(("offset-", "offset+")):
        return (name[7:][:1] or "o"), (8 if name[6] == "-" else 7)
    if name.endswith(" to head") or name.startswith("head to "):
        return ("r" if name.endswith(" to head") else "R"), 9
    return next((c for c in name if c in string.ascii_letters), "?"), GREY


def roles_met(heads: Sequence[HeadRecord]) -> list[dict[str, Any]]:
    """Every role that was measured: those that most heads play first, then by name; then those that none plays."""
    counts: dict[str, int] = {}
    thresholds: dict[str, float] = {}
    for head in heads:
        for name, score in head.scores.items():
            counts[name] = counts.get(name, 0) + score.plays
            thresholds.setdefault(name, score.threshold)
    known = {role.name: role for role in ROLES}
    place = {name: i for i, name in enumerate(known)}
    order = sorted(
        counts, key=lambda name: (-counts[name], name if counts[name] else "", place.get(name, len(place)), name)
    )
    listed = []
    for name in order:
        role = known.get(name)
        letter, colour = letter_and_colour(name)
        listed.append(
            {
                "name": name,
                "label": cut(name),
                "letter": letter,
                "colour": colour,
                "played": counts[name],
                "threshold": thresholds[name],
                "formula": cut(role.formula, 500) if role else "",
                "source": cut(role.source, 500) if role else "",
                "control": cut(role.control, 300) if role else "",
                "reads": role.reads if role else "",
            }
        )
    return listed
