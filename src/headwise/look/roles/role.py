"""The definition of a role: a measure, a threshold, a control, and its source; `catalog.ROLES` lists them all."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..records import axes
from .measures import Measure

TIMES_CHANCE = 2.0
"""The factor of the control's value that a role must exceed, unless the role sets its own."""

SEVERAL = 4
"""The fewest queries of a role, unless it sets its own: a full stop at the end of a text has only its own query, and in
a text of five tokens a sink on the first would pass for an offset of four."""

WORDS = frozenset({axes.TEXT})
LINE = WORDS | {axes.SOUND}
"""Axes with one order of positions: tokens, and the frames of a sound."""

PATCHES = frozenset({axes.PICTURE, axes.MIXED})
ALL = frozenset(axes.KINDS)


@dataclass(frozen=True)
class Role:
    """The definition of one role.

    Attributes:
        name: the name in tables.
        formula: the value as a formula of the attention matrix A.
        threshold: the value that a head must exceed.
        source: the source of the formula and threshold.
        control: a description of the null.
        measure: computes the value of a call.
        reads: the kind of input: ``"text"``, ``"copies"``, ``"sentences"`` or ``"needles"``.
        times: the factor of the null that the value must exceed.
        plus: a margin added to that product.
        least: the fewest queries that must have been scored.
        mass: for a role of a choice, whose value is the share of right choices: the mean weight on right choices that
            must be exceeded too. None for other roles, whose value is itself a weight.
        state: whether it is a state of rest (a sink, broad attention), which most heads have beside their role.
        over: the allowed kinds of the query and key axes: kinds of `headwise.look.Axis`. On an axis of text and
            pictures, a role of text counts only the queries that are text.
    """

    name: str
    formula: str
    threshold: float
    source: str
    control: str
    measure: Measure = field(compare=False)
    reads: str = "text"
    times: float = TIMES_CHANCE
    plus: float = 0.0
    least: int = SEVERAL
    mass: float | None = None
    state: bool = False
    over: frozenset[str] = WORDS

    def plays(
        self, value: float, null: float | None, count: int, low: float | None = None, mass: float | None = None
    ) -> bool:
        """Return whether these numbers make a head play the role.

        >>> import headwise
        >>> induction = next(role for role in headwise.look.ROLES if role.name == "induction")
        >>> induction.plays(0.6, null=0.02, count=99), induction.plays(0.6, null=0.4, count=99)
        (True, False)
        """
        bar = self.times * (null or 0.0) + self.plus
        above = value > self.threshold and value > bar and count >= self.least
        above &= self.mass is None or (mass is not None and mass > self.mass)
        return above and (low is None or null is None or low > null)
