"""Measures of roles over pictures and sentence pairs: neighbors in two dimensions, and the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...nn.hooks.probe import AttentionCall
from ...ops.masks import keep
from ...ops.statistics.api import StatisticsOptions, row_statistics
from ..records.axes import NOWHERE
from .call_tokens import CallTokens, padded
from .measures import CallStatistics, Measure, ScoreSums, StatisticsRequest, forbidden, is_link

Shift = tuple[int, int]
"""Rows down and columns to the right."""

PatchCell = tuple[int, int, int]
"""Picture, row and column."""

AROUND: tuple[Shift, ...] = tuple((r, c) for r in (-1, 0, 1) for c in (-1, 0, 1))
NEAR = 1
"""The largest distance of neighbors in a row or column."""


def shifted(shift: Shift, scene: CallTokens) -> Tensor | None:
    """Return the links of each patch to the patch at a shift, in the same picture."""
    return scene.once(("shifted", shift), lambda: _linked(scene, lambda p, r, c: [(p, r + shift[0], c + shift[1])]))


def in_row(scene: CallTokens) -> Tensor | None:
    """Return the links of each patch to its row, without itself and its neighbors."""
    grids = scene.axes[0].grids
    return _linked(scene, lambda p, r, c: [(p, r, n) for n in range(grids[p][1]) if abs(n - c) > NEAR])


def in_column(scene: CallTokens) -> Tensor | None:
    """Return the links of each patch to its column, without itself and its neighbors."""
    grids = scene.axes[0].grids
    return _linked(scene, lambda p, r, c: [(p, n, c) for n in range(grids[p][0]) if abs(n - r) > NEAR])


def to_apart(name: str, scene: CallTokens) -> Tensor | None:
    """Return the links of each patch to the positions of that name: [CLS], registers."""
    places = scene.axes[1].apart.get(name, ())
    return _linked(scene, lambda p, r, c: places) if places else None


def _linked(scene: CallTokens, wanted: Callable[[int, int, int], Iterable[PatchCell | int]]) -> Tensor | None:
    """Return the positions of the `wanted` cells for each patch, (1, T, n), padded with -1; None without patches."""
    queries, keys = scene.axes
    if not queries.known or not keys.known:
        return None
    there = {cell: place for place, cell in enumerate(keys.cells) if cell != NOWHERE}
    cells = [() if cell == NOWHERE else wanted(*cell) for cell in queries.cells]
    links = padded([[[there.get(c, -1) if isinstance(c, tuple) else c for c in some] for some in cells]])
    return links if links.shape[-1] else None


@dataclass(frozen=True)
class NeighbourShare(Measure):
    """Mean of the sum of A[i, j] over the patches around i, 0 if one direction exceeds half; null: uniform."""

    def _links(self, scene: CallTokens) -> dict[str, Tensor]:
        named = {f"patch {r:+} {c:+}": shifted((r, c), scene) for r, c in AROUND}
        return {name: links for name, links in named.items() if links is not None and bool((links >= 0).any())}

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return one target per direction."""
        return StatisticsRequest({}, self._links(scene))

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the masses of the directions, each over the patches that have such a neighbor."""
        links = self._links(got.scene)
        if not links:
            return None
        total = null = most = torch.zeros((), device="cpu")
        for one, places in links.items():
            mass, level = (s.targets[one].double() for s in (got.rows, got.uniform))
            count = got.scene.count((places >= 0).any(-1)) * (level > 0)
            total, null, most = total + mass * count, null + level * count, torch.maximum(most, mass)
        patches = torch.tensor([cell != NOWHERE for cell in got.scene.axes[0].cells], device="cpu")[None]
        count = got.scene.count(patches).expand(got.rows.largest_key.shape[0], 1)
        return ScoreSums(torch.where(most > 0.5, 0.0, total), count, null)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the key is around the patch."""
        return is_link(keys, torch.cat([*self._links(got.scene).values()], -1))


@dataclass(frozen=True)
class FromTo(Measure):
    """Mean of the sum of A[i, j] over keys j of one class, for queries i of another; null: uniform attention.

    It runs its own pass, in which all other queries attend to nothing and so do not count.
    """

    queries: Callable[[CallTokens], Tensor] = field(compare=False)
    keys: Callable[[CallTokens], Tensor] = field(compare=False)

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the mass of the keys under a mask that keeps only these queries."""
        if got.scene.cross:
            return None
        rows, keys = (scene_of(got.scene) for scene_of in (self.queries, self.keys))
        if not bool(rows.any()) or not bool(keys.any()):
            return None
        mass, count = only(got, rows, keys)
        level, _ = only(replace(got, call=_even(got)), rows, keys)
        return ScoreSums(mass * count, count[:, :1], level[:, :1] * count[:, :1])

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether query and key are in their classes."""
        rows, chosen = (scene_of(got.scene) for scene_of in (self.queries, self.keys))
        among = chosen[:, None].expand(*keys.shape[:2], -1)
        return among.gather(2, keys.clamp(min=0)) & rows[:, None] & (keys >= 0)


def only(got: CallStatistics, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean mass on `keys` (B, S) of the queries in `rows` (B, T), and their number: (B, H) each."""
    call = got.call
    device = call.query.device
    among = keep(rows[:, None, :, None].to(device))
    mask = among if call.mask is None else call.mask & among
    options: StatisticsOptions = {**call.scoring, "mask": mask, "offsets": (0,), "targets": {}, "pool": 1}
    options["features"] = {"mass": keys.to(device)}
    one = row_statistics(call.query, call.key, **options)
    return one.features["mass"].double().cpu(), one.rows.double().cpu()


def _even(got: CallStatistics) -> AttentionCall:
    """Return the call with all scores 0 and the keys that its mask forbids."""
    call = got.call
    query, key = torch.zeros_like(call.query), torch.zeros_like(call.key)
    return replace(call, query=query, key=key, mask=forbidden(call), softcap=None, sinks=None)


def patch_sink(got: CallStatistics) -> ScoreSums | None:
    """Return the sums of the patch with the most weight from other patches, over rows whose largest weight is on it."""
    queries, keys = got.scene.axes
    patches = torch.tensor([cell != NOWHERE for cell in keys.cells], device="cpu")
    if queries is not keys or int(patches.sum()) < LEAST_PATCHES:
        return None
    value, place = _masses(got).max(-1)
    count = got.scene.count(patches[None]) - 1
    chance = (1 / got.rows.keys.double().clamp(min=1)).mean(-1) * count

    def detail(b: int, h: int) -> str:
        picture, row, column = keys.cells[int(place[b, h])]
        where = f"row {row}, column {column}"
        return where if len(keys.grids) < 2 else f"{where} of picture {picture}"

    return ScoreSums(value, count.expand_as(value), chance, detail=detail)


LEAST_PATCHES = 9
"""The fewest patches of a picture for one of them to count as a sink."""


def on_patch_sink(got: CallStatistics, keys: Tensor) -> Tensor:
    """Return whether the key of each patch is the head's own patch sink, (B, H, T) bool."""
    return _on_patches(got, keys) & (keys == _masses(got).argmax(-1, keepdim=True))


def _masses(got: CallStatistics) -> Tensor:
    """Return for each patch the sum of the largest weights that other patches have on it, (B, H, T)."""

    def make() -> Tensor:
        largest = torch.where(_on_patches(got, got.rows.largest_key), got.rows.largest.double(), 0.0)
        return torch.zeros_like(largest).scatter_add(2, got.rows.largest_key.clamp(min=0), largest)

    return got.once("masses", make)


def _on_patches(got: CallStatistics, keys: Tensor) -> Tensor:
    """Return whether query and key are two patches, (B, H, T) bool."""
    patches = torch.tensor([cell != NOWHERE for cell in got.scene.axes[1].cells], device="cpu")
    return patches[keys.clamp(min=0)] & (keys >= 0) & patches & (got.back(keys) != 0)
