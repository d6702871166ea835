"""Handmade weights: the matrices of a head with one job, and the definition of each job on token ids.

The residual stream of `headwise.testing.constructed` consists of blocks, each a one-hot vector or empty: the token, its
position, and the outputs of lower heads (the previous token, a repeated name, a name to exclude, a block that no head
reads). Scores have three levels: 2 SHARP for a target, SHARP for the resting position of the head, and 0 for every
other key. After the softmax, each other key has at most about ``exp(-SHARP)``, and targets have the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.nn import Head
from headwise.shapes.arguments import check_counts, check_flags, shown, whole_numbers

SHARP = 20.0
GAIN = 4.0
"""The amount that a copying head adds to the logit of the attended token; the logit of the current token is 1."""

LEAVE_OUT = 400.0
"""The score (in units of SHARP) that a name mover subtracts for a repeated name; enough for 200 repeated names."""

NEEDS = {
    "induction": "previous-token",
    "retrieval": "previous-token",
    "subject inhibition": "duplicate name",
    "name mover": "subject inhibition",
}
"""Jobs that read the output of a head in a lower layer."""

COPIES = ("induction", "retrieval", "name mover", "copying")
"""Jobs that raise the logit of the attended token."""

WRITES = {"previous-token": "before", "duplicate name": "repeated", "subject inhibition": "inhibited"}
"""The block to which each of these jobs writes the attended token, for heads in higher layers."""

OFFSETS = {"previous-token": -1, "self": 0, "next-token": 1, "alignment": 0}
BY_TABLE = {
    "delimiter": "delimiters",
    "copying": "names",
    "[CLS]": "opener",
    "[SEP]": "closer",
    "relation by offset": "offsets",
    "relation by id": "heads",
    "coreference": "antecedents",
    "word class": "classes",
    "duplicate name": "names",
    "subject inhibition": "names",
    "name mover": "names",
    "retrieval": "needles",
    "local band": "band",
}
"""Jobs that use a table, with the field of `Tables`."""

OTHERS = ("first-token sink", "broad", "duplicate-token", "same token", "induction", "idle")
JOBS = (*OFFSETS, "offset-K", "offset+K", "sink at K", *OTHERS, *BY_TABLE)
"""All jobs; K is a number."""


@dataclass(frozen=True)
class Tables:
    """The token ids used by heads, and relations between ids.

    Attributes:
        opener: The first id of every text, which occurs nowhere else ([CLS] of an encoder); heads never copy it.
        closer: The last id of an encoder's text ([SEP]).
        delimiters: The ids that a delimiter head attends to.
        names: The ids that copying heads and name movers attend to.
        needles: The ids for which a retrieval head attends to the token after their previous occurrence.
        offsets: For "relation by offset": the offset from an id to its syntactic head, in positions.
        heads: For "relation by id": the id of the syntactic head of an id.
        antecedents: For "coreference": the id to which an id (a pronoun, for example) refers.
        classes: For "word class": the class of an id; an id without a class is the only one in its class.
        band: Number of positions of a local band on each side, including the query's own.
    """

    opener: int = 1
    closer: int = 2
    delimiters: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    needles: tuple[int, ...] = ()
    offsets: Mapping[int, int] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
    antecedents: Mapping[int, int] = field(default_factory=dict)
    classes: Mapping[int, int] = field(default_factory=dict)
    band: int = 5

    def __post_init__(self) -> None:
        check_counts(opener=self.opener, closer=self.closer)
        check_counts(1, band=self.band)
        for name in ("delimiters", "names", "needles"):
            object.__setattr__(self, name, tuple(whole_numbers(name, getattr(self, name))))
        for name in ("offsets", "heads", "antecedents", "classes"):
            table = getattr(self, name)
            if not isinstance(table, Mapping):
                raise TypeError(f"{name} is a dict, from ids to numbers; got {shown(table)}")
            whole_numbers(f"keys of {name}", list(table))
            whole_numbers(f"values of {name}", list(table.values()))


@dataclass(frozen=True)
class StreamSlots:
    """The layout of the residual stream: consecutive blocks of one-hot vectors, and a constant 1."""

    vocabulary: int
    places: int
    scratch: tuple[str, ...]

    @property
    def one(self) -> int:
        """The index of the constant, after the token and position blocks."""
        return self.vocabulary + self.places

    @property
    def width(self) -> int:
        """The size of the residual stream."""
        return self.one + 1 + self.vocabulary * len(self.scratch)

    @property
    def head_dim(self) -> int:
        """The size of a query or key: one number for every position, one for every id, and two more."""
        return self.places + self.vocabulary + 2

    def block(self, name: str) -> Tensor:
        """Return the indices of a block, (V,) or (P,)."""
        if name == "token":
            return torch.arange(self.vocabulary)
        if name == "place":
            return torch.arange(self.places) + self.vocabulary
        start = self.one + 1 + self.vocabulary * self.scratch.index(name)
        return torch.arange(start, start + self.vocabulary)


def number_in(job: str) -> int | None:
    """Return the signed number in "offset-K", "offset+K" or "sink at K"; None for any other text."""
    match = re.fullmatch(r"offset([+-]\d{1,6})|sink at (\d{1,6})", job)
    return int(match[1] or match[2]) if match else None


def is_job(job: str, among: Sequence[str]) -> bool:
    """Return whether a text is a job, with or without a number."""
    return job in among if number_in(job) is None else "sink at K" in among


def offset_of(job: str) -> int | None:
    """Return the offset from query to key for a job with a fixed offset; None for other jobs."""
    return number_in(job) if job.startswith("offset") else OFFSETS.get(job)


# --- the definition ---------------------------------------------------------------------------------------------------


def targets(job: str, ids: Tensor, memory: Tensor | None = None, *, tables: Tables, causal: bool) -> Tensor:
    """Return the target keys of a job, (T, S) bool, from its definition and not from the weights.

    A row without True is a query without targets, for which the head attends to its resting position.

    Args:
        job: One of `JOBS`.
        ids: The ids of the queries, (T,).
        memory: The ids of the keys, (S,), in cross-attention; by default `ids`.
        tables: The tables of the job.
        causal: True if queries attend only to earlier keys and their own; ignored in cross-attention.

    Example:
        >>> targets("duplicate-token", torch.tensor([1, 7, 5, 7]), tables=Tables(), causal=True).nonzero().tolist()
        [[3, 1]]
    """
    _check_targets(job, tables, causal)
    ids = torch.tensor(whole_numbers("ids", ids), dtype=torch.long)
    keys = ids if memory is None else torch.tensor(whole_numbers("memory", memory), dtype=torch.long)
    T, S = len(ids), len(keys)
    i, j = torch.arange(T)[:, None], torch.arange(S)[None]
    a, b = ids[:, None], keys[None]
    seen = (j <= i) if causal and memory is None else torch.ones(T, S, dtype=torch.bool)
    before = torch.cat([keys.new_full((1,), -1), keys[:-1]])[None]
    offset = offset_of(job)
    if offset is not None:
        return (j == i + offset) & seen
    if job.startswith("sink at "):
        return (j == number_in(job)) & seen
    named = {"delimiter": tables.delimiters, "copying": tables.names, "[CLS]": (tables.opener,)}
    named |= {"[SEP]": (tables.closer,)}
    if job in named:
        return torch.isin(b, torch.tensor(named[job])).expand(T, S) & seen
    looked_up: dict[str, Mapping[int, int]] = {"relation by id": tables.heads, "coreference": tables.antecedents}
    if job in looked_up:
        return (b == _read(looked_up[job], a)) & seen
    names = torch.isin(b, torch.tensor(tables.names, dtype=b.dtype)).expand(T, S)
    again = ((keys[:, None] == keys[None]) & (torch.arange(S)[:, None] > torch.arange(S))).any(1)[None]
    if job == "name mover":
        repeated = (b[..., None] == torch.where(again, b, -2)) & (j[0] <= i)[:, None]  # (T, S, S): up to query i
        return names & seen & ~repeated.any(-1)
    rules = {
        "first-token sink": j == 0,
        "broad": seen,
        "idle": j < 0,
        "local band": (i - j).abs() < tables.band,
        "duplicate-token": (a == b) & (i != j),
        "same token": a == b,
        "duplicate name": (a == b) & (i != j) & names,
        "subject inhibition": names & again,
        "induction": a == before,
        "retrieval": (a == before) & torch.isin(a, torch.tensor(tables.needles, dtype=a.dtype)),
        "word class": (_class_of(tables, a) == _class_of(tables, b)) & (i != j),
        "relation by offset": j - i == _read(tables.offsets, a, missing=S + T),
    }
    return rules[job] & seen


def _check_targets(job: object, tables: object, causal: object) -> None:
    """Check the arguments of `targets` except the ids; raise TypeError or ValueError."""
    if not isinstance(job, str) or not is_job(job, JOBS):
        raise ValueError(f"a job is one of {', '.join(JOBS)}; got {shown(job)}")
    if not isinstance(tables, Tables):
        raise TypeError(f"tables is a headwise.testing.constructed.Tables; got {shown(tables)}")
    check_flags(causal=causal)


def _class_of(tables: Tables, ids: Tensor) -> Tensor:
    """Return the class of each id; an id without a class is the only one in its class."""
    return _read({int(i): tables.classes.get(int(i), -1 - int(i)) for i in ids.unique()}, ids)


def _read(table: Mapping[int, int], ids: Tensor, missing: int = -1) -> Tensor:
    """Return the table entry of each id."""
    return torch.tensor([table.get(i, missing) for i in ids.flatten().tolist()]).view(ids.shape)


# --- the weights ------------------------------------------------------------------------------------------------------


@dataclass
class _Scores:
    """The W_Q and W_K, (width, D) each, of a head under construction; D is the number of positions and ids plus two."""

    layout: StreamSlots
    rest: Tensor

    def __post_init__(self) -> None:
        self.W_Q = torch.zeros(self.layout.width, self.layout.head_dim)
        self.W_K = torch.zeros_like(self.W_Q)
        self.place, self.token = self.layout.block("place"), self.layout.block("token")
        self.for_place = torch.arange(self.layout.places)
        self.for_id = torch.arange(self.layout.vocabulary) + self.layout.places

    def to_rest(self, rows: Tensor | None = None) -> None:
        """Add a score of SHARP for the resting position, for all queries or for those in `rows`, (P,) bool."""
        rows = torch.ones(self.layout.places, dtype=torch.bool) if rows is None else rows
        self.W_K[self.place, self.for_place] = 1
        self.W_Q[self.place[rows], self.rest[rows]] += SHARP

    def by_place(self, wanted: Tensor) -> None:
        """Add 2 SHARP for keys by position, (P, P) bool; queries that always have a target get no resting position."""
        self.W_Q[self.place[:, None], self.for_place] += 2 * SHARP * wanted
        self.to_rest(~wanted.tril().any(1))

    def by_pair(self, wanted: Tensor, *, of: str = "token", others: bool = False) -> None:
        """Add 2 SHARP by query id and content of the key's block, (V, V) bool; `others` excludes the query itself."""
        self.W_Q[self.token[:, None], self.for_id] = 2 * SHARP * wanted
        self.W_K[self.layout.block(of), self.for_id] = 1
        if others:  # cancel the score of the query's own key
            self.W_Q[self.place, self.for_place] -= 2 * SHARP
        self.to_rest()

    def by_key(self, wanted: Tensor, *, of: str = "token", but: str | None = None) -> None:
        """Add 2 SHARP by the content of the key's block, (V,) bool; ids in the query's block `but` are excluded."""
        self.W_Q[self.layout.one, self.for_id] = 2 * SHARP * wanted
        self.W_K[self.layout.block(of), self.for_id] = 1
        if but is not None:
            self.W_Q[self.layout.block(but), self.for_id] = -LEAVE_OUT * SHARP
        self.to_rest()

    def by_step(self, steps: Tensor) -> None:
        """Set scores to -SHARP times the squared distance from the position that is `steps` (V,) after the query.

        That is -j^2 + 2 j (i + step), plus a term that depends only on the query, which the softmax cancels.
        """
        # Centered, because smaller numbers have smaller rounding errors.
        j = torch.arange(self.layout.places) - self.layout.places // 2.0
        self.W_Q[self.layout.one, 0], self.W_K[self.place, 0] = 1, -SHARP * j.square()
        self.W_Q[self.place, 1], self.W_Q[self.token, 1], self.W_K[self.place, 1] = 2 * SHARP * j, 2 * SHARP * steps, j


def planted(job: str, layout: StreamSlots, tables: Tables, *, rest: Tensor, share: float = 1.0, away: Tensor) -> Head:
    """Build a head with this job.

    Args:
        job: One of `JOBS`.
        layout: The layout of the residual stream.
        tables: The tables of the job.
        rest: The resting position of a query at each position, (P,).
        share: The fraction of the output of all heads with this job that this head writes.
        away: The steps from the query to its resting position for each id, (V,), for "relation by offset".
    """
    scores = _Scores(layout, torch.zeros_like(rest) if job in ("duplicate name", "subject inhibition") else rest)
    V, P = layout.vocabulary, layout.places
    same, place = torch.eye(V, dtype=torch.bool), torch.arange(P)
    ids = {name: _one_hot(V, getattr(tables, name)) for name in ("names", "delimiters", "needles")}
    ids |= {"opener": _one_hot(V, [tables.opener]), "closer": _one_hot(V, [tables.closer])}
    offset = offset_of(job)
    if offset is not None:
        scores.by_place(place[:, None] + offset == place)
    elif job == "first-token sink" or job.startswith("sink at "):
        scores.by_place((place == (number_in(job) or 0)).expand(P, P))
    elif job == "local band":
        scores.by_place((place[:, None] - place).abs() < tables.band)
    elif job in ("delimiter", "copying", "[CLS]", "[SEP]"):
        scores.by_key(ids[BY_TABLE[job]])
    elif job == "subject inhibition":
        scores.by_key(ids["names"], of="repeated")
    elif job == "name mover":
        scores.by_key(ids["names"], but="inhibited")
    elif job in ("duplicate-token", "duplicate name"):
        scores.by_pair(same if job == "duplicate-token" else same & ids["names"], others=True)
    elif job == "same token":
        scores.by_pair(same)
    elif job in ("induction", "retrieval"):
        scores.by_pair(same if job == "induction" else same & ids["needles"], of="before")
    elif job in ("relation by id", "coreference"):
        scores.by_pair(_pairs(V, tables.heads if job == "relation by id" else tables.antecedents))
    elif job == "word class":
        kinds = _class_of(tables, torch.arange(V))
        scores.by_pair(kinds[:, None] == kinds, others=True)
    elif job == "relation by offset":
        scores.by_step(torch.tensor([tables.offsets.get(i, int(away[i])) for i in range(V)]).float())
    elif job == "idle":
        scores.to_rest()
    return Head(scores.W_Q * layout.head_dim**0.5, scores.W_K, *_written(job, layout, tables, share))


def _written(job: str, layout: StreamSlots, tables: Tables, share: float) -> tuple[Tensor, Tensor]:
    """Return W_V (width, V) and W_O (V, width), which copy the token, except the opener, to the job's block."""
    W_V, W_O = torch.zeros(layout.width, layout.vocabulary), torch.zeros(layout.vocabulary, layout.width)
    copied = layout.block("token") != tables.opener
    W_V[layout.block("token")[copied], copied.nonzero()[:, 0]] = 1
    target, amount = ("token", GAIN) if job in COPIES else (WRITES.get(job, "seen"), share)
    target = target if target == "token" or target in layout.scratch else "seen"
    W_O[torch.arange(layout.vocabulary), layout.block(target)] = amount
    return W_V, W_O


def _one_hot(size: int, ids: Collection[int]) -> Tensor:
    return torch.isin(torch.arange(size), torch.tensor(list(ids), dtype=torch.long))


def _pairs(size: int, table: Mapping[int, int]) -> Tensor:
    allowed = torch.zeros(size, size, dtype=torch.bool)
    for a, b in table.items():
        allowed[a, b] = True
    return allowed
