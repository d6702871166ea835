"""The catalog of head roles, as data: a role is a measure, a threshold, a control, and its source.

A head plays a role if its value exceeds the threshold **and** twice the chance level. The control that gives this level
is uniform attention on the same tokens under the same mask, the same head on shuffled links, or the baseline of the
paper. On long texts the second condition is trivial for most roles, because uniform attention gives every key almost
nothing. On five tokens it gives the own token 0.46, and a head with no more than that plays no role. With several
texts, the lower end of the bootstrap interval must also exceed chance.

`ROLES` is sorted from the most specific role to the least: of the roles that a head plays, the first in this order is
its name (`HeadRecord.role`). Values of different roles are on different scales, so they are never compared. A state
(`Role.state`) says how a head rests where it has nothing to do; it stands beside the role and is never the name.

To add a role, add one entry to `ROLES` at its place: it defines its measure and the input that the model must read.

A[i, j] below is the weight of query i on key j; means are over the queries that may attend to that key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..records import axes
from . import spatial_measures as placed
from . import text_measures as links
from .call_tokens import FIRST, SECOND, CallTokens
from .choice_measures import Argmax
from .measures import FAR, AtOffset, BandShare, OfRows, OnKeys, OnLinks
from .name_measures import OnNames
from .role import ALL, LINE, PATCHES, Role
from .text_measures import CLARK_KEYS, FEW_KEYS

NOTICED = 0.2
"""The mean weight on right choices that a role of a choice asks for beside the share of right choices: twice what
uniform attention gives the right mention in the sentences of the package (0.10)."""

RELATED = 24
"""The fewest words of a relation: of fewer, some of a few hundred heads choose three quarters rightly by chance."""

TEXT, COPIES, SENTENCES, NEEDLES = "text", "copies", "sentences", "needles"
"""The kinds of input: texts, repeated random tokens, annotated sentences, texts with a needle."""

_CLARK = "Clark et al. 2019, arXiv 1906.04341"
_IOI = "Wang et al. 2022, arXiv 2211.00593, appendix H"
_VOITA = "Voita et al. 2019, arXiv 1905.09418"
_OURS = "; the threshold is ours"
_ABOVE = "special tokens above 0.6"
_UNIFORM = "uniform attention under the same mask"
_SHUFFLED = f"{_UNIFORM}; the same head on shuffled links"


def _at(offset: int, name: str, source: str) -> Role:
    """Return the role of attending to one position relative to the query."""
    place = f"i{offset:+}" if offset else "i"
    over = LINE if offset else LINE | {axes.PICTURE}
    return Role(name, f"mean_i A[i, {place}]", 0.5, source, _UNIFORM, AtOffset(offset), over=over)


def _neighbour(name: str, rows: int, columns: int) -> Role:
    """Return the role of attending to the next patch in one direction."""
    formula = f"pictures: mean_i A[i, j] on the patch {_SHIFTS[rows, columns]} of patch i"
    measure = OnLinks(partial(placed.shifted, (rows, columns)))
    return Role(name, formula, 0.5, _CORDONNIER + _OURS, _SHUFFLED, measure, over=PATCHES)


_SHIFTS = {(0, -1): "to the left", (0, 1): "to the right", (-1, 0): "above", (1, 0): "below"}
_CORDONNIER = "Cordonnier et al. 2020, arXiv 1911.03584 (heads that attend at a fixed shift of pixels)"


def _line(name: str, links: Callable[[CallTokens], Tensor | None]) -> Role:
    return Role(
        name,
        f"pictures: mean_i sum of A[i, j] over the patches j in the {name[5:]} of patch i, more than one away",
        0.5,
        f"Ho et al. 2019, arXiv 1912.12180 (attention along an axis){_OURS}",
        _SHUFFLED,
        OnLinks(links),
        over=PATCHES,
    )


def _apart(name: str, places: str, source: str) -> Role:
    return Role(
        name,
        f"pictures: mean_i sum of A[i, j] over {places}, of the patches i",
        0.6,
        source,
        _UNIFORM,
        OnLinks(partial(placed.to_apart, places), against=None),
        over=PATCHES,
        state=True,
    )


def _class(name: str, formula: str, source: str, ids: str) -> Role:
    """Return the role of attending to the keys of one class of `Vocabulary`."""
    measure = OnKeys(lambda scene: scene.keys_in(getattr(scene.words, ids)))
    return Role(name, f"mean_i sum of A[i, j] over {formula}", 0.6, f"{_CLARK}: {source}", _UNIFORM, measure)


def _mark(name: str, what: str, ids: str) -> Role:
    source = "section 3.2, [SEP], full stops and commas apart; threshold as for special tokens"
    return _class(name, f"j > 0 that {what}, of the i from the first of them on", source, ids)


def _across(name: str, queries: str, keys: str) -> Role:
    return Role(
        name,
        f"pairs of sentences: mean_i sum of A[i, j] over the tokens j of the {keys}, of the i of the {queries}",
        0.5,
        f"Vig 2019, arXiv 1906.05714 (attention between the sentences of a pair){_OURS}",
        _UNIFORM,
        placed.FromTo(lambda scene: scene.of_class(queries), lambda scene: scene.of_class(keys)),
        times=1.5,
    )


def _mover(name: str, which: str, how: str, sign: int) -> Role:
    """Return the role of attending, at the end of a sentence of two names and a gift, to one of the names."""
    linked, other = ("other name", "name mover") if which == "does not come next" else ("name mover", "other name")
    return Role(
        name,
        f"sentences of two names and a gift: mean of A[end, j] over the name j that {which}{how}",
        0.3,
        f"{_SUPPRESSION if linked == 'other name' else _MOVERS}{_OURS}",
        f"{_UNIFORM}; the same head on the other of the two names",
        OnNames(lambda scene: scene.links(linked), against=lambda _, scene: links.named(other, scene), sign=sign),
        reads=SENTENCES,
        least=8,
    )


_MOVERS = "Wang et al. 2022, arXiv 2211.00593, section 3 (attention and copying through W_OV of name movers)"
_SUPPRESSION = "McDougall et al. 2023, arXiv 2310.04625 (copy suppression), on the name that does not come next"
_RAISES = ", where W_O v_j raises its logit to the highest 1 %"
_LOWERS = ", where W_O v_j lowers its logit to the lowest 1 %"


_RELATIONS = """
    nsubj nsubj:pass obj iobj obl nmod nmod:poss amod det case mark aux aux:pass cop advmod conj cc compound nummod acl
    acl:relcl advcl xcomp ccomp
"""
RELATIONS = tuple(_RELATIONS.split())
"""Relations of Universal Dependencies that have their own roles, in both directions."""


def _relation(name: str, what: str) -> Role:
    return Role(
        name,
        f"annotated sentences: share of {what} whose largest weight, apart from own, first and special tokens, lies on "
        "the other",
        0.4,
        f"{_CLARK}, section 4.2; {_VOITA}: 10 % above the positional baseline{_OURS}",
        "the best fixed offset; another query's choice",
        Argmax(name),
        reads=SENTENCES,
        times=1.0,
        plus=0.1,
        least=RELATED,
        mass=NOTICED,
    )


ROLES: tuple[Role, ...] = (
    # what is done with words, names and earlier text: an induction head also retrieves, so it goes before retrieval
    Role(
        "induction",
        "random tokens repeated: mean_i sum of A[i, j+1] over earlier copies j of token i",
        0.4,
        "Olsson et al. 2022, arXiv 2209.11895 (prefix matching)" + _OURS,
        _SHUFFLED,
        OnLinks(partial(links.copies, "induction")),
        reads=COPIES,
    ),
    _mover("name mover", "comes next", _RAISES, 1),
    _mover("negative name mover", "comes next", _LOWERS, -1),
    _mover("name suppressor", "does not come next", _LOWERS, -1),
    _mover("name mover by attention", "comes next", "; for models without logits", 0),
    Role(
        "duplicate-token",
        "random tokens repeated: mean_i sum of A[i, j] over earlier copies j of token i",
        0.4,
        _IOI + _OURS,
        _SHUFFLED,
        OnLinks(partial(links.copies, "duplicate")),
        reads=COPIES,
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
        mass=NOTICED,
    ),
    Role(
        "alignment",
        "cross-attention: mean_i A[i, j] on the encoder's key j of the token that the decoder reads at i",
        0.4,
        f"Bahdanau et al. 2014, arXiv 1409.0473 (soft alignment), on a decoder that reads the encoder's text{_OURS}",
        _SHUFFLED,
        OnLinks(partial(links.aligned, 0)),
    ),
    Role(
        "alignment, next",
        "cross-attention: mean_i A[i, j] on the encoder's key j of the token that the decoder reads next",
        0.4,
        f"as alignment{_OURS}",
        _SHUFFLED,
        OnLinks(partial(links.aligned, 1)),
    ),
    # places, which account for more than half of the weight of all queries
    _at(-1, "previous-token", f"{_IOI}; threshold: {_CLARK}"),
    *(_at(-k, f"offset-{k}", f"{_IOI}, generalised; threshold: {_CLARK}") for k in range(2, FAR + 1)),
    _at(0, "self", _CLARK),
    _at(1, "next-token", _CLARK),
    *(_at(k, f"offset+{k}", f"{_CLARK}, generalised") for k in range(2, FAR + 1)),
    Role(
        "far offset",
        f"share of the i, at least half of all, whose largest weight lies at one same distance, more than {FAR} away",
        0.9,
        f"{_VOITA}: positional heads",
        "the same keys, dealt out to other queries",
        OfRows(links.far_offset, links.on_far_offset),
        over=LINE,
    ),
    # language, read on chosen queries of annotated sentences
    Role(
        "coreference",
        "annotated sentences: share of mentions whose largest weight among earlier mentions' heads is of their entity",
        0.5,
        f"{_CLARK}, section 4.3 (antecedent selection){_OURS}",
        "the nearest noun before; a mention at random",
        Argmax("coreference", candidates="mentions", baseline="nearest noun"),
        mass=NOTICED,
        reads=SENTENCES,
        times=1.0,
        plus=0.15,
        least=8,
    ),
    *(_relation(f"{label} to head", f"{label} dependents") for label in RELATIONS),
    *(_relation(f"head to {label}", f"heads with a dependent {label}") for label in RELATIONS),
    Role(
        "same word class",
        "annotated sentences: mean_i sum of A[i, j] over other words j of i's part of speech",
        0.5,
        f"Vig & Belinkov 2019, arXiv 1906.04284 (attention by part of speech){_OURS}",
        f"{_UNIFORM}; the same head on copies of the word",
        OnLinks(lambda scene: scene.links("same word class"), against=links.same_token),
        reads=SENTENCES,
        least=8,
    ),
    # marks, the single ones before their classes; then pairs of sentences
    _mark("[SEP]", "are the separator", "separators"),
    _mark("full stop", "are '.'", "stops"),
    _mark("comma", "are ','", "commas"),
    _class("delimiter", "delimiters j > 0, of the i from the first of them on", _ABOVE, "delimiters"),
    _class("punctuation", "j > 0 whose text is punctuation alone", "as special tokens", "punctuation"),
    _class("special tokens", "special tokens j > 0, such as [SEP]", _ABOVE, "special"),
    _across("first to second", FIRST, SECOND),
    _across("second to first", SECOND, FIRST),
    # pictures, and what is true of many heads
    _neighbour("left neighbour", 0, -1),
    _neighbour("right neighbour", 0, 1),
    _neighbour("upper neighbour", -1, 0),
    _neighbour("lower neighbour", 1, 0),
    Role(
        "surroundings",
        "pictures: mean_i sum of A[i, j] over patch i and the eight around it, where no single one exceeds 0.5",
        0.6,
        f"Cordonnier et al. 2020, arXiv 1911.03584 (heads as small convolutions){_OURS}",
        _UNIFORM,
        placed.NeighbourShare(),
        over=PATCHES,
    ),
    _line("same row", placed.in_row),
    _line("same column", placed.in_column),
    Role(
        "local band",
        f"mean_i sum of A[i, j] over |i - j| <= {FAR}, where no single offset exceeds 0.5",
        0.8,
        f"Voita et al. 2019 and Child et al. 2019 (arXiv 1904.10509) describe such heads{_OURS}",
        _UNIFORM,
        BandShare(),
        over=LINE,
    ),
    # states
    Role(
        "first-token sink",
        "mean_{i>0} A[i, 0]",
        0.3,
        "Gu et al. 2024, arXiv 2410.10781: alpha_1 > 0.3 (here without query 0, which has no choice)",
        _UNIFORM,
        OnLinks(links.first, against=None),
        least=24,
        state=True,
    ),
    Role(
        "sink elsewhere",
        "max over 0 < k <= T / 2 of mean_{i>=k} A[i, k], where A[i, k] is the row's largest",
        0.5,
        "Gu et al. 2024, arXiv 2410.10781: alpha_k, from below (other rows' weights on k are not counted); the "
        "threshold is ours: 0.3 is passed by the first delimiter under a head that attends all delimiters alike",
        _UNIFORM,
        OfRows(links.other_sink, links.on_other_sink),
        over=LINE,
        state=True,
    ),
    _apart("[CLS] sink", axes.CLS, f"{_CLARK}: {_ABOVE}"),
    _apart("register sink", axes.REGISTERS, f"Darcet et al. 2023, arXiv 2309.16588 (registers){_OURS}"),
    Role(
        "patch sink",
        "pictures: max over patches k of mean_i A[i, k] of the other patches i, where A[i, k] is the row's largest",
        0.5,
        f"Darcet et al. 2023, arXiv 2309.16588 (patches that serve as registers){_OURS}",
        _UNIFORM,
        OfRows(placed.patch_sink, placed.on_patch_sink),
        over=PATCHES,
        state=True,
    ),
    Role(
        "broad",
        f"mean_i entropy(A[i]) / ln(min(n_i, {CLARK_KEYS})) over queries with n_i >= {FEW_KEYS} keys",
        3.8 / math.log(CLARK_KEYS),
        f"{_CLARK}: entropy above 3.8 nats, at {CLARK_KEYS} tokens; relative to ln n for shorter texts",
        "none, because uniform attention has this role",
        OfRows(links.broad),
        over=ALL,
        state=True,
    ),
)
