"""Sums over texts that merge exactly: they are integers, so the order and grouping of the texts change no bit.

A sum over the queries of one text is rounded to a multiple of 2**-24 once; all further additions are of integers.
Texts are divided into at most 64 groups, from which the bootstrap draws: memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

UNIT = 1 << 24
"""The resolution: sums are multiples of 1 / UNIT (6e-8), and 128k queries of a million texts stay below 2**63."""

GROUPS = 64
"""The most groups of texts; text t is in group t % GROUPS."""

DRAWS = 400
"""The number of bootstrap resamples."""

ON_PICTURE = "mass on the picture"
"""The mass from the tokens of a text to the patches inside the text, averaged over those tokens."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def units(sums: Any) -> Ints:
    """Return the sums as integer multiples of 1 / UNIT."""
    return np.array(np.rint(np.asarray(sums, dtype=np.float64) * UNIT), dtype=np.int64)


@lru_cache(maxsize=GROUPS)
def _draws(number: int) -> Floats:
    """Return the bootstrap's draws of each group, (DRAWS, number)."""
    return np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), size=DRAWS).astype(np.float64)


@dataclass
class RoleSums:
    """The sums of one role in one layer, (5, GROUPS, H): total, count, two controls, weight on right choices."""

    ints: Ints
    has_null: bool = True

    @classmethod
    def empty(cls, heads: int) -> RoleSums:
        """Return sums of zero."""
        return cls(np.zeros((5, GROUPS, heads), np.int64))

    def add(self, texts: Sequence[int], total: Any, count: Any, null: Any | None, *more: Any | None) -> None:
        """Add the sums of these texts, each (texts, H), in the order of `ints`; None for those that the role lacks."""
        self.has_null &= null is not None
        groups = [text % GROUPS for text in texts]
        for row, sums in enumerate((total, count, null, *more)):
            if sums is not None:
                np.add.at(self.ints[row], groups, units(sums))

    def merge(self, other: RoleSums) -> None:
        """Add the sums of other texts."""
        self.ints += other.ints
        self.has_null &= other.has_null

    def means(self) -> tuple[Floats, Floats, Floats, Ints]:
        """Return value, null (the larger control), weight on right choices and count of each head, over all texts."""
        total, count, null, against, mass = self.ints.sum(1)
        least = np.maximum(count, 1)
        return total / least, np.maximum(null, against) / least, mass / least, count // UNIT

    def interval(self) -> tuple[Floats, Floats] | None:
        """Return the 95 % interval of each head's value, by a percentile bootstrap over groups; None for one group."""
        total, count = self.ints[:2].astype(np.float64)
        filled = count.any(1)
        number = int(filled.sum())
        if number < 2:
            return None
        total, count = total[filled], count[filled]
        draws = _draws(number)
        means = (draws @ total) / np.maximum(draws @ count, 1.0)
        low, high = np.percentile(means, (2.5, 97.5), axis=0)
        return low, high


Shown = tuple[float, int, int, int]
"""Evidence as a tuple in sort order: minus the weight, text, query, key."""

MOST_SHOWN = 3

PARTS = ("decoder", "encoder", "cross")
"""The possible parts of a call. On a short text a call may look like an earlier part of this list (no query that
looks ahead, equal lengths of queries and keys): so the last part that any text shows counts.
"""


@dataclass
class LayerTally:
    """The sums of one attention call over all texts."""

    place: dict[str, Any]  # as in `HeadRecord`: module, call, part
    heads: int  # the number of query heads
    roles: dict[str, RoleSums] = field(default_factory=dict)
    numbers: dict[str, Ints] = field(default_factory=dict)  # sums over queries, (..., H), and the counts of their rows
    shown: dict[tuple[str, int], list[Shown]] = field(default_factory=dict)  # by role and head: the best evidence
    details: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)  # the same: the queries of each detail
    widest: tuple[int, int] = (0, 0)  # the numbers of queries and keys of the longest text
    over: tuple[int, int] | None = None  # the axes of queries and keys, by number, in the pass over the main text

    def add(self, sums: Mapping[str, Any]) -> None:
        """Add the sums of one text, by name."""
        self._add({name: units(values) for name, values in sums.items()})

    def _add(self, sums: Mapping[str, Ints]) -> None:
        for name, whole in sums.items():
            self.numbers[name] = np.asarray(self.numbers[name] + whole) if name in self.numbers else whole

    def role(self, name: str) -> RoleSums:
        """Return the sums of a role; new roles get empty sums."""
        if name not in self.roles:
            self.roles[name] = RoleSums.empty(self.heads)
        return self.roles[name]

    def show(self, role: str, head: int, evidence: Iterable[Shown]) -> None:
        """Add evidence and keep the best."""
        best = sorted({*self.shown.get((role, head), ()), *evidence})
        self.shown[role, head] = best[:MOST_SHOWN]

    def tell(self, role: str, head: int, detail: str, count: int) -> None:
        """Add queries to the count of a detail."""
        said = self.details.setdefault((role, head), {})
        said[detail] = said.get(detail, 0) + count

    def detail(self, role: str, head: int) -> str:
        """Return the detail with the most queries; on ties the first by name."""
        said = self.details.get((role, head), {})
        return min(said, key=lambda text: (-said[text], text)) if said else ""

    def is_of(self, part: str) -> None:
        """Set the part of the call, if this text shows a later one in `PARTS`."""
        if PARTS.index(part) > PARTS.index(self.place["part"]):
            self.place = {**self.place, "part": part}

    def merge(self, other: LayerTally) -> None:
        """Add the sums of other texts for the same call."""
        self.is_of(other.place["part"])
        if self.place != {**other.place, "part": self.place["part"]} or self.heads != other.heads:
            raise ValueError(
                f"looks merge call by call; got {other.place} with {other.heads} heads where {self.place} with "
                f"{self.heads} stands: merge looks of one model alone"
            )
        self.widest = max(self.widest, other.widest)
        for name, sums in other.roles.items():
            self.role(name).merge(sums)
        self._add(other.numbers)
        for (role, head), evidence in other.shown.items():
            self.show(role, head, evidence)
        for (role, head), said in other.details.items():
            for detail, count in said.items():
                self.tell(role, head, detail, count)
