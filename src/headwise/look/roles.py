"""What heads are called, as data: a role is a measure, a threshold, a control, and who says so.

A head plays a role if its value exceeds the threshold **and** what chance gives, twice over: the control is
the value of uniform attention on the same tokens under the same mask, of the same head on shuffled links, or the
baseline that the paper names. On a long text that second condition asks nothing of most roles: uniform attention gives
every key next to nothing. On five tokens it gives the own token 0.46, and a head that does no more is not called
anything. Where several texts were read, the lower end of the bootstrap interval has to stand above chance as well.

A new role is one entry of `ROLES`: it says itself what has to be measured, and on what the model has to read.

A[i, j] below is the weight of query i on key j; means are over the queries that may attend that key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .measures import FAR, Argmax, AtOffset, Band, Got, Measure, OfRows, OnKeys, OnLinks, Sums
from .repeats import as_tensors
from .scene import Scene

TIMES_CHANCE = 2.0
"""How many times the control's value a role must exceed, unless it says otherwise."""

FEW_KEYS = 8
"""Rows with fewer keys say nothing of broadness: two keys at 0.7 and 0.3 are already "88 % even"."""

CLARK_KEYS = 128
"""Length of the texts on which Clark et al. called an entropy above 3.8 nats broad."""

TEXT, COPIES, SENTENCES, NEEDLES = "text", "copies", "sentences", "needles"
"""What the model reads: the texts; random tokens repeated; annotated sentences; texts with a needle in them."""

_CLARK = "Clark et al. 2019, arXiv 1906.04341"
_IOI = "Wang et al. 2022, arXiv 2211.00593, appendix H"
_VOITA = "Voita et al. 2019, arXiv 1905.09418"
_OURS = "; the threshold is ours"


@dataclass(frozen=True)
class Role:
    """One role.

    Attributes:
        name: what the table shows.
        formula: how the value comes from the attention matrix A.
        threshold: the value that a head must exceed.
        source: where the formula and threshold come from.
        control: what the null is.
        measure: how the value is taken from a call.
        reads: what the model reads for it: ``"text"``, ``"copies"``, ``"sentences"`` or ``"needles"``.
        times: how many times the null the value must exceed.
        plus: by how much beyond that.
        least: how many queries must have been scored.
    """

    name: str
    formula: str
    threshold: float
    source: str
    control: str
    measure: Measure = field(compare=False)
    reads: str = TEXT
    times: float = TIMES_CHANCE
    plus: float = 0.0
    least: int = 1

    def plays(self, value: float, null: float | None, count: int, low: float | None = None) -> bool:
        """Whether these numbers make a head play the role.

        >>> induction = next(role for role in ROLES if role.name == "induction")
        >>> induction.plays(0.6, null=0.02, count=99), induction.plays(0.6, null=0.4, count=99)
        (True, False)
        """
        bar = self.times * (null or 0.0) + self.plus
        above = value > self.threshold and value > bar and count >= self.least
        return above and (low is None or null is None or low > null)


_UNIFORM = "uniform attention under the same mask"


def _at(offset: int, name: str, source: str) -> Role:
    """The role of attending one place, seen from the query."""
    place = f"i{offset:+}" if offset else "i"
    return Role(name, f"mean_i A[i, {place}]", 0.5, source, _UNIFORM, AtOffset(offset))


# -- measures of single roles -----------------------------------------------------------------------------------------


def _first(scene: Scene) -> Tensor:
    """(1, T, 1): key 0 for every query but the first, which in self-attention has no choice."""
    links = torch.zeros(1, scene.queries.shape[1], 1, dtype=torch.long)
    links[:, 0] = -1
    return links


def _copies(name: str) -> Callable[[Scene], Tensor | None]:
    """Links to earlier copies of a token, or to what followed them, by `repeats.targets`."""

    def links(scene: Scene) -> Tensor | None:
        copies = [passage.copies for passage in scene.passages]
        if scene.ahead is None or not scene.known or None in copies:
            return None
        rows = [replace(one, ids=ids) for one, ids in zip(copies, scene.queries.tolist(), strict=True) if one]
        return as_tensors(rows, ahead=scene.ahead)[name]

    return links


def _aligned(shift: int) -> Callable[[Scene], Tensor | None]:
    """Links of a decoder's query to the encoder's key of the same token, or `shift` tokens on."""

    def links(scene: Scene) -> Tensor | None:
        if not scene.cross or not scene.known or scene.moved != (1, 0):
            return None
        T, S = scene.queries.shape[1], scene.keys.shape[1]
        keys = torch.arange(T) - 1 + shift
        return torch.where((keys >= 0) & (keys < S), keys, -1)[None, :, None]

    return links


def _broad(got: Got) -> Sums:
    """Entropy over the logarithm of the number of choices, at most 128, over rows of 8 keys and more."""
    rows = got.rows
    choices = (rows.keys + int(got.call.sinks is not None)).clamp(max=CLARK_KEYS)
    enough = rows.keys >= FEW_KEYS
    ratio = (rows.entropy / choices.log()).clamp(max=1.0)
    return Sums(torch.where(enough, ratio, 0.0).double().sum(-1).cpu(), enough.double().sum(-1).cpu(), None)


def _far_offset(got: Got) -> Sums | None:
    """The offset beyond those with roles of their own at which most rows have their largest weight."""
    if got.scene.cross:
        return None
    filled = got.largest_key >= 0
    far = torch.where(filled & (got.distance.abs() > FAR), got.distance, 0)
    B, H, T = far.shape
    counts = torch.zeros(B, H, 2 * T, dtype=torch.long).scatter_add(2, far + T, (far != 0).long())
    most, place = counts.max(-1)
    drawn = got.largest_key[..., torch.randperm(T, generator=torch.Generator().manual_seed(T))]
    chance = (torch.arange(T) - drawn == (place - T)[..., None]) & filled & (most > 0)[..., None]

    def detail(b: int, h: int) -> str:
        return f"{T - int(place[b, h]):+}"

    return Sums(most.double(), filled.double().sum(-1), chance.double().sum(-1), detail=detail)


LEAST_ROWS = 16
"""Queries that a text must have before one of its keys counts as a sink."""


def _other_sink(got: Got) -> Sums | None:
    """alpha_k of the key k > 0 on which most weight lies, from the rows whose largest weight it has.

    Keys in the first half alone: of a late key few queries decide, and they are its neighbours.
    """
    if got.scene.cross:
        return None
    keys, T = got.largest_key, got.rows.entropy.shape[2]
    rows = torch.arange(T)
    if T <= LEAST_ROWS:
        return None
    behind = (keys > 0) & (keys <= rows)
    largest = torch.where(behind, got.rows.largest.double().cpu(), 0.0)
    level = (1 / got.rows.keys.double().cpu().clamp(min=1)).flip(-1).cumsum(-1).flip(-1)
    alpha = torch.zeros_like(largest).scatter_add(2, keys.clamp(min=0), largest)
    queries = (T - rows).double()
    alpha = torch.where(2 * queries >= T, alpha / queries, 0.0)
    value, place = alpha.max(-1)
    chance = level.gather(2, place[..., None])[..., 0] / queries[place]
    count = torch.full_like(value, T - 1)

    def detail(b: int, h: int) -> str:
        return f"key {int(place[b, h])}"

    return Sums(value * count, count, chance * count, detail=detail)


_RELATIONS = """
    nsubj nsubj:pass obj iobj obl nmod nmod:poss amod det case mark aux aux:pass cop advmod conj cc compound nummod acl
    acl:relcl advcl xcomp ccomp
"""
RELATIONS = tuple(_RELATIONS.split())
"""Relations of Universal Dependencies that have roles of their own, in both directions."""


def _relation(name: str, what: str) -> Role:
    return Role(
        name,
        f"annotated sentences: share of {what} whose largest weight, own and special tokens aside, lies on the other",
        0.4,
        f"{_CLARK}, section 4.2; {_VOITA}: 10 % above the positional baseline{_OURS}",
        "the best fixed offset; another query's choice",
        Argmax(name),
        reads=SENTENCES,
        times=1.0,
        plus=0.1,
        least=8,
    )


ROLES: tuple[Role, ...] = (
    _at(-1, "previous-token", f"{_IOI}; threshold: {_CLARK}"),
    *(_at(-k, f"offset-{k}", f"{_IOI}, generalised; threshold: {_CLARK}") for k in range(2, FAR + 1)),
    _at(0, "self", _CLARK),
    _at(1, "next-token", _CLARK),
    *(_at(k, f"offset+{k}", f"{_CLARK}, generalised") for k in range(2, FAR + 1)),
    Role(
        "far offset",
        f"share of i whose largest weight lies at one same distance, more than {FAR} away",
        0.9,
        f"{_VOITA}: positional heads",
        "the same keys, dealt out to other queries",
        OfRows(_far_offset, lambda got: got.distance.abs() > FAR),
    ),
    Role(
        "local band",
        f"mean_i sum of A[i, j] over |i - j| <= {FAR}, where no single offset exceeds 0.5",
        0.8,
        f"Voita et al. 2019 and Child et al. 2019 (arXiv 1904.10509) describe such heads{_OURS}",
        _UNIFORM,
        Band(FAR),
    ),
    Role(
        "first-token sink",
        "mean_{i>0} A[i, 0]",
        0.3,
        "Gu et al. 2024, arXiv 2410.10781: alpha_1 > 0.3 (here without query 0, which has no choice)",
        _UNIFORM,
        OnLinks(_first, against=None),
        least=24,
    ),
    Role(
        "sink elsewhere",
        "max over 0 < k <= T / 2 of mean_{i>=k} A[i, k], where A[i, k] is the row's largest",
        0.5,
        "Gu et al. 2024, arXiv 2410.10781: alpha_k, from below (other rows' weights on k are not counted); the "
        "threshold is ours: 0.3 is passed by the first delimiter under a head that attends all delimiters alike",
        _UNIFORM,
        OfRows(_other_sink, lambda got: got.largest_key > 0),
    ),
    Role(
        "delimiter",
        "mean_i sum of A[i, j] over delimiters j > 0, of the i from the first of them on",
        0.6,
        f"{_CLARK}: special tokens above 0.6",
        _UNIFORM,
        OnKeys(lambda scene: scene.keys_in(scene.words.delimiters)),
    ),
    Role(
        "punctuation",
        "mean_i sum of A[i, j] over j > 0 whose text is punctuation alone",
        0.6,
        f"{_CLARK}: as special tokens",
        _UNIFORM,
        OnKeys(lambda scene: scene.keys_in(scene.words.punctuation)),
    ),
    Role(
        "special tokens",
        "mean_i sum of A[i, j] over special tokens j > 0, such as [SEP]",
        0.6,
        f"{_CLARK}: special tokens above 0.6",
        _UNIFORM,
        OnKeys(lambda scene: scene.keys_in(scene.words.special)),
    ),
    Role(
        "broad",
        f"mean_i entropy(A[i]) / ln(min(n_i, {CLARK_KEYS})) over queries with n_i >= {FEW_KEYS} keys",
        3.8 / math.log(CLARK_KEYS),
        f"{_CLARK}: entropy above 3.8 nats, at {CLARK_KEYS} tokens; relative to ln n for shorter texts",
        "none: uniform attention plays it",
        OfRows(_broad),
    ),
    Role(
        "alignment",
        "cross-attention: mean_i A[i, j] on the encoder's key j of the token that the decoder reads at i",
        0.4,
        f"Bahdanau et al. 2014, arXiv 1409.0473 (soft alignment), on a decoder that reads the encoder's text{_OURS}",
        f"{_UNIFORM}; the same head on shuffled links",
        OnLinks(_aligned(0)),
    ),
    Role(
        "alignment, next",
        "cross-attention: mean_i A[i, j] on the encoder's key j of the token that the decoder reads next",
        0.4,
        f"as alignment{_OURS}",
        f"{_UNIFORM}; the same head on shuffled links",
        OnLinks(_aligned(1)),
    ),
    Role(
        "duplicate-token",
        "random tokens repeated: mean_i sum of A[i, j] over earlier copies j of token i",
        0.4,
        _IOI + _OURS,
        f"{_UNIFORM}; the same head on shuffled links",
        OnLinks(_copies("duplicate")),
        reads=COPIES,
    ),
    Role(
        "induction",
        "random tokens repeated: mean_i sum of A[i, j+1] over earlier copies j of token i",
        0.4,
        "Olsson et al. 2022, arXiv 2209.11895 (prefix matching)" + _OURS,
        f"{_UNIFORM}; the same head on shuffled links",
        OnLinks(_copies("induction")),
        reads=COPIES,
    ),
    Role(
        "same word class",
        "annotated sentences: mean_i sum of A[i, j] over other words j of i's part of speech",
        0.5,
        f"Vig & Belinkov 2019, arXiv 1906.04284 (attention by part of speech){_OURS}",
        f"{_UNIFORM}; the same head on copies of the word",
        OnLinks(lambda scene: scene.links("same word class"), against=lambda links, scene: _same_token(links, scene)),
        reads=SENTENCES,
        least=8,
    ),
    *(_relation(f"{label} to head", f"{label} dependents") for label in RELATIONS),
    *(_relation(f"head to {label}", f"heads with a dependent {label}") for label in RELATIONS),
    Role(
        "coreference",
        "annotated sentences: share of mentions whose largest weight among earlier mentions' heads is of their entity",
        0.5,
        f"{_CLARK}, section 4.3 (antecedent selection){_OURS}",
        "the nearest noun before; a mention at random",
        Argmax("coreference", candidates="mentions", baseline="nearest noun"),
        reads=SENTENCES,
        times=1.0,
        plus=0.15,
        least=8,
    ),
    Role(
        "name mover",
        "sentences of two names and a gift: mean of A[end, j] over the name j that comes next",
        0.3,
        f"Wang et al. 2022, arXiv 2211.00593, section 3.1{_OURS}",
        f"{_UNIFORM}; the same head on the other name",
        OnLinks(lambda scene: scene.links("name mover"), against=lambda links, scene: _other(scene)),
        reads=SENTENCES,
        least=8,
    ),
    Role(
        "retrieval",
        "a needle in the text: share of its tokens, repeated at the end, whose largest weight lies on what follows",
        0.1,
        "Wu et al. 2024, arXiv 2404.15574 (the next token given, not generated)",
        "the best fixed offset; another query's choice",
        Argmax("retrieval"),
        reads=NEEDLES,
        plus=0.05,
        least=8,
    ),
)


def _same_token(links: Tensor, scene: Scene) -> Tensor:
    """The links to copies of the query's own token."""
    keys = scene.keys[:, None].expand(-1, links.shape[1], -1).gather(2, links.clamp(min=0))
    return torch.where((keys == scene.queries[..., None]) & (links >= 0), links, -1)


def _other(scene: Scene) -> Tensor:
    """Links to the name that does not come next."""
    links = scene.links("other name")
    return torch.full((*scene.queries.shape, 1), -1) if links is None else links
