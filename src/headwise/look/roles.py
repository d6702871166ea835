"""What heads are called, as data: a role is a formula on a head's numbers, a threshold, and who says so.

A head plays a role if its score exceeds the threshold **and** twice the score of uniform attention on the same tokens
under the same mask (the role's baseline). On a long text that second condition asks nothing: uniform
attention gives every key next to nothing. On five tokens it gives the own token 0.46, and a head that does no more is
not called anything.

A[i, j] below is the weight of query i on key j; means are over the queries that may attend that key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .records import HeadRecord, RoleScore

TIMES_UNIFORM = 2.0
"""How many times the score of uniform attention a role must exceed."""

FEW_KEYS = 8
"""Rows with fewer keys say nothing of broadness: two keys at 0.7 and 0.3 are already "88 % even"."""

CLARK_KEYS = 128
"""Length of the texts on which Clark et al. called an entropy above 3.8 nats broad."""

_CLARK = "Clark et al. 2019, arXiv 1906.04341"
_IOI = "Wang et al. 2022, arXiv 2211.00593, appendix H"
_OUR_THRESHOLD = "; the threshold is ours"


@dataclass(frozen=True)
class Role:
    """One role.

    Attributes:
        name: what the table shows.
        formula: how the score comes from the attention matrix A.
        threshold: the score that a head must exceed.
        source: where the formula and threshold come from.
        score: the score of a head's record; None where it was not measured.
        by_position: the role compares positions of queries and keys, so it means nothing in cross-attention.
        beats_uniform: whether uniform attention is a baseline; it is not for a role that uniform attention plays.
    """

    name: str
    formula: str
    threshold: float
    source: str
    score: Callable[[HeadRecord], float | None] = field(compare=False)
    by_position: bool = True
    beats_uniform: bool = True


def _at(name: str, offset: int, source: str) -> Role:
    """The role of attending one place, seen from the query."""
    place = f"i{offset:+}" if offset else "i"
    return Role(name, f"mean_i A[i, {place}]", 0.5, source, lambda head: head.mass_at(offset))


ROLES: tuple[Role, ...] = (
    _at("previous-token", -1, f"{_IOI}; threshold: {_CLARK}"),
    *(_at(f"offset-{k}", -k, f"{_IOI}, generalised; threshold: {_CLARK}") for k in range(2, 9)),
    _at("self", 0, _CLARK),
    _at("next-token", 1, _CLARK),
    *(_at(f"offset+{k}", k, f"{_CLARK}, generalised") for k in range(2, 9)),
    Role(
        "first-token sink",
        "mean_{i>0} A[i, 0]",
        0.3,
        "Gu et al. 2024, arXiv 2410.10781: alpha_1 > 0.3 (here without query 0, which has no choice)",
        lambda head: head.sink,
        by_position=False,
    ),
    Role(
        "delimiter",
        "mean_i sum of A[i, j] over delimiters j > 0",
        0.6,
        f"{_CLARK}: special tokens above 0.6",
        lambda head: head.delimiter,
        by_position=False,
    ),
    Role(
        "broad",
        f"mean_i entropy(A[i]) / ln(min(n_i, {CLARK_KEYS})) over queries with n_i >= {FEW_KEYS} keys",
        3.8 / math.log(CLARK_KEYS),
        f"{_CLARK}: entropy above 3.8 nats, at {CLARK_KEYS} tokens; relative to ln n for shorter texts",
        lambda head: head.evenness,
        by_position=False,
        beats_uniform=False,
    ),
    Role(
        "duplicate-token",
        "random tokens repeated: mean_i sum of A[i, j] over earlier copies j of token i",
        0.4,
        _IOI + _OUR_THRESHOLD,
        lambda head: head.duplicate,
    ),
    Role(
        "induction",
        "random tokens repeated: mean_i sum of A[i, j+1] over earlier copies j of token i",
        0.4,
        "Olsson et al. 2022, arXiv 2209.11895 (prefix matching)" + _OUR_THRESHOLD,
        lambda head: head.induction,
    ),
)


def find(head: HeadRecord, uniform: HeadRecord | None = None, roles: Iterable[Role] = ROLES) -> tuple[RoleScore, ...]:
    """The roles that a head plays, strongest first: by how far the score went from the threshold towards 1.

    Args:
        head: the record to judge; its own ``roles`` are not read.
        uniform: the record that uniform attention gets on the same tokens; None asks for the thresholds alone.
        roles: what to look for.

    Example:
        >>> from headwise.look import HeadRecord
        >>> numbers = dict(entropy=0.3, largest=0.9, distance=1.1, sink=0.1, delimiter=0.1, self_mass=0.05)
        >>> head = HeadRecord("layers.0", 0, 0, 0, **numbers, offsets=(0.05, 0.9), duplicate=None, induction=None,
        ...                   roles=(), map=(), queries=99, keys=99)
        >>> [(role.name, role.score) for role in find(head)]
        [('previous-token', 0.9)]
    """
    scores = []
    for role in roles:
        score = role.score(head)
        if score is None or (role.by_position and head.queries != head.keys):
            continue
        chance = role.score(uniform) if uniform is not None and role.beats_uniform else None
        baseline = chance or 0.0
        if score > role.threshold and score > TIMES_UNIFORM * baseline:
            scores.append(RoleScore(role.name, score, role.threshold, role.source, baseline))
    return tuple(sorted(scores, key=lambda role: (role.threshold - role.score) / (1 - role.threshold)))
