"""Sums over texts that merge exactly: whole numbers, so that no order of texts and no split changes a bit.

A sum over the queries of one text is rounded to a multiple of 2**-24 once; from there on everything is integer
addition. Texts fall into at most 64 groups, which is what the bootstrap draws: memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

UNIT = 1 << 24
"""A sum is kept in multiples of 1 / UNIT: 6e-8, while 128k queries of a million texts stay below 2**63."""

GROUPS = 64
"""Most groups of texts; text t is in group t % GROUPS."""

DRAWS = 400
"""Resamples of the bootstrap."""

ON_PICTURE = "mass on the picture"
"""What the tokens of a text give to the patches that stand in it, a mean over those tokens."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def units(sums: Any) -> Ints:
    """Return the sums as whole multiples of 1 / UNIT."""
    whole: Ints = np.array(np.rint(np.asarray(sums, dtype=np.float64) * UNIT), dtype=np.int64)
    return whole


@lru_cache(maxsize=GROUPS)
def _draws(number: int) -> Floats:
    """(DRAWS, number): how often the bootstrap draws each of so many groups."""
    return np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), size=DRAWS).astype(np.float64)


@dataclass
class RoleSums:
    """One role in one layer: total, count, and what two controls give, (4, GROUPS, H)."""

    ints: Ints
    has_null: bool = True

    @classmethod
    def empty(cls, heads: int) -> RoleSums:
        """Nothing summed yet."""
        return cls(np.zeros((4, GROUPS, heads), np.int64))

    def add(self, texts: Sequence[int], total: Any, count: Any, null: Any | None, against: Any | None = None) -> None:
        """The sums of these texts, each (texts, H); no null where chance has no say."""
        self.has_null &= null is not None
        groups = [text % GROUPS for text in texts]
        for row, sums in enumerate((total, count, null, against)):
            if sums is not None:
                np.add.at(self.ints[row], groups, units(sums))

    def merge(self, other: RoleSums) -> None:
        """Other texts' sums."""
        self.ints += other.ints
        self.has_null &= other.has_null

    def means(self) -> tuple[Floats, Floats, Ints]:
        """Value, null (the larger control) and count of each head, over all texts; 0 where nothing was counted."""
        total, count, null, against = self.ints.sum(1)
        least = np.maximum(count, 1)
        return total / least, np.maximum(null, against) / least, count // UNIT

    def interval(self) -> tuple[Floats, Floats] | None:
        """The 95 % interval of each head's value, by percentiles of a bootstrap over groups; None for one group."""
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
"""Evidence as it is ordered: minus the weight, text, query, key."""

MOST_SHOWN = 3

PARTS = ("decoder", "encoder", "cross")
"""What a call may be of. A short text does not show that its queries may look ahead, or are another text's than its
keys: so of several texts the last word in this order counts."""


@dataclass
class LayerTally:
    """One attention call of the forward, over all texts.

    Attributes:
        place: what `HeadRecord` says of where the call is: module, call, layer, part.
        heads: number of query heads.
        roles: sums by role.
        numbers: sums over queries by name, (..., H) whole numbers; those called ``..._count`` divide the others.
        shown: by role and head, the best evidence so far.
        details: by role and head, what the role left open, and how many queries said so.
        widest: queries and keys of the longest text.
        over: the axes of its queries and keys, by number, in the pass over the main text.
    """

    place: dict[str, Any]
    heads: int
    roles: dict[str, RoleSums] = field(default_factory=dict)
    numbers: dict[str, Ints] = field(default_factory=dict)
    shown: dict[tuple[str, int], list[Shown]] = field(default_factory=dict)
    details: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    widest: tuple[int, int] = (0, 0)
    over: tuple[int, int] | None = None

    def add(self, sums: Mapping[str, Any]) -> None:
        """Return the sums of one text by name."""
        for name, values in sums.items():
            whole = units(values)
            self.numbers[name] = np.asarray(self.numbers[name] + whole) if name in self.numbers else whole

    def role(self, name: str) -> RoleSums:
        """Return the sums of a role, empty ones if new."""
        if name not in self.roles:
            self.roles[name] = RoleSums.empty(self.heads)
        return self.roles[name]

    def show(self, role: str, head: int, evidence: Iterable[Shown]) -> None:
        """Offer evidence; the best stay."""
        best = sorted({*self.shown.get((role, head), ()), *evidence})
        self.shown[role, head] = best[:MOST_SHOWN]

    def tell(self, role: str, head: int, detail: str, count: int) -> None:
        """Count a detail."""
        said = self.details.setdefault((role, head), {})
        said[detail] = said.get(detail, 0) + count

    def detail(self, role: str, head: int) -> str:
        """Return what most queries said; of equals the first by name."""
        said = self.details.get((role, head), {})
        return min(said, key=lambda text: (-said[text], text)) if said else ""

    def is_of(self, part: str) -> None:
        """What a text shows of the part that the call is of."""
        if PARTS.index(part) > PARTS.index(self.place["part"]):
            self.place = {**self.place, "part": part}

    def merge(self, other: LayerTally) -> None:
        """Other texts' sums of the same call."""
        self.is_of(other.place["part"])
        if self.place != {**other.place, "part": self.place["part"]} or self.heads != other.heads:
            raise ValueError(
                f"looks merge call by call; got {other.place} with {other.heads} heads where {self.place} with "
                f"{self.heads} stands: merge looks of one model alone"
            )
        self.widest = max(self.widest, other.widest)
        for name, sums in other.roles.items():
            self.role(name).merge(sums)
        for name, whole in other.numbers.items():
            self.numbers[name] = np.asarray(self.numbers[name] + whole) if name in self.numbers else whole
        for (role, head), evidence in other.shown.items():
            self.show(role, head, evidence)
        for (role, head), said in other.details.items():
            for detail, count in said.items():
                self.tell(role, head, detail, count)
