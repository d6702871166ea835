"""Weights by hand: the matrices of a head that does one job, and the definition of that job on ids.

The residual stream of `headwise.testing.constructed` consists of blocks, each a one-hot vector or empty: the token, its
place, and what heads below wrote (the token before, a repeated name, a name to leave out, a block that nothing reads).
So W_Q and W_K say in words what a head attends, and scores have three levels: a target gets 2 SHARP, the place where a
head rests gets SHARP, every other key 0. After the softmax targets hold all but about ``exp(-SHARP)`` a key.
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
"""What a copying head adds to the logit of the token that it attends; the token at hand has 1."""

LEAVE_OUT = 400.0
"""Score (in units of SHARP) that a name mover takes from a name that was repeated; it may be one of 200 such."""

NEEDS = {
    "induction": "previous-token",
    "retrieval": "previous-token",
    "subject inhibition": "duplicate name",
    "name mover": "subject inhibition",
}
"""Jobs that read what a head of a lower layer wrote."""

COPIES = ("induction", "retrieval", "name mover", "copying")
"""Jobs that raise the logit of the token that they attend."""

WRITES = {"previous-token": "before", "duplicate name": "repeated", "subject inhibition": "inhibited"}
"""The block that the job of a lower layer writes the attended token to."""

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
"""Jobs that look something up, with the field of `Tables` that holds it."""

OTHERS = ("first-token sink", "broad", "duplicate-token", "same token", "induction", "idle")
JOBS = (*OFFSETS, "offset-K", "offset+K", "sink at K", *OTHERS, *BY_TABLE)
"""Every job; K is a number."""


@dataclass(frozen=True)
class Tables:
    """What heads look up: ids, and relations between ids.

    Attributes:
        opener: the id that begins every text, and occurs nowhere else ([CLS] of an encoder); heads never copy it.
        closer: the id that ends an encoder's text ([SEP]).
        delimiters: the ids that a delimiter head attends.
        names: the ids that copying heads and name movers attend.
        needles: the ids after which a retrieval head reads on.
        offsets: for "relation by offset": how many places from an id its syntactic head is.
        heads: for "relation by id": the id of the syntactic head of an id.
        antecedents: for "coreference": the id that an id (a pronoun, say) stands for.
        classes: for "word class": the class of an id; an id without one is a class of its own.
        band: places that a local band holds on a side, the query's own included.
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
    """Which numbers of the residual stream hold what: blocks of one-hot vectors, in a row, and a constant 1."""

    vocabulary: int
    places: int
    scratch: tuple[str, ...]

    @property
    def one(self) -> int:
        """Where the constant is: behind token and place."""
        return self.vocabulary + self.places

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        return self.one + 1 + self.vocabulary * len(self.scratch)

    @property
    def head_dim(self) -> int:
        """A number for every place, one for every id, and two more."""
        return self.places + self.vocabulary + 2

    def block(self, name: str) -> Tensor:
        """(V,) or (P,): the numbers of a block."""
        if name == "token":
            return torch.arange(self.vocabulary)
        if name == "place":
            return torch.arange(self.places) + self.vocabulary
        start = self.one + 1 + self.vocabulary * self.scratch.index(name)
        return torch.arange(start, start + self.vocabulary)


def number_in(job: str) -> int | None:
    """The K of "offset-K", "offset+K" or "sink at K"; None for any other text."""
    match = re.fullmatch(r"offset([+-]\d{1,6})|sink at (\d{1,6})", job)
    return int(match[1] or match[2]) if match else None


def is_job(job: str, among: Sequence[str]) -> bool:
    """Whether a text is a job, one with a number included."""
    return job in among if number_in(job) is None else "sink at K" in among


def offset_of(job: str) -> int | None:
    """How far from the query the job's key is, where that is all that it asks."""
    return number_in(job) if job.startswith("offset") else OFFSETS.get(job)


# --- the definition ---------------------------------------------------------------------------------------------------


def targets(job: str, ids: Tensor, memory: Tensor | None = None, *, tables: Tables, causal: bool) -> Tensor:
    """(T, S) bool: the keys that a head with this job attends, by the words of the job and not by its weights.

    A row without any is a query that finds no target; the head then rests.

    Args:
        job: one of `JOBS`.
        ids: (T,) of the queries.
        memory: (S,) of the keys, in cross-attention; the queries' own otherwise.
        tables: what is looked up.
        causal: whether a query sees no later key; without a meaning in cross-attention.

    Example:
        >>> targets("duplicate-token", torch.tensor([1, 7, 5, 7]), tables=Tables(), causal=True).nonzero().tolist()
        [[3, 1]]
    """
    _check_asked(job, tables, causal)
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
        repeated = (b[..., None] == torch.where(again, b, -2)) & (j[0] <= i)[:, None]  # (T, S, S): as seen by i
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


def _check_asked(job: object, tables: object, causal: object) -> None:
    """What `targets` takes beside ids; raises TypeError or ValueError."""
    if not isinstance(job, str) or not is_job(job, JOBS):
        raise ValueError(f"a job is one of {', '.join(JOBS)}; got {shown(job)}")
    if not isinstance(tables, Tables):
        raise TypeError(f"tables is a headwise.testing.constructed.Tables; got {shown(tables)}")
    check_flags(causal=causal)


def _class_of(tables: Tables, ids: Tensor) -> Tensor:
    """The class of each id; one that has none is a class of its own."""
    return _read({int(i): tables.classes.get(int(i), -1 - int(i)) for i in ids.unique()}, ids)


def _read(table: Mapping[int, int], ids: Tensor, missing: int = -1) -> Tensor:
    """What a table says of each id."""
    return torch.tensor([table.get(i, missing) for i in ids.flatten().tolist()]).view(ids.shape)


# --- the weights ------------------------------------------------------------------------------------------------------


@dataclass
class _Scores:
    """W_Q (width, D) and W_K (width, D) of a head in the making; a number of D for each place, id, and two more."""

    layout: StreamSlots
    rest: Tensor

    def __post_init__(self) -> None:
        self.W_Q = torch.zeros(self.layout.width, self.layout.head_dim)
        self.W_K = torch.zeros_like(self.W_Q)
        self.place, self.token = self.layout.block("place"), self.layout.block("token")
        self.for_place = torch.arange(self.layout.places)
        self.for_id = torch.arange(self.layout.vocabulary) + self.layout.places

    def to_rest(self, rows: Tensor | None = None) -> None:
        """A SHARP for the place of rest, of all queries or of those in `rows` (P,)."""
        rows = torch.ones(self.layout.places, dtype=torch.bool) if rows is None else rows
        self.W_K[self.place, self.for_place] = 1
        self.W_Q[self.place[rows], self.rest[rows]] += SHARP

    def by_place(self, wanted: Tensor) -> None:
        """2 SHARP for keys by place, (P, P) bool; a query that sees one of them in any text needs no rest."""
        self.W_Q[self.place[:, None], self.for_place] += 2 * SHARP * wanted
        self.to_rest(~wanted.tril().any(1))

    def by_pair(self, wanted: Tensor, *, of: str = "token", others: bool = False) -> None:
        """2 SHARP for keys by the query's id and what is in their block, (V, V) bool; `others`: not for the query."""
        self.W_Q[self.token[:, None], self.for_id] = 2 * SHARP * wanted
        self.W_K[self.layout.block(of), self.for_id] = 1
        if others:  # what its own id gave the query is taken back
            self.W_Q[self.place, self.for_place] -= 2 * SHARP
        self.to_rest()

    def by_key(self, wanted: Tensor, *, of: str = "token", but: str | None = None) -> None:
        """2 SHARP for keys by what is in their block, (V,) bool; none for those in the query's block `but`."""
        self.W_Q[self.layout.one, self.for_id] = 2 * SHARP * wanted
        self.W_K[self.layout.block(of), self.for_id] = 1
        if but is not None:
            self.W_Q[self.layout.block(but), self.for_id] = -LEAVE_OUT * SHARP
        self.to_rest()

    def by_step(self, steps: Tensor) -> None:
        """SHARP times minus the squared distance from the place that is (V,) steps from the query.

        That is -j^2 + 2 j (i + step), and a term of the query alone, which no softmax sees.
        """
        j = (
            torch.arange(self.layout.places) - self.layout.places // 2.0
        )  # from the middle: smaller numbers, less rounding
        self.W_Q[self.layout.one, 0], self.W_K[self.place, 0] = 1, -SHARP * j.square()
        self.W_Q[self.place, 1], self.W_Q[self.token, 1], self.W_K[self.place, 1] = 2 * SHARP * j, 2 * SHARP * steps, j


def planted(job: str, layout: StreamSlots, tables: Tables, *, rest: Tensor, share: float = 1.0, away: Tensor) -> Head:
    """A head with this job.

    Args:
        job: one of `JOBS`.
        layout: of the residual stream.
        tables: what is looked up.
        rest: (P,) where a query at each place rests.
        share: of what the job's heads write together, the part of this one.
        away: (V,) steps from the query to where it rests, for "relation by offset".
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
    """W_V (width, V) and W_O (V, width): the token, but for the opener, goes to the job's block."""
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
