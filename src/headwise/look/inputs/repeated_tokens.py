"""Random tokens, repeated: the text on which duplicate-token and induction heads show themselves.

Random tokens carry no meaning and no grammar, so what a head does with their second copy it does because it is a copy.
Each sequence has a period of its own: under one fixed period, a head that looks back at a fixed offset would pass for
an induction head. Sinks are never measured here: repeated input weakens them (Gu et al. 2024, arXiv 2410.10781).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...shapes.arguments import check_counts, whole_numbers

SHORTEST = 8
"""Random tokens a sequence needs at the least; a model with fewer positions is not measured."""


@dataclass(frozen=True)
class Repeats:
    """How the repeated random tokens are made.

    Attributes:
        sequences: how many, each with a period of its own where there are enough of them.
        length: tokens of each, at most; a model with fewer positions gets as many as it takes.
        seed: of the random tokens and periods.
        vocabulary: the ids to draw from; None for all ids of the model but its special ones.
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
    """One sequence: its ids, and the id that begins each copy."""

    ids: list[int]
    drawn: frozenset[int]
    opener: int


def draw(
    repeats: Repeats, vocabulary: Sequence[int], length: int, *, before: Sequence[int] = (), after: Sequence[int] = ()
) -> list[Repeated]:
    """Return the sequences, all of one length: `before`, random tokens again and again, `after`.

    A period is drawn between a fifth and two fifths of the random part, so each sequence holds two copies and more;
    its tokens are distinct, as long as the vocabulary has enough. Empty where fewer than `SHORTEST` tokens are left.

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
    """For each position the keys that a duplicate-token and an induction head would attend.

    duplicate: the other places that hold the same token; earlier ones, unless the model looks `ahead`.
    induction: the places after those; none where the model looks ahead, for there the next copy can be read off.
    The first token of a copy is left out of induction: what preceded it differs from copy to copy.
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


def as_tensors(sequences: Sequence[Repeated], *, ahead: bool) -> dict[str, Tensor]:
    """Return the targets of a batch of sequences, (B, T, n) long each, -1 where there are fewer than n."""
    lists = [targets(sequence, ahead=ahead) for sequence in sequences]
    tensors = {}
    for name in ("duplicate", "induction"):
        widest = max(len(keys) for one in lists for keys in one[name])
        rows = [[keys + [-1] * (widest - len(keys)) for keys in one[name]] for one in lists]
        tensors[name] = torch.tensor(rows, dtype=torch.long, device="cpu").view(len(sequences), len(rows[0]), widest)
    return tensors
