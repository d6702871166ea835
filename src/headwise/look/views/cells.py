"""What one cell of a matrix of heads shows: the head's most specific role, and its states as marks over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..records.head import NO_ROLE
from . import palette

if TYPE_CHECKING:
    from ..records.head import HeadRecord
    from ..records.scores import Score

MARKS = {"dot": "\u2022", "ring": "\u25cb"}
"""The characters of the marks where a cell is text."""


class Cell(NamedTuple):
    """One head in a matrix.

    Attributes:
        role: the name of the most specific role; empty if it plays none, or states alone.
        letter: the letter of that role, or the mark of its state; empty without either.
        colour: the color, ``#rrggbb``.
        marks: the marks of its states: ``"dot"`` for sinks, ``"ring"`` for broad.
    """

    role: str
    letter: str
    colour: str
    marks: tuple[str, ...]


def cell_of(head: HeadRecord) -> Cell:
    """Return what the cell of a head shows."""
    marks = tuple(dict.fromkeys(filter(None, map(palette.mark, head.states))))
    if head.role != NO_ROLE:
        return Cell(head.role, palette.letter(head.role), palette.colour(head.role), marks)
    return Cell("", MARKS[marks[0]] if marks else "", palette.NONE, marks)


def text(score: Score) -> str:
    """Return a role and its value for readers: ``"subject -> verb 0.62"``."""
    return f"{palette.label(score.name)}{f' ({score.detail})' if score.detail else ''} {score.value:.2f}"


def roles_text(head: HeadRecord) -> str:
    """Return the played roles of a head with their values; empty if it plays none."""
    return ", ".join(map(text, head.roles))
