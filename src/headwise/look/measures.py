"""How a score is taken from an attention call: a few kinds, each of which says what the one pass has to sum for it.

Every kind answers two questions. `asks`: which features of keys and which sparse targets `headwise.statistics` has to
sum. `read`: from the statistics of the call, the sum of the score over the queries, how many queries that is, and the
same sum for what chance gives. Sums and counts, not means, so that texts merge exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..nn.probe import AttentionCall
from ..ops.masks import Mask, keep, window
from ..ops.scoring import ScoringOptions
from ..ops.statistics.api import RowStatistics
from ..ops.statistics.top_keys import top_keys
from .draws import other_queries, shuffled
from .scene import Scene

FAR = 8
"""How many places before the query, and after it, have a mass of their own."""

OFFSETS = (*range(0, -FAR - 1, -1), *range(1, FAR + 1))

_COLUMNS = {offset: column for column, offset in enumerate(OFFSETS)}


class Asks(NamedTuple):
    """What a pass has to sum: features (B, S) of keys and targets (B, T, n) of queries, by name."""

    features: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]


NOTHING = Asks({}, {})


def forbidden(call: AttentionCall) -> Mask | None:
    """What the call's mask forbids to every head; None where nothing is."""
    B, H = call.query.shape[:2]
    return None if call.mask is None else call.mask.sized(B, H).forbids()


@dataclass(frozen=True)
class Got:
    """What a pass gave.

    Attributes:
        call: the call itself.
        scene: the tokens behind it.
        rows: its statistics, (B, H).
        uniform: those of uniform attention on the same tokens under the same mask, (B, 1).
    """

    call: AttentionCall
    scene: Scene
    rows: RowStatistics
    uniform: RowStatistics
    kept: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def once(self, name: object, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, made once for all roles."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    @cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """The masses at `OFFSETS`, (B, H, n), and those of uniform attention, (B, 1, n)."""
        return self.rows.offsets.double().cpu(), self.uniform.offsets.double().cpu()

    @cached_property
    def able(self) -> Tensor:
        """(B|1, n): how many queries may attend the key at each of `OFFSETS`, in self-attention."""
        call, T = self.call, self.rows.entropy.shape[2]
        i = torch.arange(T, device=call.query.device)[:, None]
        j = i + torch.tensor(OFFSETS, device=i.device)
        inside = (j >= 0) & (j < T)
        seen = self.allowed(i[None, None], j.clamp(0, T - 1)[None, None]) & inside
        return seen.sum(2)[:, 0].double().cpu()

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """(B|1, H|1, R, C) bool: whether some head may attend key j from query i; i and j broadcast to that shape."""
        mask, T, S = forbidden(self.call), self.call.query.shape[2], self.call.key.shape[2]
        seen = None if mask is None else mask.at(i, j, T, S)[0]
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=i.device) if seen is None else seen

    def seeing(self, links: Tensor) -> Tensor:
        """(B|1, 1): how many queries may attend a key that they are linked to; links are (B|1, T, n), -1 for none."""
        links = links.to(self.call.query.device)
        rows = torch.arange(links.shape[1], device=links.device)[None, None, :, None]
        seen = self.allowed(rows, links.clamp(min=0)[:, None]) & (links >= 0)[:, None]
        return seen.any(-1).sum(-1)[:, 0, None].double().cpu()

    @cached_property
    def distance(self) -> Tensor:
        """(B, H, T): how far before the query its largest weight lies; meaningless where the row is empty."""
        return torch.arange(self.rows.largest_key.shape[2], device="cpu") - self.largest_key

    @cached_property
    def largest_key(self) -> Tensor:
        """(B, H, T) long, -1 where the row is empty."""
        return self.rows.largest_key.cpu()


@dataclass(frozen=True)
class Sums:
    """Of each text and head: sums over queries, and how many queries; a width of 1 stands for all heads.

    `null` and `against` are what chance gives by two controls, of which the larger counts; None where there is none.
    `detail` tells by head what the role leaves open, on this text.
    """

    total: Tensor
    count: Tensor
    null: Tensor | None
    against: Tensor | None = None
    detail: Callable[[int, int], str] | None = None


@runtime_checkable
class Measure(Protocol):
    """One kind of score."""

    def asks(self, name: str, scene: Scene) -> Asks:
        """What the pass has to sum for the role of this name."""
        ...

    def read(self, name: str, got: Got) -> Sums | None:
        """The score's sums on this call; None where it says nothing about the call."""
        ...

    def hits(self, name: str, got: Got) -> Tensor:
        """(B, H, T) bool: whether a query's largest weight lies where the role says."""
        ...


@dataclass(frozen=True)
class AtOffset:
    """Mean of A[i, i + offset] over the queries that may attend that key; null: uniform attention."""

    offset: int

    def asks(self, name: str, scene: Scene) -> Asks:
        """Offsets are always summed."""
        return NOTHING

    def read(self, name: str, got: Got) -> Sums | None:
        """In self-attention alone: positions of two texts have no distance."""
        if got.scene.cross:
            return None
        mass, level, count = _offset(got, self.offset)
        return Sums(mass * count, count, level * count)

    def hits(self, name: str, got: Got) -> Tensor:
        """Whether the largest weight lies at the offset."""
        return (got.distance == -self.offset) & (got.largest_key >= 0)


@dataclass(frozen=True)
class BandShare:
    """Mean of the sum of A[i, j] over |i - j| <= reach, 0 where one offset exceeds half; null: uniform attention."""

    reach: int

    def asks(self, name: str, scene: Scene) -> Asks:
        """Offsets are always summed."""
        return NOTHING

    def read(self, name: str, got: Got) -> Sums | None:
        """The masses of the offsets, each over the queries that have such a key."""
        if got.scene.cross:
            return None
        parts = [_offset(got, k) for k in OFFSETS if abs(k) <= self.reach]
        total = sum((mass * count for mass, _, count in parts), torch.zeros((), device="cpu"))
        total = torch.where(torch.stack([mass for mass, _, _ in parts]).amax(0) > 0.5, 0.0, total)
        null = sum((level * count for _, level, count in parts), torch.zeros((), device="cpu"))
        return Sums(total, got.uniform.rows.double().cpu(), null)

    def hits(self, name: str, got: Got) -> Tensor:
        """Whether the largest weight lies in the band."""
        return (got.distance.abs() <= self.reach) & (got.largest_key >= 0)


def _offset(got: Got, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mass (B, H) at an offset, that of uniform attention (B, 1), and the number of queries (B, 1)."""
    mass, level = (masses[..., _COLUMNS[offset]] for masses in got.offsets)
    T = got.rows.entropy.shape[2]
    if got.scene.among is None:
        return mass, level, got.able[:, _COLUMNS[offset], None].expand_as(level)
    return mass, level, (level > 0).double() * got.scene.count(torch.ones(1, T, dtype=torch.bool, device="cpu"))


@dataclass(frozen=True)
class OnKeys:
    """Mean of the sum of A[i, j] over the keys j of a class, from the first such key on; null: uniform attention."""

    keys: Callable[[Scene], Tensor] = field(compare=False)

    def _keys(self, name: str, scene: Scene) -> Tensor:
        return scene.once(name, lambda: self.keys(scene))

    def asks(self, name: str, scene: Scene) -> Asks:
        """One feature."""
        chosen = self._keys(name, scene)
        return Asks({name: chosen}, {}) if bool(chosen.any()) else NOTHING

    def read(self, name: str, got: Got) -> Sums | None:
        """The feature's mass."""
        if name not in got.rows.features:
            return None
        mass, level = (s.features[name].double().cpu() for s in (got.rows, got.uniform))
        rows, keys = got.rows.rows.double().cpu(), self._keys(name, got.scene)
        before = keys.double().argmax(-1, keepdim=True) if got.scene.ahead is False else 0  # queries that see none
        count = torch.where(keys.any(-1, keepdim=True), (rows - before).clamp(min=0), 0.0)
        if got.scene.among is not None:
            seeing = torch.arange(got.scene.among.shape[1], device="cpu") >= before
            count = got.scene.count(seeing) * keys.any(-1, keepdim=True)
        return Sums(mass * rows, count, level * rows)

    def hits(self, name: str, got: Got) -> Tensor:
        """Whether the largest weight lies on such a key."""
        chosen, keys = self._keys(name, got.scene)[:, None], got.largest_key
        return chosen.expand(*keys.shape[:2], -1).gather(2, keys.clamp(min=0)) & (keys >= 0)


@dataclass(frozen=True)
class OnLinks:
    """Mean of the sum of A[i, j] over the keys j that query i is linked to.

    Null: the larger of uniform attention and the same head's mass on `against`: by default on shuffled links (for each
    link another key, drawn from those that the query may attend by its position); None asks uniform attention alone.
    """

    links: Callable[[Scene], Tensor | None] = field(compare=False)
    against: Callable[[Tensor, Scene], Tensor] | None = field(default=shuffled, compare=False)

    def asks(self, name: str, scene: Scene) -> Asks:
        """The links, and those they are held against."""
        return scene.once(("asks", name), lambda: self._asks(name, scene))

    def _asks(self, name: str, scene: Scene) -> Asks:
        links = self._links(name, scene)
        if links is None or not bool((links >= 0).any()):
            return NOTHING
        other = {} if self.against is None else {_against(name): self.against(links, scene)}
        return Asks({}, {name: links, **other})

    def _links(self, name: str, scene: Scene) -> Tensor | None:
        return scene.once(name, lambda: self.links(scene))

    def read(self, name: str, got: Got) -> Sums | None:
        """The mass on links, over the queries with one that they may attend."""
        if name not in got.rows.targets:
            return None
        links = self._links(name, got.scene)
        assert links is not None
        count = got.seeing(links)
        total, null = (_mass(s, name) * _having(s, links) for s in (got.rows, got.uniform))
        if self.against is None:
            return Sums(total, count, null)
        against = _against(name)
        places = self.asks(name, got.scene).targets[against]
        mean = _mass(got.rows, against) * (_having(got.rows, places) / got.seeing(places).clamp(min=1))
        return Sums(total, count, null, mean * count)

    def hits(self, name: str, got: Got) -> Tensor:
        """Whether the largest weight lies on a link."""
        links = self._links(name, got.scene)
        assert links is not None
        return ((got.largest_key[..., None] == links[:, None]) & (links >= 0)[:, None]).any(-1)


def _mass(rows: RowStatistics, name: str) -> Tensor:
    """(B, H): the mass on links, a mean over `_having`."""
    return rows.targets[name].double().cpu()


def _having(rows: RowStatistics, links: Tensor) -> Tensor:
    """(B, H): how many queries have a link and may attend anything."""
    return ((links >= 0).any(-1)[:, None] & (rows.keys > 0).cpu()).sum(-1)


def _against(name: str) -> str:
    """What the links that a role is held against are called in the pass."""
    return f"{name}, against"


@dataclass(frozen=True)
class Argmax:
    """Share of the linked queries whose largest weight lies on a link (Clark et al.'s accuracy).

    The choice is among the candidates, links of their own name; without any, among all keys but the query's own and
    special tokens. Null: the share that is right by the baseline, links of their own name with one key each; without
    any, by one fixed offset, the best over all texts that were read. Against: a choice among the candidates at random;
    without any, the choice of another query, drawn from those that may attend the link too, so that a head which
    attends a word from everywhere gains nothing.
    """

    name: str
    candidates: str = ""
    baseline: str = ""

    def asks(self, name: str, scene: Scene) -> Asks:
        """Nothing of the pass: the largest keys are chosen apart."""
        return NOTHING

    def read(self, name: str, got: Got) -> Sums | None:
        """How often the best key is a link."""
        links = got.scene.links(self.name)
        if got.scene.cross or links is None:
            return None
        linked = (links >= 0).any(-1)
        count = linked.sum(-1, keepdim=True).double()
        right = self.hits(name, got).double().sum(-1)
        null = self._baseline(links, got.scene).double().sum(-1, keepdim=True)
        if self.candidates:
            among = got.scene.links(self.candidates)
            some = torch.ones_like(count) if among is None else (among >= 0).sum(-1).clamp(min=1)
            return Sums(right, count, null, ((links >= 0).sum(-1) / some).double().sum(-1, keepdim=True))
        other = got.scene.once(("other query", self.name), lambda: other_queries(links, got.scene))
        best = self._best(got).gather(2, other[:, None].expand(-1, right.shape[1], -1))
        elsewhere = (best[..., None] == links[:, None]).any(-1) & linked[:, None] & (best >= 0)
        return Sums(right, count, null, elsewhere.double().sum(-1))

    def _baseline(self, links: Tensor, scene: Scene) -> Tensor:
        """(B, T) bool: which queries the baseline gets right."""
        if self.baseline:
            chosen = scene.links(self.baseline)
            if chosen is None:
                return torch.zeros(links.shape[:2], dtype=torch.bool, device="cpu")
            return ((links[..., None] == chosen[:, :, None]) & (links >= 0)[..., None]).any(-1).any(-1)
        back = torch.arange(links.shape[1], device="cpu")[:, None] - links
        usual = scene.usual.get(f"{self.name}, earlier" if scene.ahead is False else self.name, 0)
        return ((back == usual) & (links >= 0)).any(-1)

    def hits(self, name: str, got: Got) -> Tensor:
        """Whether the best key among the candidates is a link."""
        links = got.scene.links(self.name)
        if links is None:
            return torch.zeros(got.call.query.shape[:3], dtype=torch.bool, device="cpu")
        best = self._best(got)
        return (best[..., None] == links[:, None]).any(-1) & (best >= 0)

    def _best(self, got: Got) -> Tensor:
        """(B, H, T) long: the candidate of greatest weight, -1 where there is none; one for all relations."""
        return got.once(("best", self.candidates), lambda: self._choose(got))

    def _choose(self, got: Got) -> Tensor:
        call, among = got.call, self._among(got.scene, got.call.query.device)
        options: ScoringOptions = {**call.scoring, "mask": among if call.mask is None else call.mask & among}
        return top_keys(call.query, call.key, 1, **options).keys[..., 0].cpu()

    def _among(self, scene: Scene, device: torch.device) -> Mask:
        """The keys among which a query chooses."""
        (B, T), S = scene.queries.shape, scene.keys.shape[1]
        if self.candidates:
            links = scene.links(self.candidates)
            allowed = torch.zeros(B, T, S + 1, dtype=torch.bool, device="cpu")
            chosen = (allowed if links is None else allowed.scatter(2, links % (S + 1), True))[..., :S]
            return keep(chosen[:, None].to(device))
        plain = ~torch.isin(scene.keys, torch.tensor(sorted(scene.words.special), dtype=torch.long, device="cpu"))
        return keep(plain[:, None, None].to(device)) & ~window(1)


@dataclass(frozen=True)
class OfRows:
    """A score made of the statistics themselves."""

    sums: Callable[[Got], Sums | None] = field(compare=False)
    where: Callable[[Got], Tensor] | None = field(default=None, compare=False)

    def asks(self, name: str, scene: Scene) -> Asks:
        """Nothing beyond what every pass gives."""
        return NOTHING

    def read(self, name: str, got: Got) -> Sums | None:
        """The function's answer."""
        return self.sums(got)

    def hits(self, name: str, got: Got) -> Tensor:
        """Where the function says; nowhere without one."""
        if self.where is None:
            return torch.zeros(got.rows.largest_key.shape, dtype=torch.bool, device="cpu")
        return self.where(got)
