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

from ...nn.hooks.probe import AttentionCall
from ...ops.masks import Mask
from ...ops.options import Scoring
from ...ops.row_blocks import softcapped
from ...ops.statistics.api import RowStatistics
from .call_tokens import CallTokens
from .controls import shuffled

FAR = 8
"""How many places before the query, and after it, have a mass of their own."""

OFFSETS = (*range(0, -FAR - 1, -1), *range(1, FAR + 1))

_COLUMNS = {offset: column for column, offset in enumerate(OFFSETS)}


class StatisticsRequest(NamedTuple):
    """What a pass has to sum: features (B, S) of keys and targets (B, T, n) of queries, by name."""

    features: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]


NOTHING = StatisticsRequest({}, {})


def forbidden(call: AttentionCall) -> Mask | None:
    """Return what the call's mask forbids to every head; None where nothing is."""
    B, H = call.query.shape[:2]
    return None if call.mask is None else call.mask.sized(B, H).forbids()


@dataclass(frozen=True)
class CallStatistics:
    """What a pass gave.

    Attributes:
        call: the call itself.
        scene: the tokens behind it.
        rows: its statistics, (B, H).
        uniform: those of uniform attention on the same tokens under the same mask, (B, 1).
    """

    call: AttentionCall
    scene: CallTokens
    rows: RowStatistics
    uniform: RowStatistics
    kept: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def once(self, name: object, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` gives, made once for all roles."""
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

    def largest_where(self, chosen: Tensor) -> Tensor:
        """(B, H, T) long: the key of a query's largest weight where it is chosen, (B, H, T) bool; -1 elsewhere."""
        return torch.where(chosen, self.largest_key, -1)

    def weights_on(self, keys: Tensor) -> Tensor:
        """(B, H, T): what each query gives to one key, (B, H, T) long; 0 where that is -1.

        The largest weight of the row is known, and two weights of a row differ by what their scores differ by.
        """
        largest = self.rows.largest.cpu()
        if bool(((keys == self.largest_key) | (keys < 0)).all()):
            return torch.where(keys >= 0, largest, 0.0)
        apart = self._scores(keys.clamp(min=0)) - self._scores(self.largest_key.clamp(min=0))
        return torch.where(keys >= 0, largest * apart.exp().to(largest.dtype), 0.0)

    def _scores(self, keys: Tensor) -> Tensor:
        """(B, H, T): the score of each query on one key, softcap and biases included."""
        call, (T, S) = self.call, (self.call.query.shape[2], self.call.key.shape[2])
        scoring = Scoring.of(call.query, call.key, call.mask, call.scale, call.softcap, call.sinks)
        keys, group = keys.to(call.query.device), call.query.shape[1] // call.key.shape[1]
        chosen = call.key.repeat_interleave(group, 1).take_along_dim(keys[..., None], 2)
        scores = softcapped((call.query.float() * chosen.float()).sum(-1) * scoring.scale, scoring.softcap)
        rows = torch.arange(T, device=keys.device)[:, None]
        added = scoring.mask.at(rows[None, None], keys[..., None], T, S)[1]
        return (scores if added is None else scores + added[..., 0]).cpu()


@dataclass(frozen=True)
class ScoreSums:
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

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return what the pass has to sum for the role of this name."""
        ...

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the score's sums on this call; None where it says nothing about the call."""
        ...

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """(B, H, T) long: the key of each query that shows the role; -1 of the other queries."""
        ...


@dataclass(frozen=True)
class AtOffset:
    """Mean of A[i, i + offset] over the queries that may attend that key; null: uniform attention."""

    offset: int

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Offsets are always summed."""
        return NOTHING

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """In self-attention alone: positions of two texts have no distance."""
        if got.scene.cross:
            return None
        mass, level, count = _offset(got, self.offset)
        return ScoreSums(mass * count, count, level * count)

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """Return the largest weight, where it lies at the offset."""
        return got.largest_where(got.distance == -self.offset)


@dataclass(frozen=True)
class BandShare:
    """Mean of the sum of A[i, j] over |i - j| <= reach, 0 where one offset exceeds half; null: uniform attention."""

    reach: int

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Offsets are always summed."""
        return NOTHING

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the masses of the offsets, each over the queries that have such a key."""
        if got.scene.cross:
            return None
        parts = [_offset(got, k) for k in OFFSETS if abs(k) <= self.reach]
        total = sum((mass * count for mass, _, count in parts), torch.zeros((), device="cpu"))
        total = torch.where(torch.stack([mass for mass, _, _ in parts]).amax(0) > 0.5, 0.0, total)
        null = sum((level * count for _, level, count in parts), torch.zeros((), device="cpu"))
        return ScoreSums(total, got.uniform.rows.double().cpu(), null)

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """Return the largest weight, where it lies in the band."""
        return got.largest_where(got.distance.abs() <= self.reach)


def _offset(got: CallStatistics, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mass (B, H) at an offset, that of uniform attention (B, 1), and the number of queries (B, 1)."""
    mass, level = (masses[..., _COLUMNS[offset]] for masses in got.offsets)
    return mass, level, got.able[:, _COLUMNS[offset], None].expand_as(level)


@dataclass(frozen=True)
class OnKeys:
    """Mean of the sum of A[i, j] over the keys j of a class, from the first such key on; null: uniform attention."""

    keys: Callable[[CallTokens], Tensor] = field(compare=False)

    def _keys(self, name: str, scene: CallTokens) -> Tensor:
        return scene.once(name, lambda: self.keys(scene))

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return one feature."""
        chosen = self._keys(name, scene)
        return StatisticsRequest({name: chosen}, {}) if bool(chosen.any()) else NOTHING

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the feature's mass."""
        if name not in got.rows.features:
            return None
        mass, level = (s.features[name].double().cpu() for s in (got.rows, got.uniform))
        rows, keys = got.rows.rows.double().cpu(), self._keys(name, got.scene)
        before = keys.double().argmax(-1, keepdim=True) if got.scene.ahead is False else 0  # queries that see none
        count = torch.where(keys.any(-1, keepdim=True), (rows - before).clamp(min=0), 0.0)
        if got.scene.among is not None:
            seeing = torch.arange(got.scene.among.shape[1], device="cpu") >= before
            count = got.scene.count(seeing) * keys.any(-1, keepdim=True)
        return ScoreSums(mass * rows, count, level * rows)

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """Return the largest weight, where it lies on such a key."""
        chosen, keys = self._keys(name, got.scene)[:, None], got.largest_key
        return got.largest_where(chosen.expand(*keys.shape[:2], -1).gather(2, keys.clamp(min=0)))


@dataclass(frozen=True)
class OnLinks:
    """Mean of the sum of A[i, j] over the keys j that query i is linked to.

    Null: the larger of uniform attention and the same head's mass on `against`: by default on shuffled links (for each
    link another key, drawn from those that the query may attend by its position); None asks uniform attention alone.
    """

    links: Callable[[CallTokens], Tensor | None] = field(compare=False)
    against: Callable[[Tensor, CallTokens], Tensor] | None = field(default=shuffled, compare=False)

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return the links, and those they are held against."""
        return scene.once(("asks", name), lambda: self._asks(name, scene))

    def _asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        links = self._links(name, scene)
        if links is None or not bool((links >= 0).any()):
            return NOTHING
        other = {} if self.against is None else {_against(name): self.against(links, scene)}
        return StatisticsRequest({}, {name: links, **other})

    def _links(self, name: str, scene: CallTokens) -> Tensor | None:
        return scene.once(name, lambda: self.links(scene))

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the mass on links, over the queries with one that they may attend."""
        if name not in got.rows.targets:
            return None
        links = self._links(name, got.scene)
        assert links is not None
        count = got.seeing(links)
        total, null = (_mass(s, name) * _having(s, links) for s in (got.rows, got.uniform))
        if self.against is None:
            return ScoreSums(total, count, null)
        against = _against(name)
        places = self.asks(name, got.scene).targets[against]
        mean = _mass(got.rows, against) * (_having(got.rows, places) / got.seeing(places).clamp(min=1))
        return ScoreSums(total, count, null, mean * count)

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """Return the largest weight, where it lies on a link."""
        links = self._links(name, got.scene)
        assert links is not None
        return got.largest_where((got.largest_key[..., None] == links[:, None]).any(-1))


def _mass(rows: RowStatistics, name: str) -> Tensor:
    """(B, H): the mass on links, a mean over `_having`."""
    return rows.targets[name].double().cpu()


def _having(rows: RowStatistics, links: Tensor) -> Tensor:
    """(B, H): how many queries have a link and may attend anything."""
    return ((links >= 0).any(-1)[:, None] & (rows.keys > 0).cpu()).sum(-1)


def _against(name: str) -> str:
    """Return what the links that a role is held against are called in the pass."""
    return f"{name}, against"


@dataclass(frozen=True)
class OfRows:
    """A score made of the statistics themselves."""

    sums: Callable[[CallStatistics], ScoreSums | None] = field(compare=False)
    where: Callable[[CallStatistics], Tensor] | None = field(default=None, compare=False)

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Nothing beyond what every pass gives."""
        return NOTHING

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the function's answer."""
        return self.sums(got)

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """Return the largest weight, where the function says; nowhere without one."""
        if self.where is None:
            return torch.full(got.largest_key.shape, -1, device="cpu")
        return got.largest_where(self.where(got))
