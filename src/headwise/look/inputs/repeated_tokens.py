"""Random tokens, repeated: the input that identifies duplicate-token and induction heads.

Random tokens have no meaning and no grammar, so the attention pattern on the second copy depends only on the copy.
Each sequence has its own period: with one fixed period, a head that attends at a fixed offset would pass for an
induction head. Sinks are never measured here: repeated input weakens them (Gu et al. 2024, arXiv 2410.10781).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...shapes.arguments import check_counts, whole_numbers

SHORTEST = 8
"""The fewest random tokens of a sequence; a model with fewer positions is not measured."""


@dataclass(frozen=True)
class Repeats:
    """Settings of the repeated random tokens.

    Attributes:
        sequences: the number of sequences, each with its own period if there are enough periods.
        length: the most tokens of each; a model with fewer positions gets as many as it takes.
        seed: the seed of the random tokens and periods.
        vocabulary: the ids to draw from; None for all ids of the model without its special ones.
    """

    sequences: int = 6
    length: int = 72
    seed: int = 0
    vocabulary: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_counts(0, 2**20, sequences=self.sequences, length=self.length)
        if self.sequences < 1 or self.length < 1:
            raise ValueError(
                f"repeats need at least one sequence of one token; got sequences={self.sequences}, "
                f"length={self.length}; repeats=None leaves them out"
            )
        check_counts(-(2**63), 2**63, seed=self.seed)
        if self.vocabulary is not None and not isinstance(self.vocabulary, range):
            object.__setattr__(self, "vocabulary", tuple(whole_numbers("vocabulary", self.vocabulary)))


@dataclass(frozen=True)
class Repeated:
    """One sequence: its ids, the drawn ids, and the id that begins each copy."""

    ids: list[int]
    drawn: frozenset[int]
    opener: int


def draw(
    repeats: Repeats, vocabulary: Sequence[int], length: int, *, before: Sequence[int] = (), after: Sequence[int] = ()
) -> list[Repeated]:
    """Return the sequences, all of one length: `before`, copies of random tokens, `after`.

    A period is between a fifth and two fifths of the random part, so each sequence has at least two copies; the tokens
    of a period are distinct if the vocabulary has enough. Empty if fewer than `SHORTEST` random tokens fit.

    >>> [sequence] = draw(Repeats(sequences=1), range(10, 99), 11, before=[0])
    >>> sequence.ids[1:4] == sequence.ids[4:7] == sequence.ids[7:10], len(sequence.ids)
    (True, 11)
    """
    make = random.Random(repeats.seed)
    body = min(length, repeats.length) - len(before) - len(after)
    if body < SHORTEST or len(vocabulary) < 2:
        return []
    periods = list(range(max(2, body // 5), max(2, 2 * body // 5) + 1))
    few = len(periods) < repeats.sequences
    chosen = make.choices(periods, k=repeats.sequences) if few else make.sample(periods, repeats.sequences)
    made = []
    for period in chosen:
        enough = len(vocabulary) >= period
        block = make.sample(vocabulary, period) if enough else make.choices(vocabulary, k=period)
        copies = (block * (body // period + 1))[:body]
        made.append(Repeated([*before, *copies, *after], frozenset(block), block[0]))
    return made


def targets(sequence: Repeated, *, ahead: bool) -> Mapping[str, list[list[int]]]:
    """Return the keys of each position that a duplicate-token head and an induction head would attend to.

    duplicate: the other positions of the same token; only earlier ones, unless the model looks `ahead`.
    induction: the positions after those; none if the model looks ahead, because it can attend to the next copy
    directly. The first token of a copy is left out of induction: the token before it differs between copies.
    """
    places: dict[int, list[int]] = {}
    for i, token in enumerate(sequence.ids):
        if token in sequence.drawn:
            places.setdefault(token, []).append(i)
    duplicate: list[list[int]] = [[] for _ in sequence.ids]
    induction: list[list[int]] = [[] for _ in sequence.ids]
    for token, where in places.items():
        for i in where:
            duplicate[i] = [j for j in where if j < i or (ahead and j > i)]
            if not ahead and token != sequence.opener:
                induction[i] = [j + 1 for j in where if j + 1 < i]
    return {"duplicate": duplicate, "induction": induction}
