"""The roles that a look measured, for the page: name, letter, color, and source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.look.records.head import HeadRecord
from headwise.look.roles.catalog import ROLES
from headwise.look.views import palette, plain_words

from .escape import cut


def roles_met(heads: Sequence[HeadRecord]) -> list[dict[str, Any]]:
    """Return every measured role: played ones, in the order of the catalog and states last; then those of no head."""
    counts: dict[str, int] = {}
    thresholds: dict[str, float] = {}
    for head in heads:
        for name, score in head.scores.items():
            counts[name] = counts.get(name, 0) + score.plays
            thresholds.setdefault(name, score.threshold)
    known = {role.name: role for role in ROLES}
    order = sorted(palette.in_order(counts), key=lambda name: not counts[name])
    listed = []
    for name in order:
        role = known.get(name)
        listed.append(
            {
                "name": name,
                **marking(name),
                "plain": plain_words.sentence(name),
                "played": counts[name],
                "threshold": thresholds[name],
                "formula": cut(role.formula, 500) if role else "",
                "source": cut(role.source, 500) if role else "",
                "control": cut(role.control, 300) if role else "",
                "reads": role.reads if role else "",
            }
        )
    return listed


def marking(name: str) -> dict[str, Any]:
    """Return how the pages mark a role: its label, letter, color and mark."""
    letter, colour = palette.letter_and_colour(name)
    return {"label": cut(palette.label(name)), "letter": letter, "colour": colour, "mark": palette.mark(name)}
