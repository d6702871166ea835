"""The record of one attention head, and its large map: plain frozen data that converts to JSON.

The records hold no tensors, so they can be compared, stored and sent. Every number is a Python float, int or None;
None means "not measured", never "zero".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...shapes.arguments import check_counts, check_texts, shown
from .schema import Damaged, PlainRecord
from .scores import Score

NO_ROLE = "-"
AnyHead = TypeVar("AnyHead", bound=Any)
"""A record that has a `layer`."""


def by_layer(heads: Iterable[AnyHead]) -> dict[int, list[AnyHead]]:
    """Return the records of heads by their layer, in their order."""
    layers: dict[int, list[AnyHead]] = {}
    for head in heads:
        layers.setdefault(head.layer, []).append(head)
    return layers


@dataclass(frozen=True)
class HeadRecord(PlainRecord):
    """One head: its statistics on the texts, and its score in each role.

    Attributes:
        module: qualified name of the attention module.
        call: the number of earlier calls of that module in the same forward pass (0 unless layers share it).
        layer: index of the attention call in the forward pass, from 0.
        head: index of the query head, from 0.
        part: ``"encoder"``, ``"decoder"`` or ``"cross"``, by the keys that the queries of the call may attend to.
        entropy: mean entropy of a row, in nats.
        largest: mean of the largest weight of a row.
        distance: mean distance between a query and its keys, weighted by attention, in tokens; None in
            cross-attention, whose positions are of two texts.
        offsets: mean mass on the key 0, 1, ... k positions back, over the queries that may attend to it; empty in
            cross-attention.
        ahead: mean mass on the key 1, 2, ... k positions ahead, as ``offsets``; empty if no query may look ahead.
        scores: the score in each role; roles that were not measured are missing.
        map: the pooled attention matrix, rows of queries; each row sums to 1, or to 0 if it attends to nothing.
        queries: number of queries of the call, of the longest text.
        keys: number of keys of the call, of the longest text.
        extras: additional numbers by name, such as importance by a criterion; see `Look.with_extras`.
        over: the indices of its query and key axes in the look's `axes`; empty for a look at one text only.
        role: the name of the most specific role that the head plays, by the order of `headwise.look.ROLES`; ``"-"`` if
            it plays none, or states alone.
        states: the states that it is in (sinks, broad), in the same order.
        first_moved: mean share of the first key in what a query moves (weight times length of what the head writes
            from a key), over the queries after the first; None if it was not measured.
    """

    CALLED = "a head's record is"

    module: str
    call: int
    layer: int
    head: int
    part: str
    entropy: float
    largest: float
    distance: float | None
    offsets: tuple[float, ...]
    ahead: tuple[float, ...]
    scores: Mapping[str, Score]
    map: tuple[tuple[float, ...], ...] = ()
    queries: int = 0
    keys: int = 0
    extras: Mapping[str, float] = field(default_factory=dict)
    over: tuple[int, ...] = ()
    role: str = NO_ROLE
    states: tuple[str, ...] = ()
    first_moved: float | None = None

    @property
    def roles(self) -> tuple[Score, ...]:
        """The scores of the roles that the head plays: its role, others in the order of `scores`, and its states."""
        played = [score for score in self.scores.values() if score.plays]
        return tuple(sorted(played, key=lambda score: (score.name in self.states, score.name != self.role)))

    def score(self, name: str) -> Score | None:
        """Return the score in a role by its name; None if it was not measured."""
        check_texts(name=name)
        return self.scores.get(name)

    def value(self, name: str) -> float | None:
        """Return the value of a score; None if it was not measured."""
        score = self.score(name)
        return None if score is None else score.value

    def check(self) -> None:
        """Raise ValueError for a role or state that the head does not play, or rows of several lengths in the map."""
        played = {name for name, score in self.scores.items() if score.plays}
        for n, name in enumerate(self.states):
            if name not in played:
                raise Damaged(f"is a role that the head plays; got {shown(name)}", "states", n)
        if self.role not in played | {NO_ROLE}:
            raise Damaged(f"is a role that the head plays; got {shown(self.role)}", "role")
        if len(widths := {*map(len, self.map)}) > 1:
            raise Damaged(f"has rows of one length; got {sorted(widths)}", "map")


@dataclass(frozen=True)
class HeadMap:
    """The large map of one head, one byte per cell.

    A byte is ``round(255 * sqrt(weight))``: the square root resolves small weights (1 / 128 becomes 23, not 2), and
    suits a color scale.

    Attributes:
        rows: number of (pooled) queries.
        columns: number of (pooled) keys.
        data: the bytes, row by row.
    """

    rows: int
    columns: int
    data: bytes

    def __post_init__(self) -> None:
        check_counts(rows=self.rows, columns=self.columns)
        if not isinstance(self.data, bytes):
            raise TypeError(f"a map's data is bytes, one a cell; got {shown(self.data)}")
        if len(self.data) != self.rows * self.columns:
            raise ValueError(
                f"a map of {self.rows} x {self.columns} cells needs {self.rows * self.columns} bytes, got "
                f"{len(self.data)}; give one byte a cell"
            )

    def weights(self) -> tuple[tuple[float, ...], ...]:
        """Return the weights with an error of at most 0.004 near 1 and less below: half a step of a byte.

        >>> HeadMap(rows=1, columns=2, data=bytes([255, 0])).weights()
        ((1.0, 0.0),)
        """
        values = [(byte / 255) ** 2 for byte in self.data]
        return tuple(tuple(values[i * self.columns : (i + 1) * self.columns]) for i in range(self.rows))
