"""Measures: each computes a score from an attention call, and requests the sums that it needs from the one pass.

Every measure has three main methods. `asks` returns the features of keys and the sparse targets that
`headwise.statistics` must sum. `read` returns, from the statistics of the call, the sum of the score over the queries,
the number of these queries, and the same sum for the chance level. Sums and counts instead of means merge exactly.
`counts` says which pairs of a query and a key the score counts; evidence is chosen among these pairs alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...nn.hooks.probe import AttentionCall
from ...ops.masks import Mask
from ...ops.masks.reads import is_constant
from ...ops.options import ScoreOptions
from ...ops.row_blocks import softcapped
from ...ops.statistics.api import RowStatistics
from .call_tokens import CallTokens, Kept
from .controls import shuffled

FAR = 8
"""The largest offset, before and after the query, that has its own mass."""

OFFSETS = (*range(0, -FAR - 1, -1), *range(1, FAR + 1))

_COLUMNS = {offset: column for column, offset in enumerate(OFFSETS)}


class StatisticsRequest(NamedTuple):
    """The sums that a pass must compute: features (B, S) of keys and targets (B, T, n) of queries, by name."""

    features: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]


NOTHING = StatisticsRequest({}, {})


def forbidden(call: AttentionCall) -> Mask | None:
    """Return the call's mask of keys that no head may attend to, without biases; None without a mask."""
    B, H = call.query.shape[:2]
    return None if call.mask is None else call.mask.sized(B, H).forbids()


def device_of_mask(call: AttentionCall) -> torch.device:
    """Return the device on which the call's mask is asked: the CPU for one of numbers alone, which waits for none."""
    rules = () if call.mask is None else call.mask.parts
    return torch.device("cpu") if all(map(is_constant, rules)) else call.query.device


@dataclass(frozen=True)
class CallStatistics(Kept):
    """The statistics of one attention call, on the CPU; `once` computes for all roles."""

    call: AttentionCall
    scene: CallTokens
    rows: RowStatistics  # (B, H)
    uniform: RowStatistics  # (B, 1): of uniform attention on the same tokens under the same mask
    vectors: Mapping[str, Tensor] | None = None  # the numbers of the first tokens, where they are kept
    kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def able(self) -> Tensor:
        """The number of queries that may attend to the key at each of `OFFSETS`, (B|1, n), in self-attention."""
        call, T = self.call, self.rows.entropy.shape[2]
        i = torch.arange(T, device=device_of_mask(call))[:, None]
        j = i + torch.tensor(OFFSETS, device=i.device)
        inside = (j >= 0) & (j < T)
        seen = self.allowed(i[None, None], j.clamp(0, T - 1)[None, None]) & inside
        return seen.sum(2)[:, 0].double().cpu()

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether a head may attend to key j from query i, (B|1, H|1, R, C) bool; i and j broadcast to that."""
        mask, T, S = forbidden(self.call), self.call.query.shape[2], self.call.key.shape[2]
        seen = None if mask is None else mask.at(i, j, T, S)[0]
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=i.device) if seen is None else seen

    def seeing(self, links: Tensor) -> Tensor:
        """Return the number of queries that may attend to a link, (B|1, 1); links are (B|1, T, n), padded with -1."""
        links = links.to(device_of_mask(self.call))
        rows = torch.arange(links.shape[1], device=links.device)[None, None, :, None]
        seen = self.allowed(rows, links.clamp(min=0)[:, None]) & (links >= 0)[:, None]
        return seen.any(-1).sum(-1)[:, 0, None].double().cpu()

    def back(self, keys: Tensor) -> Tensor:
        """Return the distance from each query back to its key, (B, H, T); not meaningful where the key is -1."""
        return torch.arange(keys.shape[2], device="cpu") - keys

    @cached_property
    def choosing(self) -> Tensor:
        """Whether a query may attend to at least two keys, (B, H, T) bool; otherwise its weights show nothing."""
        return self.rows.keys > 1

    def weights_on(self, keys: Tensor) -> Tensor:
        """Return the weight of each query on one key, (B, H, T); 0 where the key, (B, H, T) long, is -1.

        The largest weight of the row is known, and the ratio of two weights of a row follows from the difference of
        scores.
        """
        largest = self.rows.largest
        if bool(((keys == self.rows.largest_key) | (keys < 0)).all()):
            return torch.where(keys >= 0, largest, 0.0)
        apart = self._scores(keys.clamp(min=0)) - self._scores(self.rows.largest_key.clamp(min=0))
        return torch.where(keys >= 0, largest * apart.exp().to(largest.dtype), 0.0)

    def _scores(self, keys: Tensor) -> Tensor:
        """Return the score of each query on one key, (B, H, T), softcap and biases included."""
        call, (T, S) = self.call, (self.call.query.shape[2], self.call.key.shape[2])
        options = ScoreOptions.checked(call.query, call.key, call.mask, call.scale, call.softcap, call.sinks)
        keys, group = keys.to(call.query.device), call.query.shape[1] // call.key.shape[1]
        chosen = call.key.repeat_interleave(group, 1).take_along_dim(keys[..., None], 2)
        scores = softcapped((call.query.float() * chosen.float()).sum(-1) * options.scale, options.softcap)
        rows = torch.arange(T, device=keys.device)[:, None]
        added = options.mask.at(rows[None, None], keys[..., None], T, S)[1]
        return (scores if added is None else scores + added[..., 0]).cpu()


@dataclass(frozen=True)
class ScoreSums:
    """Sums over queries, and the number of queries, by text and head; a width of 1 stands for all heads."""

    total: Tensor
    count: Tensor
    null: Tensor | None  # the chance level of the control, if there is one
    against: Tensor | None = None  # that of a second control; the larger counts
    detail: Callable[[int, int], str] | None = None  # the free part of the role for a text and a head
    mass: Tensor | None = None  # the weight on right choices, for measures of a choice


class Measure(ABC):
    """The interface of a measure."""

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return the sums that the pass must compute for the role of this name; by default none of its own."""
        return NOTHING

    @abstractmethod
    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the score's sums on this call; None if the measure does not apply to it."""

    @abstractmethod
    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the score counts each query with its key: keys (B, H, T) long, -1 for none; result bool."""

    def judged(self, got: CallStatistics) -> Tensor:
        """Return the key by which each query is judged, (B, H, T) long: by default the key of its largest weight."""
        return got.rows.largest_key

    def evidence(self, name: str, got: CallStatistics) -> Tensor:
        """Return the key of each query that shows the role, (B, H, T) long; -1 for other queries.

        A query without a choice shows nothing.
        """
        keys = self.judged(got)
        return torch.where(self.counts(name, got, keys) & got.choosing & (keys >= 0), keys, -1)


@dataclass(frozen=True)
class AtOffset(Measure):
    """Mean of A[i, i + offset] over the queries that may attend to that key and another; null: uniform attention."""

    offset: int

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the mass at the offset; None for cross-attention, where positions of two texts have no distance."""
        if got.scene.cross:
            return None
        total, null, count = _offset(got, self.offset)
        return ScoreSums(total, count, null)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the key is at the offset of a query that has a choice."""
        return (got.back(keys) == -self.offset) & got.choosing


@dataclass(frozen=True)
class BandShare(Measure):
    """Mean of the sum of A[i, j] over |i - j| <= FAR, 0 if one offset exceeds half; null: uniform attention.

    Queries that may attend to one key only do not count.
    """

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the masses of the offsets, each over the queries that have such a key."""
        if got.scene.cross:
            return None
        parts = [_offset(got, k) for k in OFFSETS]
        total, null = (torch.stack([part[which] for part in parts]).sum(0) for which in (0, 1))
        most = torch.stack([total / count.clamp(min=1) for total, _, count in parts]).amax(0)
        count = got.uniform.rows.double() - (got.uniform.keys == 1).sum(-1)
        return ScoreSums(torch.where(most > 0.5, 0.0, total), count, null)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the key is in the band of a query that has a choice."""
        return (got.back(keys).abs() <= FAR) & got.choosing


def _offset(got: CallStatistics, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the masses (B, H) at an offset, that of uniform attention (B, 1), and the queries (B, 1).

    The offsets of the pass hold every query; those that may attend to one key only are subtracted.
    """
    able = got.able[:, _COLUMNS[offset], None]
    sums = []
    for rows in (got.rows, got.uniform):
        forced = (rows.keys == 1) & (got.back(rows.largest_key) == -offset)
        sums.append(rows.offsets[..., _COLUMNS[offset]].double() * able - (rows.largest.double() * forced).sum(-1))
    return sums[0], sums[1], able - forced.sum(-1)


@dataclass(frozen=True)
class OnKeys(Measure):
    """Mean of the sum of A[i, j] over the keys j of a class, from the first such key on; null: uniform attention."""

    keys: Callable[[CallTokens], Tensor] = field(compare=False)

    def _keys(self, name: str, scene: CallTokens) -> Tensor:
        return scene.once(name, lambda: self.keys(scene))

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return one feature: the keys of the class."""
        chosen = self._keys(name, scene)
        return StatisticsRequest({name: chosen}, {}) if bool(chosen.any()) else NOTHING

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the mass on the keys of the class."""
        if name not in got.rows.features:
            return None
        mass, level = (s.features[name].double() for s in (got.rows, got.uniform))
        rows, keys = got.rows.rows.double(), self._keys(name, got.scene)
        before = keys.double().argmax(-1, keepdim=True) if got.scene.ahead is False else 0  # before all such keys
        count = torch.where(keys.any(-1, keepdim=True), (rows - before).clamp(min=0), 0.0)
        if got.scene.among is not None:
            seeing = torch.arange(got.scene.among.shape[1], device="cpu") >= before
            count = got.scene.count(seeing) * keys.any(-1, keepdim=True)
        return ScoreSums(mass * rows, count, level * rows)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the key is in the class."""
        chosen = self._keys(name, got.scene)[:, None]
        return chosen.expand(*keys.shape[:2], -1).gather(2, keys.clamp(min=0)) & (keys >= 0)


@dataclass(frozen=True)
class OnLinks(Measure):
    """Mean of the sum of A[i, j] over the keys j that query i is linked to.

    Null: the larger of uniform attention and the same head's mass on `against`: by default on shuffled links (for each
    link another key, drawn from those that the query may attend to by position); with None only uniform attention.
    """

    links: Callable[[CallTokens], Tensor | None] = field(compare=False)
    against: Callable[[Tensor, CallTokens], Tensor] | None = field(default=shuffled, compare=False)

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return the links and the control's links as targets."""

        def make() -> StatisticsRequest:
            links = self._links(name, scene)
            if links is None or not bool((links >= 0).any()):
                return NOTHING
            other = {} if self.against is None else {f"{name}, against": self.against(links, scene)}
            return StatisticsRequest({}, {name: links, **other})

        return scene.once(("asks", name), make)

    def _links(self, name: str, scene: CallTokens) -> Tensor | None:
        return scene.once(name, lambda: self.links(scene))

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the mass on links, over the queries that may attend to a link."""
        if name not in got.rows.targets:
            return None
        links = self._links(name, got.scene)
        assert links is not None
        count = got.seeing(links)
        total, null = (_mass(s, name) * _having(s, links) for s in (got.rows, got.uniform))
        if self.against is None:
            return ScoreSums(total, count, null)
        against = f"{name}, against"
        places = self.asks(name, got.scene).targets[against]
        mean = _mass(got.rows, against) * (_having(got.rows, places) / got.seeing(places).clamp(min=1))
        return ScoreSums(total, count, null, mean * count)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the key is a link of the query."""
        links = self._links(name, got.scene)
        assert links is not None
        return is_link(keys, links)


def is_link(keys: Tensor, links: Tensor) -> Tensor:
    """Return whether the key of each query, (B, H, T), is one of its links (B|1, T, n): (B, H, T) bool."""
    return (keys[..., None] == links[:, None]).any(-1) & (keys >= 0)


def _mass(rows: RowStatistics, name: str) -> Tensor:
    """Return the mass on links (B, H), a mean over the queries of `_having`."""
    return rows.targets[name].double()


def _having(rows: RowStatistics, links: Tensor) -> Tensor:
    """Return the number of queries (B, H) that have a link and may attend to any key."""
    return ((links >= 0).any(-1)[:, None] & (rows.keys > 0)).sum(-1)


@dataclass(frozen=True)
class OfRows(Measure):
    """A score computed from the row statistics directly; `pairs` are those that it counts, None for no single pairs."""

    sums: Callable[[CallStatistics], ScoreSums | None] = field(compare=False)
    pairs: Callable[[CallStatistics, Tensor], Tensor] | None = field(default=None, compare=False)

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the result of `sums`."""
        return self.sums(got)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return the result of `pairs`; False everywhere without it."""
        return torch.zeros_like(keys, dtype=torch.bool) if self.pairs is None else self.pairs(got, keys)
