"""The roles that a look measured, for the page: name, letter, color, and source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.look.records.head import HeadRecord
from headwise.look.roles.catalog import ROLES
from headwise.look.views.palette import letter_and_colour

from .escape import cut


def roles_met(heads: Sequence[HeadRecord]) -> list[dict[str, Any]]:
    """Return every measured role: played ones by number of heads, then by name; then those that no head plays."""
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
