"""The score of a head in a role, and its evidence: plain frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """One query whose largest weight is on a key of the role.

    Attributes:
        text: the index of the text, from 0.
        query: position of the query in its text.
        key: position of the key.
        weight: the weight of the query on the key.
    """

    text: int
    query: int
    key: int
    weight: float


@dataclass(frozen=True)
class Score:
    """The score of a head in one role.

    Attributes:
        name: the role, such as ``"previous-token"``; `headwise.look.ROLES` has its formula and source.
        value: the score, from 0 to 1.
        null: the chance level by the role's control (uniform attention, shuffled targets, the best fixed offset);
            None if the role has no control.
        threshold: the value must exceed this.
        count: number of queries that were scored.
        low, high: the 95 % interval of the value, from a bootstrap over texts; None with a single text.
        plays: whether the head plays the role: by value, null, interval and count.
        evidence: the queries with the clearest evidence, for the roles it plays.
        detail: the free part of the role, such as the offset; empty for most.
        mass: for a role of a choice, such as coreference: the mean weight of a query on its right keys. The value is
            the share of right choices, which may be high where this is almost nothing. None for other roles.
    """

    name: str
    value: float
    null: float | None
    threshold: float
    count: int
    low: float | None = None
    high: float | None = None
    plays: bool = False
    evidence: tuple[Evidence, ...] = ()
    detail: str = ""
    mass: float | None = None

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.detail})' if self.detail else ''} {self.value:.2f}"

    def to_list(self) -> list[Any]:
        """Return the fields in order without the name, evidence as lists: short in JSON with thousands of scores.

        `HeadRecord.from_dict` reads them.
        """
        row: list[Any] = [self.value, self.null, self.threshold, self.count, self.low, self.high, self.plays]
        more: list[Any] = [[[e.text, e.query, e.key, e.weight] for e in self.evidence], self.detail, self.mass]
        while more and more[-1] in ([], "", None):
            more.pop()
        return row + more
