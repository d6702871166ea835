"""Looks that earlier versions wrote as JSON, brought to the present format."""

from __future__ import annotations

from typing import Any

from .fields import each
from .scores import Score

_SCORES = {
    "first-token sink": ("sink", 0.3),
    "delimiter": ("delimiter", 0.6),
    "self": ("self_mass", 0.5),
    "broad": ("evenness", 0.78),
    "duplicate-token": ("duplicate", 0.4),
    "induction": ("induction", 0.4),
}
"""Role -> the field that held its value in format 1, and its threshold."""


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """The dictionary of format 1 as one of format 2; what format 1 did not hold is 0 or None.

    Roles that were played keep their threshold and baseline; the other values get no null, for none was written.
    """
    cross = data["kind"] == "encoder-decoder"
    return {**data, "texts": 1, "heads": each("heads", data["heads"], lambda head: _head(head, data["kind"], cross))}


def _head(head: dict[str, Any], kind: str, several: bool) -> dict[str, Any]:
    played = {role["name"]: role for role in head["roles"]}
    values = {name: (head.get(field), threshold) for name, (field, threshold) in _SCORES.items()}
    values |= {name: (role["score"], role["threshold"]) for name, role in played.items()}
    scores = {
        name: Score(
            name,
            value,
            played.get(name, {}).get("baseline"),
            threshold,
            head.get("queries", 0),
            plays=name in played,
        ).to_list()
        for name, (value, threshold) in values.items()
        if value is not None
    }
    part = kind
    if several:
        part = "cross" if head.get("queries") != head.get("keys") else "encoder" if head.get("ahead") else "decoder"
    moved = ("sink", "delimiter", "self_mass", "duplicate", "induction", "roles", "evenness")
    rest = {name: value for name, value in head.items() if name not in moved}
    return {**rest, "part": part, "ahead": head.get("ahead", ()), "scores": scores}
